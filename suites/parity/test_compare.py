"""Comparisons name the worst element, its owner and its distance, and handle NaN, wrong shapes and wrong names."""

from __future__ import annotations

import math

import pytest
import torch

from zharness.engines import Piece
from zharness.errors import EngineContractError, HarnessFault
from zharness.parity import Comparison, Part, Tier, compare, compare_bitwise, compare_ranks, compare_within_bound
from zharness.parity.attribution import attribute_mismatch
from zharness.parity.baseline import Baseline, LocalResult
from zharness.parity.bounds import mean_and_bound, unit_roundoff
from zharness.parity.certificate import certify_exactness, single_term_mean_exactness
from zharness.parity.compare import CHUNK_ELEMENTS, PROBE_ELEMENTS, check_names, compare_in_chunks, ulp_distance
from zharness.parity.comparison import TensorLocation
from zharness.parity.contamination import ProcessConditions
from zharness.parity.snapshot import evidence_path, open_evidence_writer, read_evidence
from zharness.workload import MODELS, model_spec

PLACE = TensorLocation("layer.weight", Part.REDUCTION, step=2, seen_on=1, pieces=(Piece(0, 0, 4), Piece(1, 4, 6)))


def test_equal_tensors_have_ratio_zero_and_no_mismatch() -> None:
    tensor = torch.tensor([1.0, -0.0, math.nan, math.inf])
    found = compare_bitwise(PLACE, tensor, tensor.clone())
    assert (found.tier, found.ratio, found.mismatch) == (Tier.EXACT, 0.0, None)


def test_the_worst_element_is_named_with_its_owner_and_its_place_in_the_shard() -> None:
    expected = torch.zeros(2, 3)
    actual = expected.clone()
    actual[0, 1], actual[1, 2] = 1.0, 2.0
    found = compare_bitwise(PLACE, expected, actual).mismatch
    assert found is not None
    assert (found.index, found.owner, found.offset, found.wrong, found.total) == ((1, 2), 1, 1, 2, 6)
    assert (found.step, found.seen_on, found.expected, found.actual) == (2, 1, 0.0, 2.0)
    assert "step 2, reduction: layer.weight[1, 2] (owned by rank 1, element 1; seen on rank 1)" in found.describe()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_a_mismatch_under_any_bound(bad: float) -> None:
    expected = torch.ones(3, dtype=torch.float64)
    found = compare_within_bound(
        PLACE, expected, torch.tensor([1.0, bad, 1.0]), torch.full((3,), 1e300, dtype=torch.float64)
    )
    assert found.mismatch is not None
    assert found.mismatch.index == (1,)


@pytest.mark.parametrize(
    ("dtype", "wrong", "distance"),
    [(torch.float32, 1.25, "2097152 ULP apart, "), (torch.float64, 1.25, ""), (torch.float32, math.nan, "")],
)
def test_a_distance_is_stated_only_if_a_reader_can_use_it(dtype: torch.dtype, wrong: float, distance: str) -> None:
    found = compare_bitwise(PLACE, torch.ones(1, dtype=dtype), torch.tensor([wrong], dtype=dtype)).mismatch
    assert found is not None
    assert f"(bound 0, {distance}1 of 1 elements wrong)" in found.describe()


def test_a_large_tensor_in_pieces_is_judged_as_it_is_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    count = 2 * CHUNK_ELEMENTS + 3
    expected = torch.randn(count, generator=generator, dtype=torch.float64)
    actual, bound = expected.float(), expected.abs() * torch.rand(count, generator=generator, dtype=torch.float64)
    bound += (actual.double() - expected).abs()
    bound[::5] += 10

    def compare(piece: slice) -> list[Comparison]:
        return [compare_within_bound(PLACE, expected[piece], actual[piece], bound[piece])]

    assert compare_in_chunks(compare, count) == compare(slice(0, count))
    actual[-1] += 100
    assert compare(slice(0, count))[0].mismatch is not None
    assert compare_in_chunks(compare, count) == [], "what is wrong has to be told of the whole"


