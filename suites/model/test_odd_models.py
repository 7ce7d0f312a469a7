"""A model is judged, or refused with a reason, whose ranks use different parameters or whose state is no tensor."""

from __future__ import annotations

import pytest

from suites.warm import programs
from zharness import engines
from zharness.cell import Cell
from zharness.engines.registry import resolve_version
from zharness.run import Record
from zharness.run.matching_failures import describe_known_cause
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
@pytest.mark.cells("deepspeed", stages=(3,), checks=("training.kernels",), models=(f"{ODD}:causal", f"{ODD}:packing"))
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


def test_an_engine_with_masters_is_not_failed_for_weights_that_a_forward_edits() -> None:
    assert measure_model(f"{ODD}:limited_norm", "fp32", "").edited_parameters == ("0.weight",)
    reasons = list_reasons("limited_norm", "deepspeed", 2)
    assert any("edits parameters in place (0.weight)" in reason for reason in reasons)
    assert "" in reasons, "the gradients are compared"
    assert list_reasons("limited_norm", "ddp", 0) == list_reasons("extra_state", "ddp", 0)


def test_a_failure_of_a_known_bug_s_message_names_the_bug() -> None:
    """The model of a user is none of those that the entries about DeepSpeed 0.19.8 name."""
    cell = Cell("training.grads", "deepspeed", 2, 2, "fp32", f"{ODD}:transposed")
    raised = "RuntimeError: self.stride(-1) must be 1 to view Float as Byte (different element sizes), but got 5"
    known = describe_known_cause(cell, "0.19.8", "crash", raised, "")
    assert known.startswith(
        "deepspeed has a known bug with this message (deepspeedai/DeepSpeed#6571): initialize views"
    )
    assert not describe_known_cause(cell, "0.19.7", "crash", raised, ""), "this release has no such bug"
    assert not describe_known_cause(cell, "0.19.8", "crash", "rank 1 was ended by a signal: SIGABRT, before", "")


def test_a_model_around_which_an_engine_cannot_be_built_is_refused_with_the_known_bug() -> None:
    if resolve_version("deepspeed") != "0.19.8":
        pytest.skip("the bug is of DeepSpeed 0.19.8")
    arguments = (f"{ODD}:transposed", "--engine", "deepspeed", "--stage", "1", "--only", "training.grads")
    done = programs.run("-m", "zharness", "model", *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "_broadcast_model); deepspeed has a known bug with this message (" in done.stderr


def test_an_engine_that_refuses_different_parameters_is_not_failed_for_them() -> None:
    refused, in_block = list_reasons("branching", "fsdp2", 3), list_reasons("branching", "reference", 3)
    assert "" not in refused | in_block, "no cell runs"
    assert any("which the engine refuses: the forward of each group is a collective" in reason for reason in refused)
    assert any("inside `with engine.uneven()` alone" in reason for reason in in_block)
    assert "" in list_reasons("branching", "reference", 2), "these cells run"
    assert "" in list_reasons("branching", "ddp", 0)
