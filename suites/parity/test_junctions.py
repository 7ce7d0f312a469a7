"""Nodes in the baseline's graph where an engine has its own: another order of sums, and no other gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zharness.engines import fsdp2
from zharness.parity.junctions import with_junctions
from zharness.workload.models import Batch, ModelSpec

LARGE = 2.0**25  # 1 + LARGE is LARGE in float32


class Difference(nn.Module):
    """Uses its input twice, and is 0."""

    def forward(self, *, value: Tensor) -> Tensor:
        return value * LARGE - value * LARGE


class Behind(nn.Module):
    """A tensor that goes into a module, and is used once more behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.inner = nn.ModuleList([Difference()])

    def forward(self, _inputs: Tensor) -> Tensor:
        value = self.weight * 1
        return (self.inner[0](value=value) + value).sum()


def draw(_generator: torch.Generator) -> Batch:
    return Batch(torch.ones(4, 1), torch.ones(4, 1))


SPEC = ModelSpec("behind", "", Behind, draw, lambda output, _: output)


def gradient(spec: ModelSpec) -> float:
    model: nn.Module = spec.model(0)
    spec.loss(model(torch.ones(4, 1)), None).backward()  # type: ignore[no-untyped-call]
    (weight,) = model.parameters()
    assert weight.grad is not None
    return float(weight.grad)


def test_gradients_of_uses_behind_a_junction_are_added_before_the_others() -> None:
    assert gradient(SPEC) == 0.0, "(1 + LARGE) - LARGE"
    assert gradient(with_junctions(SPEC, lambda model: [model.get_submodule("inner.0")])) == 1.0, "1 + (LARGE - LARGE)"


def test_a_junction_around_the_whole_model_changes_nothing() -> None:
    assert gradient(with_junctions(SPEC, lambda model: [model])) == gradient(SPEC)


def test_fsdp2_has_one_at_each_of_its_groups_and_at_the_root() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))
    assert fsdp2.sharded_apart(model, {"grouping": "block"}) == [model[0], model[2], model]
    assert fsdp2.sharded_apart(model, {"grouping": "root"}) == [model]
    assert fsdp2.CAPABILITIES.junctions is fsdp2.sharded_apart
