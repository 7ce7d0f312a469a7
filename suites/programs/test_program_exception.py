"""An exception in a program's model is the engine's crash only if plain PyTorch runs the model."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import zharness
from zharness.engines import Capabilities
from zharness.run.program_runner import ProgramRunner, find_finite_part, observe_programs, run_plain_models
from zharness.run.record import Verdict
from zharness.workload.program_text import DEFAULT_SETTINGS, parse_program
from zharness.workload.programs import Program
from zharness.world import GroupOutcome, RankEnd, RankOutcome, RankTask

MODEL_FILE = Path(zharness.__file__).parent / "workload" / "program_model.py"
RAISED = RankOutcome(
    *(0, RankEnd.RAISED, 0),
    cause="IndexError: Dimension out of range",
    exception="builtins.IndexError",
    innermost_file=str(MODEL_FILE),
)
PROGRAM: Program = parse_program("x(1) linear(1) | f b s", DEFAULT_SETTINGS)


class ServerOfFailedRanks:
    """A server whose engine raises in the model's code, and which runs the plain models in this process."""

    scratch_dir = None

    def submit(self, task: RankTask) -> GroupOutcome:
        """Return the prepared failure of the engine, or the outcome of plain PyTorch."""
        if task.function is observe_programs:
            return GroupOutcome((RAISED,), 0.0)
        assert task.function in (run_plain_models, find_finite_part)
        try:
            value = task.function(*task.args)
        except IndexError:
            return GroupOutcome((RAISED,), 0.0)
        return GroupOutcome((RankOutcome(0, RankEnd.RETURNED, 0, payload=pickle.dumps(value)),), 0.0)


class PreparedProgramRunner(ProgramRunner):
    """A runner whose servers are a ServerOfFailedRanks."""

    def __init__(self) -> None:
        server: Any = ServerOfFailedRanks()
        self.timeout, self._observe, self._server, self._judge_server = 60.0, observe_programs, server, server
        self._claims = {("reference", PROGRAM.stage): Capabilities(stages=frozenset({PROGRAM.stage}))}


def raise_index_error(*_: object) -> None:
    raise IndexError("Dimension out of range")


def test_an_exception_that_plain_pytorch_does_not_raise_is_a_crash_of_the_engine() -> None:
    assert PreparedProgramRunner().run("reference", [PROGRAM]).verdict is Verdict.CRASH


def test_an_exception_that_plain_pytorch_raises_too_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", raise_index_error)
    assert PreparedProgramRunner().run("reference", [PROGRAM]).verdict is Verdict.ERROR
