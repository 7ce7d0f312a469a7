"""An exception in a model's code is the engine's failure only if plain PyTorch runs the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import zharness
from zharness.cell import Cell
from zharness.engines import Capabilities
from zharness.run import PlannedCell, Verdict
from zharness.run.observe_and_judge import observe, run_plain_model
from zharness.run.runner import Runner
from zharness.run.torchrun_runner import TorchrunRunner, observe_and_read_evidence
from zharness.run.verdicts import is_raised_by_model
from zharness.workload import MODELS
from zharness.workload.nets import FusedLossNet
from zharness.world import GroupOutcome, Isolation, RankEnd, RankOutcome, RankTask

CELL = Cell("training.grads", "reference", 3, 2, "fp32", "fused")
CLAIMS = Capabilities(stages=frozenset({3}))
RAISED = RankOutcome(
    *(0, RankEnd.RAISED, 0),
    cause="IndexError: Dimension out of range",
    exception="builtins.IndexError",
    innermost_file=str(Path(zharness.__file__).parent / "workload" / "nets.py"),
)


class ServerOfFailedRanks:
    """A server whose engine raises in the model's code, and which runs the plain model in this process."""

    scratch_dir = None
    launch = SimpleNamespace(world_size=CELL.world_size)
    task_title = ""

    def submit(self, task: RankTask) -> GroupOutcome:
        """Return the prepared failure of the engine, or the outcome of the plain model."""
        if task.function in (observe, observe_and_read_evidence):
            return GroupOutcome((RAISED,), 0.0)
        assert task.function is run_plain_model
        try:
            task.function(*task.args)
        except IndexError:
            return GroupOutcome((RAISED,), 0.0)
        return GroupOutcome((RankOutcome(0, RankEnd.RETURNED, 0),), 0.0)


class PreparedRunner(Runner):
    """A runner whose servers are a ServerOfFailedRanks."""

    def __init__(self) -> None:
        self.seed, self.isolation, self.timeout, self.user_expected_failures = 0, Isolation.FRESH, 60.0, ()
        server: Any = ServerOfFailedRanks()
        self._servers, self._judge_server, self._pools = {CELL.engine: server}, server, {}
        self._observe = observe
        self._claims, self._free_evidence_dirs = {(CELL.engine, CELL.stage): CLAIMS}, []


class PreparedTorchrunRunner(PreparedRunner, TorchrunRunner):
    """A runner on the ranks of torchrun whose leader and judge are a ServerOfFailedRanks."""

    def __init__(self) -> None:
        super().__init__()
        self._leader = self._servers[CELL.engine]


def raise_index_error(*_: object) -> None:
    raise IndexError("Dimension out of range")


@pytest.mark.parametrize("make_runner", [PreparedRunner, PreparedTorchrunRunner])
def test_an_exception_that_plain_pytorch_does_not_raise_is_a_crash_of_the_engine(
    make_runner: Callable[[], Runner],
) -> None:
    record = make_runner().run(PlannedCell(CELL))
    assert record.verdict is Verdict.CRASH
    assert "plain PyTorch runs its forward and backward" in record.notes[0]


def test_an_exception_that_plain_pytorch_raises_too_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(MODELS[CELL.model].model(0), FusedLossNet)
    monkeypatch.setattr(FusedLossNet, "forward", raise_index_error)
    record = PreparedRunner().run(PlannedCell(CELL))
    assert (record.verdict, record.notes) == (Verdict.ERROR, ())


def test_only_the_code_of_models_is_tried_in_plain_pytorch() -> None:
    package = Path(zharness.__file__).parent
    assert is_raised_by_model(RAISED)
    assert not is_raised_by_model(replace(RAISED, innermost_file=str(package / "law_kit" / "rank_context.py")))
    assert not is_raised_by_model(replace(RAISED, exception="zharness.errors.UsageError"))
    assert not is_raised_by_model(replace(RAISED, end=RankEnd.HUNG))
