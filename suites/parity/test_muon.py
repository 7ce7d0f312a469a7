"""Muon's bound holds where the norm rounds once more, and shows a matrix that was orthogonalized by shards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from zharness.engines.protocol import Piece
from zharness.laws.training.muon import LOST_MOMENTUM_HINT, MUON, OWN_PART_HINT, MatrixStep, hint_wrong_weight
from zharness.mesh import Mesh
from zharness.parity import Part, RankEvidence, compare_bitwise
from zharness.parity.baseline import LocalResult
from zharness.parity.comparison import TensorLocation
from zharness.parity.muon import bound_step, orthogonalize, step_like_deepspeed, step_like_torch
from zharness.workload.matrices import COLUMNS, LARGE, ROWS, SIGNS, TALL_COLUMN, TALL_COPIES, TALL_ROW

OPTIONS = {"lr": 2.0**-5, "momentum": 0.0, "weight_decay": 0.5}
VALUES = torch.tensor([3, -6, 0, 3 * LARGE, 15, 0, 3, 9, 6 * LARGE])

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is of torch 2.9 and later")


def make_matrix() -> Tensor:
    """Return a tall matrix with at most one element in each row and column that is not zero."""
    matrix = torch.zeros(ROWS, COLUMNS)
    matrix[TALL_ROW, TALL_COLUMN] = VALUES
    return matrix


def largest_ratio(weight: Tensor, after: Tensor) -> float:
    """Return the largest error of the weight after a step, over its bound."""
    expected, bound = bound_step(weight, make_matrix(), OPTIONS, ranks=2)
    return float(((after.double() - expected).abs() / bound).nan_to_num(0).max())  # zeros are exact


@pytest.mark.parametrize("factor", [1.0, 1 + 2**-8, 1 - 2**-8])
def test_the_bound_holds_for_a_norm_that_rounds_once_more(factor: float) -> None:
    weight = torch.linspace(-1, 1, ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    after = step_like_torch(weight, factor * make_matrix(), torch.zeros_like(weight), OPTIONS).weight
    assert largest_ratio(weight, after) < 1


def test_both_definitions_differ_by_rounding_alone() -> None:
    weight = torch.ones(ROWS, COLUMNS)
    like_torch, like_deepspeed = (
        step(weight, make_matrix(), weight, OPTIONS) for step in (step_like_torch, step_like_deepspeed)
    )
    assert torch.equal(like_torch.momentum, like_deepspeed.momentum)
    differences = like_torch.weight - like_deepspeed.weight
    assert not differences[make_matrix() == 0].any()
    assert largest_ratio(weight, like_torch.weight) < 1


@pytest.mark.parametrize("parts", [2, 3])
def test_orthogonalized_shards_are_far_outside_the_bound(parts: int) -> None:
    weight, whole = torch.zeros(ROWS, COLUMNS), make_matrix()
    halves = [
        step_like_torch(part, grad, torch.zeros_like(part), OPTIONS).weight
        for part, grad in zip(weight.chunk(parts), whole.chunk(parts), strict=True)
    ]
    assert largest_ratio(weight, torch.cat(halves)) > 4


def test_no_element_of_two_ranks_has_a_bound_as_large_as_itself() -> None:
    expected, bound = bound_step(torch.zeros(ROWS, COLUMNS), make_matrix(), OPTIONS, ranks=2)
    assert bool((bound < expected.abs())[make_matrix() != 0].all())


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_products_of_dense_vectors_are_zero_also_if_each_shard_is_rounded(ranks: int) -> None:
    matrix = SIGNS.repeat(TALL_COPIES, 1) * torch.tensor([3.0, 3 * LARGE, 15, 9])
    power = orthogonalize(matrix)
    products = sum(part.T @ part for part in power.chunk(ranks))
    assert isinstance(products, Tensor)
    assert products.dtype == torch.bfloat16
    assert torch.equal(products, torch.diag(products.diag()))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_bound_of_a_dense_matrix_holds(ranks: int) -> None:
    matrix = SIGNS.repeat(TALL_COPIES, 1) * torch.tensor([3.0, 3 * LARGE, 15, 9])
    weight = torch.zeros_like(matrix)
    after = step_like_torch(weight, matrix, weight, OPTIONS).weight
    expected, bound = bound_step(weight, matrix, OPTIONS, ranks)
    assert bool(((after.double() - expected).abs() < bound).all())
    assert bool((bound < expected.abs() / 8)[:, [0, 2, 3]].all())


@pytest.mark.parametrize("step", [step_like_torch, step_like_deepspeed])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("mesh", "wrong", "is_hinted"), [("tp2", 0, True), ("", 0, False), ("tp2", 1, False)])
def test_the_hint_names_parts_of_tp_that_are_orthogonalized_alone(
    step: Any, dim: int, mesh: str, wrong: float, is_hinted: bool
) -> None:
    weight, momentum, grad = torch.ones(ROWS, COLUMNS), torch.full((ROWS, COLUMNS), 2.0), make_matrix()
    places = torch.arange(weight.numel()).view_as(weight).tensor_split(2, dim)
    parts = zip(*(each.tensor_split(2, dim) for each in (weight, grad, momentum)), strict=True)
    moved = torch.cat([step(*part, MUON.args).weight for part in parts], dim) + wrong
    pieces = tuple(Piece(rank, at, at + 1) for rank, place in enumerate(places) for at in map(int, place.flatten()))
    ctx: Any = SimpleNamespace(
        evidence=[RankEvidence((), {"weight": pieces})],
        compute_local_grads=lambda at: [LocalResult(grad, {"weight": grad})],
        data_coordinate=lambda rank: 0,
        mesh=Mesh.parse(mesh),
        world_size=2,
    )
    taken = MatrixStep(1, "weight", grad, weight, momentum, moved, None)
    found = compare_bitwise(TensorLocation("weight", Part.OPTIMIZER, 1, pieces=pieces), weight, moved)
    mismatch = hint_wrong_weight(ctx, found, taken).mismatch
    assert mismatch is not None
    assert (mismatch.hint == OWN_PART_HINT) is is_hinted


@pytest.mark.parametrize(
    ("step", "kept", "wrong_part", "is_hinted"),
    [
        (1, 0.0, slice(None), True),
        (1, 0.0, slice(4, 6), True),  # the other rank's part is right
        (1, 0.5, slice(None), False),
        (0, 0.0, slice(None), False),
    ],
)
def test_the_hint_names_a_step_of_muon_without_earlier_momentum(
    step: int, kept: float, wrong_part: slice, is_hinted: bool
) -> None:
    weight, momentum = torch.ones(3, 2), torch.tensor([[0.0, 4.0], [8.0, 0.0], [2.0, 1.0]])
    grad = torch.tensor([[2.0, 0.0], [0.0, 8.0], [0.0, 0.0]])
    after, found = (step_like_torch(weight, grad, factor * momentum, MUON.args) for factor in (1, kept))
    moved = after.weight.clone()
    moved.flatten()[wrong_part] = found.weight.flatten()[wrong_part]
    taken = MatrixStep(step, "weight", grad, weight, momentum, moved, after.momentum)
    pieces = (Piece(0, 0, 4), Piece(1, 4, 6))
    ctx: Any = SimpleNamespace(
        evidence=[RankEvidence((), {"weight": pieces})],
        compute_local_grads=lambda at: [LocalResult(grad, {"weight": grad})] * 2,
        data_coordinate=lambda rank: rank,
        mesh=Mesh.parse(""),
        world_size=2,
    )
    wrong = compare_bitwise(TensorLocation("weight", Part.OPTIMIZER, step, pieces=pieces), after.weight, moved)
    mismatch = hint_wrong_weight(ctx, wrong, taken).mismatch
    assert mismatch is not None
    assert (mismatch.hint == LOST_MOMENTUM_HINT) is is_hinted
