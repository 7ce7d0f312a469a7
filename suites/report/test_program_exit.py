"""The exit code of programs follows the rule for cells."""

from __future__ import annotations

import pytest

from zharness.run.program_commands import programs_exit_code
from zharness.run.program_runner import ProgramOutcome
from zharness.run.record import Verdict


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ((Verdict.PASS, Verdict.PASS), 0),
        ((Verdict.PASS, Verdict.FAIL), 1),
        ((Verdict.UNDETERMINED,), 1),
        ((Verdict.FAIL, Verdict.ERROR), 3),
    ],
)
def test_the_exit_code_of_programs_is_0_only_if_all_pass(verdicts: tuple[Verdict, ...], code: int) -> None:
    assert programs_exit_code([ProgramOutcome(verdict) for verdict in verdicts]) == code
