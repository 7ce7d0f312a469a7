"""An engine may divide losses, gradients or its outputs' gradients by the accumulation steps, all in one way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from zharness.errors import EngineContractError
from zharness.law_kit.accumulation import divide_output_gradients, judge_engine_divided_gradients
from zharness.law_kit.judge_context import JudgeContext, stop_at_first_mismatch
from zharness.parity import Mismatch, Tier
from zharness.parity.baseline import Baseline, LocalResult
from zharness.parity.certificate import Exactness
from zharness.parity.contamination import ProcessConditions
from zharness.parity.snapshot import RankEvidence, Snapshot
from zharness.workload import Batch, model_spec

STEPS, RANKS = range(3), range(2)
NAMES = ("v", "w")
Grads = dict[str, Tensor]


def drawn(name: str, step: int, rank: int) -> Tensor:
    seed = 100 * NAMES.index(name) + 10 * step + rank
    return torch.randn(50, generator=torch.Generator().manual_seed(seed))


def local(step: int, rank: int, divisor: int = 1) -> LocalResult:
    return LocalResult(torch.zeros(()), {name: drawn(name, step, rank) / divisor for name in NAMES})


APART = 1 + 1e-4  # of the undivided gradients, so that no engine fits two ways: thirds alone round within the bound


@dataclass(frozen=True)
class Drawn(Baseline):
    """A baseline with random local gradients; these tests run no model."""

    parameter_names: tuple[str, ...] = field(default=NAMES)  # type: ignore[misc]  # a property there

    @property
    def parameter_dtypes(self) -> Mapping[str, torch.dtype]:
        return dict.fromkeys(self.parameter_names, torch.float32)

    def run_all_ranks(
        self, step: int = 0, _params: object = None, objective: object = None, *_: object
    ) -> list[LocalResult]:
        factor = APART if objective is None else APART**2 / len(STEPS)  # an objective divides the output's gradient
        whole = [local(step, rank) for rank in RANKS]
        return [LocalResult(each.loss, {name: grad * factor for name, grad in each.grads.items()}) for each in whole]


def by_loss() -> Grads:
    """Return the mean over ranks of the sum over micro-steps of gradients of a third of the loss."""
    return {name: make_sum(name, 3) / len(RANKS) for name in NAMES}


def by_gradient() -> Grads:
    """Return the mean over ranks and micro-steps of the undivided gradients."""
    return {name: make_sum(name, 1) * APART / len(RANKS) / 3 for name in NAMES}


def by_output() -> Grads:
    """Return the gradients that follow from a third of the gradient of each output."""
    return {name: grad * APART for name, grad in by_gradient().items()}


def make_sum(name: str, divisor: int) -> Tensor:
    return torch.stack([drawn(name, step, rank) / divisor for step in STEPS for rank in RANKS]).sum(0)


def wrong_in(grads: Grads, name: str) -> Grads:
    return {**grads, name: grads[name] * torch.tensor([1.5] + 49 * [1.0])}


def make_context(copies: Sequence[Grads]) -> JudgeContext:
    """Return the judge's context for these gradients of the ranks."""
    seen = [RankEvidence((Snapshot("grads", 0, copy),), {}, ProcessConditions({}, ())) for copy in copies]
    return JudgeContext(Drawn(model_spec("mlp"), 0, len(RANKS)), tuple(seen), torch.float32)


def first_wrong(*copies: Grads) -> Mismatch | None:
    """Return the first mismatch in these gradients of the ranks; None if there is none."""
    trial = make_context(copies)
    divided = [[local(step, rank, 3) for rank in RANKS] for step in STEPS]
    return list(stop_at_first_mismatch(judge_engine_divided_gradients(trial, "grads", 0, STEPS, {}, divided)))[
        -1
    ].mismatch


WAYS = pytest.mark.parametrize(
    "grads", [by_loss(), by_gradient(), by_output()], ids=["loss", "gradient", "gradient of the output"]
)


@WAYS
def test_an_engine_may_divide_the_loss_the_gradient_or_the_gradient_of_its_output(grads: Grads) -> None:
    assert first_wrong(grads, grads) is None


def test_it_may_not_divide_one_parameter_so_and_another_otherwise() -> None:
    mixed = {**by_loss(), "w": by_gradient()["w"]}
    wrong = first_wrong(mixed, mixed)
    assert wrong is not None
    assert wrong.wrong > 1


