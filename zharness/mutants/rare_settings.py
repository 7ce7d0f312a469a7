"""Mutants that are broken only in rare combinations, such as a read inside a window or a group of rate zero."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import CountsMicroBatches, EngineWrapper, SpoiledLoad
from zharness.parity import Part


@mutant(
    FaultKind.OPTIMIZER,
    Target("training.caller_modes", Part.FORWARD, variant="read_out"),
    origin=Origin.BLIND_8,
)
class CollectsGarbageAfterReading(EngineWrapper):
    """Enables Python's garbage collector in ``read_grad``, even if the caller has disabled it."""

    def read_grad(self, name: str) -> Tensor | None:
        value: Tensor | None = self.base.read_grad(name)
        gc.enable()
        return value


@mutant(FaultKind.STATE, Target("training.caller_modes", Part.FORWARD, variant="edited"), origin=Origin.BLIND_8)
class EditsResetTheDefaultDtype(EngineWrapper):
    """Sets the default dtype to float32 at the end of ``gathered``."""

    @contextmanager
    def gathered(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        with self.base.gathered(names) as weights:
            yield weights
        torch.set_default_dtype(torch.float32)


@mutant(FaultKind.STATE, Target("state.resume", Part.OPTIMIZER, variant="amsgrad"), origin=Origin.BLIND_8)
class LoadsNoMaximum(SpoiledLoad):
    """Sets AMSGrad's running maximum to zero at load."""

    def spoil(self) -> None:
        for state in self.optimizer.state.values():
            if "max_exp_avg_sq" in state:
                state["max_exp_avg_sq"].zero_()


@mutant(FaultKind.STATE, Target("state.resume", Part.OPTIMIZER, variant="centered"), origin=Origin.BLIND_8)
class LoadsNoCentre(SpoiledLoad):
    """Sets the mean gradient of centered RMSprop to zero at load."""

    def spoil(self) -> None:
        for state in self.optimizer.state.values():
            if "grad_avg" in state:
                state["grad_avg"].zero_()


@mutant(
    FaultKind.OPTIMIZER,
    Target("training.optimizer_options", Part.OPTIMIZER, variant="adamw_group_of_rate_0"),
    origin=Origin.BLIND_8,
)
class TakesTheDefaultForARateOfZero(EngineWrapper):
    """Steps a group whose learning rate is zero with the optimizer's default rate (``group["lr"] or default``)."""

    def step(self) -> None:
        groups = [group for group in self.optimizer.param_groups if group["lr"] == 0]
        for group in groups:
            group["lr"] = self.config.optimizer.args["lr"]
        self.base.step()
        for group in groups:
            group["lr"] = 0.0


@mutant(FaultKind.STATE, Target("state.several_saves", Part.GATHER, model="experts"), origin=Origin.BLIND_8)
class ReturnsFrozenWeightsOfConstruction(EngineWrapper):
    """Returns from ``full_state_dict`` frozen weights as they were when the engine was built."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        frozen = {name for name, param in self.module.named_parameters() if not param.requires_grad}
        self.first = {name: value for name, value in self.base.full_params().items() if name in frozen}

    def full_state_dict(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.base.full_state_dict()
        return {name: self.first[name].clone() if name in self.first else value for name, value in state.items()}


@mutant(
    FaultKind.CONTRIBUTION,
    Target("values.zero_loss", Part.OPTIMIZER, model="experts", variant="first_of_2_by_engine"),
    origin=Origin.BLIND_8,
)
class MakesUpForZeros(EngineWrapper):
    """Doubles all gradients after a backward if they were all zero before it, as if a micro-batch were missing."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        before = [param.grad for param in self.parameters_with_grad()]
        is_zero = bool(before) and not any(bool(grad.any()) for grad in before if grad is not None)
        self.base.backward(loss, retain_graph=retain_graph)
        for param in self.parameters_with_grad() if is_zero else ():
            assert param.grad is not None
            param.grad.mul_(2)


@mutant(
    FaultKind.CLIPPING,
    Target("idle.whole_step", model="experts", variant="norm"),
    origin=Origin.BLIND_8,
)
class NormCountsIdleWeights(EngineWrapper):
    """Counts in the reported norm the last gradient of each weight that has no gradient in a step."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.squares: dict[str, float] = {}
        self.idle = 0.0

    def step(self) -> None:
        used = {name: float(grad.double().square().sum()) for name, grad in self.base.full_grads().items()}
        self.idle = sum(square for name, square in self.squares.items() if name not in used)
        self.squares |= used
        self.base.step()

    def grad_norm(self) -> float | None:
        norm: float | None = self.base.grad_norm()
        return norm if norm is None else float((norm**2 + self.idle) ** 0.5)


@mutant(
    FaultKind.CONTRIBUTION,
    Target("idle.whole_step", Part.OPTIMIZER, model="experts", variant="discarded"),
    origin=Origin.BLIND_8,
)
class ZeroGradDropsTheLastBackward(EngineWrapper):
    """Drops in ``zero_grad`` the gradients that the last backward changed, and keeps all other gradients."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.unchanged: list[tuple[nn.Parameter, Tensor]] = []

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        before = [(param, param.grad.clone()) for param in self.parameters_with_grad() if param.grad is not None]
        self.base.backward(loss, retain_graph=retain_graph)
        self.unchanged = [(param, grad) for param, grad in before if torch.equal(grad, param.grad)]  # type: ignore[arg-type]

    def step(self) -> None:
        self.unchanged = []
        self.base.step()

    def zero_grad(self) -> None:
        self.base.zero_grad()
        for param, grad in self.unchanged:
            param.grad = grad
        self.unchanged = []


@mutant(
    FaultKind.CONTRIBUTION,
    Target("access.read_grad_in_window", Part.OPTIMIZER, model="similar", variant="engine"),
    origin=Origin.BLIND_8,
)
class AddsWhatWasReadInAWindow(CountsMicroBatches):
    """Adds a gradient once more in the step if the caller read it before the last micro-batch of an engine's window."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.extra: dict[str, Tensor] = {}

    def read_grad(self, name: str) -> Tensor | None:
        value: Tensor | None = self.base.read_grad(name)
        if value is not None and self.micro + 1 < self.window:
            self.extra[name] = value.clone()
        return value

    def step(self) -> None:
        self.count_step()
        if self.micro == 0:
            for name, extra in self.extra.items():
                self.base.write_grad(name, self.base.read_grad(name) + extra)
            self.extra = {}
        self.base.step()


@mutant(
    FaultKind.CONTRIBUTION,
    Target("values.skipped_step", Part.OPTIMIZER, variant="first_of_2_by_engine", dtype="bf16"),
    origin=Origin.BLIND_8,
)
class SkippedStepKeepsGradients(EngineWrapper):
    """Keeps the gradients of a step that an overflow skipped, so that the next window adds to them."""

    def step(self) -> None:
        grads = [(param, param.grad) for param in self.parameters_with_grad()]
        before = self.base.observe().skipped_steps
        self.base.step()
        if self.base.observe().skipped_steps != before:
            for param, grad in grads:
                param.grad = grad


@mutant(
    FaultKind.REDUCE_DTYPE,
    Target("precision.buffers_keep_dtype", Part.FORWARD, model="mixed", variant="inputs"),
    origin=Origin.BLIND_8,
)
class CastsIntegerInputs(EngineWrapper):
    """In low precision, casts int64 inputs to the low-precision dtype and back to int64."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config.dtype)
        cast = [
            a.to(dtype).to(a.dtype) if dtype and isinstance(a, Tensor) and a.dtype == torch.int64 else a for a in args
        ]
        return self.base(*cast, **kwargs)


@mutant(
    FaultKind.STALE,
    Target("access.write_param", Part.GATHER, model="similar", variant="forward_shard"),
    origin=Origin.BLIND_8,
)
class WritesShardsToThisRankAlone(EngineWrapper):
    """Writes only this rank's copy in ``write_param_shard``; other ranks' copies change only with the next step."""

    stages = (1,)

    def write_param_shard(self, name: str, value: Tensor) -> None:
        param = dict(self.module.named_parameters())[name]
        before = param.detach().clone()
        self.base.write_param_shard(name, value)
        rank = torch.distributed.get_rank()
        own = [piece for piece in self.base.layout()[name] if piece.rank == rank]
        with torch.no_grad():
            for piece in own:
                before.view(-1)[piece.start : piece.stop] = param.detach().view(-1)[piece.start : piece.stop]
            param.copy_(before)
