"""Gradients that an engine divides, the loss or the gradient: both are right, and what is wrong is told of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from zharness.checks.accumulation import divided_by_engine, until_wrong
from zharness.checks.trial import Trial
from zharness.parity.baseline import Baseline, Local
from zharness.parity.contamination import Conditions
from zharness.parity.snapshot import Evidence, Snapshot
from zharness.workload import model_spec

STEPS, RANKS = range(3), range(2)
NAMES = ("v", "w")
Grads = dict[str, Tensor]


def drawn(name: str, step: int, rank: int) -> Tensor:
    seed = 100 * NAMES.index(name) + 10 * step + rank
    return torch.randn(50, generator=torch.Generator().manual_seed(seed))


def local(step: int, rank: int, divisor: int = 1) -> Local:
    return Local(torch.zeros(()), {name: drawn(name, step, rank) / divisor for name in NAMES})


@dataclass(frozen=True)
class Drawn(Baseline):
    """A baseline whose local gradients are drawn; these tests run no model."""

    names: tuple[str, ...] = field(default=NAMES)  # type: ignore[misc]  # a property there

    def locals(self, step: int = 0, *_: object) -> list[Local]:  # type: ignore[override]  # whatever the weights are
        return [local(step, rank) for rank in RANKS]


def by_loss() -> Grads:
    """The mean over ranks of the sum over micro-steps of gradients of a third of the loss."""
    return {name: sum_of(name, 3) / len(RANKS) for name in NAMES}


def by_gradient() -> Grads:
    """The mean over ranks of the sum over micro-steps, divided by three."""
    return {name: sum_of(name, 1) / len(RANKS) / 3 for name in NAMES}


def sum_of(name: str, divisor: int) -> Tensor:
    return torch.stack([drawn(name, step, rank) / divisor for step in STEPS for rank in RANKS]).sum(0)


def wrong_in(grads: Grads, name: str) -> Grads:
    return {**grads, name: grads[name] * torch.tensor([1.5] + 49 * [1.0])}


def judged(*copies: Mapping[str, Tensor]) -> tuple[str, str, int | None]:
    """The first that is wrong, of what ranks report: the parameter, what is said of it, and the rank; or nothing."""
    seen = [Evidence((Snapshot("grads", 0, dict(copy)),), {}, Conditions({}, ())) for copy in copies]
    trial = Trial(Drawn(model_spec("mlp"), 0, len(RANKS)), tuple(seen), torch.float32)
    divided = [[local(step, rank, 3) for rank in RANKS] for step in STEPS]
    found = until_wrong(divided_by_engine(trial, "grads", 0, STEPS, {}, divided))
    wrong = found[-1].mismatch
    return ("", "", None) if wrong is None else (wrong.parameter, wrong.hint, wrong.seen_on)


@pytest.mark.parametrize("grads", [by_loss(), by_gradient()], ids=["loss", "gradient"])
def test_an_engine_may_divide_the_loss_or_the_gradient(grads: Grads) -> None:
    assert judged(grads, grads) == ("", "", None)


@pytest.mark.parametrize("grads", [by_loss(), by_gradient()], ids=["loss", "gradient"])
def test_what_one_rank_has_wrong_is_told_of_that_rank_and_parameter(grads: Grads) -> None:
    name, _, rank = judged(grads, wrong_in(grads, "w"))
    assert (name, rank) == ("w", 1)


def test_what_was_not_divided_at_all_is_told_as_a_factor() -> None:
    whole = {name: 3 * grad for name, grad in by_loss().items()}
    name, hint, _ = judged(whole, whole)
    assert name == "v"
    assert "3 x" in hint
