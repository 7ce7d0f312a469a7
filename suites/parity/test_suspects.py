"""Judges tell gradients that survive zero_grad, and weights from before a step, from other wrong numbers."""

from __future__ import annotations

import pytest
import torch

from zharness.engines.protocol import Piece
from zharness.law_kit.program_suspects import (
    DIVIDED_AGAIN_HINT,
    SUMMED_OVER_SEQUENCE_AGAIN_HINT,
    make_added_again_suspects,
    make_reduced_again_suspects,
    make_unreduced_suspects,
)
from zharness.law_kit.record_comparisons import replace_vectors
from zharness.law_kit.scenario_baseline import ScenarioResult
from zharness.law_kit.scenario_judge import (
    DISCARDED_GRADS_KEPT_HINT,
    LAST_DISCARDED_GRAD_KEPT_HINT,
    make_backward_suspects,
)
from zharness.mesh import Mesh
from zharness.parity.baseline import LocalResult


def make_result(*backwards: float) -> ScenarioResult:
    """Return the result of backwards of which ``zero_grad`` discards all but the last; ``kept`` has no other."""
    last = torch.tensor([backwards[-1]])
    recorded = {"w": [[torch.tensor([grad])] for grad in backwards], "kept": [[last]]}
    return ScenarioResult((), ({"w": last, "kept": last},), (), (recorded,), ())


def test_gradients_that_zero_grad_discarded_are_suspects() -> None:
    results = [make_result(1, 10, 100), make_result(2, 20, 200)]
    suspects = make_backward_suspects(results, 0, 0.5)
    for hint, sums in ((DISCARDED_GRADS_KEPT_HINT, [55.5, 111]), (LAST_DISCARDED_GRAD_KEPT_HINT, [55, 110])):
        (row,) = suspects[hint]
        assert [{name: float(grad) for name, grad in local.grads.items()} for local in row] == [
            {"w": total} for total in sums
        ], hint


def test_vectors_of_another_step_are_mixed_with_weights() -> None:
    old = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2), "scale": torch.zeros(())}
    mixed = replace_vectors(old, {name: torch.ones_like(tensor) for name, tensor in old.items()})
    assert {name: bool(tensor.all()) for name, tensor in mixed.items()} == {
        "weight": False,
        "bias": True,
        "scale": False,
    }


def make_row(grad: float) -> list[LocalResult]:
    """Return the local results of one rank whose weight ``w`` has the gradient ``grad``."""
    return [LocalResult(torch.zeros(()), {"w": torch.tensor([grad])})]


def test_a_second_backward_of_one_forward_adds_the_first_again() -> None:
    window = [make_row(1), make_row(10), make_row(100), make_row(1000)]
    (rows,) = make_added_again_suspects((0, 1, 1, 2), window, 0.5).values()
    assert [float(row[0].grads["w"]) for row in rows] == [0.5, 5, 5, 50, 500]
    assert make_added_again_suspects((0, 1, 2, 3), window, 0.5) == {}


@pytest.mark.parametrize(
    ("mesh", "first", "hint", "sums"),
    [
        ("ep4", 0, DIVIDED_AGAIN_HINT, [1, 40, 1600]),
        ("ep2", 1, DIVIDED_AGAIN_HINT, [8, 80, 1600]),
        ("cp2", 0, SUMMED_OVER_SEQUENCE_AGAIN_HINT, [64, 320, 1600]),
        ("cp2", 1, SUMMED_OVER_SEQUENCE_AGAIN_HINT, [32, 320, 1600]),
    ],
)
def test_each_reduction_reduces_what_earlier_ones_left_again(
    mesh: str, first: int, hint: str, sums: list[float]
) -> None:
    window = [make_row(16), make_row(160), make_row(1600)]
    suspects = make_reduced_again_suspects(Mesh.parse(mesh), window, first, 1.0)
    assert {name: [float(row[0].grads["w"]) for row in rows] for name, rows in suspects.items()} == {hint: sums}


@pytest.mark.parametrize(("mesh", "first"), [("", 0), ("tp2", 0), ("cp2", 2)])
def test_without_such_an_axis_or_a_second_reduction_nothing_is_reduced_again(mesh: str, first: int) -> None:
    window = [make_row(16), make_row(160), make_row(1600)]
    assert make_reduced_again_suspects(Mesh.parse(mesh), window, first, 1.0) == {}


def test_an_unreduced_gradient_is_that_of_each_elements_owner() -> None:
    first, last = (
        [LocalResult(torch.zeros(()), {"w": torch.full((3,), grad)}) for grad in row]
        for row in ((1.0, 3.0), (5.0, 9.0))
    )
    pieces = (Piece(1, 0, 1), Piece(0, 1, 3))
    (rows,) = make_unreduced_suspects({"w": pieces}, [first, last], 2, 4).values()
    assert [[local.grads["w"].tolist() for local in row] for row in rows] == [
        [[0.5] * 3, [1.5] * 3],
        [[2.25, 1.25, 1.25]] * 2,
    ]
    assert make_unreduced_suspects({}, [first, last], 2, 4) == {}
