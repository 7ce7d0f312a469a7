"""A failing program is shrunk to a smaller one that fails in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from zharness import engines
from zharness.run import program_search as module
from zharness.run.program_runner import ProgramOutcome
from zharness.run.program_search import SearchOptions, search_programs
from zharness.run.record import Verdict


class Alone:
    """A runner on which programs fail with a wrong number, but a single program hangs, which is another bug."""

    def claims(self, engine: str, stage: int) -> Any:
        return engines.capabilities(engine, stage)

    def run(self, _engine: str, programs: Sequence[Any]) -> ProgramOutcome:
        return ProgramOutcome(Verdict.HANG if len(programs) == 1 else Verdict.FAIL)


def test_a_wrong_number_does_not_shrink_into_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "smaller_batches", lambda batch, _limits: [batch[:1], batch[:-1]] if batch[1:] else [])
    found = search_programs(Alone(), "reference", SearchOptions(stages=(0,), batches=3))  # type: ignore[arg-type]
    assert found.outcome.verdict is Verdict.FAIL
    assert len(found.smallest) == 2
