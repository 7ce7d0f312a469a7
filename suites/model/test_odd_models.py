"""A model is judged, or refused with a reason, whose ranks use different parameters or whose state is no tensor."""

from __future__ import annotations

import pytest

from zharness import engines
from zharness.run import Record
from zharness.run.model_check import ModelCheckRequest, plan_model_cells
from zharness.run.model_facts import measure_model
from zharness.run.model_limits import describe_uneven_ranks
from zharness.run.pytest_cells import describe_problem

ODD = "suites.model.odd_models"
BRANCHES = ("weights.0", "weights.1")


@pytest.mark.cells("ddp", checks=("training.grads", "state.resume"), models=(f"{ODD}:weight_norm_by_hooks",))
@pytest.mark.cells("reference", stages=(3,), checks=("state.resume",), models=(f"{ODD}:extra_state",))
@pytest.mark.cells("fsdp2", stages=(3,), checks=("training.grads",), models=(f"{ODD}:weight_norm_by_hooks",))
@pytest.mark.cells("deepspeed", stages=(3,), checks=("training.kernels",), models=(f"{ODD}:spectral_norm",))
def test_an_odd_model_is_not_red(record: Record) -> None:
    assert not describe_problem(record), describe_problem(record)


def list_reasons(model: str, engine: str, stage: int) -> set[str]:
    """Return the reasons for which cells of ``model`` are unsupported, beginning with their first words."""
    claims = engines.capabilities(engine, stage)
    assert claims is not None
    check_request = ModelCheckRequest(f"{ODD}:{model}", engine=engine, stages=(stage,))
    facts = measure_model(check_request.model, "fp32", "")
    cells = plan_model_cells(check_request.build_request(), check_request, facts, lambda _engine, _stage: claims)
    return {cell.unsupported_reason for cell in cells}


def test_a_converged_power_iteration_is_a_buffer_that_forwards_write_and_read() -> None:
    facts = measure_model(f"{ODD}:spectral_norm", "fp32", "")
    assert set(facts.read_buffers) == {"0.parametrizations.weight.0._u", "0.parametrizations.weight.0._v"}
    (reason,) = {reason for reason in list_reasons("spectral_norm", "reference", 3) if "buffers" in reason}
    assert "forward reads buffers that earlier forwards wrote (0.parametrizations" in reason


@pytest.mark.parametrize("model", ["branching", "drawing"])
def test_a_branch_is_found_that_ranks_take_differently(model: str) -> None:
    facts = measure_model(f"{ODD}:{model}", "fp32", "")
    assert facts.uneven_parameters == BRANCHES
    assert "2 parameters (weights.0, weights.1)" in describe_uneven_ranks(facts)
    assert not measure_model("suites.model.zoo:unused", "fp32", "").uneven_parameters, "no rank uses them"


def test_an_engine_that_refuses_different_parameters_is_not_failed_for_them() -> None:
    refused, in_block = list_reasons("branching", "fsdp2", 3), list_reasons("branching", "reference", 3)
    assert "" not in refused | in_block, "no cell runs"
    assert any("which the engine refuses: the forward of each group is a collective" in reason for reason in refused)
    assert any("inside `with engine.uneven()` alone" in reason for reason in in_block)
    assert "" in list_reasons("branching", "reference", 2), "these cells run"
    assert "" in list_reasons("branching", "ddp", 0)
