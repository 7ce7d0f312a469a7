"""The reference ZeRO engine behind the Engine protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zharness import reference
from zharness.engines import optimizers
from zharness.engines.json_variants import JSON_VARIANTS
from zharness.engines.protocol import (
    Absent,
    AccumulationOwner,
    Capabilities,
    EngineConfig,
    Feature,
    Observations,
    Piece,
    Resources,
    Traffic,
)
from zharness.errors import UsageError

CAPABILITIES = Capabilities(
    stages=frozenset({0, 1, 2, 3}), dtypes=frozenset({"fp32", "bf16", "fp16"}), variants=JSON_VARIANTS
)
NO_SYNC_REFUSES = {
    Feature.NO_SYNC: "a stage that shards gradients has no room for unreduced ones; accumulate over step() instead"
}
WHOLE_WEIGHTS_REFUSES = {
    Feature.REDUCED_WEIGHT_GRADIENTS: "weights are whole, so autograd.grad gives a rank its own; a backward is reduced"
}
SHARDED_WEIGHTS_REFUSES = {
    Feature.OWN_WEIGHT_GRADIENTS: "weights are shards, so autograd.grad gives a rank its shard of the reduced gradient",
}


def capabilities_at(stage: int) -> Capabilities:
    """What the engine claims at one stage."""
    refuses = {
        **(NO_SYNC_REFUSES if stage > 1 else {}),
        **(SHARDED_WEIGHTS_REFUSES if stage == 3 else WHOLE_WEIGHTS_REFUSES),
    }
    return replace(CAPABILITIES, refuses=refuses)


class ReferenceEngine:
    """``zharness.reference.Engine`` in the protocol's words."""

    def __init__(self, engine: reference.Engine) -> None:
        self.engine = engine
        self.capabilities = capabilities_at(engine.settings.stage)
        self.module: nn.Module = engine.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.engine.backward(loss, retain_graph=retain_graph)

    def scale(self, loss: Tensor) -> Tensor:
        return self.engine.scale(loss)

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.engine.no_sync()

    def full_grads(self) -> dict[str, Tensor]:
        return self.engine.full_grads()

    def full_params(self) -> dict[str, Tensor]:
        return self.engine.full_params()

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        return self.engine.full_optimizer_state()

    def grad_norm(self) -> float | None:
        return self.engine.grad_norm()

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        return {
            name: tuple(Piece(rank, start, stop) for rank, (start, stop) in enumerate(bounds))
            for name, bounds in self.engine.shards().items()
        }

    def uneven(self) -> AbstractContextManager[None]:
        """A block in which ranks may use other parameters than their peers."""
        return self.engine.uneven()

    def gathered(self, names: Sequence[str]) -> AbstractContextManager[dict[str, Tensor]]:
        """A block in which full weights may be edited, by name; afterwards every rank has rank 0's."""
        return self.engine.gathered(names)

    def observe(self) -> Observations:
        rates = tuple(float(group["lr"]) for group in self.engine.optimizer.param_groups)
        engine = self.engine
        held, traffic = (
            Resources(**engine.held_bytes()),
            Traffic(engine.comm.logical_bytes(), engine.peak_gathered_bytes()),
        )
        wire = {
            f"{kind.value} {_dtype_name(dtype)}": seen.elements for (kind, dtype), seen in engine.comm.tallies.items()
        }
        masters = engine.full_masters() or Absent("the optimizer works on the parameters themselves")
        gathered = engine.gathered_bytes()
        return Observations(engine.loss_scale, engine.skipped_steps, rates, gathered, wire, masters, held, traffic)

    def save(self, path: Path) -> None:
        self.engine.save_checkpoint(path)

    def load(self, path: Path) -> None:
        self.engine.load_checkpoint(path)

    def full_state_dict(self) -> dict[str, Tensor]:
        return self.engine.full_state_dict()

    def load_universal(self, path: Path) -> None:
        self.engine.load_universal_checkpoint(path)

    def close(self) -> None:
        self.engine.close()


def factory(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """The reference engine over ``model``. Called on every rank with the default process group ready."""
    if config.dtype not in CAPABILITIES.dtypes:
        raise UsageError.unknown_name(
            "dtype", config.dtype, sorted(CAPABILITIES.dtypes), "and a low one has fp32 masters"
        )
    engine, *_ = reference.initialize(
        model=model,
        config=_build_json_config(config),
        optimizer=lambda leaves: optimizers.build(leaves, config.optimizer),
        lr_scheduler=lambda optimizer: optimizers.schedule(optimizer, config.optimizer),
    )
    return ReferenceEngine(engine)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _build_json_config(config: EngineConfig) -> dict[str, Any]:
    """DeepSpeed's JSON for ``config``; ``config.options`` are laid over it, section by section."""
    engine_owns = config.accumulation_owner is AccumulationOwner.ENGINE
    written: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": config.accumulation_steps if engine_owns else 1,
        "gradient_clipping": config.clip or 0.0,
        "gradient_allreduce_op": config.reduction.value,
        "zero_optimization": {"stage": config.stage},
    }
    if config.dtype == "bf16":
        written["bf16"] = {"enabled": True}
    if config.dtype == "fp16":
        written["fp16"] = {"enabled": True, "loss_scale": config.loss_scale}
    for key, value in config.options.items():
        section = written.get(key)
        written[key] = {**section, **value} if isinstance(section, dict) else value
    return written
