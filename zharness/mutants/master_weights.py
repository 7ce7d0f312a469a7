"""Mutants that round fp32 master weights and accumulated gradients to lower precision, or discard them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines import (
    EngineConfig,
    fsdp2,
)
from zharness.engines.reference import ReferenceEngine
from zharness.engines.torch_engine import TorchEngine
from zharness.errors import ConfigError
from zharness.mutants import seams, seams_engines
from zharness.mutants.mutant import (
    ALL_STAGES,
    FaultKind,
    Origin,
    Target,
    mutant,
    mutant_factory,
)
from zharness.mutants.tensor_access import ShardedWrapper
from zharness.mutants.wrapper import EngineWrapper, SpoiledLoad
from zharness.parity import Part


@mutant(
    FaultKind.AUTOCAST,
    Target("precision.master_weights", Part.OPTIMIZER, model="mixed", variant="fp32"),
    origin=Origin.PRECISION,
)
class ForgetsItsMasters(EngineWrapper):
    """Rounds the fp32 master weights to bf16 after every step."""

    def step(self) -> None:
        self.base.step()
        for master in seams.master_weights(self.base).values():
            master.copy_(master.bfloat16())


@mutant(
    FaultKind.AUTOCAST,
    Target("precision.master_weights", Part.FORWARD, model="mixed", variant="fp32", parameter="input"),
    origin=Origin.PRECISION,
)
class TakesAnyMixOfMasters(EngineWrapper):
    """Accepts an invalid combination of dtypes of master weights, gradients and optimizer state.

    The mutant trains without the options that configure these dtypes.
    """

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        try:
            super().__init__(model, config)
        except ConfigError:
            super().__init__(model, replace(config, options={}))


@mutant_factory(
    FaultKind.AUTOCAST,
    Target("training.trajectory", Part.OPTIMIZER, variant="adamw", dtype="bf16"),
    wraps="fsdp2",
    stages=(2, 3),
    origin=Origin.BLIND_5,
)
def masters_rounded_by_step(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Under bf16, rounds FSDP2's fp32 shards to bf16 after each step, like an optimizer over bf16 weights.

    Updates smaller than the spacing of bf16 are lost instead of adding up, although fp32 master weights are configured.
    """
    from torch.distributed.tensor import DTensor

    engine = fsdp2.factory(model, config)
    if config.dtype != "bf16":
        return engine
    params = list(seams_engines.params(engine).values())

    @torch.no_grad()
    def round_shards(*_: Any) -> None:
        for param in params:
            local = param.to_local() if isinstance(param, DTensor) else param
            local.copy_(local.to(torch.bfloat16))

    seams_engines.optimizer(engine).register_step_post_hook(round_shards)
    return engine


