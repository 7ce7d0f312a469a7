"""Judges tell gradients that survive zero_grad, and weights from before a step, from other wrong numbers."""

from __future__ import annotations

import torch

from zharness.law_kit.record_comparisons import replace_vectors
from zharness.law_kit.scenario_baseline import ScenarioResult
from zharness.law_kit.scenario_judge import (
    DISCARDED_GRADS_KEPT_HINT,
    LAST_DISCARDED_GRAD_KEPT_HINT,
    make_backward_suspects,
)


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
