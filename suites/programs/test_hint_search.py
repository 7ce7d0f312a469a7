"""A judge of programs searches for the cause of the first wrong gradient of a step only."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.program_judge import ProgramJudge
from zharness.mesh import DEFAULT_MESH
from zharness.parity import Comparison, Part, compare_bitwise
from zharness.parity.comparison import TensorLocation
from zharness.workload.programs import Program


def compare_to_zero(name: str, value: float) -> Comparison:
    return compare_bitwise(TensorLocation(name, Part.REDUCTION, 0, 0, ()), torch.zeros(1), torch.full((1,), value))


def test_gradients_after_the_first_wrong_one_are_compared_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    comparisons = [compare_to_zero(name, value) for name, value in (("a", 0.0), ("b", 1.0), ("c", 1.0))]
    searched: list[str] = []

    def note_search(_judge: ProgramJudge, comparison: Comparison, _position: int) -> Comparison:
        assert comparison.location is not None
        searched.append(comparison.location.name)
        return comparison

    def read_records(label: str, _step: int = 0) -> list[dict[str, Any]]:
        return [{"allowed": False} if label == "zeros" else {}]

    monkeypatch.setattr(ProgramJudge, "hint_old_gradient", note_search)
    ctx = SimpleNamespace(
        mesh=DEFAULT_MESH, rank_records=read_records, compare_reduced_grads=lambda *_, **__: iter(comparisons)
    )
    judge = ProgramJudge(cast(JudgeContext, ctx), Program((), ()))
    assert list(judge.compare_window_grads(1)) == comparisons
    assert searched == ["a", "b"]