@mutant_factory(
    FaultKind.AUTOCAST,
    Target("precision.master_weights", Part.ACCUMULATION, model="mixed", variant="fp32"),
    wraps="reference",
    stages=(2, 3),
    origin=Origin.BLIND_5,
)
def accumulates_in_model_dtype(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Accumulates sharded gradients in the dtype of the model instead of the dtype of the master weights.

    Small gradients of later micro-batches are rounded away, although the optimizer should get fp32 gradients.
    """
    engine = seams.build(model, config)

    def wrap(add: seams.AddGrad) -> seams.AddGrad:
        @torch.no_grad()
        def add_low(param: seams.ModelParam, share: Tensor) -> None:
            add(param, share)
            if param.has_master and seams.grads_are_sharded(engine):
                table = seams.reduced_grads(engine)
                table[param.name] = table[param.name].to(param.dtypes.param_dtype).to(param.dtypes.master_dtype)

        return add_low

    seams.wrap_add_reduced(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.AUTOCAST,
    Target("precision.master_weights", Part.ACCUMULATION, model="mixed", variant="fp32"),
    wraps="reference",
    stages=(2, 3),
    origin=Origin.BLIND_6,
)
def micro_batches_add_up_low(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Accumulates reduced gradients in the model's bf16 or fp16 instead of the fp32 of the master weights.

    The accumulated gradient loses low bits with each micro-batch, which fp32 master weights are meant to prevent.
    """
    engine = seams.build(model, config)

    @torch.no_grad()
    def add_low(param: seams.ModelParam, share: Tensor) -> None:
        table, low = seams.reduced_grads(engine), param.dtypes.param_dtype
        before = table.get(param.name)
        table[param.name] = share if before is None else (before.to(low) + share.to(low)).to(share.dtype)

    seams.wrap_add_reduced(engine, lambda _: add_low)
    return engine


@mutant_factory(
    FaultKind.AUTOCAST,
    Target("training.any_order", Part.GATHER, variant="saved", dtype="bf16"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_6,
)
def edits_miss_the_master(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Writes an edit inside ``gathered`` to the model's low-precision weight, but not to the fp32 master weight.

    The next step copies the master weight to the model, so the edit is undone. Only bf16 and fp16 show the fault.
    """
    engine = seams.build(model, config)

    def wrap(broadcast: Callable[[seams.ModelParam, Tensor, int], None]) -> Callable[..., None]:
        def edit_the_model_alone(param: seams.ModelParam, value: Tensor, source: int) -> None:
            master = seams.master_weights(engine).get(param.name)
            before = None if master is None else master.clone()
            broadcast(param, value, source)
            if master is not None and before is not None:
                with torch.no_grad():
                    master.copy_(before)

        return edit_the_model_alone

    seams.wrap_broadcast_edit(engine, wrap)
    return engine


@mutant(FaultKind.STATE, Target("state.resume", Part.OPTIMIZER, variant="adamw", dtype="bf16"), origin=Origin.STATE)
class LosesItsMasters(SpoiledLoad):
    """Rounds the loaded master weights to bf16."""

    def spoil(self) -> None:
        for master in seams.master_weights(self.base).values():
            master.copy_(master.bfloat16())


class _RoundsLoadedMasters(ReferenceEngine):
    @torch.no_grad()
    def load(self, path: Path) -> None:
        super().load(path)
        for name, master in seams.master_weights(self).items():
            master.copy_(master.to(seams.model_params(self)[name].dtypes.param_dtype))


@mutant_factory(
    FaultKind.STATE,
    Target("state.resume", Part.OPTIMIZER, variant="adamw", dtype="bf16"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_1,
)
def load_rounds_masters(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Under bf16 and fp16, sets the master weights in ``load`` from the model's weights, which loses low bits.

    The weights are equal after the load, but differ from those of the uninterrupted training some steps later.
    """
    return seams.build(model, config, _RoundsLoadedMasters)


@mutant_factory(
    FaultKind.STATE,
    Target("state.resume", Part.OPTIMIZER, variant="adamw", dtype="bf16"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_2,
)
def load_takes_masters_from_model(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Makes ``load`` cast the low-precision weights to fp32 master weights instead of reading the saved ones.

    The protocol requires ``load`` to continue from the checkpoint, but the low bits of every master weight are lost.
    """
    return seams.build(model, config, _RoundsLoadedMasters)


class _CopiesModelToMasters(ReferenceEngine):
    @torch.no_grad()
    def load(self, path: Path) -> None:
        super().load(path)
        for name, master in seams.master_weights(self).items():
            master.copy_(seams.local_elements(self, seams.model_params(self)[name]))


@mutant_factory(
    FaultKind.STATE,
    Target("state.resume", Part.OPTIMIZER, variant="adamw", dtype="bf16"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_3,
)
def masters_from_model_at_load(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Copies the low-precision weights to the fp32 master weights in ``load`` instead of reading the saved ones.

    A resumed training continues from rounded master weights, unlike a training that was not interrupted.
    """
    return seams.build(model, config, _CopiesModelToMasters)


@mutant_factory(
    FaultKind.STATE,
    Target("state.resume", Part.OPTIMIZER, variant="adamw", dtype="bf16"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_4,
)
def masters_rounded_on_load(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Recreates the fp32 master weights in ``load`` from the low-precision weights, so their low bits are lost.

    A resumed training differs from a training that was never interrupted.
    """
    return seams.build(model, config, _CopiesModelToMasters)


@mutant(
    FaultKind.AUTOCAST,
    Target("parameters.edited_and_stepped", Part.GATHER, model="similar", dtype="bf16", variant="partly"),
    origin=Origin.BLIND_9,
)
class AnEditRoundsWhatItLeaves(ShardedWrapper):
    """Rounds to bf16 the master weights that were gathered for an edit but that nobody edited."""

    @contextmanager
    def gathered(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        with self.base.gathered(names) as weights:
            before = {name: weight.clone() for name, weight in weights.items()}
            yield weights
            left = [name for name, weight in before.items() if torch.equal(weight, weights[name])]
        for name in left:
            if self.module.get_parameter(name).requires_grad:
                self.access.write_param(name, self.base.read_param(name).bfloat16().float())


@mutant(
    FaultKind.AUTOCAST,
    Target("precision.frozen_masters", Part.GATHER, dtype="bf16", parameter="first*"),
    Target("precision.frozen_masters", Part.GATHER, dtype="fp16", parameter="first*"),
    origin=Origin.BLIND_12,
)
class ReturnsMastersOfFrozenWeights(EngineWrapper):
    """Returns the fp32 master of a weight that was frozen after a step, instead of the weight itself."""

    def full_params(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = self.base.full_params()
        frozen = {name for name, weight in self.module.named_parameters() if not weight.requires_grad}
        masters = self.base.observe().masters
        if isinstance(masters, Mapping):
            weights |= {name: master for name, master in masters.items() if name in frozen}
        return weights
