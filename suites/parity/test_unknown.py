"""Numbers that a judge cannot know count as undetermined, and all others are judged."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from zharness.law_kit.clipping import NO_CLIPPING, ClipFactor
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.optimizer_step import ClippedSgdStep
from zharness.law_kit.program_judge import StepCounts, judge_parameter_updates
from zharness.law_kit.program_steps import OPTIMIZERS
from zharness.law_kit.recorded_gradients import drain_gradients, has_split_gradients, record_gradients, split_gradient
from zharness.parity import Comparison, Part
from zharness.parity.baseline import Baseline, LocalResult
from zharness.parity.bounds import BoundedTensor, gamma
from zharness.parity.comparison import TensorLocation
from zharness.parity.contamination import ProcessConditions
from zharness.parity.snapshot import RankEvidence, Snapshot
from zharness.workload import model_spec
from zharness.workload.programs import PendingGradients

PLACE = TensorLocation("w", Part.OPTIMIZER)
NAMES = Baseline(model_spec("odd"), 0, 3).parameter_names


def test_a_sparse_gradient_is_taken_apart_into_entries_that_have_no_row_twice() -> None:
    table = nn.Embedding(4, 3, sparse=True)
    given = record_gradients(table)
    (table(torch.tensor([0, 2, 0, 0, 2])) * torch.arange(15.0).reshape(5, 3)).sum().backward()
    ((parts,),) = drain_gradients(given).values()
    assert torch.equal(torch.stack([*parts]).sum(0), table.weight.grad.to_dense())
    assert [part[:, 1].tolist() for part in parts] == [[1, 0, 4, 0], [7, 0, 13, 0], [10, 0, 0, 0]]
    assert not given, "what is taken is told once"


def test_a_dense_gradient_is_its_only_entry() -> None:
    grad = torch.randn(2, 3)
    assert [torch.equal(grad, part) for part in split_gradient(grad)] == [True]
    assert not has_split_gradients({"w": [[grad], [grad]]})
    assert has_split_gradients({"w": [[grad], [grad, grad]]})


def test_a_sparse_gradient_without_any_row_is_zeros() -> None:
    table = nn.Embedding(4, 3, sparse=True)
    given = record_gradients(table)
    table(torch.zeros(0, dtype=torch.int64)).sum().backward()
    ((parts,),) = drain_gradients(given).values()
    assert [part.tolist() for part in parts] == [torch.zeros(4, 3).tolist()]


@pytest.mark.parametrize(("off", "right"), [(1.0, True), (1 + 9e-5, True), (1 + 2e-4, False)])
def test_a_factor_whose_norm_nobody_reports_is_known_as_well_as_that_norm(off: float, right: bool) -> None:
    weight, grad = torch.zeros(5), torch.linspace(1, 2, 5)
    clipped = ClippedSgdStep(weight, grad, ClipFactor(0.5, uncertainty=1e-4))
    assert (clipped.compare_weight(PLACE, -grad * 0.5 * off).mismatch is None) is right
    assert (
        ClippedSgdStep(weight, grad, ClipFactor(0.5)).compare_weight(PLACE, -grad * 0.5 * (1 + 9e-5)).mismatch
        is not None
    )


def scalar_tensor(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


@pytest.mark.parametrize(
    ("norm", "error", "least", "most"),
    [
        (0.5, 1e-7, 1.0, 1.0),  # far below the limit: nobody clips, whatever the rounding
        (1.0 - 1e-6, 1e-5, 1 / (1 + 1e-5), 1.0),  # nearly at it: some may
        (2.0, 1.0, 1 / 3, 1 - 1e-6),  # known by half: from three times the limit to the limit itself
    ],
)
def test_a_factor_takes_in_whatever_a_norm_that_nobody_reports_may_be(
    norm: float, error: float, least: float, most: float
) -> None:
    factor = ClipFactor.from_norm(1.0, scalar_tensor(norm), scalar_tensor(error), None)
    grad = factor.apply_to(BoundedTensor.exact(torch.ones(1, dtype=torch.float64)))
    assert float((grad.value - grad.error).max()) <= least
    assert float((grad.value + grad.error).min()) >= most
    assert (factor == NO_CLIPPING) is (least == 1)


def test_a_norm_that_is_reported_is_taken_by_its_word_and_no_number_spreads_as_torch_spreads_it() -> None:
    assert ClipFactor.from_norm(1.0, scalar_tensor(2.0), scalar_tensor(1.0), scalar_tensor(4.0 - 1e-6)) == ClipFactor(
        0.25
    )
    lost = ClipFactor.from_norm(1.0, scalar_tensor(math.nan), scalar_tensor(math.nan), scalar_tensor(math.nan))
    assert math.isnan(lost.value)
    grad = torch.ones(3)
    assert ClippedSgdStep(torch.zeros(3), grad, lost).compare_weight(PLACE, -grad).mismatch is not None, (
        "torch's weights are NaN"
    )
    assert ClippedSgdStep(torch.zeros(3), grad, lost).compare_weight(PLACE, grad * math.nan).mismatch is None


def reduced(
    name: str,
    given: Tensor,
    terms: list[Tensor],
    dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype | None = None,
) -> list[Comparison]:
    """Judge ``given`` as the mean of ``terms`` over three ranks."""
    evidence = RankEvidence((Snapshot("grads", 0, {name: given}),), {}, ProcessConditions({}, ()))
    trial = JudgeContext(Baseline(model_spec("odd"), 0, 3), (evidence,) * 3, dtype, declared_reduce_dtype=reduce_dtype)
    return list(trial.compare_reduced_grads("grads", [[LocalResult(torch.zeros(()), {name: term}) for term in terms]]))


def test_a_parameter_of_a_narrower_dtype_is_reduced_in_its_own() -> None:
    terms = [torch.tensor([0.25, -0.5, 1.0])] * 3
    third = (torch.stack(terms).to(torch.bfloat16) / 3).sum(0)
    beyond = third + 2 * gamma(3, torch.bfloat16)
    assert not any(each.mismatch for each in reduced("narrow", third, terms))
    assert any(each.mismatch for each in reduced("narrow", beyond.to(torch.bfloat16), terms))
    assert any(each.mismatch for each in reduced("wide", (terms[0] * (1 + 1e-3)).double(), terms)), "others are not"


def test_a_narrow_parameter_that_an_engine_holds_in_a_wider_dtype_is_reduced_in_that() -> None:
    terms = [torch.tensor([0.25, -0.5, 1.0])] * 3
    off = terms[0] * (1 + 6e-3)
    assert any(each.mismatch for each in reduced("narrow", off, terms))
    assert any(each.mismatch for each in reduced("narrow", off.half(), terms, torch.float16))


def test_an_engine_that_hands_out_narrow_gradients_of_a_wide_parameter_is_held_to_the_wire_that_it_declares() -> None:
    terms = [torch.tensor([1.0, 1 / 3, 1 / 5])] * 3
    mean, name = torch.stack(terms).mean(0), next(name for name in NAMES if name != "narrow")
    off = mean.bfloat16() * (1 + 2**-7)  # one step of bf16 beside what that would round to
    assert not any(each.mismatch for each in reduced(name, mean.bfloat16(), terms))
    assert any(each.mismatch for each in reduced(name, off, terms))


def test_a_wire_that_is_narrower_than_a_gradient_decides() -> None:
    terms = [torch.tensor([0.3, -0.7, 1.1]).half()] * 3
    third = (torch.stack(terms).to(torch.bfloat16) / 3).sum(0).half()
    assert not any(each.mismatch for each in reduced("narrow", third, terms, torch.float32, torch.bfloat16))
    assert any(each.mismatch for each in reduced("narrow", third, terms))


@pytest.mark.parametrize(
    ("error", "pending", "right"), [(1.5, "UNSEEN", True), (0.0, "UNSEEN", False), (1.5, "REDUCED", False)]
)
def test_adam_s_step_by_an_unseen_gradient_that_may_be_nothing_is_undetermined_and_by_a_known_one_is_not(
    error: float, pending: str, right: bool
) -> None:
    weight, spec = torch.zeros(1), OPTIMIZERS["adamw"]
    grad = BoundedTensor(
        torch.ones(1, dtype=torch.float64), torch.full((1,), error, dtype=torch.float64), torch.float32
    )
    moments = {"w/exp_avg": torch.full((1,), 0.1), "w/exp_avg_sq": torch.full((1,), 0.05)}
    after = RankEvidence(
        (
            Snapshot("masters", 0, {"w": weight}),
            Snapshot("masters", 1, {"w": weight + 1.0}),  # some hundred times the rate, in the wrong direction
            Snapshot("state", 0, {}),
            Snapshot("state", 1, moments),
        ),
        {},
        ProcessConditions({}, ()),
    )
    trial = JudgeContext(Baseline(model_spec("mlp"), 0, 1), (after,), torch.float32)
    found = [
        each
        for each in judge_parameter_updates(trial, spec, {"w": grad}, 0, StepCounts(), 1, PendingGradients[pending])
        if each.location and each.location.name == "w"
    ]
    assert [each.mismatch is None for each in found] == [right]
    assert [each.undetermined for each in found if right] == [1] * right
