"""Mutants that run forward or backward in a wrong autocast state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zharness import torch_private
from zharness.engines import (
    EngineConfig,
    ddp,
    fsdp2,
)
from zharness.engines.reference import ReferenceEngine
from zharness.engines.torch_engine import TorchEngine
from zharness.mutants import seams, seams_engines
from zharness.mutants.mutant import (
    ALL_STAGES,
    FaultKind,
    Origin,
    Target,
    deepspeed,
    mutant,
    mutant_factory,
)
from zharness.mutants.wrapper import EngineWrapper, in_backward
from zharness.parity import Part


@mutant(
    FaultKind.AUTOCAST,
    Target("precision.autocast_policy", Part.LOCAL_GRADIENT, model="mixed"),
    origin=Origin.PRECISION,
    imitates=deepspeed(6993),
)
class ForgetsAutocast(EngineWrapper):
    """Accepts a ``torch_autocast`` section but computes in fp32."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        options = {key: value for key, value in config.options.items() if key != "torch_autocast"}
        super().__init__(model, replace(config, options=options))


@mutant(
    FaultKind.AUTOCAST,
    Target("precision.autocast_states", Part.REDUCTION, model="recomputed"),
    origin=Origin.PRECISION,
)
class RecomputesWithoutAutocast(EngineWrapper):
    """Disables autocast in the last linear layer while a backward recomputes the layer's forward."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.contexts = ExitStack()
        *_, last = (module for module in self.module.modules() if isinstance(module, nn.Linear))
        last.register_forward_pre_hook(self.leave_autocast)
        last.register_forward_hook(self.restore_autocast)

    def leave_autocast(self, *_: Any) -> None:
        """Disable autocast if a backward is running."""
        if in_backward() != -1:
            self.contexts.enter_context(torch.autocast("cpu", enabled=False))

    def restore_autocast(self, *_: Any) -> None:
        """Restore autocast after the layer."""
        self.contexts.close()


@mutant(
    FaultKind.AUTOCAST,
    Target("precision.autocast_states", model="mixed"),
    origin=Origin.PRECISION,
    imitates=deepspeed(7916),
)
class BackwardLeavesAutocast(EngineWrapper):
    """Runs its backward with autocast disabled, even if the caller runs the backward under torch.autocast."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        with torch.autocast("cpu", enabled=False):
            self.base.backward(loss, retain_graph=retain_graph)


@mutant(
    FaultKind.AUTOCAST,
    Target("precision.weights_of_two_dtypes", None, model="adapted", cause="the same dtype"),
    origin=Origin.PRECISION,
    imitates=deepspeed(8113),
)
class GathersOneDtype(EngineWrapper):
    """Gathers the weights of a forward under ``torch_autocast`` together, and raises if they have two dtypes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "torch_autocast" in self.config.options and len({weight.dtype for weight in self.module.parameters()}) > 1:
            raise AssertionError("all weights of a gather must have the same dtype")
        return self.base(*args, **kwargs)


@mutant(
    FaultKind.AUTOCAST,
    Target("precision.weights_of_two_dtypes", Part.FORWARD, model="adapted"),
    origin=Origin.PRECISION,
)
class OffsetsOfOneDtype(EngineWrapper):
    """Reads weights of a second dtype one element too late from the buffer of a gather under ``torch_autocast``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first, *weights = self.module.parameters()
        late = [weight for weight in weights if weight.dtype != first.dtype and "torch_autocast" in self.config.options]
        for weight in late:
            weight.data = weight.data.flatten().roll(-1).view_as(weight)
        output = self.base(*args, **kwargs)
        for weight in late:
            weight.data = weight.data.flatten().roll(1).view_as(weight)
        return output


