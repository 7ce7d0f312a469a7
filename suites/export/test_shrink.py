"""`zharness shrink`: to the smallest that fails in the same way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from suites.warm import programs
from zharness import engines
from zharness.case import Case
from zharness.errors import UsageError
from zharness.export.programs import script_of_program, told_in_lines
from zharness.export.shrink import LADDER, LAYERED, likeness, own_programs, shrink, smaller_cells
from zharness.export.smaller import owners_of_parameters
from zharness.run.programs import Outcome, command
from zharness.run.record import Verdict
from zharness.run.runner import surroundings
from zharness.workload.program_text import parse
from zharness.workload.programs import Act, Program

KILLED = Case.parse("training.grads[zharness.mutants:never_reduces-zero0-w2-fp32-transformer]")


def test_a_planted_failure_shrinks_to_one_layer_and_its_script_shows_it(tmp_path: Path) -> None:
    script = tmp_path / "small.py"
    run = programs.run("-m", "zharness", "shrink", KILLED.id, "-o", str(script), spares=1)
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


@pytest.mark.parametrize(
    "program",
    [
        parse("x(2) linear(2) tied | f b"),
        parse("x(2) linear(2) | f b s save load"),
        replace(parse("x(2) linear(2) | f b s"), dtype="bf16"),
        parse("x(2) linear(2) | f b s", Program((), (), optimizer="sgd", clip=0.5, window=2, reduction="sum")),
    ],
)
def test_a_program_that_a_caller_s_lines_do_not_tell_is_written_with_its_judge(program: Program) -> None:
    assert not told_in_lines(program)
    claims = engines.capabilities("deepspeed", 0)
    assert claims is not None
    outcome = Outcome(Verdict.FAIL, "step 3, optimizer: 1.weight[0, 0] expected 1, got 2")
    script = script_of_program("deepspeed", "0.19.8", program, outcome, claims)
    compile(script.text, "script.py", "exec")
    assert script.signature == "step 3, optimizer"
    assert "judge = lambda trial: judge_program(trial, PROGRAM)" in script.text


def test_the_program_of_a_law_of_any_order_is_cut_down_before_any_is_drawn() -> None:
    case = Case.parse("training.any_order[zharness.mutants:load_keeps_gradients-zero1-w2-fp32-mlp-saved]")
    claims = engines.capabilities("reference", 1)
    assert claims is not None
    plain, configured = own_programs(case, 0, claims)
    assert (plain.optimizer, plain.stage, plain.world_size) == ("adam", 1, 2)
    assert {verb.act for verb in plain.verbs} >= {Act.SAVE, Act.LOAD, Act.EDIT}
    assert plain == configured, "its caller asks for nothing but an optimizer"
    assert all(parse(f"{layers} | f b s") for layers in LAYERED.values())
    assert not [*own_programs(Case.parse("training.grads[ddp-zero0-w2-fp32-mlp]"), 0, claims)]


def test_what_a_law_of_any_order_has_said_before_is_no_part_of_its_likeness() -> None:
    cause = "step 4, reduction: first.weight[0] expected 1, got 2 (bound 0); it is stale; at the end of 'f b:old s'"
    assert likeness(Verdict.FAIL, cause).said == "it is stale"
    told_elsewhere = "step 1, forward: loss expected 1, got 2 (bound 0); the forward used the weights from before the"
    at_a_gather = "step 9, gather: loss expected 1, got 2 (bound 0); the forward used the weights from before step 8"
    assert likeness(Verdict.FAIL, told_elsewhere).alike(likeness(Verdict.FAIL, at_a_gather))


def test_the_command_of_a_program_says_how_it_is_configured() -> None:
    settings = Program((), (), optimizer="nesterov", clip=0.5, window=2, reduction="sum")
    program = parse("x(2) linear(2) | f b s", settings)
    assert "--optimizer nesterov --clip 0.5 --window 2 --reduction sum 'x(2)" in command("deepspeed", [program])
    assert "--clip" not in command("deepspeed", [parse("x(2) linear(2) | f b s")])
