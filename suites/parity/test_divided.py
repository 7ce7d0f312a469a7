"""Gradients that an engine divides, the loss or the gradient: both are right, and what is wrong is told of one."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from zharness.checks.accumulation import divided_by_engine
from zharness.checks.trial import Trial, until_wrong
from zharness.errors import EngineContractError
from zharness.parity import Mismatch
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


APART = 1 + 1e-4  # of the undivided gradients, so that no engine fits both: thirds alone round within the bound


@dataclass(frozen=True)
class Drawn(Baseline):
    """A baseline whose local gradients are drawn; these tests run no model."""

    names: tuple[str, ...] = field(default=NAMES)  # type: ignore[misc]  # a property there

    def locals(self, step: int = 0, *_: object) -> list[Local]:  # type: ignore[override]  # whatever the weights are
        whole = [local(step, rank) for rank in RANKS]
        return [Local(each.loss, {name: grad * APART for name, grad in each.grads.items()}) for each in whole]


def by_loss() -> Grads:
    """The mean over ranks of the sum over micro-steps of gradients of a third of the loss."""
    return {name: sum_of(name, 3) / len(RANKS) for name in NAMES}


def by_gradient() -> Grads:
    """The mean over ranks and micro-steps of the undivided gradients."""
    return {name: sum_of(name, 1) * APART / len(RANKS) / 3 for name in NAMES}


def sum_of(name: str, divisor: int) -> Tensor:
    return torch.stack([drawn(name, step, rank) / divisor for step in STEPS for rank in RANKS]).sum(0)


def wrong_in(grads: Grads, name: str) -> Grads:
    return {**grads, name: grads[name] * torch.tensor([1.5] + 49 * [1.0])}


def first_wrong(*copies: Grads) -> Mismatch | None:
    """In what the ranks report."""
    seen = [Evidence((Snapshot("grads", 0, copy),), {}, Conditions({}, ())) for copy in copies]
    trial = Trial(Drawn(model_spec("mlp"), 0, len(RANKS)), tuple(seen), torch.float32)
    divided = [[local(step, rank, 3) for rank in RANKS] for step in STEPS]
    return list(until_wrong(divided_by_engine(trial, "grads", 0, STEPS, {}, divided)))[-1].mismatch


EITHER = pytest.mark.parametrize("grads", [by_loss(), by_gradient()], ids=["loss", "gradient"])


@EITHER
def test_an_engine_may_divide_the_loss_or_the_gradient(grads: Grads) -> None:
    assert first_wrong(grads, grads) is None


def test_it_may_not_divide_one_parameter_so_and_another_otherwise() -> None:
    mixed = {**by_loss(), "w": by_gradient()["w"]}
    wrong = first_wrong(mixed, mixed)
    assert wrong is not None
    assert wrong.wrong > 1


@EITHER
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rank", RANKS)
def test_one_wrong_element_is_told_as_one(grads: Grads, name: str, rank: int) -> None:
    copies = [grads, grads]
    copies[rank] = wrong_in(grads, name)
    wrong = first_wrong(*copies)
    assert wrong is not None
    assert (wrong.parameter, wrong.seen_on, wrong.index, wrong.wrong) == (name, rank, (0,), 1)


def test_gradients_of_other_names_are_refused() -> None:
    other = {"other": by_loss()["v"]}
    with pytest.raises(EngineContractError, match="wrong names"):
        first_wrong(other, other)


def test_what_was_not_divided_at_all_is_told_as_a_factor() -> None:
    whole = {name: 3 * grad for name, grad in by_gradient().items()}
    wrong = first_wrong(whole, whole)
    assert wrong is not None
    assert "3 x" in wrong.hint
