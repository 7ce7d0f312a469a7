"""Large tensors: a result that is bitwise plain torch's needs no bound; any other is judged like that of a small
tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from zharness.law_kit.clipping import ClipFactor
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.optimizer_step import ClippedSgdStep, ParameterStep
from zharness.parity import Comparison, Part, Tier
from zharness.parity.baseline import Baseline, LocalResult
from zharness.parity.compare import CHUNK_ELEMENTS
from zharness.parity.comparison import TensorLocation
from zharness.parity.contamination import ProcessConditions
from zharness.parity.snapshot import RankEvidence, Snapshot
from zharness.workload import model_spec

COUNT = 2 * CHUNK_ELEMENTS + 5
PLACE = TensorLocation("w", Part.OPTIMIZER)
LAST = COUNT - 1


@dataclass(frozen=True)
class Named(Baseline):
    """A baseline with one parameter, of which these tests run nothing."""

    @property
    def parameter_dtypes(self) -> Mapping[str, torch.dtype]:
        return {"w": torch.float32}

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return ("w",)


def drawn(number: int) -> Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(number))


def trial(*copies: Tensor) -> JudgeContext:
    """Return the judge's context of two ranks with these gradients."""
    seen = [RankEvidence((Snapshot("grads", 0, {"w": copy}),), {}, ProcessConditions({}, ())) for copy in copies]
    return JudgeContext(Named(model_spec("mlp"), 0, 2), tuple(seen), torch.float32)


def make_locals(terms: list[list[Tensor]]) -> list[list[LocalResult]]:
    """Return local results by micro-step and rank."""
    return [[LocalResult(torch.zeros(()), {"w": term}) for term in row] for row in terms]


def tiers(found: list[Comparison]) -> set[tuple[Tier, bool]]:
    return {
        (each.tier, each.mismatch is None) for each in found if each.location and each.location.part is Part.REDUCTION
    }


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_mean_that_is_torch_s_own_claims_no_more_than_one_that_rounds_apart_within_its_bound(
    micros: int, scaled: bool
) -> None:
    terms = [[drawn(2 * micro), drawn(2 * micro + 1)] for micro in range(micros)]
    scale = float(micros) if scaled else 1.0
    sums = [sum(row[rank] for row in terms) for rank in range(2)]
    right = (sums[0] + sums[1]) / 2 / (micros / scale)
    judged = trial(right, right)
    own = list(judged.compare_reduced_grads("grads", make_locals(terms), scale=scale))
    assert tiers(own) == {(Tier.STAGED, True), (Tier.EXACT, True)}, "ranks agree exactly"
    assert tiers(list(judged.compare_reduced_grads("grads", make_locals(terms), exact=True, scale=scale))) == {
        (Tier.EXACT, True)
    }
    assert all(each.mismatch is None for each in own)
    apart = right.clone()
    apart[LAST] *= 1 + micros * 2.0**-23
    found = [
        each
        for each in trial(apart, apart).compare_reduced_grads("grads", make_locals(terms), scale=scale)
        if each.ratio
    ]
    assert {each.tier for each in found} == {Tier.STAGED}
    assert all(each.mismatch is None for each in found)
    assert sum(each.elements for each in found) == 2 * COUNT, "of every rank, all elements"


def test_a_wrong_element_of_a_large_gradient_is_found_on_the_rank_that_has_it() -> None:
    terms = [[drawn(0), drawn(1)]]
    right = (terms[0][0] + terms[0][1]) / 2
    wrong = right.clone()
    wrong[LAST] += 1e-3
    assert any(each.mismatch for each in trial(wrong, right).compare_reduced_grads("grads", make_locals(terms)))
    (first,) = [
        each.mismatch
        for each in trial(right, wrong).compare_reduced_grads("grads", make_locals(terms))
        if each.mismatch
    ][:1]
    assert (first.seen_on, first.index, first.wrong) == (1, (LAST,), 1)


OPTIMIZERS = {
    "adamw": {"lr": 1e-2, "weight_decay": 0.1},
    "sgd": {"lr": 5e-2, "momentum": 0.9},
    "adagrad": {"lr": 1e-2},
}


def stepped(name: str, steps: int, settings: dict[str, float]) -> ParameterStep:
    """Return the last of ``steps`` torch.optim steps with ``settings``, claiming the settings in OPTIMIZERS."""
    weight = drawn(0)
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    optimizer = kinds[name]([weight], **settings)
    before: dict[str, Tensor] = {}
    for step in range(steps):
        moved, before = weight.clone(), {key: value.clone() for key, value in optimizer.state[weight].items()}
        weight.grad = drawn(step + 1)
        optimizer.step()
    assert weight.grad is not None
    return ParameterStep(moved, weight, weight.grad, before, optimizer.state[weight], OPTIMIZERS[name])


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_is_torch_s_own_claims_no_more_than_its_replay_and_is_told_by_its_names(
    name: str, steps: int
) -> None:
    found = stepped(name, steps, OPTIMIZERS[name])
    whole, pieces = list(found.compare_with_replay(name, PLACE)), found.compare_in_pieces(name, PLACE)
    assert [each.location for each in pieces] == [each.location for each in whole]
    assert [each.elements for each in pieces] == [each.elements for each in whole]
    assert {each.tier for each in pieces} == {Tier.STAGED}
    for own, replayed in zip(pieces, whole, strict=True):
        assert own.mismatch is None
        assert own.smallest_detectable >= replayed.smallest_detectable
        assert own.undetermined >= replayed.undetermined


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_at_another_rate_is_no_large_tensor_that_is_right(name: str) -> None:
    assert stepped(name, 2, {**OPTIMIZERS[name], "lr": 0.03}).compare_in_pieces(name, PLACE) == []


def test_a_state_that_torch_cannot_step_from_is_left_to_the_replay() -> None:
    found = stepped("adamw", 2, OPTIMIZERS["adamw"])
    lost = {key: value for key, value in found.state_before.items() if key != "exp_avg"}
    assert (
        ParameterStep(
            found.weight, found.weight_after, found.grad, lost, found.state_after, found.hyperparameters
        ).compare_in_pieces("adamw", PLACE)
        == []
    ), "the replay takes zeros for it"


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_a_clipped_step_is_right_and_an_unclipped_one_is_wrong(factor: float) -> None:
    weight, grad = drawn(0), drawn(1)
    moved = weight - grad * factor
    step = ClippedSgdStep(weight, grad, ClipFactor(factor))
    assert {each.tier for each in step.compare_in_pieces([moved, moved], PLACE)} == {Tier.STAGED}
    assert step.compare_in_pieces([moved.view(-1, 1)] * 2, PLACE) == [], "of another shape"
    assert step.compare_weight(PLACE, moved).mismatch is None
    other = ClippedSgdStep(weight, grad, ClipFactor(factor / 2))
    assert other.compare_in_pieces([moved, moved], PLACE) == []
    assert other.compare_weight(PLACE, moved).mismatch is not None
