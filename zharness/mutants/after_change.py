"""Mutants that are wrong after a write, an edit, a load, a skipped step or an idle step, or in a mode of the caller."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mutants import seams
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.tensor_access import ShardedWrapper
from zharness.mutants.wrapper import DDPWrapper, EngineWrapper, SpoiledLoad
from zharness.parity import Part


def changed(variant: str, part: Part) -> Target:
    """Return the target in a variant of access.after_change."""
    return Target("access.after_change", part, model="similar", variant=variant)


@mutant(
    FaultKind.STALE,
    changed("written_param", Part.GATHER),
    changed("edited", Part.GATHER),
    changed("loaded", Part.GATHER),
    origin=Origin.BLIND_7,
)
class ReadsTheWeightOfTheLastStep(ShardedWrapper):
    """Caches each weight at its first read, and returns the cached value in every read until the next step."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.read: dict[str, Tensor] = {}

    def read_param(self, name: str) -> Tensor | None:
        if name not in self.read:
            self.read[name] = self.base.read_param(name)
        return self.read[name].clone()

    def step(self) -> None:
        self.base.step()
        self.read.clear()


@mutant(FaultKind.OPTIMIZER, changed("written_state_before_step", Part.OPTIMIZER), origin=Origin.BLIND_7)
class ForgetsStateWrittenAfterBackward(ShardedWrapper):
    """Starts the step from the old optimizer state if the caller replaced that state between backward and step."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.has_gradients = False
        self.before: dict[tuple[str, str], Tensor] = {}

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss, retain_graph=retain_graph)
        self.has_gradients = True

    def write_optimizer_state(self, name: str, key: str, value: Tensor) -> None:
        if self.has_gradients:
            self.before.setdefault((name, key), self.base.read_optimizer_state(name, key))
        self.access.write_optimizer_state(name, key, value)

    def step(self) -> None:
        for (name, key), value in self.before.items():
            self.access.write_optimizer_state(name, key, value)
        self.before, self.has_gradients = {}, False
        self.base.step()


@mutant(
    FaultKind.OPTIMIZER,
    changed("written_param", Part.OPTIMIZER),
    changed("written_param_before_step", Part.OPTIMIZER),
    origin=Origin.BLIND_7,
)
class WritingAWeightClearsItsState(ShardedWrapper):
    """If the caller replaces a weight, sets the weight's moments to zero."""

    def write_param(self, name: str, value: Tensor) -> None:
        self.access.write_param(name, value)
        for key, moment in self.base.full_optimizer_state().get(name, {}).items():
            if key != "step":
                self.access.write_optimizer_state(name, key, torch.zeros_like(moment))


@mutant(FaultKind.SHARDS, changed("groups", Part.OPTIMIZER), origin=Origin.BLIND_7)
class FindsStateByShape(ShardedWrapper):
    """If the caller reads optimizer state, returns the state of the first trained parameter with the same shape."""

    def read_optimizer_state(self, name: str, key: str) -> Tensor | None:
        trained = {other: p for other, p in self.module.named_parameters() if p.requires_grad}
        first = next(other for other, p in trained.items() if p.shape == trained[name].shape)
        return self.access.read_optimizer_state(first, key)


@mutant(FaultKind.STALE, changed("idle", Part.OPTIMIZER), origin=Origin.BLIND_7)
class ReadsZerosAfterAnIdleStep(ShardedWrapper):
    """If the caller reads optimizer state after a step without gradients, returns zeros."""

    is_idle = False

    def step(self) -> None:
        self.is_idle = not self.base.full_grads()
        self.base.step()

    def read_optimizer_state(self, name: str, key: str) -> Tensor | None:
        state = self.access.read_optimizer_state(name, key)
        return state if state is None or not self.is_idle else torch.zeros_like(state)


@mutant(FaultKind.STATE, Target("state.several_saves", Part.GATHER, model="experts"), origin=Origin.BLIND_7)
class SavesTheFirstBuffers(EngineWrapper):
    """Writes the buffers of the first checkpoint into every later checkpoint."""

    first: dict[str, Tensor] | None = None

    @torch.no_grad()
    def save(self, path: Path) -> None:
        now = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        self.first = self.first or now
        self.set_buffers(self.first)
        self.base.save(path)
        self.set_buffers(now)

    def set_buffers(self, values: dict[str, Tensor]) -> None:
        """Overwrite every buffer."""
        for name, buffer in self.module.named_buffers():
            buffer.copy_(values[name])


