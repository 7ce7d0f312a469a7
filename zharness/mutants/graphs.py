"""What goes wrong in autograd's graph, in transforms of torch.func, and with parameters out of the ordinary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from zharness import torch_private
from zharness.engines import EngineConfig
from zharness.mutants.around import Around, in_backward
from zharness.mutants.mutant import Kind, Mutant, Target, deepspeed
from zharness.parity import Part


class SilentTransform(Around):
    """Runs the forward outside torch.func's sight: a transform sees a constant, and its gradient is zero."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.right(*args, **kwargs)
        return output.detach() if torch_private.is_transforming() else output


class ScaledTransform(Around):
    """A transform of the engine comes out half as large, as one divided by accumulation does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.right(*args, **kwargs)
        return output / 2 if torch_private.is_transforming() else output


class LegacyFunctions(Around):
    """Its autograd.Functions take ctx in their forward, which torch.func refuses."""

    stages = (3,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        self.kept = torch_private.has_setup_context
        super().__init__(model, config)
        torch_private.has_setup_context = lambda: False

    def close(self) -> None:
        torch_private.has_setup_context = self.kept
        self.right.close()


class Once(torch.autograd.Function):
    """The identity, whose backward forgets its graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].detach()


class FirstOrderOnly(Around):
    """Right once; nothing flows through a gradient a second time."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Once.apply(self.right(*args, **kwargs))  # type: ignore[no-untyped-call]


class DrawsWhileRecomputing(Around):
    """Draws a random number before each forward that runs within a backward."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for module in self.module.modules():
            module.register_forward_pre_hook(self.draw)

    def draw(self, *_: Any) -> None:
        """One number, where a backward runs."""
        if in_backward() != -1:
            torch.rand(1)


class FlipsParameters(Around):
    """Reports its parameters with the wrong sign."""

    def full_params(self) -> dict[str, Tensor]:
        return {name: -parameter for name, parameter in self.right.full_params().items()}


class ZerosForTheUnused(Around):
    """Gives a gradient of zero to every parameter that nobody used, so that the optimizer decays it."""

    def fill(self) -> None:
        """Zeros where there is no gradient."""
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def full_grads(self) -> dict[str, Tensor]:
        self.fill()
        grads: dict[str, Tensor] = self.right.full_grads()
        return grads

    def step(self) -> None:
        self.fill()
        self.right.step()


class DecaysTheUnused(Around):
    """Its optimizer decays what has no gradient too."""

    def step(self) -> None:
        used = self.right.full_grads()
        self.right.step()
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                if name not in used:
                    parameter.mul_(0.999)


class FreezesForGood(Around):
    """Never gives a gradient to what was frozen when it was made."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}

    def full_grads(self) -> dict[str, Tensor]:
        return {name: grad for name, grad in self.right.full_grads().items() if name not in self.frozen}


class ReducesTiedTwice(Around):
    """A tied weight is reduced once for each of its names."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        names = Counter(parameter for _, parameter in self.module.named_parameters(remove_duplicate=False))
        for parameter, count in names.items():
            if count > 1 and parameter.requires_grad:
                parameter.register_hook(lambda grad: 2 * grad)  # type: ignore[no-untyped-call]


class EditsStayLocal(Around):
    """Leaves what a rank edits on that rank."""

    def gathered(self, names: Sequence[str]) -> AbstractContextManager[dict[str, Tensor]]:
        weights = dict(self.module.named_parameters())
        return nullcontext({name: weights[name].detach() for name in names})


class DrawsAtConstruction(Around):
    """Draws its initial weights after having drawn something else."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        torch.rand(1)
        super().__init__(model, config)


LOCAL, REDUCED = Part.LOCAL_GRADIENT, Part.REDUCTION


def transforms(*names: str, model: str = "mlp") -> tuple[Target, ...]:
    """Targets among the laws of torch.func."""
    return tuple(Target(f"torch_func.{name}", LOCAL, model) for name in names)


MUTANTS = (
    Mutant(
        SilentTransform,
        Kind.GRAPH,
        (*transforms("grad"), *transforms("hessian", model="exact"), Target("torch_func.vmap_grad", LOCAL, "conv")),
        imitates=deepspeed(8026),
    ),
    Mutant(
        ScaledTransform,
        Kind.GRAPH,
        (
            Target("torch_func.grad", LOCAL, "exact"),
            *transforms("grad_and_value", "has_aux", "vjp", "vmap"),
            *transforms("jvp", "jacrev", "jacfwd", "hessian", model="exact"),
            Target("torch_func.identities", LOCAL, "exact"),
            Target("torch_func.through_transforms", LOCAL, "blocks"),
        ),
        imitates=deepspeed(8026),
    ),
    Mutant(
        LegacyFunctions,
        Kind.GRAPH,
        (Target("torch_func.grad", None, words="setup_context"),),
        imitates=deepspeed(7913),
    ),
    Mutant(FirstOrderOnly, Kind.GRAPH, (Target("double_backward.gradient_penalty", LOCAL, "blocks"),)),
    Mutant(
        DrawsWhileRecomputing,
        Kind.GRAPH,
        (Target("checkpointing.dropout", REDUCED, "blocks", "non_reentrant"),),
    ),
    Mutant(FlipsParameters, Kind.PARAMETERS, transforms("functional_call")),
    Mutant(
        ZerosForTheUnused,
        Kind.PARAMETERS,
        (
            Target("parameters.branch", None, "changing", words="'unused.bias', 'unused.weight']"),
            Target("backward.engine_backward", None, "blocks", words="unknown ['head.bias', 'head.weight']"),
        ),
    ),
    Mutant(DecaysTheUnused, Kind.PARAMETERS, (Target("parameters.stay_put", Part.OPTIMIZER, "changing"),)),
    Mutant(
        FreezesForGood,
        Kind.PARAMETERS,
        (Target("parameters.frozen_and_unfrozen", None, "changing", words="missing ['frozen.bias', 'frozen.weight']"),),
    ),
    Mutant(
        ReducesTiedTwice,
        Kind.PARAMETERS,
        (Target("training.grads", REDUCED, "transformer", parameter="tokens.weight"),),
    ),
    Mutant(EditsStayLocal, Kind.PARAMETERS, (Target("parameters.edited", LOCAL, "changing"),)),
    Mutant(DrawsAtConstruction, Kind.PARAMETERS, (Target("parameters.deferred", Part.GATHER),)),
)
