"""`zharness shrink`: to the smallest that fails in the same way."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from zharness import engines
from zharness.case import Case
from zharness.errors import UsageError
from zharness.export.programs import reason_against, script_of_program
from zharness.export.shrink import LADDER, likeness, shrink, smaller_cells
from zharness.export.smaller import owners_of_parameters
from zharness.run.programs import Outcome
from zharness.run.record import Verdict
from zharness.run.runner import surroundings
from zharness.workload.program_text import parse

KILLED = Case.parse("training.grads[zharness.mutants:never_reduces-zero0-w2-fp32-transformer]")


def test_a_planted_failure_shrinks_to_one_layer_and_its_script_shows_it(tmp_path: Path) -> None:
    script = tmp_path / "small.py"
    run = subprocess.run(
        [sys.executable, "-m", "zharness", "shrink", KILLED.id, "-o", str(script)],
        capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "fail: x(1) linear(1) | f b" in run.stderr
    assert "it shows the same verdict" in run.stderr
    assert "nn.Sequential(nn.Identity(), nn.Linear(1, 1))" in script.read_text()


def test_a_cell_that_holds_is_not_shrunk() -> None:
    holds = Case.parse("training.grads[ddp-zero0-w1-fp32-exact]")
    with pytest.raises(UsageError, match="does not fail, so there is nothing to shrink: pass"):
        shrink(holds, 0, surroundings("ddp"), 60.0, 60.0)


def test_two_failures_are_one_where_the_part_or_the_exception_and_their_words_are() -> None:
    first = likeness(Verdict.FAIL, "step 0, reduction: first.weight[7, 11] expected 1, got 2")
    assert first.alike(likeness(Verdict.FAIL, "step 2, reduction: 1.weight[0, 0] expected 3, got 4"))
    assert not first.alike(likeness(Verdict.FAIL, "step 0, optimizer: first.weight[7, 11] expected 1, got 2"))
    raised = likeness(Verdict.CRASH, "rank 0 raised: KeyError: 0")
    assert raised.alike(likeness(Verdict.CRASH, "rank 1 raised: KeyError: 'a'"))
    assert not raised.alike(likeness(Verdict.CRASH, "rank 1 raised: KeyError: 'a' is no parameter"))
    assert not raised.alike(likeness(Verdict.CRASH, "rank 1 raised: IndexError: 0"))
    assert not raised.alike(likeness(Verdict.HANG, "rank 0 raised: KeyError: 0"))


def test_a_failure_does_not_slip_to_one_whose_numbers_look_otherwise() -> None:
    scaled = likeness(Verdict.FAIL, "step 0, reduction: a.w[0] got 2 (bound 1); it is 1.0001 x the right gradient")
    other = "step 0, reduction: x[0] got 3 (bound 1); it is "
    assert scaled.alike(likeness(Verdict.FAIL, f"{other}1.0002 x the right gradient"))
    assert not scaled.alike(likeness(Verdict.FAIL, f"{other}the gradient of rank 0 alone, not reduced"))
    assert not scaled.alike(likeness(Verdict.FAIL, "step 0, reduction: x[0] got 3 (bound 1)"))


def test_smaller_cells_are_smaller_in_one_axis() -> None:
    case = Case.parse("training.grads[deepspeed{overlap_comm}-zero2-w4-bf16-transformer]")
    found = list(smaller_cells(case))
    assert (
        owners_of_parameters(found[0].model) <= owners_of_parameters(found[1].model) < owners_of_parameters(case.model)
    )
    assert replace(case, engine_variant="") in found
    assert {each.world_size for each in found} == {1, 2, 3, 4}
    assert {each.stage for each in found} == {0, 1, 2}
    assert replace(case, dtype="fp32") in found


def test_programs_that_are_tried_first_are_legal() -> None:
    assert [str(parse(text)) for text in LADDER] == list(LADDER)


def test_a_program_becomes_modules_and_lines() -> None:
    program = replace(parse("x(3) twice[linear(3) relu] read(2) unused(1) | f b:tensor,retain b:other z n g e i"))
    claims = engines.capabilities("ddp", 0)
    assert claims is not None
    script = script_of_program("ddp", "2.13.0", program, Outcome(Verdict.FAIL, "step 1, reduction: x"), claims)
    compile(script.text, "script.py", "exec")
    assert "Chain([nn.Identity(), Twice(Chain([nn.Linear(3, 3), nn.ReLU()])), Read(3, 2), Unused(1)])" in script.text
    assert "with engine.no_sync():" in script.text
    assert "second_loss(output0)" in script.text


def test_a_program_that_cannot_be_written_is_told() -> None:
    assert "tied" in reason_against(parse("x(2) linear(2) tied | f b"))
    assert "save" in reason_against(parse("x(2) linear(2) | save"))
    assert "bf16" in reason_against(replace(parse("x(2) linear(2) | f b"), dtype="bf16"))
