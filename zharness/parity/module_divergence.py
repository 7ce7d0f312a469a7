"""The first module whose own computation departs from the baseline's, in forward order and in backward order.

Every module is fed the baseline's numbers: its inputs are exchanged for them on the way in, its outputs on the way out,
and so are the gradients on the way back. An error is seen where it arises then, and cascades to nowhere. What a module
computes between its children shows as a wrong input of the next child.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import (
    tree_map,  # torch's own walk over nested outputs; transformers registers its classes there
)

# Where a tensor passed, to the tensor: "blocks.0.up, call 0, output 0" forward, with " gradient" behind it backward.
Trace = dict[str, Tensor]


@dataclass(frozen=True)
class ModuleDivergence:
    """The first place at which a tensor is not the baseline's, though everything before it was."""

    location: str
    expected: float
    actual: float
    wrong: int
    total: int

    def describe(self) -> str:
        """As in: ``blocks.0.up, call 0, output 0: expected 1, got 2, 3 of 8 elements wrong``."""
        return (
            f"{self.location}: expected {self.expected:.9g}, got {self.actual:.9g}, {self.wrong} of {self.total} wrong"
        )


@dataclass(frozen=True)
class ModuleDivergences:
    """The first departure of each direction; None where every module computes what the baseline's does."""

    forward: ModuleDivergence | None
    backward: ModuleDivergence | None

    def describe(self) -> str:
        """Both, or nothing where neither departs."""
        found = {"forward": self.forward, "backward": self.backward}
        return "; ".join(f"first in {order} order: {one.describe()}" for order, one in found.items() if one is not None)


class TensorVisitor(Protocol):
    """What becomes of a tensor that passes a place."""

    def visit(self, location: str, tensor: Tensor) -> Tensor:
        """The tensor that goes on from there."""


class TraceRecorder:
    """Keeps every tensor, and lets it pass."""

    def __init__(self) -> None:
        self.trace: Trace = {}

    def visit(self, location: str, tensor: Tensor) -> Tensor:
        self.trace[location] = tensor.detach().cpu().clone()
        return tensor


class TraceFeeder:
    """Holds every tensor against the trace, bitwise, and sends on the trace's."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.divergences: list[ModuleDivergence] = []

    def visit(self, location: str, tensor: Tensor) -> Tensor:
        wanted = self.trace.get(location)
        if wanted is None or wanted.shape != tensor.shape:
            return tensor  # a call that the baseline did not make, as in a recomputation
        departure = find_divergence(location, wanted, tensor.detach().cpu())
        self.divergences += [departure] if departure is not None else []
        return wanted.to(tensor.device, tensor.dtype)


def find_divergence(location: str, expected: Tensor, actual: Tensor) -> ModuleDivergence | None:
    """The worst element, NaN equal to NaN; None where all are equal."""
    want, got = expected.double().flatten(), actual.double().flatten()
    wrong = (want != got) & ~(want.isnan() & got.isnan())
    if not bool(wrong.any()):
        return None
    worst = int(torch.where(wrong, (want - got).abs().nan_to_num(nan=torch.inf), -1.0).argmax())
    return ModuleDivergence(location, float(want[worst]), float(got[worst]), int(wrong.sum()), wrong.numel())


class VisitTensor(torch.autograd.Function):
    """The identity but for its keeper, in both directions."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, visitor: TensorVisitor, location: str) -> Tensor:
        ctx.keeper, ctx.place = visitor, location
        return visitor.visit(location, tensor).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.keeper.passed(f"{ctx.place} gradient", grads[0]), None, None


@contextmanager
def visiting_tensors(model: nn.Module, visitor: TensorVisitor) -> Iterator[None]:
    """While the block runs, every tensor into and out of every module of ``model`` passes by ``keeper``."""
    calls: dict[str, int] = {}

    def visit_nested(name: str, direction: str, nested: Any) -> Any:
        count = iter(range(1_000_000))

        def visit_leaf(value: Any) -> Any:
            place = f"{name or 'the model'}, call {calls.get(name, 0)}, {direction} {next(count)}"
            return VisitTensor.apply(value, visitor, place) if isinstance(value, Tensor) else value  # type: ignore[no-untyped-call]

        return tree_map(visit_leaf, nested)

    def register_hooks(name: str, module: nn.Module) -> list[Any]:
        def before_forward(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            return visit_nested(name, "input", args), visit_nested(name, "keyword", kwargs)

        def after_forward(_module: nn.Module, _args: Any, output: Any) -> Any:
            exchanged = visit_nested(name, "output", output)
            calls[name] = calls.get(name, 0) + 1
            return exchanged

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
    """What passes through the modules of ``model``, the baseline, while ``run()`` does a forward and a backward."""
    recorder = TraceRecorder()
    with visiting_tensors(model, recorder):
        run()
    return recorder.trace


def find_divergences(model: nn.Module, trace: Trace, run: Callable[[], object]) -> ModuleDivergences:
    """Where ``model`` departs from ``trace`` while ``run()`` does the same forward and backward with it."""
    feeder = TraceFeeder(trace)
    with visiting_tensors(model, feeder):
        run()
    backward = [found.location.endswith(" gradient") for found in feeder.divergences]
    ways = {
        way: next((found for found, is_back in zip(feeder.divergences, backward, strict=True) if is_back is way), None)
        for way in (False, True)
    }
    return ModuleDivergences(ways[False], ways[True])