@WAYS
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


def test_a_rank_that_kept_its_own_gradient_is_told_so_beside_one_that_is_right() -> None:
    own = [{name: drawn(name, 0, rank) for name in NAMES} for rank in RANKS]
    mean = {name: (own[0][name] + own[1][name]) / len(RANKS) for name in NAMES}
    found = list(
        stop_at_first_mismatch(
            make_context([mean, own[1]]).compare_reduced_grads("grads", [[local(0, rank) for rank in RANKS]])
        )
    )
    wrong = found[-1].mismatch
    assert wrong is not None
    assert wrong.seen_on == 1
    assert "rank 1 alone" in wrong.hint
    assert wrong.bound > 0, "held against the mean, not against rank 0's copy"


def test_copies_that_are_alike_are_each_told_with_their_rank_and_the_reason() -> None:
    grads = [[local(0, rank) for rank in RANKS]]
    mean = {name: (drawn(name, 0, 0) + drawn(name, 0, 1)) / len(RANKS) for name in NAMES}
    found = list(make_context([mean, mean]).compare_reduced_grads("grads", grads, exact=Exactness(False, "planted")))
    staged = [each for each in found if each.tier is Tier.STAGED]
    assert [each.location.seen_on for each in staged if each.location is not None] == [*RANKS, *RANKS]
    assert all("planted" in each.note for each in staged)
    assert all(each.mismatch is None for each in found)


def test_the_gradient_of_every_output_is_divided_and_the_loss_is_not() -> None:
    leaf = torch.tensor([3.0, 5.0], requires_grad=True)
    outputs = {"first": leaf * 1, "rest": [leaf * 2, torch.ones(2)]}
    objective = divide_output_gradients(lambda output, _: (output["first"] + output["rest"][0]).sum(), 4)
    loss = objective(outputs, Batch(leaf, leaf))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 24.0
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [0.75, 0.75]


class ModelOutput(OrderedDict[str, Tensor]):
    """A dictionary that refuses update(), as the outputs of transformers' models do."""

    def update(self, *_args: Any, **_kwargs: Any) -> None:
        raise TypeError("update() is not supported")


def test_an_output_that_refuses_update_keeps_its_type() -> None:
    leaf = torch.tensor([3.0, 5.0], requires_grad=True)
    output = ModelOutput()
    output["loss"] = leaf * 2

    def score(output: ModelOutput, _batch: Batch) -> Tensor:
        assert isinstance(output, ModelOutput)
        return output["loss"].sum()

    divide_output_gradients(score, 4)(output, Batch(leaf, leaf)).backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [0.5, 0.5]


class Pair(NamedTuple):
    """An output of two tensors with names."""

    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class Answer:
    """An output that torch.utils._pytree does not look into."""

    first: Tensor
    second: Tensor


class Named(OrderedDict[str, Any]):
    """A dictionary of a class of its own, as the outputs of transformers are."""


def sum_of_both(output: Any, _: Batch) -> Tensor:
    first, second = output.values() if isinstance(output, dict) else (output.first, output.second)
    return (first + second).sum()


@pytest.mark.parametrize(
    "wrap",
    [Pair, Answer, lambda first, second: Named(a=first, b=second), lambda first, second: {"a": first, "b": second}],
    ids=["named tuple", "dataclass", "subclass of a dictionary", "dictionary"],
)
@pytest.mark.parametrize(
    ("second_of", "expected"),
    [
        (lambda leaf, first: leaf * 3, [4 / 4] * 2),  # each output of its own
        (lambda leaf, first: first * 3, [4 / 4] * 2),  # an output that was computed from the other
        (lambda leaf, first: first, [2 / 4] * 2),  # one tensor twice
        (lambda leaf, first: leaf, [2 / 4] * 2),  # a parameter
    ],
    ids=["apart", "from the other", "twice", "parameter"],
)
def test_every_output_is_divided_once(
    wrap: Callable[[Tensor, Tensor], Any], second_of: Callable[[Tensor, Tensor], Tensor], expected: list[float]
) -> None:
    leaf = torch.tensor([3.0, 5.0], requires_grad=True)
    first = leaf * 1
    loss = divide_output_gradients(sum_of_both, 4)(wrap(first, second_of(leaf, first)), Batch(leaf, leaf))
    loss.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert leaf.grad.tolist() == expected