@mutant(
    FaultKind.STATE,
    Target("state.several_saves", Part.OPTIMIZER, model="experts", variant="idle", parameter="*/step"),
    Target("state.several_saves", Part.OPTIMIZER, model="experts", variant="frozen", parameter="*/step"),
    origin=Origin.BLIND_7,
)
class LoadsOneStepCount(SpoiledLoad):
    """Sets, in a load, every parameter's step count to the largest step count of the checkpoint."""

    def spoil(self) -> None:
        counts = [state["step"] for state in self.optimizer.state.values() if "step" in state]
        for count in counts:
            count.fill_(max(map(float, counts)))


@mutant(
    FaultKind.STATE,
    Target("state.several_saves", Part.GATHER, model="experts"),
    origin=Origin.BLIND_7,
)
class KeepsFrozenWeightsInALoad(EngineWrapper):
    """Does not load the weights that are frozen at the time of the load."""

    @torch.no_grad()
    def load(self, path: Path) -> None:
        frozen = [(p, p.clone()) for p in self.module.parameters() if not p.requires_grad]
        self.base.load(path)
        for parameter, value in frozen:
            parameter.copy_(value)


@mutant(
    FaultKind.STATE,
    Target(
        "state.several_saves",
        Part.LOCAL_GRADIENT,
        model="experts",
        variant="frozen",
        parameter="requires_grad of experts.1.*",
    ),
    origin=Origin.ORDERS,
)
class UnfreezesInALoad(SpoiledLoad):
    """Unfreezes, in a load, the parameters that were frozen after construction."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.trained_at_first = [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def spoil(self) -> None:
        for parameter in self.trained_at_first:
            parameter.requires_grad_(True)


@mutant(
    FaultKind.PARAMETERS,
    Target("parameters.edited", Part.LOCAL_GRADIENT, model="changing"),
    Target("parameters.edited_and_stepped", Part.GATHER, model="similar"),
    origin=Origin.BLIND_7,
)
class KeepsFrozenWeightsInAnEdit(EngineWrapper):
    """Ignores edits of frozen weights."""

    @contextmanager
    def gathered(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        params = dict(self.module.named_parameters())
        kept = {name: params[name].detach().clone() for name in names if not params[name].requires_grad}
        with self.base.gathered(names) as weights:
            yield weights
            with torch.no_grad():
                for name, value in kept.items():
                    weights[name].copy_(value)


@mutant(
    FaultKind.AUTOCAST,
    Target("parameters.edited_and_stepped", Part.OPTIMIZER, model="similar", dtype="bf16", stage=2),
    origin=Origin.BLIND_7,
)
class StepsFromTheMastersBeforeAnEdit(ShardedWrapper):
    """Starts the step after an edit from the weights before the edit."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.before: dict[str, Tensor] = {}

    @contextmanager
    def gathered(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        trained = {name for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        self.before = {name: self.base.read_param(name) for name in names if name in trained}
        with self.base.gathered(names) as weights:
            yield weights

    def step(self) -> None:
        for name, weight in self.before.items():
            self.access.write_param(name, weight)
        self.before = {}
        self.base.step()


@mutant(FaultKind.CLIPPING, Target("training.calls_under_modes", variant="autocast"), origin=Origin.BLIND_7)
class NormInTheCallersAutocast(EngineWrapper):
    """Under the caller's torch.autocast, computes the norm by a matrix product, which autocast rounds."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)

        def wrap(norm: Callable[[], float]) -> Callable[[], float]:
            def norm_in_low_precision() -> float:
                if not torch.is_autocast_enabled("cpu"):
                    return norm()
                flat = torch.cat([grad.flatten() for grad in seams.reduced_grads(self.base).values()])
                return math.sqrt(float(flat[None] @ flat[:, None]))

            return norm_in_low_precision

        seams.wrap_grad_norm(self.base, wrap)


@mutant(
    FaultKind.LOSS_SCALE,
    Target("values.skipped_step", Part.OPTIMIZER, dtype="fp16", stage=2),
    Target("values.skipped_step", Part.OPTIMIZER, dtype="fp16", stage=2, variant="clipped"),
    origin=Origin.BLIND_7,
)
class ClearsMomentsInASkippedStep(ShardedWrapper):
    """Sets every moment of the optimizer to zero in a step that is skipped for an overflow."""

    def step(self) -> None:
        before = self.base.observe().skipped_steps
        self.base.step()
        if self.base.observe().skipped_steps == before:
            return
        for name, state in self.base.full_optimizer_state().items():
            for key, moment in state.items():
                if key != "step":
                    self.access.write_optimizer_state(name, key, torch.zeros_like(moment))


@mutant(
    FaultKind.CLIPPING,
    Target("values.skipped_step", dtype="fp16", stage=2, variant="clipped"),
    origin=Origin.BLIND_7,
)
class DoublesTheNormAfterASkippedStep(ShardedWrapper):
    """Reports twice the norm in the step that follows a step that was skipped for an overflow."""

    skipped = after_skipped = 0

    def step(self) -> None:
        self.after_skipped = self.skipped
        before = self.base.observe().skipped_steps
        self.base.step()
        self.skipped = self.base.observe().skipped_steps - before

    def grad_norm(self) -> float | None:
        norm: float | None = self.base.grad_norm()
        return norm if norm is None or not self.after_skipped else 2 * norm


@mutant(
    FaultKind.CLIPPING,
    Target("values.not_finite", Part.OPTIMIZER, model="experts", variant="one_inf_clipped"),
    origin=Origin.BLIND_7,
)
class ClipsInfinityToZero(DDPWrapper):
    """If clipping is configured and the norm is infinite, sets every gradient to zero."""

    def step(self) -> None:
        grads = [parameter.grad for parameter in self.parameters_with_grad() if parameter.grad is not None]
        infinite = math.isinf(float(torch.stack([grad.norm() for grad in grads]).norm())) if grads else False
        if self.config.clip is not None and infinite:
            for grad in grads:
                grad.zero_()
        self.base.step()


@mutant(
    FaultKind.GRAPH,
    Target("backward.outputs", None, model="blocks", variant="named_tuple", cause="the engine's forward a tuple"),
    origin=Origin.BLIND_7,
)
class ReturnsPlainTuples(EngineWrapper):
    """Returns a plain tuple in place of a named tuple."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.base(*args, **kwargs)
        return tuple(output) if isinstance(output, tuple) else output


@mutant(
    FaultKind.SCALE,
    Target("window.partly_used", Part.OPTIMIZER, model="experts", variant="first_4_by_engine_scaled"),
    origin=Origin.BLIND_7,
)
class ScaleDividesByTwo(EngineWrapper):
    """Divides each loss in ``scale`` by 2, even if the accumulation window of the engine has more micro-batches."""

    def scale(self, loss: Tensor) -> Tensor:
        excess = max(self.config.accumulation_steps // 2, 1)
        scaled: Tensor = self.base.scale(loss * excess)
        return scaled


@mutant(
    FaultKind.SCALE,
    Target("window.partly_used_on_some_ranks", Part.OPTIMIZER, model="experts", variant="first_of_rank_0_1"),
    Target("window.partly_used_on_some_ranks", Part.OPTIMIZER, model="experts", variant="changing_ranks_1"),
    origin=Origin.BLIND_7,
)
class AveragesOverTheRanksWithGradients(EngineWrapper):
    """Averages a gradient over only the ranks that have it, if the accumulation window has one micro-batch."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss, retain_graph=retain_graph)
        used = torch.tensor([float(parameter.grad is not None) for parameter in self.module.parameters()])
        torch.distributed.all_reduce(used)
        world_size = torch.distributed.get_world_size()
        for parameter, users in zip(self.module.parameters(), used.tolist(), strict=True):
            if parameter.grad is not None and self.config.accumulation_steps == 1:
                parameter.grad.mul_(world_size / users)


@mutant(
    FaultKind.STATE,
    Target("state.buffer_kinds", Part.GATHER, variant="int64", dtype="bf16", parameter="values of the buffer, loaded"),
    Target("state.buffer_kinds", Part.GATHER, variant="int64", dtype="fp16", parameter="values of the buffer, loaded"),
    origin=Origin.BLIND_7,
)
class LoadsBuffersInLowPrecision(SpoiledLoad):
    """Rounds every buffer to bf16 in a load, if the engine trains in low precision."""

    def spoil(self) -> None:
        if self.config.dtype != "fp32":
            for buffer in self.module.buffers():
                buffer.copy_(buffer.bfloat16())
