"""The laws of activation checkpointing: the gradients are those of the same model without it.

The plain model does not checkpoint at all (``Side.recompute``), but where vanilla's reentrant form itself gives other
gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import backward
from torch.utils.checkpoint import checkpoint

from zharness.checks.backward import BrokenOnPurpose
from zharness.checks.law import Check
from zharness.checks.play import Play, Scene, Side, Values, check
from zharness.engines.protocol import Feature

Block = Callable[[Tensor], Tensor]
Through = Callable[[Block, Tensor], Tensor]
REENTRANT, NON_REENTRANT = "reentrant", "non_reentrant"


def region(side: Side) -> Through:
    """A way to run a block under a checkpoint of the variant's kind."""
    return lambda block, hidden: side.recompute(block, hidden, use_reentrant=side.variant == REENTRANT)


def block(side: Side) -> None:
    """A region in the middle whose layer is used twice in it."""
    backward(side.loss(side.call(side.leaf(), through=region(side))))


def nested(side: Side) -> None:
    inside = region(side)

    def twice(block: Block, hidden: Tensor) -> Tensor:
        return inside(lambda h: inside(block, h), hidden)

    backward(side.loss(side.call(side.leaf(), through=twice)))


def whole_model(side: Side) -> Values:
    leaf = side.leaf()
    backward(side.loss(region(side)(side.call, leaf)))
    assert leaf.grad is not None
    return {"input": leaf.grad}


def two_regions(side: Side) -> None:
    """One layer in two regions of one loss."""
    inside = region(side)
    backward(side.loss(side.call(side.leaf(), through=lambda block, h: inside(block, inside(block, h)))))


def frozen(side: Side) -> None:
    """A frozen layer in the region, beside trained ones, and nothing but a frozen one."""
    inside = region(side)

    def through(block: Block, hidden: Tensor) -> Tensor:
        return inside(lambda h: block(side.module.frozen(h)), inside(side.module.frozen, hidden))

    backward(side.loss(side.call(side.leaf(), through=through)))


def plain_inputs(side: Side) -> None:
    """The region is the first layer, so its input requires no gradient: vanilla's reentrant form then gives it none."""
    recompute = checkpoint if side.variant == REENTRANT else side.recompute
    hidden = recompute(side.module.first, side.x(), use_reentrant=side.variant == REENTRANT)
    backward(side.module.head(side.x()).sum() + side.module.shared(hidden).sum())


def accumulation(side: Side) -> None:
    for micro in (0, 2):
        backward(side.loss(side.call(side.leaf(micro), through=region(side)), micro))


def non_scalar(side: Side) -> None:
    backward(side.call(side.leaf(), through=region(side)), side.draw(0).target)


class Raises:
    """A block that raises when it is called for the second time, which is its recomputation."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.calls = 0

    def __call__(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise BrokenOnPurpose
        return self.block(hidden)


def exception(side: Side) -> Values:
    """The recomputation raises; after zero_grad the micro-batch is trained again."""

    def through(block: Block, hidden: Tensor) -> Tensor:
        result: Any = checkpoint(Raises(block), hidden, use_reentrant=side.variant == REENTRANT)
        return result  # type: ignore[no-any-return]

    try:
        backward(side.loss(side.call(side.leaf(), through=through)))
        raised = torch.zeros(1)
    except BrokenOnPurpose:
        raised = torch.ones(1)
    side.zero_grad()
    block(side)
    return {"raised": raised}


def dropout(side: Side) -> None:
    """The recomputation draws the numbers that the forward drew."""
    torch.manual_seed(side.rank)
    loss = side.loss(side.call(side.leaf(), through=region(side), dropping=True))
    torch.manual_seed(100)
    backward(loss)


def recompute_law(play: Play, words: str, *more: Feature) -> Check:
    name = play.__name__
    needs = (Feature.RECOMPUTATION, Feature.TENSOR_BACKWARD, *more)
    return check(f"checkpointing.{name}", words, Scene(play), needs, variants=((REENTRANT, ()), (NON_REENTRANT, ())))


CHECKS = (
    recompute_law(block, "checkpointing a block, a layer of which is used twice, changes no gradient"),
    recompute_law(nested, "a checkpoint within a checkpoint changes no gradient"),
    recompute_law(whole_model, "checkpointing the whole model changes no gradient"),
    recompute_law(two_regions, "a layer in two checkpointed regions of one loss gets the sum of both gradients"),
    recompute_law(frozen, "frozen layers within a region, and regions of nothing else, change no gradient"),
    recompute_law(
        plain_inputs, "a region whose inputs require no gradient does what vanilla's does", Feature.SUBMODULES
    ),
    recompute_law(accumulation, "checkpointed micro-batches accumulate to the sum of their gradients"),
    recompute_law(non_scalar, "out.backward(g) through a checkpointed region is vanilla's"),
    recompute_law(exception, "after an exception within a recomputation and zero_grad the gradients are vanilla's"),
    recompute_law(dropout, "a recomputation draws the random numbers that its forward drew"),
)
