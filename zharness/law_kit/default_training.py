"""Define the configured training: the optimizer, the gradient clipping and the accumulation that the user chose."""

from __future__ import annotations

from dataclasses import dataclass

from zharness.engines.protocol import GroupSpec, OptimizerSpec

# The default training has two groups, a schedule, clipping and accumulation, because an engine may get each of them
# wrong. The schedule ends before the third of the default steps; this step has to keep the schedule's last factor.
DEFAULT_OPTIMIZER = OptimizerSpec(
    name="adamw",
    args={"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    groups=(GroupSpec("*bias", {"weight_decay": 0.0, "lr": 2e-2}),),
    schedule=(1.0, 0.5),
)


@dataclass(frozen=True)
class TrainingConfig:
    """The optimizer, the norm for gradient clipping, and the number of micro-batches in each optimizer step."""

    optimizer: OptimizerSpec = DEFAULT_OPTIMIZER
    clip: float | None = 1.0
    accumulation: int = 2


DEFAULT_TRAINING = TrainingConfig()
