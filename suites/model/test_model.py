"""Check users' models on engines, a sample of what scripts/soak_models.py runs, and call zharness.verify."""

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
from zharness.law_kit.default_training import DEFAULT_OPTIMIZER
from zharness.laws.model import DEFAULT_STEPS
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


@pytest.mark.cells(
    "zharness.mutants:ddp_schedule_wraps",
    stages=(0,),
    checks=("model.configured",),
    models=("suites.model.tiny:perceptron",),
)
def test_a_schedule_that_begins_again_after_its_end_fails_the_default_training(record: Record) -> None:
    assert record.verdict is Verdict.FAIL, record.cause
    assert record.divergence is not None
    assert record.divergence.step == len(DEFAULT_OPTIMIZER.schedule), "the first step after the end of the schedule"


def test_the_default_training_has_a_step_after_the_end_of_its_schedule() -> None:
    assert len(DEFAULT_OPTIMIZER.schedule) == int(DEFAULT_STEPS) - 1
    assert len(set(DEFAULT_OPTIMIZER.schedule)) == len(DEFAULT_OPTIMIZER.schedule), "no factor hides a late step"


@pytest.mark.parametrize("engine", ["reference", "ddp"])
def test_steps_after_the_end_of_the_schedule_keep_its_last_factor(engine: str) -> None:
    stage = 2 if engine == "reference" else 0
    steps = len(DEFAULT_OPTIMIZER.schedule) + 3
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    found = zharness.verify(
        model, rows(6), score, engine=engine, stages=(stage,), steps=steps, only=("model.configured",), jobs=1
    )
    assert [record.verdict for record in found.records] == [Verdict.PASS], found.table()


def test_a_library_call_splits_a_module_by_its_own_plan() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    model.tp_plan = {"0": "colwise", "2": "rowwise"}  # type: ignore[assignment]  # as on models of transformers
    found = zharness.verify(model, rows(6), score, engine="torch_tp", mesh="tp2", only=("training.sgd_step",), jobs=1)
    assert [(record.cell.mesh.label, record.verdict) for record in found.records] == [("tp2", Verdict.PASS)]


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
        record.cell for record in found.records
    ]


def test_a_wrong_engine_makes_the_result_false_and_shows_its_first_divergence() -> None:
    def factory() -> Any:
        return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)), draw, score

    found = zharness.verify(factory, engine="zharness.mutants:doubles_every_gradient", stages=(0,), steps=1, jobs=1)
    assert not found
    cell_id, _, description = found.first_divergence.partition(": ")
    assert Cell.parse(cell_id).law == "training.grads"
    assert "0.weight" in description
    configured = next(record for record in found.records if record.cell.law == "model.configured")
    assert configured.verdict is Verdict.FAIL, configured.cause
    assert configured.evidence is not None
    loss = configured.evidence["curves"]["loss"]
    assert (len(loss["engine"]), len(loss["baseline"])) == (1, 1), "the losses of the one training step"
    assert "zharness.verify" in configured.command, "no command can load an object of this process"


def test_a_registered_name_follows_from_the_model_and_can_be_freed() -> None:
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
def test_recomputation_that_draws_other_numbers_fails(record: Record) -> None:
    assert record.verdict is Verdict.FAIL, record.cause


def test_an_engine_that_dies_while_it_is_built_fails_the_law_model_configured() -> None:
    def factory() -> Any:
        return deadly.Poison(5, 2), draw, score

    found = zharness.verify(factory, engine="suites.model.deadly:factory", stages=(0,), steps=1, jobs=1)
    (crashed,) = [record for record in found.records if record.verdict is not Verdict.UNSUPPORTED]
    assert (crashed.cell.law, crashed.verdict) == ("model.configured", Verdict.CRASH)
    assert "while the engine was built around the model: rank 1 was ended by a signal: SIGKILL" in crashed.cause
    assert "cannot be built around the model; see the failure of model.configured" in found.table()
    assert records_exit_code(found.records) == 1


def test_a_run_without_any_supported_law_is_false_and_says_why() -> None:
    def factory() -> Any:
        return nn.Linear(5, 2), draw, score

    found = zharness.verify(factory, engine="ddp", dtype="fp16", stages=(0,), jobs=1)
    assert not found
    assert {record.verdict for record in found.records} == {Verdict.UNSUPPORTED}
    assert "no law passed (ddp supports" in found.first_divergence
