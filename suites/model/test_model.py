"""Models of anyone's, on engines: a sample of what scripts/soak_models.py runs, and the library call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zharness
from suites.model import deadly
from suites.model.tiny import draw, score
from zharness.cell import Cell
from zharness.run.outcomes import records_exit_code
from zharness.run.pytest_cells import describe_problem
from zharness.run.record import Record, Verdict
from zharness.run.record_reader import load_records
from zharness.verification import register_model, resolve_config_name
from zharness.workload import user_model

pytest.importorskip("transformers")
REAL = "suites.model.tiny_real"
OWN = ("model", "training.grads")


@pytest.mark.cells("reference", stages=(3,), checks=OWN, models=(f"{REAL}:gpt2",))
@pytest.mark.cells("reference", stages=(1,), checks=("model.configured",), models=(f"{REAL}:mixtral",))
@pytest.mark.cells("fsdp2", stages=(3,), checks=("model.configured",), models=(f"{REAL}:llama",))
@pytest.mark.cells("fsdp2", stages=(3,), checks=("training.one_hot_rank",), models=(f"{REAL}:t5",))
@pytest.mark.cells("deepspeed", stages=(2,), checks=("model.configured",), models=(f"{REAL}:bert",))
def test_the_laws_hold(record: Record) -> None:
    assert not describe_problem(record), describe_problem(record)


def rows(number: int) -> tuple[Tensor]:
    return (torch.arange(number * 5.0).remainder(7).view(number, 5),)


def test_a_library_call_verifies_a_module_and_a_batch(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    scale = 2.0

    def loss(output: Tensor, batch: Any) -> Tensor:
        return score(output, batch) * scale

    found = zharness.verify(model, rows(6), loss, stages=(2,), steps=1, jobs=1)
    assert found, found.table()
    assert found.first_divergence == ""
    assert "model.configured" in found.table()
    found.save(tmp_path / "records.jsonl")
    assert [record.cell for record in load_records([tmp_path / "records.jsonl"]).records] == [
        r.case for r in found.records
    ]


def test_an_engine_that_is_wrong_makes_the_result_false_and_is_told_by_its_first_divergence() -> None:
    def factory() -> Any:
        return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)), draw, score

    found = zharness.verify(factory, engine="zharness.mutants:doubles_every_gradient", stages=(0,), steps=1, jobs=1)
    assert not found
    case, _, words = found.first_divergence.partition(": ")
    assert Cell.parse(case).law == "training.grads"
    assert "0.weight" in words
    configured = next(record for record in found.records if record.case.check == "model.configured")
    assert configured.verdict is Verdict.FAIL, configured.cause
    assert configured.evidence is not None
    loss = configured.evidence["curves"]["loss"]
    assert (len(loss["engine"]), len(loss["baseline"])) == (1, 1), "how the one step of the training went"
    assert "zharness.verify" in configured.command, "no command can find what was handed over"


def test_a_name_follows_from_the_model_and_nothing_is_kept_after_a_call() -> None:
    model, config = nn.Linear(5, 2), {"zero_optimization": {"stage": 1}}
    names = []
    for _ in range(2):
        names.append((register_model(model, draw, score), resolve_config_name(config)))
        user_model.unregister_factory(names[-1][0])
    assert names[0] == names[1]
    assert not user_model.is_registered_factory(names[0][0])


@pytest.mark.cells(
    "zharness.mutants:draws_while_recomputing",
    stages=(0,),
    checks=("model.checkpointing",),
    models=(f"{REAL}:gpt2",),
)
def test_recomputation_that_draws_other_numbers_is_seen(record: Record) -> None:
    assert record.verdict is Verdict.FAIL, record.cause


def test_an_engine_that_dies_as_it_is_built_around_the_model_breaks_the_law_of_its_training() -> None:
    def factory() -> Any:
        return deadly.Poison(5, 2), draw, score

    found = zharness.verify(factory, engine="suites.model.deadly:factory", stages=(0,), steps=1, jobs=1)
    (broken,) = [record for record in found.records if record.verdict is not Verdict.UNSUPPORTED]
    assert (broken.case.check, broken.verdict) == ("model.configured", Verdict.CRASH)
    assert "while the engine was built around the model: rank 1 was ended by a signal: SIGKILL" in broken.cause
    assert "cannot be built around the model, see model.configured" in found.table()
    assert records_exit_code(found.records) == 1


def test_a_run_in_which_no_law_can_be_run_is_no_pass_and_says_why() -> None:
    def factory() -> Any:
        return nn.Linear(5, 2), draw, score

    found = zharness.verify(factory, engine="ddp", dtype="fp16", stages=(0,), jobs=1)
    assert not found
    assert {record.verdict for record in found.records} == {Verdict.UNSUPPORTED}
    assert "no law passed (ddp claims" in found.first_divergence
