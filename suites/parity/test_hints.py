"""Hints name a wrong step count, learning rate or norm, and old gradients and weights, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zharness.engines.protocol import Piece
from zharness.law_kit.clipping import (
    INFINITE_NORM_HINT,
    NO_GRADIENT_HINT,
    hint_missing_norm,
    hint_other_norm,
    hint_scaled_norm,
)
from zharness.law_kit.hints import (
    OLD_GRADIENT_ADDED_HINT,
    UNREDUCED_PARTS_HINT,
    add_hint,
    hint_added_gradient,
    hint_learning_rate,
    hint_step_count,
    hint_unreduced_parts,
)
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.scenario_baseline import make_plain_participant
from zharness.law_kit.scenario_judge import (
    OLD_GRADIENT_KEPT_HINT,
    describe_counted_terms,
    hint_old_gradient,
    reduce_at_each_end,
    reduce_on_copies,
)
from zharness.law_kit.window_judge import (
    OLD_WEIGHTS_HINT,
    PlainRanks,
    WindowResult,
    hint_old_weights,
    hint_own_gradients,
    judge_windows,
    sum_terms,
)
from zharness.law_kit.window_scenarios import WindowScenario
from zharness.laws import double_backward
from zharness.laws.circumstances.windows import FURTHER_READS, UNDIVIDED_READ_HINT, TrainWithReadOutside
from zharness.laws.double_backward import FIRST_ORDER_HINT, judge_gradient_penalty, penalize_input_gradient
from zharness.parity import Part, compare_bitwise
from zharness.parity.attribution import describe_wrong_elements
from zharness.parity.baseline import Baseline
from zharness.parity.comparison import TensorLocation
from zharness.parity.snapshot import RankEvidence, Snapshot
from zharness.workload import model_spec


@pytest.mark.parametrize(
    ("counts", "hint"),
    [
        ((1.0, 7.0), "its step count went from 1 to 7"),
        ((1.0, 2.0), ""),
        ((3.0, 3.0), "its step count went from 3 to 3"),
    ],
)
def test_the_hint_names_a_wrong_step_count(counts: tuple[float, float], hint: str) -> None:
    place = TensorLocation(name="weight", part=Part.OPTIMIZER, step=0)
    wrong = compare_bitwise(place, torch.zeros(1), torch.ones(1))
    before, after = ({"step": torch.tensor(count)} for count in counts)
    hinted = hint_step_count(wrong, before, after)
    assert hinted.mismatch is not None
    assert hinted.mismatch.hint == hint


def test_a_weight_without_a_count_or_a_mismatch_has_no_hint() -> None:
    place = TensorLocation(name="weight", part=Part.OPTIMIZER, step=0)
    right, wrong = (compare_bitwise(place, torch.zeros(1), torch.full((1,), value)) for value in (0.0, 1.0))
    count = {"step": torch.tensor(1.0)}
    assert hint_step_count(right, count, count).mismatch is None
    assert hint_step_count(wrong, {}, {}) == wrong


@pytest.mark.parametrize(
    ("rate", "options", "hint"),
    [
        (0.5, {}, "as if the learning rate were 0.5 in place of 0.25, or the gradient 2 times as large"),
        (0.5, {"lr": 0.0}, "as if the learning rate were 0.5 in place of 0"),
        (0.5, {"momentum": 0.5}, ""),
        (0.25 * (1 + 1e-5), {}, ""),
    ],
)
def test_the_hint_names_the_learning_rate_of_plain_sgd(rate: float, options: dict[str, float], hint: str) -> None:
    place = TensorLocation(name="weight", part=Part.OPTIMIZER, step=0)
    grad = torch.tensor([1.0, 2.0], dtype=torch.float64)
    wrong = compare_bitwise(place, -0.25 * grad, -rate * grad)
    hinted = hint_learning_rate(wrong, -rate * grad, grad, {"lr": 0.25, **options})
    assert hinted.mismatch is not None
    assert hinted.mismatch.hint == (f"the step is {hint}" if hint else "")
    unfitting = hint_learning_rate(wrong, torch.tensor([1.0, -2.0]), grad.float(), {"lr": 0.25})
    assert unfitting == wrong
    counted = add_hint(wrong, "its step count went from 1 to 7")
    assert hint_learning_rate(counted, -rate * grad, grad, {"lr": 0.25}) == counted


def test_the_hint_names_the_gradients_that_have_the_norm() -> None:
    place = TensorLocation(name="norm", part=Part.REDUCTION, step=0)
    wrong = compare_bitwise(place, torch.tensor(1.0), torch.tensor(5.0))
    others = {"other": {"weight": torch.tensor([1.0])}, "old": {"weight": torch.tensor([3.0, 4.0])}}
    hinted = hint_other_norm(wrong, others)
    assert hinted.mismatch is not None
    assert hinted.mismatch.hint == "old"
    assert hint_other_norm(wrong, {}) == wrong


@pytest.mark.parametrize(
    ("norms", "hint"),
    [
        ((2.0, torch.inf), INFINITE_NORM_HINT),
        ((torch.inf, 2.0), ""),
        ((torch.nan, torch.inf), ""),
        ((2.0, 0.0), NO_GRADIENT_HINT),
        ((2.0, torch.nan), "the engine reports none"),
        ((2.0, 3.0), ""),
    ],
)
def test_the_hint_names_a_norm_that_is_infinite_or_missing(norms: tuple[float, float], hint: str) -> None:
    place = TensorLocation(name="norm", part=Part.REDUCTION, step=0)
    hinted = hint_missing_norm(compare_bitwise(place, *map(torch.tensor, norms)))
    assert hinted.mismatch is not None
    assert hinted.mismatch.hint == hint


@pytest.mark.parametrize(
    ("norms", "hint"),
    [
        ((2.0, 1.0), "it is 0.5 x the right norm"),
        ((2.0, 8.001), "it is 4 x the right norm"),
        ((2.0, 1.01), ""),
        ((2.0, 0.0), NO_GRADIENT_HINT),
    ],
)
def test_the_hint_names_the_power_of_two_by_which_a_norm_is_wrong(norms: tuple[float, float], hint: str) -> None:
    place = TensorLocation(name="norm", part=Part.REDUCTION, step=0)
    compared = hint_missing_norm(compare_bitwise(place, *map(torch.tensor, norms)))
    hinted = hint_scaled_norm(compared, torch.tensor(2.0**-8))
    assert hinted.mismatch is not None
    assert hinted.mismatch.hint == hint


TERMS = [torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64), torch.tensor([1.0, 4.0, 0.0], dtype=torch.float64)]


@pytest.mark.parametrize(
    ("factors", "added", "hint"),
    [
        ((1.0, 2.0), 0.0, "1 of 2 terms count 2 times"),
        ((0.5, 1.0), 0.0, "1 of 2 terms count 0.5 times"),
        ((1 / 3, 1.0), 2.0**-24, "1 of 2 terms count 0.3333333 times"),  # rounded to float32
        ((3.0, 4.0), 0.0, "2 terms count 3, 4 times"),
        ((3.0, 4.0), 0.25, ""),
        ((3.0, 4.0), torch.inf, ""),
    ],
)
def test_the_hint_names_how_often_the_terms_of_a_sum_count(
    factors: tuple[float, float], added: float, hint: str
) -> None:
    found = factors[0] * TERMS[0] + factors[1] * TERMS[1] + torch.tensor([0.0, 0.0, added])
    described = describe_counted_terms(found, TERMS[0] + TERMS[1], TERMS)
    assert described == (f"it is the sum in which {hint}" if hint else "")


def test_an_error_that_rounding_explains_and_a_term_of_one_element_have_no_hint() -> None:
    right = TERMS[0] + TERMS[1]
    assert describe_counted_terms(right + 2.0**-23 * TERMS[0], right, TERMS) == ""
    assert (
        describe_counted_terms(torch.tensor([7.0]), torch.tensor([3.0]), [torch.tensor([1.0]), torch.tensor([2.0])])
        == ""
    )


def test_terms_that_depend_on_each_other_have_no_hint_of_several_factors() -> None:
    terms = [TERMS[0], 2 * TERMS[0]]
    assert describe_counted_terms(TERMS[1], 3 * TERMS[0], terms) == ""


def test_an_end_of_a_backward_reduces_again_what_is_left_in_the_buffers() -> None:
    # The second end adds what the first one reduced in the part that a rank owns (11), and the other rank's term there.
    terms = [[torch.tensor([1.0, 1.0]), torch.tensor([100.0, 100.0])], [torch.tensor([10.0, 10.0]), torch.zeros(2)]]
    owned = [(0, 0, 1), (1, 1, 2)]
    assert reduce_at_each_end(terms, owned, 1.0, 1).tolist() == [11 + (11 + 100 + 10), 11 + (1 + 100 + 11)]
    assert reduce_at_each_end([row[:1] for row in terms], owned, 0.5, 1).tolist() == [5.5, 5.5]
    assert reduce_at_each_end(terms, owned, 1.0, 2).tolist() == [111.0, 111.0], "a micro-batch leaves nothing"
    assert reduce_at_each_end(terms, owned, 1.0, 3).tolist() == [0.0, 0.0], "two ends are not three"
    assert reduce_at_each_end([terms[0], []], owned, 1.0, 1).tolist() == [0.0, 0.0]


def test_each_reduction_sums_over_the_copies_what_earlier_ones_added() -> None:
    # Two copies of two shards, of which each rank but the last has a term of 4, and rank 3 one of 8, in the first end.
    terms = [[torch.full((2,), first), torch.full((2,), 4.0)] for first in (4.0, 4.0, 4.0, 8.0)]
    owned = [(0, 0, 1), (1, 1, 2), (2, 0, 1), (3, 1, 2)]
    first = 20 / 4
    # A rank has the reduced 8 / 4 or 12 / 4 of its copy in its own part, and in the other one a term of its own.
    left = torch.tensor([8 / 4 + 4 / 4 + 12 / 4 + 8 / 4, 8 / 4 + 4 / 4 + 12 / 4 + 4 / 4]) / 4
    expected = 4 * (2 * (2 * first + left) + 16 / 4)
    assert torch.equal(reduce_on_copies(terms, owned, 0.25, 2), expected.double())
    assert reduce_on_copies([*terms[:3], []], owned, 0.25, 2).tolist() == []


def make_context(**records: torch.Tensor) -> Any:
    """Return a stand-in for the context of a judge: one rank recorded ``weight`` under each label at each step."""
    return SimpleNamespace(rank_records=lambda label, at=0: [{"weight": records[label][at]}], data_size=1)


@pytest.mark.parametrize(("old", "hint"), [([0.0, 3.0], OLD_GRADIENT_KEPT_HINT), ([0.0, 2.0], "only 1 of 2")])
def test_the_hint_names_a_gradient_from_before_zero_grad(old: list[float], hint: str) -> None:
    found = torch.tensor([0.0, 3.0])
    place = TensorLocation(name="weight", part=Part.REDUCTION, step=0)
    wrong = compare_bitwise(place, torch.zeros(2), found)
    assert wrong.mismatch is not None
    unexplained = add_hint(wrong, describe_wrong_elements(wrong.mismatch))
    ctx = make_context(grads=torch.tensor([old]), after=found[None])
    hinted = hint_old_gradient(ctx, unexplained, 0)
    assert hinted.mismatch is not None
    assert hinted.mismatch.hint.startswith(hint)
    explained = add_hint(wrong, "another cause")
    assert hint_old_gradient(ctx, explained, 0) is explained


@pytest.mark.parametrize(
    ("old_names", "hint"),
    [
        (("own", "layer.weight", "layer.bias"), OLD_WEIGHTS_HINT),
        (("layer.weight",), f"{OLD_WEIGHTS_HINT}, except vectors"),
        (("own",), f"{OLD_WEIGHTS_HINT}, of parameters outside of submodules alone"),
        (("layer.weight", "layer.bias"), ""),
        ((), ""),
    ],
)
def test_the_hint_names_a_forward_with_the_weights_from_before_the_last_step(
    old_names: tuple[str, ...], hint: str
) -> None:
    # The gradient of ``own`` is a sum of the weights, each of which a step has changed, times different factors.
    shapes = {"own": (1,), "layer.weight": (1, 1), "layer.bias": (1,)}
    old, new = ({name: torch.full(shape, float(at)) for name, shape in shapes.items()} for at in (1, 0))
    shares = {"own": 1.0, "layer.weight": 3.0, "layer.bias": 9.0}

    def run_window(window: int, weights: Mapping[str, torch.Tensor]) -> WindowResult:
        grad = sum(share * weights[name].sum() for name, share in shares.items())
        return WindowResult([[{"own": torch.as_tensor(grad).reshape(1)}], [{"own": torch.tensor([5.0])}]], [])

    plain: Any = SimpleNamespace(run_window=run_window)
    used = {name: old[name] if name in old_names else new[name] for name in shapes}
    update = sum_terms("own", run_window(1, used))
    records = [old, new, {**new, "own": (new["own"] - update).float()}]
    ctx: Any = SimpleNamespace(rank_records=lambda label, at=0: [records[at]], data_size=1)
    place = TensorLocation(name="own", part=Part.OPTIMIZER, step=1)
    wrong = compare_bitwise(place, torch.tensor([99.0]), records[2]["own"])
    scenario = WindowScenario(lambda participant, window, micro: None, micro_batches=2)
    hinted = hint_old_weights(ctx, wrong, scenario, plain, "params", run_window(1, new))
    assert hinted.mismatch is not None
    assert hinted.mismatch.hint == hint


@pytest.mark.parametrize("is_first_order", [True, False])
def test_the_hint_names_a_gradient_without_the_term_of_the_second_order(
    monkeypatch: pytest.MonkeyPatch, is_first_order: bool
) -> None:
    baseline = Baseline(model_spec("blocks"), 0, 1)
    plain = make_plain_participant(baseline, "", 0, torch.float32, None)
    found = penalize_input_gradient(plain, create_graph=not is_first_order)["penalty"]
    place = TensorLocation(name="penalty", part=Part.LOCAL_GRADIENT, step=0)
    wrong = compare_bitwise(place, found + 1, found)
    monkeypatch.setattr(double_backward, "make_scenario_judge", lambda scenario: lambda ctx: [wrong])
    ctx: Any = SimpleNamespace(
        baseline=baseline,
        variant="",
        dtype=torch.float32,
        data_coordinate=lambda rank: rank,
        rank_records=lambda label, at=0: [{"penalty": found}],
    )
    (hinted,) = judge_gradient_penalty(ctx)
    assert hinted.mismatch is not None
    assert (hinted.mismatch.hint == FIRST_ORDER_HINT) is is_first_order


@pytest.mark.parametrize(("old", "is_added"), [(2.0, True), (1.0, False), (0.0, False)])
def test_the_hint_names_an_old_gradient_that_is_added(old: float, is_added: bool) -> None:
    place = TensorLocation(name="weight", part=Part.REDUCTION, step=1)
    found, right = torch.tensor([7.0, 9.0]), torch.tensor([5.0, 9.0 - old])
    hinted = hint_added_gradient(
        compare_bitwise(place, right, found),
        {"weight": found},
        {"weight": torch.tensor([old, old])},
        [{"weight": right - 1}, {"weight": right + 1}],
        torch.float32,
    )
    assert hinted.mismatch is not None
    assert (hinted.mismatch.hint == OLD_GRADIENT_ADDED_HINT) is is_added


OWN_GRADIENTS = [torch.tensor([3.0, -1.0, 2.0, 5.0]), torch.tensor([-2.0, 4.0, 1.0, 7.0])]  # of rank 0 and rank 1
STEPPED_ALONE = torch.tensor([3.0, -1.0, 1.0, 7.0])  # each rank's half of a weight


@pytest.mark.parametrize(
    ("update", "factor"),
    [
        (STEPPED_ALONE, "1"),
        (STEPPED_ALONE / 4, "0.25"),
        (torch.zeros(4), ""),
        (-STEPPED_ALONE, ""),
        (1000 * STEPPED_ALONE, ""),
        (0.36 * OWN_GRADIENTS[0] + 1.4 * OWN_GRADIENTS[1], ""),
        (0.36 * OWN_GRADIENTS[0] + 1.4 * OWN_GRADIENTS[1] - 7.3 * torch.tensor([1.0, 1.0, -1.0, 2.0]), ""),
        (STEPPED_ALONE * torch.tensor([1.0, 1.0, 0.5, 0.5]), ""),  # a factor of each rank
        (sum(OWN_GRADIENTS) / 2, ""),  # reduced
    ],
)
def test_the_hint_names_a_weight_of_which_each_rank_stepped_its_part_alone(update: torch.Tensor, factor: str) -> None:
    place = TensorLocation("weight", Part.OPTIMIZER, 0, pieces=(Piece(0, 0, 2), Piece(1, 2, 4)))
    wrong = compare_bitwise(place, torch.full((4,), 9.0), torch.zeros(4))
    hinted = hint_own_gradients(wrong, place, update, OWN_GRADIENTS)
    assert hinted.mismatch is not None
    expected = f"each rank's part of the weight moved by {factor} x that rank's own gradient" if factor else ""
    assert hinted.mismatch.hint == expected


def test_a_rank_without_a_gradient_must_not_have_moved_its_part() -> None:
    place = TensorLocation("weight", Part.OPTIMIZER, 0, pieces=(Piece(0, 0, 2), Piece(1, 2, 4)))
    wrong = compare_bitwise(place, torch.full((4,), 9.0), torch.zeros(4))
    unmoved, moved = torch.tensor([3.0, -1.0, 0.0, 0.0]), torch.tensor([3.0, -1.0, 0.0, 1.0])
    for update, is_hinted in ((unmoved, True), (moved, False)):
        mismatch = hint_own_gradients(wrong, place, update, [OWN_GRADIENTS[0], None]).mismatch
        assert mismatch is not None
        assert bool(mismatch.hint) is is_hinted


@pytest.mark.parametrize(
    ("found", "is_own"),
    [
        (STEPPED_ALONE, True),
        (STEPPED_ALONE + torch.tensor([2.0**-8, 0.0, 0.0, 0.0]), True),  # rounded to bf16
        (STEPPED_ALONE / 2, False),
        (OWN_GRADIENTS[0], False),
        (sum(OWN_GRADIENTS) / 2, False),  # reduced
        (torch.zeros(4), False),
    ],
)
def test_the_hint_names_a_gradient_of_which_no_part_is_reduced(found: torch.Tensor, is_own: bool) -> None:
    pieces = (Piece(0, 0, 2), Piece(1, 2, 4))
    wrong = compare_bitwise(TensorLocation("weight", Part.REDUCTION, 0, pieces=pieces), torch.full((4,), 9.0), found)
    hinted = hint_unreduced_parts(wrong, found, OWN_GRADIENTS, torch.bfloat16)
    assert hinted.mismatch is not None
    assert (hinted.mismatch.hint == UNREDUCED_PARTS_HINT) is is_own


def test_a_gradient_whose_owners_are_unknown_has_no_hint() -> None:
    wrong = compare_bitwise(TensorLocation("weight", Part.REDUCTION, 0), torch.full((4,), 9.0), STEPPED_ALONE)
    assert hint_unreduced_parts(wrong, STEPPED_ALONE, OWN_GRADIENTS, torch.bfloat16) is wrong


def train_outside(ranks: int, seed: int, factor: int) -> JudgeContext:
    """Return what an engine records which multiplies the read outside of the forward by ``factor``."""
    scenario, baseline = FURTHER_READS["outside_2_by_engine"], Baseline(model_spec("experts"), seed, ranks)
    ctx = JudgeContext(baseline, (), torch.float32)
    plain = PlainRanks(ctx, scenario, torch.float32)
    weights = {name: p.detach().clone() for name, p in baseline.build_module().named_parameters()}
    records = [Snapshot("setting", 0, {"exact": torch.tensor(1.0)}), Snapshot("params", 0, weights)]
    records += [Snapshot("values", micro, {}) for micro in range(scenario.windows * scenario.micro_batches)]
    for window in range(scenario.windows):
        result = plain.run_window(window, weights, TrainWithReadOutside(factor))
        updates = {name: sum_terms(name, result) / (ranks * scenario.divisor) for name in weights}
        weights = {name: (weight - updates[name]).float() for name, weight in weights.items()}
        records.append(Snapshot("params", window + 1, weights))
    return replace(ctx, evidence=(RankEvidence(tuple(records), {}),) * ranks)


@pytest.mark.parametrize(("ranks", "seed"), [(2, 0), (2, 1), (4, 0)])
@pytest.mark.parametrize("factor", [0, 1, 2, 3])
def test_the_hint_names_a_read_outside_of_the_forward_that_is_not_divided(ranks: int, seed: int, factor: int) -> None:
    ctx = train_outside(ranks, seed, factor)
    found = [each.mismatch for each in judge_windows(ctx, FURTHER_READS["outside_2_by_engine"]) if each.mismatch]
    assert {mismatch.parameter for mismatch in found} == ({"experts.1.weight"} if factor != 1 else set())
    assert all((mismatch.hint == UNDIVIDED_READ_HINT) is (factor == 2) for mismatch in found)
