"""Find the first module, in forward and in backward order, whose own computation differs from the baseline's.

The inputs and outputs of every module, and their gradients, are replaced by the baseline's tensors. Therefore an error
appears in the module in which it arises, and does not propagate to later modules. An error in the code between two
child modules appears as a wrong input of the second child.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map  # transformers registers its output classes with this module

# Tensors by location: "blocks.0.up, call 0, output 0" in forward, the same with " gradient" in backward.
Trace = dict[str, Tensor]


@dataclass(frozen=True)
class ModuleDivergence:
    """The first tensor that differs from the baseline's although all earlier tensors were equal.

    ``expected`` and ``actual`` are the numbers of the worst element; ``wrong`` out of ``total`` elements differ.
    """

    location: str
    expected: float
    actual: float
    wrong: int
    total: int

    def describe(self) -> str:
        """Return a text such as ``blocks.0.up, call 0, output 0: expected 1, got 2, 3 of 8 wrong``."""
        return (
            f"{self.location}: expected {self.expected:.9g}, got {self.actual:.9g}, {self.wrong} of {self.total} wrong"
        )


@dataclass(frozen=True)
class ModuleDivergences:
    """The first divergence in forward order and the first in backward order; None if no module diverges."""

    forward: ModuleDivergence | None
    backward: ModuleDivergence | None

    def describe(self) -> str:
        """Return a description of the first divergence in each direction, or an empty string if no module diverges."""
        found = {"forward": self.forward, "backward": self.backward}
        return "; ".join(
            f"first in {order} order: {first.describe()}" for order, first in found.items() if first is not None
        )


class TensorVisitor(Protocol):
    """The interface of an object that receives, and may replace, each tensor that enters or leaves a module."""

    def visit(self, location: str, tensor: Tensor) -> Tensor:
        """Return the tensor that replaces ``tensor``.

        ``location`` names the module and says which of its inputs or outputs ``tensor`` is.
        """


class TraceRecorder:
    """A visitor that records a copy of every tensor and replaces none."""

    def __init__(self) -> None:
        self.trace: Trace = {}

    def visit(self, location: str, tensor: Tensor) -> Tensor:
        """Record a copy of ``tensor`` on CPU and return ``tensor`` itself."""
        self.trace[location] = tensor.detach().cpu().clone()
        return tensor


class TraceFeeder:
    """A visitor that compares every tensor bitwise with the trace's tensor, and replaces it by the trace's tensor."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.divergences: list[ModuleDivergence] = []

    def visit(self, location: str, tensor: Tensor) -> Tensor:
        """Record a divergence if ``tensor`` differs from the trace's tensor, and return the trace's tensor."""
        wanted = self.trace.get(location)
        if wanted is None or wanted.shape != tensor.shape:
            return tensor  # the baseline made no such call, as in a recomputation
        divergence = find_divergence(location, wanted, tensor.detach().cpu())
        self.divergences += [divergence] if divergence is not None else []
        return wanted.to(tensor.device, tensor.dtype)


def find_divergence(location: str, expected: Tensor, actual: Tensor) -> ModuleDivergence | None:
    """Return the divergence with the worst wrong element, or None if all elements are equal (NaN equals NaN)."""
    want, got = expected.double().flatten(), actual.double().flatten()
    wrong = (want != got) & ~(want.isnan() & got.isnan())
    if not bool(wrong.any()):
        return None
    worst = int(torch.where(wrong, (want - got).abs().nan_to_num(nan=torch.inf), -1.0).argmax())
    return ModuleDivergence(location, float(want[worst]), float(got[worst]), int(wrong.sum()), wrong.numel())


class VisitTensor(torch.autograd.Function):
    """An autograd function that passes a tensor and its gradient to a visitor and returns the replacements."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, visitor: TensorVisitor, location: str) -> Tensor:
        """Pass ``tensor`` to the visitor, and return a copy of the tensor that the visitor returns."""
        ctx.visitor, ctx.location = visitor, location
        return visitor.visit(location, tensor).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Pass the gradient of the tensor to the visitor, and return the gradient that the visitor returns."""
        return ctx.visitor.visit(f"{ctx.location} gradient", grads[0]), None, None


@contextmanager
def visiting_tensors(model: nn.Module, visitor: TensorVisitor) -> Iterator[None]:
    """Pass every tensor that enters or leaves a module of ``model`` to ``visitor`` while the block runs."""
    calls: dict[str, int] = {}

    def visit_nested(name: str, direction: str, nested: Any) -> Any:
        """Return ``nested`` with every tensor in it replaced by the visitor's replacement."""
        count = iter(range(1_000_000))

        def visit_leaf(value: Any) -> Any:
            location = f"{name or 'the model'}, call {calls.get(name, 0)}, {direction} {next(count)}"
            return VisitTensor.apply(value, visitor, location) if isinstance(value, Tensor) else value  # type: ignore[no-untyped-call]

        return tree_map(visit_leaf, nested)

    def register_hooks(name: str, module: nn.Module) -> list[Any]:
        """Register hooks that visit the inputs and the outputs of ``module``, and return the hooks' handles."""

        def before_forward(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            return visit_nested(name, "input", args), visit_nested(name, "keyword", kwargs)

        def after_forward(_module: nn.Module, _args: Any, output: Any) -> Any:
            replaced = visit_nested(name, "output", output)
            calls[name] = calls.get(name, 0) + 1
            return replaced

        return [
            module.register_forward_pre_hook(before_forward, with_kwargs=True),
            module.register_forward_hook(after_forward),
        ]

    handles = [handle for name, module in model.named_modules() for handle in register_hooks(name, module)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def record_trace(model: nn.Module, run: Callable[[], object]) -> Trace:
    """Return all tensors that enter or leave the modules of the baseline ``model`` while ``run()`` is executed.

    ``run()`` runs one forward and one backward of ``model``.
    """
    recorder = TraceRecorder()
    with visiting_tensors(model, recorder):
        run()
    return recorder.trace


def find_divergences(model: nn.Module, trace: Trace, run: Callable[[], object]) -> ModuleDivergences:
    """Find the first tensors of ``model`` that differ from ``trace`` while ``run()`` is executed.

    ``run()`` repeats the forward and the backward that were traced.
    """
    feeder = TraceFeeder(trace)
    with visiting_tensors(model, feeder):
        run()
    backward = [found for found in feeder.divergences if found.location.endswith(" gradient")]
    forward = [found for found in feeder.divergences if not found.location.endswith(" gradient")]
    return ModuleDivergences(next(iter(forward), None), next(iter(backward), None))
