"""Stand in for the optimizers of DeepSpeed's engines, which tests reach as ``engine.optimizer``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zharness.compat.deepspeed_engine.leaf_modules import get_z3_leaf_modules

if TYPE_CHECKING:
    from zharness.compat.deepspeed_engine.engine import DeepSpeedEngine


@dataclass(frozen=True)
class LossScalerView:
    """The loss scale of one engine, with DeepSpeed's names; the values are always the current ones."""

    engine: DeepSpeedEngine

    @property
    def cur_scale(self) -> float:
        """The current loss scale."""
        return self.engine.reference.loss_scale

    loss_scale = cur_scale

    @property
    def cur_iter(self) -> int:
        """The number of steps so far, with those that were skipped."""
        return self.engine.global_steps

    @property
    def scale_window(self) -> int | None:
        """The number of steps without overflow after which the scale is doubled, or None for a fixed scale."""
        scaling = self.engine.reference.settings.precision.loss_scaling
        return scaling.growth_interval if scaling is not None else None

    @property
    def dynamic(self) -> bool:
        """Whether the scale changes."""
        return self.scale_window is not None


class ZeROOptimizer:
    """The optimizer of one engine, with DeepSpeed's names; other attributes are those of the torch optimizer.

    ``optimizer`` is the torch optimizer, which updates leaves instead of the model's Parameters.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self.optimizer = engine.reference.optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the torch optimizer."""
        return self.optimizer.param_groups

    @property
    def cur_scale(self) -> float:
        """The current loss scale."""
        return self._engine.reference.loss_scale

    loss_scale = cur_scale

    @property
    def loss_scaler(self) -> LossScalerView:
        """The state of the loss scale."""
        return LossScalerView(self._engine)

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes."""
        return self.loss_scaler.dynamic

    @property
    def flat_groups(self) -> list[Tensor]:
        """This rank's elements of the weights that the optimizer updates, flattened, for each parameter group."""
        return [torch.cat([leaf.detach().reshape(-1) for leaf in group["params"]]) for group in self.param_groups]

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite."""
        return self._engine.overflow

    @property
    def _global_grad_norm(self) -> float | None:
        return self._engine.get_global_grad_norm()

    @property
    def leaf_parameters(self) -> dict[nn.Module, list[nn.Parameter]]:
        """The Parameters of each module that is marked as a leaf module."""
        return {module: list(module.parameters()) for module in get_z3_leaf_modules(self._engine.module)}

    def needs_scaler(self) -> bool:
        """Return whether a loss has to be scaled before its backward."""
        return self._engine.reference.needs_scaler()

    def scale_if_loss(self, value: Any) -> Any:
        """Return a scalar loss times the loss scale."""
        return self._engine.scale(value)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the engine's backward."""
        self._engine.backward(loss, retain_graph=retain_graph)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the engine."""
        self._engine.zero_grad()

    def step(self, closure: Any = None) -> None:
        """Refuse a direct step, as the engine has the gradients. Raises UsageError."""
        self.optimizer.step(closure)

    def _get_norm_groups(self) -> list[Tensor]:
        """Return the norm of the gradients of each group. This is a collective."""
        grads = self._engine.reference.full_grads()
        return [torch.linalg.vector_norm(torch.cat([grad.double().reshape(-1) for grad in grads.values()]))]


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """The optimizer of an engine at stage 1 or 2."""

    single_partition_of_fp32_groups = ZeROOptimizer.flat_groups


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):  # noqa: N801 - DeepSpeed's name
    """The optimizer of an engine at stage 3."""

    fp32_partitioned_groups_flat = ZeROOptimizer.flat_groups


class FP16_Optimizer(ZeROOptimizer):  # noqa: N801 - DeepSpeed's name
    """The optimizer of an engine at stage 0 in float16 or bfloat16."""

    fp32_groups_flat = ZeROOptimizer.flat_groups


class UnshardedOptimizer(ZeROOptimizer, torch.optim.Optimizer):  # type: ignore[misc, override]  # for isinstance only
    """The optimizer of an engine at stage 0 in float32, where DeepSpeed's is the torch optimizer itself."""


def make_optimizer(engine: DeepSpeedEngine) -> ZeROOptimizer:
    """Return the stand-in for the optimizer that DeepSpeed has at the engine's stage and dtype."""
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return (
            FP16_Optimizer(engine) if engine.fp16_enabled() or engine.bfloat16_enabled() else UnshardedOptimizer(engine)
        )
    return DeepSpeedZeroOptimizer_Stage3(engine) if stage == 3 else DeepSpeedZeroOptimizer(engine)
