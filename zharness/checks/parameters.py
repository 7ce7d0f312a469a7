"""The laws of parameters of every kind, and of what becomes of them after construction."""

from __future__ import annotations

from torch import nn
from torch.autograd import backward

from zharness.checks.law import Check
from zharness.checks.play import Play, Scene, Side, check
from zharness.engines.protocol import Feature

NEEDS = (Feature.PARAMETERS, Feature.TENSOR_BACKWARD)


def every_kind(side: Side) -> None:
    """Tied, frozen, unused, empty, tiny, uneven, transposed, used twice, read by attribute, of three dtypes."""
    backward(side.trained())


def branch(side: Side) -> None:
    """A branch that the first forward uses and the second does not, and one that only the second's loss reaches."""
    backward(side.loss(side.call(side.x(), branch=True)))
    side.zero_grad()
    backward(side.loss(side.call(side.x(2), branch=False), 2))


def frozen_and_unfrozen(side: Side) -> None:
    """What trains changes after construction, and changes again."""
    side.module.frozen.requires_grad_(True)
    side.module.twice.requires_grad_(False)
    backward(side.trained())
    side.module.twice.requires_grad_(True)
    side.module.tied.requires_grad_(False)
    backward(side.trained(2))
    side.module.tied.requires_grad_(True)


def outside_its_module(side: Side) -> None:
    """A weight read by attribute outside any forward, beside the ordinary loss and alone."""
    weight = side.module.first.weight
    backward(nn.functional.linear(side.x(), weight).sum() + weight.sum() + side.trained())
    backward(side.module.transposed.sum())


def late_submodule(side: Side) -> None:
    """A submodule attached late that uses a parameter of the model; its own trains nobody."""
    late = nn.Linear(side.module.first.in_features, side.module.first.out_features, bias=False)
    late.weight = dict(side.module.named_parameters())["first.weight"]
    side.module.late = nn.Sequential(late, nn.ReLU())
    backward(side.module.late(side.x()).sum() + side.trained())
    del side.module.late


def used_on_some_ranks(side: Side) -> None:
    """Rank 0's first forward and the others' second one take the branch; on one rank, the first alone does."""
    with side.uneven():
        backward(side.loss(side.call(side.x(), branch=side.rank == 0)))
        backward(side.loss(side.call(side.x(2), branch=side.rank != 0), 2))


def parameter_law(play: Play, words: str) -> Check:
    name = play.__name__
    return check(f"parameters.{name}", words, Scene(play), NEEDS, model="odd")


CHECKS = (
    parameter_law(
        every_kind, "tied, frozen, empty, tiny, uneven, transposed, shared and mixed ones train as vanilla's"
    ),
    parameter_law(branch, "a parameter that a step does not use has no gradient in it, whatever step before did"),
    parameter_law(frozen_and_unfrozen, "parameters may be frozen and unfrozen after construction"),
    parameter_law(outside_its_module, "a weight that is read outside its module's forward gets that gradient too"),
    parameter_law(used_on_some_ranks, "a parameter that only some ranks use counts as zero on the others"),
    parameter_law(late_submodule, "a submodule that is attached late may use the model's parameters"),
)