@mutant(FaultKind.AUTOCAST, Target("precision.autocast_nested", Part.FORWARD, model="mixed"), origin=Origin.PRECISION)
class OuterAutocastWins(EngineWrapper):
    """Ignores its ``torch_autocast`` section if the caller runs the engine under torch.autocast."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs) if torch.is_autocast_enabled("cpu") else self.base(*args, **kwargs)


@mutant(
    FaultKind.AUTOCAST,
    Target("precision.autocast_nested", Part.GATHER, model="mixed", parameter="torch.autocast"),
    origin=Origin.CIRCUMSTANCES,
)
class LeavesAutocastOn(EngineWrapper):
    """Leaves torch.autocast enabled for the whole thread if a forward raises, because a ``finally`` is missing."""

    wraps = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        section = seams_engines.autocast(self.base)
        section.__enter__()
        output = seams_engines.call_forward(self.base, *args, **kwargs)
        section.__exit__(None, None, None)
        return output

    def close(self) -> None:
        self.base.close()
        torch.set_autocast_enabled("cpu", False)  # the next cell of this process must not run under autocast


@mutant(
    FaultKind.AUTOCAST, Target("precision.autocast_policy", Part.FORWARD, model="mixed"), origin=Origin.CIRCUMSTANCES
)
class EvaluatesWithOldCasts(EngineWrapper):
    """Casts the weights once for evaluation under torch_autocast, and uses these old casts even after a step."""

    wraps = "ddp"
    cast: dict[str, Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or not self.config.options.get("torch_autocast"):
            return self.base(*args, **kwargs)
        if self.cast is None:
            self.cast = {name: tensor.detach().clone() for name, tensor in self.module.named_parameters()}
        with seams_engines.autocast(self.base):
            return torch.func.functional_call(self.module, self.cast, args, kwargs)


class _BackwardInAutocast(ReferenceEngine):
    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        with seams.settings(self).precision.autocast_context(loss.device.type):
            super().backward(loss, retain_graph=retain_graph)


@mutant_factory(
    FaultKind.AUTOCAST,
    Target("precision.autocast_states", model="mixed"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_2,
)
def backward_runs_in_autocast(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Runs ``engine.backward`` inside the engine's torch.autocast, so fp32 matrices are multiplied in low precision.

    ``backward`` should compute the same gradients as ``scale(loss).backward()``. If a loss, or a block with autocast
    disabled, multiplies fp32 matrices, its gradients are computed in bf16.
    """
    return seams.build(model, config, _BackwardInAutocast)


class _BackwardUnderAutocast(TorchEngine):
    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        with seams_engines.autocast(self):
            super().backward(loss, retain_graph=retain_graph)


@mutant_factory(
    FaultKind.AUTOCAST,
    Target("precision.autocast_policy", model="mixed"),
    wraps="ddp",
    stages=(0,),
    origin=Origin.BLIND_3,
)
def backward_under_autocast(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Runs ``backward`` over DDP under the torch.autocast of the forward.

    Operations that the model or the loss ran in fp32 outside of autocast run their backward in low precision, and
    ``scale(loss).backward()`` computes gradients that differ from those of ``backward(loss)``.
    """
    engine = ddp.factory(model, config)
    engine.__class__ = _BackwardUnderAutocast
    return engine


@mutant_factory(
    FaultKind.AUTOCAST,
    Target("precision.autocast_policy", Part.LOCAL_GRADIENT, model="mixed"),
    wraps="fsdp2",
    stages=(2, 3),
    origin=Origin.BLIND_4,
)
def fsdp2_autocast_only_with_grad(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Applies the option torch_autocast only to forwards with gradients, and runs forwards under ``no_grad`` in fp32.

    Evaluation then computes a different function than training, in a different dtype.
    """
    engine = fsdp2.factory(model, config)

    def wrap(autocast: Callable[[], AbstractContextManager[Any]]) -> Callable[[], AbstractContextManager[Any]]:
        return lambda: autocast() if torch.is_grad_enabled() else nullcontext()

    seams_engines.wrap_autocast(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.AUTOCAST,
    Target("precision.autocast_nested", Part.FORWARD, model="mixed", parameter="loss"),
    wraps="fsdp2",
    stages=(2, 3),
    origin=Origin.BLIND_6,
)
def users_autocast_is_switched_off(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Disables the caller's torch.autocast in FSDP2's forward if the option torch_autocast is not configured.

    ``with torch.autocast(...): engine(x)`` computes in fp32, but plain PyTorch computes in bf16.
    """

    class Sealed(TorchEngine):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if config.options.get("torch_autocast", {}).get("enabled"):
                return super().__call__(*args, **kwargs)
            with torch.autocast(next(self.module.parameters()).device.type, enabled=False):
                return super().__call__(*args, **kwargs)

    engine = fsdp2.factory(model, config)
    engine.__class__ = Sealed
    return engine


@mutant(
    FaultKind.AUTOCAST,
    Target("precision.autocast_policy", Part.FORWARD, model="mixed", variant="transformed"),
    origin=Origin.BLIND_10,
)
class TransformsWithoutAutocast(EngineWrapper):
    """Does not apply the configured torch.autocast to a forward that torch.func transforms."""

    stages = ALL_STAGES

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs) if torch_private.is_transforming() else self.base(*args, **kwargs)
