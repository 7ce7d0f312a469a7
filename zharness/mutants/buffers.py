"""Mutants that change, share or lose the model's buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import (
    EngineConfig,
    fsdp2,
)
from zharness.engines.reference import ReferenceEngine
from zharness.engines.torch_engine import LOW_PRECISION_DTYPES, TorchEngine
from zharness.mutants import seams
from zharness.mutants.mutant import (
    ALL_STAGES,
    FaultKind,
    Origin,
    Target,
    mutant,
    mutant_factory,
)
from zharness.mutants.wrapper import EngineWrapper, SpoiledLoad
from zharness.parity import Part


@mutant(
    FaultKind.AUTOCAST,
    Target("precision.buffers_keep_dtype", Part.OPTIMIZER, model="mixed", variant="bf16"),
    origin=Origin.PRECISION,
)
class LowersBuffers(EngineWrapper):
    """Converts the model's floating-point buffers to bf16 together with its parameters."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        for module in model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.bfloat16())
        super().__init__(model, config)


@mutant_factory(
    FaultKind.AUTOCAST,
    Target("precision.buffers_keep_dtype", None, model="mixed", variant="declared", cause="the buffer 'shift'"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_2,
)
@torch.no_grad()
def low_precision_rounds_buffers(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Under bf16 and fp16, rounds floating-point buffers to that dtype at construction, as ``model.bfloat16()`` does.

    Frequencies, masks and means that are stored in buffers lose their low bits.
    """
    engine = seams.build(model, config)
    if config.dtype in LOW_PRECISION_DTYPES:
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.copy_(buffer.to(LOW_PRECISION_DTYPES[config.dtype]))
    return engine


@mutant(
    FaultKind.RANKS,
    Target("training.modes", Part.FORWARD, model="stateful", parameter="norm.running*"),
    Target("training.buffers", Part.FORWARD, model="stateful", parameter="norm.running*"),
    origin=Origin.ONLOOKERS,
)
class SharesStatistics(EngineWrapper):
    """Averages floating-point buffers over ranks after each backward."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss, retain_graph=retain_graph)
        for buffer in self.module.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer /= dist.get_world_size()


@mutant(
    FaultKind.STALE,
    Target("training.modes", Part.FORWARD, model="stateful", parameter="norm.running*"),
    origin=Origin.ONLOOKERS,
)
class ForwardsOnACopyOfBuffers(EngineWrapper):
    """Restores all buffers after each forward, so that running statistics never change."""

    wraps = "fsdp2"
    stages = (2, 3)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kept = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        output = self.base(*args, **kwargs)
        for name, buffer in self.module.named_buffers():
            buffer.data = kept[name]
        return output


@mutant(
    FaultKind.AUTOCAST,
    Target("precision.buffers_keep_dtype", Part.GATHER, model="mixed", variant="declared", parameter="shift"),
    origin=Origin.ONLOOKERS,
)
class StateDictRoundsBuffers(EngineWrapper):
    """Under bf16 and fp16, rounds floating-point buffers to that dtype in ``full_state_dict``, and returns float32."""

    def full_state_dict(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.base.full_state_dict()
        low = LOW_PRECISION_DTYPES.get(self.config.dtype, torch.float32)
        names = {name for name, buffer in self.module.named_buffers() if buffer.is_floating_point()}
        return {name: tensor.to(low).to(tensor.dtype) if name in names else tensor for name, tensor in state.items()}


class _LoadShares(ReferenceEngine):
    """A ReferenceEngine whose ``load`` broadcasts the buffers of rank 0 to all ranks."""

    def load(self, path: Path) -> None:
        super().load(path)
        for buffer in self.module.buffers():
            seams.broadcast_tensors([buffer], seams.comm(self))


@mutant_factory(
    FaultKind.STATE,
    Target("state.resume", Part.GATHER, variant="buffers", parameter="seen"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_1,
)
def load_shares_buffers(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Makes ``load`` give every rank the buffers of rank 0 instead of the buffers that the rank saved.

    Running statistics differ between ranks, so the other ranks do not continue from their own statistics.
    """
    return seams.build(model, config, _LoadShares)


@mutant_factory(
    FaultKind.STATE,
    Target("state.resume", Part.GATHER, variant="adamw", parameter="seen"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_3,
)
def replaced_buffer_not_saved(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Lists the buffers once, at construction, and saves and loads only the listed tensors.

    If a module assigns a new tensor to a buffer in its forward (``self.average = 0.9 * self.average + ...``), ``save``
    writes the value from before training, and ``load`` does not restore the buffer.
    """
    engine = seams.build(model, config)
    listed = seams.persistent_buffers(engine)
    seams.replace_persistent_buffers(engine, lambda: listed)
    return engine


class _LoadsParametersOnly(TorchEngine):
    """A TorchEngine whose ``load`` does not change the buffers."""

    @torch.no_grad()
    def load(self, path: Path) -> None:
        before = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        super().load(path)
        for name, buffer in self.module.named_buffers():
            buffer.copy_(before[name])


@mutant_factory(
    FaultKind.STATE,
    Target("state.resume", Part.GATHER, variant="adamw", parameter="seen"),
    wraps="fsdp2",
    stages=(2, 3),
    origin=Origin.BLIND_2,
)
def fsdp2_load_forgets_buffers(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Makes FSDP2's ``load`` restore the parameters, the optimizer and the schedule, but not the buffers.

    A run that is resumed in a new process evaluates its batch norms with newly initialized running statistics.
    """
    engine = fsdp2.factory(model, config)
    engine.__class__ = _LoadsParametersOnly
    return engine


@mutant_factory(
    FaultKind.STATE,
    Target("state.resume", Part.GATHER, variant="buffers", parameter="seen"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_4,
)
def buffers_of_rank_0_after_load(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Makes ``load`` broadcast the buffers of rank 0, although each rank has saved its own buffers.

    The other ranks do not continue from their own running statistics.
    """
    return seams.build(model, config, _LoadShares)


@mutant_factory(
    FaultKind.STATE,
    Target("state.resume", Part.GATHER, variant="buffers", parameter="seen"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_6,
)
def load_gives_rank_0s_buffers(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Makes every rank read the buffers of rank 0 in ``load``.

    Running statistics differ between ranks, and each rank has saved its own; after the load, training continues with
    the statistics of rank 0 on all ranks.
    """
    engine, own = seams.build(model, config), f"buffers/{dist.get_rank()}/"

    def wrap(make_empty: Callable[..., Mapping[str, Tensor]]) -> Callable[..., Mapping[str, Tensor]]:
        def make_empty_of_rank_0(*args: Any, **kwargs: Any) -> Mapping[str, Tensor]:
            tensors = make_empty(*args, **kwargs)
            return {
                f"buffers/0/{key.removeprefix(own)}" if key.startswith(own) else key: t for key, t in tensors.items()
            }

        return make_empty_of_rank_0

    seams.wrap_make_empty_tensors(engine, wrap)
    return engine


@mutant(
    FaultKind.STALE,
    Target("training.modes", Part.FORWARD, model="stateful", parameter="norm.running*"),
    origin=Origin.BLIND_9,
)
class RestoresBuffersWithoutGradients(EngineWrapper):
    """Restores all buffers after a forward without gradients, even if the model is in training mode."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        output = self.base(*args, **kwargs)
        if not torch.is_grad_enabled():
            for name, buffer in self.module.named_buffers():
                buffer.copy_(before[name])
        return output


@mutant(FaultKind.STATE, Target("state.buffer_kinds", Part.GATHER, variant="shared"), origin=Origin.BLIND_11)
class LoadSplitsSharedBuffers(SpoiledLoad):
    """Gives modules that share a buffer a separate tensor each in a load."""

    def spoil(self) -> None:
        for module in self.module.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.clone())


@mutant(FaultKind.STATE, Target("state.buffer_kinds", Part.GATHER, variant="not_persistent"), origin=Origin.BLIND_11)
class LoadResetsVolatileBuffers(SpoiledLoad):
    """Resets, in a load, the buffers that are not persistent to their values at construction."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        saved = self.module.state_dict()
        self.first = {name: b.clone() for name, b in self.module.named_buffers() if name not in saved}

    def spoil(self) -> None:
        for name, value in self.first.items():
            self.module.get_buffer(name).copy_(value)
