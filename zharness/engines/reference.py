"""Adapt the reference ZeRO engine to the Engine protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness import reference
from zharness.engines import optimizers
from zharness.engines.json_variants import JSON_VARIANTS, STAGE_3_JSON_VARIANTS
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
from zharness.mesh import REPLICATE
from zharness.reference.inspection.tensor_access import TensorAccess

CAPABILITIES = Capabilities(
    stages=frozenset({0, 1, 2, 3}),
    dtypes=frozenset({"fp32", "bf16", "fp16"}),
    uncached_casts={3: "an unsharded weight is not a leaf of autograd's graph, and torch caches casts of leaves alone"},
    variants=JSON_VARIANTS,
    joined_options=4,  # no option has a bug that could hide a bug of another option
    mesh_axes=frozenset({REPLICATE}),
)
EVERY_STAGE_REFUSES = {Feature.MUON: "it shards flat buffers, and Muon cannot work on shards"}
NO_SYNC_REFUSES = {
    Feature.NO_SYNC: "a stage that shards gradients cannot keep unreduced ones; accumulate over step() instead"
}
WHOLE_WEIGHTS_REFUSES = {
    Feature.REDUCED_WEIGHT_GRADIENTS: "weights are full, so autograd.grad returns local gradients; backward reduces"
}
STAGE_0_REFUSES = {Feature.SHARD_ACCESS: "nothing is sharded at stage 0"}
SHARDED_WEIGHTS_REFUSES = {
    Feature.OWN_WEIGHT_GRADIENTS: "weights are sharded, so autograd.grad returns a shard of the reduced gradient",
}


def capabilities_at(stage: int) -> Capabilities:
    """Return CAPABILITIES with the features that the reference engine refuses at ``stage``, and its options there."""
    refuses = {
        **EVERY_STAGE_REFUSES,
        **(NO_SYNC_REFUSES if stage > 1 else {}),
        **(STAGE_0_REFUSES if stage == 0 else {}),
        **(SHARDED_WEIGHTS_REFUSES if stage == 3 else WHOLE_WEIGHTS_REFUSES),
    }
    variants = {
        name: options for name, options in JSON_VARIANTS.items() if stage == 3 or name not in STAGE_3_JSON_VARIANTS
    }
    # Stage 2 needs the same number of backwards on every rank, which a branch of the model does not change.
    block = "engine.uneven()" if stage == 3 else ""
    return replace(CAPABILITIES, refuses=refuses, variants=variants, uneven_block=block)


class ReferenceEngine:
    """``zharness.reference.Engine`` with the methods of the Engine protocol."""

    def __init__(self, engine: reference.Engine) -> None:
        self.engine = engine
        self.capabilities = capabilities_at(engine.settings.stage)
        self.module: nn.Module = engine.module
        self._tensors = TensorAccess(engine)

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
        """Return a context in which ranks may use different parameters."""
        return self.engine.uneven()

    def gathered(self, names: Sequence[str]) -> AbstractContextManager[dict[str, Tensor]]:
        """Return a context that yields full weights by name, and at its end gives every rank the weights of rank 0."""
        return self.engine.gathered(names)

    def observe(self) -> Observations:
        rates = tuple(float(group["lr"]) for group in self.engine.optimizer.param_groups)
        engine = self.engine
        resources = Resources(**engine.allocated_bytes())
        traffic = Traffic(engine.comm.logical_bytes(), engine.peak_gathered_bytes())
        sent_elements = {
            f"{kind.value} {_dtype_name(dtype)}": tally.elements for (kind, dtype), tally in engine.comm.tallies.items()
        }
        masters = engine.full_masters() or Absent("the optimizer works on the parameters themselves")
        gathered = engine.gathered_bytes()
        return Observations(
            engine.loss_scale, engine.skipped_steps, rates, gathered, sent_elements, masters, resources, traffic
        )

    def save(self, path: Path) -> None:
        self.engine.save_checkpoint(path)

    def load(self, path: Path) -> None:
        self.engine.load_checkpoint(path)

    def full_state_dict(self) -> dict[str, Tensor]:
        return self.engine.full_state_dict()

    def load_universal(self, path: Path) -> None:
        self.engine.load_universal_checkpoint(path)

    def read_grad(self, name: str) -> Tensor | None:
        return self._tensors.full_grad(name)

    def read_param(self, name: str) -> Tensor:
        return self._tensors.full_param(name)

    def read_optimizer_state(self, name: str, key: str) -> Tensor | None:
        return self._tensors.full_state(name, key)

    def write_grad(self, name: str, value: Tensor) -> None:
        self._tensors.set_full_grad(name, value)

    def write_param(self, name: str, value: Tensor) -> None:
        self._tensors.set_full_param(name, value)

    def write_optimizer_state(self, name: str, key: str, value: Tensor) -> None:
        self._tensors.set_full_state(name, key, value)

    def read_grad_shard(self, name: str) -> Tensor:
        return self._tensors.local_grad(name)

    def read_param_shard(self, name: str) -> Tensor:
        return self._tensors.local_param(name)

    def read_optimizer_state_shard(self, name: str, key: str) -> Tensor:
        return self._tensors.local_state(name, key)

    def write_grad_shard(self, name: str, value: Tensor) -> None:
        self._tensors.set_local_grad(name, value)

    def write_param_shard(self, name: str, value: Tensor) -> None:
        self._tensors.set_local_param(name, value)

    def write_optimizer_state_shard(self, name: str, key: str, value: Tensor) -> None:
        self._tensors.set_local_state(name, key, value)

    def close(self) -> None:
        self.engine.close()


def factory(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Build the reference engine around ``model`` over the default process group. This is a collective."""
    if config.dtype not in CAPABILITIES.dtypes:
        raise UsageError.unknown_name(
            "dtype", config.dtype, sorted(CAPABILITIES.dtypes), "bf16 and fp16 train fp32 masters"
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
    """Return DeepSpeed's JSON for ``config``, into which the sections of ``config.options`` are merged."""
    engine_owns = config.accumulation_owner is AccumulationOwner.ENGINE
    base: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": config.accumulation_steps if engine_owns else 1,
        "gradient_clipping": config.clip or 0.0,
        "gradient_allreduce_op": config.reduction.value,
        "zero_optimization": {"stage": config.stage},
    }
    if REPLICATE in config.mesh.axes:
        copies = config.mesh.size(REPLICATE)
        base["zero_optimization"]["mics_shard_size"] = dist.get_world_size() // copies
    if config.dtype == "bf16":
        base["bf16"] = {"enabled": True}
    if config.dtype == "fp16":
        base["fp16"] = {"enabled": True, "loss_scale": config.loss_scale}
    for key, value in config.options.items():
        section = base.get(key)
        base[key] = {**section, **value} if isinstance(section, dict) else value
    return base
