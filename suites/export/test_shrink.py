"""`zharness shrink`: find the smallest failure that matches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from suites.warm import programs
from zharness import engines
from zharness.cell import Cell
from zharness.engines.warm_up import build_warm_up_environment
from zharness.errors import UsageError
from zharness.export.imported_script import MAX_LINES
from zharness.export.model_candidates import count_parameter_owners
from zharness.export.program_script import has_short_script, render_program_script
from zharness.export.shrink import (
    FIRST_PROGRAMS,
    PROGRAM_LAYERS,
    extract_failure_signature,
    iter_smaller_cells,
    iter_smaller_meshes,
    law_programs,
    shrink_failure,
)
from zharness.law_kit.given_programs import ProgramCell, ProgramForm, split_variant
from zharness.law_kit.program_law import VERB_PROGRAMS
from zharness.laws import get_law
from zharness.laws.pipeline_cuts import CALL_PROGRAMS
from zharness.run.program_runner import ProgramOutcome, format_program_command
from zharness.run.record import Verdict
from zharness.workload.program_text import parse_program
from zharness.workload.programs import Act, Program

KILLED = Cell.parse("training.grads[zharness.mutants:never_reduces-zero0-w2-fp32-transformer]")


def test_a_planted_failure_shrinks_to_one_layer_and_its_script_shows_it(tmp_path: Path) -> None:
    script = tmp_path / "small.py"
    run = programs.run("-m", "zharness", "shrink", KILLED.id, "-o", str(script), spares=1)
    assert run.returncode == 0, run.stderr
    assert "fail: x(1) linear(1) | f b" in run.stderr
    assert "the script shows the same verdict" in run.stderr
    assert "nn.Sequential(nn.Identity(), nn.Linear(1, 1))" in script.read_text()
    assert len(script.read_text().splitlines()) <= MAX_LINES


def test_a_cell_that_holds_is_not_shrunk() -> None:
    holds = Cell.parse("training.grads[ddp-zero0-w1-fp32-exact]")
    with pytest.raises(UsageError, match="does not fail, so there is nothing to shrink: pass"):
        shrink_failure(holds, 0, build_warm_up_environment("ddp"), 60.0, 60.0)


def test_two_failures_are_one_where_the_part_or_the_exception_and_their_words_are() -> None:
    first = extract_failure_signature(Verdict.FAIL, "step 0, reduction: first.weight[7, 11] expected 1, got 2")
    assert first.can_match(
        extract_failure_signature(Verdict.FAIL, "step 2, reduction: 1.weight[0, 0] expected 3, got 4")
    )
    assert not first.can_match(
        extract_failure_signature(Verdict.FAIL, "step 0, optimizer: first.weight[7, 11] expected 1, got 2")
    )
    raised = extract_failure_signature(Verdict.CRASH, "rank 0 raised: KeyError: 0")
    assert raised.can_match(extract_failure_signature(Verdict.CRASH, "rank 1 raised: KeyError: 'a'"))
    assert not raised.can_match(
        extract_failure_signature(Verdict.CRASH, "rank 1 raised: KeyError: 'a' is no parameter")
    )
    assert not raised.can_match(extract_failure_signature(Verdict.CRASH, "rank 1 raised: IndexError: 0"))
    assert not raised.can_match(extract_failure_signature(Verdict.HANG, "rank 0 raised: KeyError: 0"))


def test_a_failure_does_not_slip_to_one_whose_numbers_look_otherwise() -> None:
    scaled = extract_failure_signature(
        Verdict.FAIL, "step 0, reduction: a.w[0] got 2 (bound 1); it is 1.0001 x the right gradient"
    )
    other = "step 0, reduction: x[0] got 3 (bound 1); it is "
    assert scaled.can_match(extract_failure_signature(Verdict.FAIL, f"{other}1.0002 x the right gradient"))
    assert not scaled.can_match(
        extract_failure_signature(Verdict.FAIL, f"{other}the gradient of rank 0 alone, not reduced")
    )
    assert not scaled.can_match(extract_failure_signature(Verdict.FAIL, "step 0, reduction: x[0] got 3 (bound 1)"))


def test_smaller_cells_are_smaller_in_one_axis() -> None:
    case = Cell.parse("training.grads[deepspeed{overlap_comm}-zero2-w4-bf16-transformer]")
    found = list(iter_smaller_cells(case))
    assert (
        count_parameter_owners(found[0].model)
        <= count_parameter_owners(found[1].model)
        < count_parameter_owners(case.model)
    )
    assert replace(case, engine_variant="") in found
    assert {each.world_size for each in found} == {1, 2, 3, 4}
    assert {each.stage for each in found} == {0, 1, 2}
    assert replace(case, dtype="fp32") in found


def test_a_smaller_mesh_lacks_an_axis_or_has_fewer_ranks_along_it() -> None:
    cell = Cell.parse("mesh.norm[fsdp2-zero2-w16.rep2.tp4-fp32-exact]")
    smaller = [each.world_label for each in iter_smaller_meshes(cell)]
    assert smaller == ["w8.tp4", "w4.rep2", "w8.rep2.tp2"]


def test_a_failure_is_the_same_on_a_mesh_with_other_coordinates() -> None:
    text = "step 0, reduction: norm (seen on rank 0) expected 2, got 4 (1 of 1 elements wrong); rank 0 is "
    first = extract_failure_signature(Verdict.FAIL, f"{text}dp_replicate 0, tp 0")
    assert first.can_match(extract_failure_signature(Verdict.FAIL, f"{text}dp_shard 0, tp 0"))
    assert first == extract_failure_signature(Verdict.FAIL, f"{text}dp_shard 1, tp 1; rank 1 is dp_shard 0, tp 1")
    assert first.detail == ""


def test_a_norm_that_counts_replicas_is_the_same_on_a_mesh_with_fewer_axes() -> None:
    text = "step 0, reduction: norm (seen on rank 0) expected 2, got 4 (1 of 1 elements wrong); it counts "
    of_tensor, of_copies = (f"what 2 ranks of {axis} have in common 2 times" for axis in ("tp", "dp_replicate"))
    smaller = extract_failure_signature(Verdict.FAIL, f"{text}{of_tensor}; rank 0 is tp 0")
    for hint in (f"{of_copies} and {of_tensor}", f"{of_copies}, or {of_tensor}"):
        first = extract_failure_signature(Verdict.FAIL, f"{text}{hint}; rank 0 is dp_replicate 0, tp 0")
        assert first.can_match(smaller)
    assert not smaller.can_match(extract_failure_signature(Verdict.FAIL, text.partition("; ")[0]))


def test_a_norm_that_counts_replicas_of_one_axis_is_not_one_that_counts_those_of_another() -> None:
    text = "step 0, reduction: norm (seen on rank 0) expected 2, got 4 (1 of 1 elements wrong); it counts "
    of_tensor, of_copies, of_shards = (
        extract_failure_signature(Verdict.FAIL, f"{text}what 2 ranks of {axis} have in common 2 times")
        for axis in ("tp", "dp_replicate", "dp_shard")
    )
    assert not of_tensor.can_match(of_copies)
    both = f"{text}what 2 ranks of tp have in common 2 times and what 4 ranks of dp_replicate have in common 4 times"
    first = extract_failure_signature(Verdict.FAIL, both)
    assert [first.can_match(each) for each in (of_tensor, of_copies, of_shards)] == [True, True, False]
    assert not of_tensor.can_match(first)


@pytest.mark.exhaustive
def test_a_failure_on_a_mesh_shrinks_to_the_smallest_mesh_that_shows_it(tmp_path: Path) -> None:
    script = tmp_path / "small.py"
    cell = "mesh.norm[zharness.mutants:norm_counts_replicas-zero2-w4.rep2.tp2-fp32-exact]"
    run = programs.run("-m", "zharness", "shrink", cell, "-o", str(script), spares=1)
    assert run.returncode == 0, run.stderr
    assert "mesh.norm[zharness.mutants:norm_counts_replicas-zero2-w2.tp2-fp32-exact]" in run.stderr
    assert "the script shows the same verdict" in run.stderr
    assert "2 ranks on the mesh tp2" in script.read_text()


def test_a_standalone_script_of_a_mesh_is_refused_in_one_sentence() -> None:
    run = programs.run("-m", "zharness", "export", "mesh.norm[fsdp2-zero2-w4.rep2-fp32-exact]", "--standalone")
    assert run.returncode == 2
    assert "whose mesh a script without zharness cannot build" in run.stderr


def test_programs_that_are_tried_first_are_legal() -> None:
    assert [str(parse_program(text)) for text in FIRST_PROGRAMS] == list(FIRST_PROGRAMS)


def test_a_program_becomes_modules_and_lines() -> None:
    program = replace(
        parse_program("x(3) twice[linear(3) relu] read(2) unused(1) | f b:tensor,retain b:other z n g e i")
    )
    claims = engines.capabilities("ddp", 0)
    assert claims is not None
    script = render_program_script(
        "ddp", "2.13.0", program, ProgramOutcome(Verdict.FAIL, "step 1, reduction: x"), claims
    )
    compile(script.text, "script.py", "exec")
    repeated = "RepeatedBlock(Chain([nn.Linear(3, 3), nn.ReLU()]))"
    assert f"Chain([nn.Identity(), {repeated}, UncalledLinear(3, 2), UnusedParameter(1)])" in script.text
    assert "with engine.no_sync():" in script.text
    assert "second_loss(output0)" in script.text


@pytest.mark.parametrize(
    "program",
    [
        parse_program("x(2) linear(2) tied | f b"),
        parse_program("x(2) linear(2) | f b s save load"),
        replace(parse_program("x(2) linear(2) | f b s"), dtype="bf16"),
        parse_program("x(2) linear(2) | f b s", Program((), (), optimizer="sgd", clip=0.5, window=2, reduction="sum")),
    ],
)
def test_a_program_that_a_caller_s_lines_do_not_tell_is_written_with_its_judge(program: Program) -> None:
    assert not has_short_script(program)
    claims = engines.capabilities("deepspeed", 0)
    assert claims is not None
    # The script, which attributes no mismatch, says "reduction".
    outcome = ProgramOutcome(Verdict.FAIL, "step 3, local gradient: 1.weight[0, 0] expected 1, got 2")
    script = render_program_script("deepspeed", "0.19.8", program, outcome, claims)
    compile(script.text, "script.py", "exec")
    assert script.signature == ": 1.weight["
    assert "judge = lambda ctx: judge_program(ctx, PROGRAM)" in script.text


def test_the_program_of_a_law_of_any_order_is_cut_down_before_any_is_drawn() -> None:
    case = Cell.parse("training.any_order[zharness.mutants:load_keeps_gradients-zero1-w2-fp32-mlp-saved]")
    claims = engines.capabilities("reference", 1)
    assert claims is not None
    plain, configured = law_programs(case, 0, claims)
    assert (plain.optimizer, plain.stage, plain.world_size) == ("adam", 1, 2)
    assert {verb.act for verb in plain.verbs} >= {Act.SAVE, Act.LOAD, Act.EDIT}
    assert plain == configured, "its caller asks for nothing but an optimizer"
    assert all(parse_program(f"{layers} | f b s") for layers in PROGRAM_LAYERS.values())
    assert not [*law_programs(Cell.parse("training.grads[ddp-zero0-w2-fp32-mlp]"), 0, claims)]


def program_cell(variant: str, engine: str, model: str) -> ProgramCell:
    claims = engines.capabilities(engine, 2 if engine == "fsdp2" else 0)
    assert claims is not None
    return ProgramCell(model, variant, 0, "fp32", claims)


def test_a_cell_may_name_the_program_of_a_law_that_draws_one() -> None:
    text = "mesh.any_order[fsdp2-zero2-w2.tp2-fp32-stepped_heads-steps(v f:few b:unseen s)]"
    cell = Cell.parse(text)
    assert cell.id == text
    assert split_variant(cell.variant) == ("steps", "v f:few b:unseen s")
    assert get_law(cell.law).get_variant(cell.variant).name == cell.variant
    assert split_variant("steps") == ("steps", "")
    with pytest.raises(UsageError, match="unknown variant"):
        get_law("training.grads").get_variant("steps(f b)")


@pytest.mark.parametrize(
    ("place", "words", "legal"),
    [
        (program_cell("steps", "torch_tp", "stepped_heads"), "f b load v b s", "f b v s"),
        (program_cell("windows", "deepspeed", "stepped_heads"), "f b s f b s save", "f b s f b s save"),
        (program_cell("windows", "fsdp2", "stepped_heads"), "f b s f b s save", ""),  # it counts no micro-batches
        (program_cell("single", "torch_pp", "chain"), "step train:1 train:1 save step load save", "train:1 step save"),
        (program_cell("gpipe", "torch_pp", "chain"), "train:9 unseen:3 unseen:4 look step", "unseen:4 look step"),
        (program_cell("accumulated_singles", "torch_pp", "chain"), "train:1 train:1 step", "train:1 train:1 step"),
        (program_cell("frozen", "torch_pp", "chain"), "freeze:0 freeze:1 train:1 step", "freeze:0 train:1 step"),
        (program_cell("frozen", "torch_pp", "chain"), "thaw:0 freeze:1 thaw:0 thaw:1 thaw:1", "freeze:1 thaw:1"),
    ],
)
def test_a_given_program_keeps_the_calls_that_are_legal(place: ProgramCell, words: str, legal: str) -> None:
    form = CALL_PROGRAMS if place.model == "chain" else VERB_PROGRAMS
    assert form.make_legal(place, words) == legal
    form.require_legal(f"{place.variant}({legal})", place)
    if words != legal:
        with pytest.raises(UsageError, match=r"is not legal; expected only calls .* such as '[a-z]"):
            form.require_legal(f"{place.variant}({words})", place)


@pytest.mark.parametrize("form", [VERB_PROGRAMS, CALL_PROGRAMS])
def test_every_smaller_program_of_a_mesh_is_legal_and_smaller(form: ProgramForm) -> None:
    is_verbs = form is VERB_PROGRAMS
    place = program_cell(*(("steps", "fsdp2", "stepped_heads") if is_verbs else ("gpipe", "torch_pp", "chain")))
    words = form.draw(place)
    smaller = [*form.iter_smaller(place, words)]
    assert smaller[0].count(" ") < words.count(" ") / 1.5
    assert all(form.make_legal(place, each) == each != words for each in smaller)
    assert len(smaller) == len({*smaller})
    same_calls = [each for each in smaller if each.count(" ") == words.count(" ")]
    assert same_calls, "no call became simpler"


def test_calls_of_another_kind_are_refused_in_a_sentence() -> None:
    with pytest.raises(UsageError, match="expected calls like train:4 or step"):
        CALL_PROGRAMS.make_legal(program_cell("single", "torch_pp", "chain"), "f b s")


@pytest.mark.parametrize(
    ("text", "smallest"),
    [
        (
            "mesh.any_order_clipped[zharness.mutants:clips_tighter_after_no_sync_on_the_second_tensor_rank-zero2-w2.tp2-"
            "fp32-stepped_sequence-(f b s n e f b s v)]",
            "stepped_sequence-(n f b s)",
        ),
        (
            "pipeline.any_order[zharness.mutants:drops_the_first_of_three_batches-zero0-w2.pp2-fp32-chain-"
            "accumulated_singles(train:1 step train:1 look train:1 train:1 step)]",
            "chain-accumulated_singles(train:1 step train:1 train:1 train:1)",
        ),
    ],
)
def test_a_program_on_a_mesh_shrinks_to_the_calls_that_show_the_mistake(text: str, smallest: str) -> None:
    run = programs.run("-m", "zharness", "shrink", text, "--no-verify", "--seconds", "300", spares=1)
    assert run.returncode == 0, run.stderr
    assert f"-{smallest}] (" in run.stderr
    assert f'{smallest}]"' in run.stdout, "the script does not run the smallest program"


def test_what_a_law_of_any_order_has_said_before_is_no_part_of_its_likeness() -> None:
    cause = "step 4, reduction: first.weight[0] expected 1, got 2 (bound 0); it is stale; at the end of 'f b:old s'"
    assert extract_failure_signature(Verdict.FAIL, cause).detail == "it is stale"
    told_elsewhere = "step 1, forward: loss expected 1, got 2 (bound 0); the forward used the weights from before the"
    at_a_gather = "step 9, gather: loss expected 1, got 2 (bound 0); the forward used the weights from before step 8"
    assert extract_failure_signature(Verdict.FAIL, told_elsewhere).can_match(
        extract_failure_signature(Verdict.FAIL, at_a_gather)
    )


def test_the_command_of_a_program_says_how_it_is_configured() -> None:
    settings = Program((), (), optimizer="nesterov", clip=0.5, window=2, reduction="sum")
    program = parse_program("x(2) linear(2) | f b s", settings)
    assert "--optimizer nesterov --clip 0.5 --window 2 --reduction sum 'x(2)" in format_program_command(
        "deepspeed", [program]
    )
    assert "--clip" not in format_program_command("deepspeed", [parse_program("x(2) linear(2) | f b s")])
