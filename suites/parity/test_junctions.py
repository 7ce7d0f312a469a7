"""Autograd nodes in the baseline where an engine has its own change the order of sums, and no gradient otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zharness.engines import EngineConfig, fsdp2
from zharness.errors import EngineContractError
from zharness.parity.baseline import read_parameter_dtypes
from zharness.parity.junctions import JunctionSelector, with_junctions
from zharness.workload.models import Batch, ModelSpec

LARGE = 2.0**25  # 1 + LARGE is LARGE in float32


class Difference(nn.Module):
    """A module that subtracts its input from itself."""

    def forward(self, *, value: Tensor) -> Tensor:
        return value * LARGE - value * LARGE


class Behind(nn.Module):
    """A model that uses the input of a module once more outside of it."""

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


def inner(model: nn.Module, _options: Mapping[str, Any]) -> list[nn.Module]:
    return [model.get_submodule("inner.0")]


def itself(model: nn.Module, _options: Mapping[str, Any]) -> list[nn.Module]:
    return [model]


def test_gradients_of_uses_behind_a_junction_are_added_before_the_others() -> None:
    assert gradient(SPEC) == 0.0, "(1 + LARGE) - LARGE"
    assert gradient(with_junctions(SPEC, inner, {})) == 1.0, "1 + (LARGE - LARGE)"


def test_a_junction_around_the_whole_model_changes_nothing() -> None:
    assert gradient(with_junctions(SPEC, itself, {})) == gradient(SPEC)


def test_fsdp2_has_one_at_each_of_its_groups_and_at_the_root() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))
    assert fsdp2.fully_sharded_modules(model, {"grouping": "block"}) == [model[0], model[2], model]
    assert fsdp2.fully_sharded_modules(model, {"grouping": "root"}) == [model]
    assert fsdp2.CAPABILITIES.junctions is fsdp2.fully_sharded_modules


@pytest.mark.world_size(2)
@pytest.mark.parametrize("grouping", ["leaf", "block", "root"])
def test_fsdp2_puts_a_node_into_the_graph_at_the_modules_that_it_claims(grouping: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))
    model.register_parameter("of_the_root", nn.Parameter(torch.ones(2)))
    claimed = fsdp2.fully_sharded_modules(model, {"grouping": grouping})
    engine = fsdp2.factory(model, EngineConfig(stage=3, options={"grouping": grouping}))
    output = engine(torch.ones(1, 2, requires_grad=True))
    assert nodes(output, "RegisterPostBackward") == len(claimed)
    engine.close()


def nodes(output: Tensor, name: str) -> int:
    """Return the number of autograd nodes behind ``output`` whose name contains ``name``."""
    seen, ahead = set(), [output.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [follower for follower, _ in node.next_functions]
    return sum(name in node.name() for node in seen)


def test_what_is_kept_for_a_model_with_junctions_is_found_again() -> None:
    options = {"grouping": {"of": ["lists"]}}
    first, again = (with_junctions(SPEC, inner, dict(options)) for _ in range(2))
    assert first == again
    assert read_parameter_dtypes(first, 0) is read_parameter_dtypes(again, 0)
    assert first not in (SPEC, with_junctions(SPEC, itself, options), with_junctions(SPEC, inner, {}))


def a_stranger(_model: nn.Module, _options: Mapping[str, Any]) -> list[nn.Module]:
    return [nn.Identity()]


def one_twice(model: nn.Module, _options: Mapping[str, Any]) -> list[nn.Module]:
    return [model, model]


def halving(model: nn.Module, _options: Mapping[str, Any]) -> list[nn.Module]:
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)
    return [model]


def hooking(model: nn.Module, _options: Mapping[str, Any]) -> list[nn.Module]:
    model.register_forward_hook(lambda _module, _inputs, output: output / 2)
    return [model]


def dressing_up(model: nn.Module, _options: Mapping[str, Any]) -> list[nn.Module]:
    model.__class__ = Loud
    return [model]


class Loud(Behind):
    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * super().forward(inputs)


@pytest.mark.parametrize(("choose", "words"), [(a_stranger, "Identity"), (one_twice, "each at most once")])
def test_junctions_elsewhere_than_at_modules_of_the_model_are_refused(choose: JunctionSelector, words: str) -> None:
    with pytest.raises(EngineContractError, match=words):
        with_junctions(SPEC, choose, {}).model(0)


@pytest.mark.parametrize("choose", [halving, hooking, dressing_up])
def test_an_engine_that_claims_junctions_cannot_change_what_it_is_held_against(choose: JunctionSelector) -> None:
    assert gradient(with_junctions(SPEC, choose, {})) == gradient(with_junctions(SPEC, itself, {}))
    assert all(p.equal(torch.ones(1)) for p in with_junctions(SPEC, choose, {}).model(0).parameters())


class Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


def test_a_model_with_junctions_begins_with_the_weights_of_its_seed() -> None:
    spec = replace(SPEC, build=Drawn)
    at_inner = with_junctions(spec, lambda model, _options: [model.get_submodule("inner")], {})
    for plain, hooked in zip(spec.model(3).parameters(), at_inner.model(3).parameters(), strict=True):
        assert plain.equal(hooked)