def test_equal_tensors_show_a_scale_error_by_any_number_in_them() -> None:
    numbers = torch.zeros(10 * PROBE_ELEMENTS)
    assert compare_bitwise(PLACE, numbers, numbers).smallest_detectable == math.inf
    numbers[-1] = 1.0
    assert compare_bitwise(PLACE, numbers, numbers).smallest_detectable == unit_roundoff(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_numbers_within_their_bounds_are_judged_alike_by_the_short_way_and_by_the_careful_one(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(200, generator=generator, dtype=torch.float64)
    expected[::7] = 0.0
    actual = expected.to(dtype)
    bound = 2 * (actual.double() - expected).abs() + torch.rand(200, generator=generator, dtype=torch.float64)
    bound[::14] = 0.0
    for signal in (None, torch.zeros_like(expected), expected / 8):
        short = compare_within_bound(PLACE, expected, actual, bound, signal=signal)
        with monkeypatch.context() as patch:
            patch.setattr(compare, "compare_fast_path", lambda *_: None)
            assert compare_within_bound(PLACE, expected, actual, bound, signal=signal) == short
        assert short.mismatch is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nothing_is_within_a_bound_that_is_not_finite(bad: float) -> None:
    one, end = torch.ones(1, dtype=torch.float64), torch.full((1,), bad, dtype=torch.float64)
    assert compare_within_bound(PLACE, one, torch.tensor([2.0]), end).mismatch is not None
    assert compare_within_bound(PLACE, end, torch.tensor([1.0]), end).mismatch is not None
    assert compare_within_bound(PLACE, end, torch.tensor([math.nan]), one).mismatch is None or bad == math.inf
    assert compare_within_bound(PLACE, one, torch.tensor([1.0]), end).mismatch is None, "the same value always does"


@pytest.mark.parametrize("bound", [-0.0, -1.0])
def test_no_error_is_within_a_bound_that_is_not_above_zero(bound: float) -> None:
    expected = torch.tensor([1.0, 2.0], dtype=torch.float64)
    found = compare_within_bound(PLACE, expected, expected + 1, torch.full_like(expected, bound))
    assert found.mismatch is not None
    assert found.mismatch.wrong == 2


def test_a_scalar_and_an_empty_tensor_can_be_compared() -> None:
    assert compare_bitwise(PLACE, torch.tensor(1.0), torch.tensor(1.0)).mismatch is None
    assert compare_bitwise(PLACE, torch.zeros(0, 3), torch.zeros(0, 3)).mismatch is None
    found = compare_bitwise(PLACE, torch.tensor(1.0), torch.tensor(2.0)).mismatch
    assert found is not None
    assert found.index == ()


def test_a_wrong_shape_is_the_engine_s_breach_of_contract() -> None:
    with pytest.raises(EngineContractError, match=r"shape \(6,\); expected \(2, 3\)"):
        compare_bitwise(PLACE, torch.zeros(2, 3), torch.zeros(6))


def test_missing_and_unknown_names_are_both_told() -> None:
    with pytest.raises(EngineContractError, match=r"missing \['a'\], unknown \['module.a'\]"):
        check_names("full_grads", {"a": 1, "b": 1}, {"module.a": 1, "b": 1})


def test_ranks_that_disagree_are_told_by_rank() -> None:
    copies = [torch.zeros(6), torch.zeros(6), torch.tensor([0.0, 0, 0, 0, 0, 1.0])]
    found = [comparison.mismatch for comparison in compare_ranks(PLACE, copies)]
    assert found[0] is None
    assert found[1] is not None
    assert (found[1].seen_on, found[1].owner, found[1].offset) == (2, 1, 1)


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [(1.0, 1.0, 0), (0.0, -0.0, 0), (1.0, 1.0 + 2**-23, 1), (-1.0, -1.0 - 2**-23, 1), (2**-149, -(2**-149), 2)],
)
def test_ulps_count_the_floats_between(one: float, other: float, apart: int) -> None:
    assert ulp_distance(one, other, torch.float32) == apart
    assert ulp_distance(other, one, torch.float32) == apart


FAULTS = {
    "rank 1 alone": (lambda t: t[1][0] / 2 + t[1][1] / 2, Part.REDUCTION, "the gradient of rank 1 alone, not reduced"),
    "micro-batch 0 lost": (lambda t: (t[0][1] + t[1][1]) / 2, Part.ACCUMULATION, "the gradient of micro-batch 1 alone"),
    "lost, still divided": (
        lambda t: (t[0][1] + t[1][1]) / 4,
        Part.ACCUMULATION,
        "the gradient of micro-batch 1 alone, divided as if nothing were missing",
    ),
    "not divided": (lambda t: t[0][0] + t[0][1] + t[1][0] + t[1][1], Part.REDUCTION, "it is 4 x the right gradient"),
    "noise": (lambda t: t[0][0] * t[1][0], Part.LOCAL_GRADIENT, ""),
}


@pytest.mark.parametrize(("fault", "part", "hint"), FAULTS.values(), ids=FAULTS.keys())
def test_a_wrong_gradient_is_recognised_by_its_numbers(fault, part: Part, hint: str) -> None:
    generator = torch.Generator().manual_seed(3)
    terms = [[torch.randn(30, generator=generator) for _ in range(2)] for _ in range(2)]
    mean, bound = mean_and_bound([term for row in terms for term in row], torch.float32)
    actual = fault(terms)
    place = TensorLocation("w", Part.REDUCTION)
    found = attribute_mismatch(
        compare_within_bound(place, mean, actual, bound), actual, terms, [actual, actual], {}
    ).mismatch
    assert found is not None
    assert found.part is part
    assert hint in found.hint


def test_a_suspect_that_no_rank_has_a_gradient_for_is_passed_over() -> None:
    zero, actual = torch.zeros(3), torch.tensor([0.0, 2.0, 0.0])
    wrong = compare_within_bound(TensorLocation("w", Part.REDUCTION), zero.double(), actual, zero.double())
    found = attribute_mismatch(wrong, actual, [[zero], [zero]], [actual, actual], {"nobody's": [[]]}).mismatch
    assert found is not None
    assert "nobody's" not in found.hint


def test_a_suspect_explains_a_gradient_only_if_every_rank_reports_it() -> None:
    right, suspect = torch.tensor([3.0]), torch.tensor([2.0])
    wrong = compare_within_bound(TensorLocation("w", Part.REDUCTION), right.double(), suspect, torch.zeros(1).double())
    for other, hint in ((suspect, "it is the last"), (torch.tensor([5.0]), "the ranks report different gradients")):
        terms = [[torch.tensor([1.0])], [torch.tensor([5.0])]]
        found = attribute_mismatch(wrong, suspect, terms, [suspect, other], {"the last": [[suspect, suspect]]}).mismatch
        assert found is not None
        assert found.hint == hint


def test_a_wrong_gradient_that_was_reduced_in_bf16_and_is_held_in_fp32_is_recognised() -> None:
    generator = torch.Generator().manual_seed(3)
    terms = [[torch.randn(30, generator=generator).bfloat16() for _ in range(2)] for _ in range(2)]
    actual = ((terms[0][1] + terms[1][1]) / 2).float()
    mean, bound = mean_and_bound([term for row in terms for term in row], torch.bfloat16, torch.float32)
    wrong = compare_within_bound(TensorLocation("w", Part.REDUCTION), mean, actual, bound)
    found = attribute_mismatch(wrong, actual, terms, [actual, actual], {}, torch.bfloat16).mismatch
    assert found is not None
    assert found.part is Part.ACCUMULATION
    assert found.hint == "it is the gradient of micro-batch 1 alone"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_exact_model_is_certified_where_ranks_are_a_power_of_two(world_size: int) -> None:
    baseline = Baseline(model_spec("exact"), seed=5, data_size=world_size)
    assert certify_exactness(baseline, range(2), torch.float32)
    assert not certify_exactness(baseline, range(3), torch.float32), "a third is not exact"
    assert not certify_exactness(baseline, range(1), torch.bfloat16), "8 bits do not hold it"


@pytest.mark.parametrize("name", sorted(name for name, spec in MODELS.items() if not spec.exact))
def test_no_other_model_is_certified(name: str) -> None:
    assert not certify_exactness(Baseline(model_spec(name), seed=5, data_size=2), range(1), torch.float32)


def test_evidence_survives_the_file_without_pickled_code(tmp_path) -> None:
    evidence_path(tmp_path, 1).write_bytes(bytes(range(256)) * 100)  # of an earlier cell
    records = open_evidence_writer(tmp_path, 1)
    recorded = torch.arange(6.0).view(2, 3)
    records.write_snapshot("params", 3, {"a.b": recorded, "c": torch.ones(3, dtype=torch.bfloat16)})
    recorded += 1
    records.write_snapshot("masters", 3, {"c": torch.zeros(3)}, base_label="params")
    with pytest.raises(HarnessFault, match="'params' was recorded twice at step 3"):
        records.write_snapshot("params", 3, {})
    records.finish({"a.b": (Piece(0, 0, 6),)}, ProcessConditions({}, ()))
    found = read_evidence(tmp_path, 1)
    for label, other in (("params", torch.ones(3, dtype=torch.bfloat16)), ("masters", torch.zeros(3))):
        assert torch.equal(found.get(label, 3)["a.b"], torch.arange(6.0).view(2, 3)), "as it was when it was recorded"
        assert torch.equal(found.get(label, 3)["c"], other)
    assert found.layout["a.b"] == (Piece(0, 0, 6),)
    with pytest.raises(EngineContractError, match="nothing was recorded under 'grads' at step 0"):
        found.get("grads")


def test_elements_smaller_than_their_bound_are_counted_and_might_be_lost_unseen() -> None:
    expected = torch.tensor([1.0, 1e-3, 0.0, -1e-3], dtype=torch.float64)
    bound = torch.full((4,), 1e-2, dtype=torch.float64)
    found = compare_within_bound(PLACE, expected, expected.clone(), bound)
    assert (found.elements, found.undetermined, found.smallest_detectable) == (4, 2, 1e-2)
    lost = torch.where(expected.abs() < bound, 0.0, expected)
    assert compare_within_bound(PLACE, expected, lost, bound).mismatch is None, "so many may be lost"
    assert compare_within_bound(PLACE, expected, torch.zeros(4), bound).mismatch is not None, "and one more is caught"


def test_what_an_update_would_lose_is_measured_against_the_update() -> None:
    weight, update = torch.full((3,), 2.0), torch.tensor([1e-3, 1e-9, 0.0])
    bound = torch.full((3,), 1e-6, dtype=torch.float64)
    found = compare_within_bound(PLACE, (weight + update).double(), weight + update, bound, signal=update)
    assert found.undetermined == 1
    assert found.smallest_detectable == float(1e-6 / update[0].double())


@pytest.mark.parametrize(
    ("world_size", "dtype", "why"),
    [
        (3, torch.float32, "3 is not a power of two"),
        (2, torch.bfloat16, "the 8 bits of bfloat16"),
        (2, torch.float32, ""),
    ],
)
def test_where_exactness_does_not_apply_it_says_why(world_size: int, dtype: torch.dtype, why: str) -> None:
    found = certify_exactness(Baseline(model_spec("exact"), seed=5, data_size=world_size), range(1), dtype)
    assert bool(found) is not bool(why)
    assert why in found.reason


def test_halving_a_subnormal_of_fp16_is_not_certified() -> None:
    step = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
    odd, even = (LocalResult(torch.zeros(()), {"w": torch.tensor([1.0, count * step])}) for count in (717, 718))
    assert single_term_mean_exactness(even, 2, torch.float16)
    assert "is not a number of float16" in single_term_mean_exactness(odd, 2, torch.float16).reason
    assert single_term_mean_exactness(odd, 2, torch.float16, loss_scale=16.0)
    assert "not a power of two" in single_term_mean_exactness(even, 3, torch.float32).reason
