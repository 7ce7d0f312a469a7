"""`zharness export --standalone`: scripts run without the package and show the same verdict as their cell."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from suites.warm import programs
from zharness import engines
from zharness.cell import Cell
from zharness.engines.promises import CallForm
from zharness.errors import HarnessFault, UsageError
from zharness.export.cell_script import extract_signature, render_cell_script
from zharness.export.collect import DefinitionCollection, defined_names
from zharness.export.command import render_law_table
from zharness.export.judge_script import JUDGE_SCRIPT_NAMES as WHOLE
from zharness.export.judge_script import render_function
from zharness.export.literals import render_literal
from zharness.export.script_length import explain_long_script, is_self_comparison
from zharness.export.script_writer import ScriptWriter
from zharness.export.source_text import prune_unused, render_imports
from zharness.export.verify import NOT_REPRODUCED, REPRODUCED, ScriptResult, is_faithful
from zharness.laws import DTYPES, LAWS
from zharness.parity import Mismatch, Part
from zharness.releases.repros import parse_repro
from zharness.run import Request, plan
from zharness.run.mesh_claims import needs_mesh
from zharness.run.record import Record, Verdict

ENGINES = ("reference", "ddp", "zero1", "fsdp2", "deepspeed")


def make_record(case: Cell, verdict: Verdict = Verdict.FAIL, cause: str = "step 0: wrong") -> Record:
    return Record(case, 0, verdict, "1.0", "2.13", cause=cause)


def get_claims(engine: str, stage: int) -> engines.Capabilities:
    claims = engines.capabilities(engine, stage)
    assert claims is not None
    return claims


def cells_to_export(whole: bool) -> list[Cell]:
    """Return one cell of every law with a short script (``whole``: a long one), on the engines in turn, at the top
    stage. Laws of a mesh have none: `zharness export` refuses a mesh. The ENGINES have no laws of another form.
    """
    planned = plan(Request(engines=ENGINES), get_claims)
    found: list[Cell] = []
    for number, check in enumerate(
        check
        for check in LAWS.values()
        if "fp32" in check.dtypes
        and check.form is CallForm.FORWARD_AND_BACKWARD
        and not needs_mesh(check)
        and bool(explain_long_script(check, "fp32")) == whole
    ):
        cells = [cell.cell for cell in planned if cell.cell.law == check.name and not cell.unsupported_reason]
        cells = [case for case in cells if bool(explain_long_script(check, "fp32", case.engine)) == whole]
        if not cells:  # a law of a user's own models alone
            cells = [
                Cell.parse(
                    f"{check.name}[ddp-zero0-w2-fp32-suites.model.tiny:perceptron-{check.user_model_variants[0]}]"
                )
            ]
        turn = [case for case in cells if case.engine == ENGINES[number % len(ENGINES)]]
        found.append((turn or cells)[-1])
    return found


def asked_of_engines(text: str) -> set[str]:
    """Return the methods that a script calls on its variable ``engine``."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
    named = {node.attr for node in calls if isinstance(node.value, ast.Name) and node.value.id == "engine"}
    return named - {"module", "rank", "seen"}


def find_methods(name: str, text: str) -> set[str]:
    """Return the methods of a script's classes with that name."""
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name]
    return {inner.name for node in classes for inner in node.body if isinstance(inner, ast.FunctionDef)}


def twice_defined(text: str) -> list[str]:
    """Return the names that two top-level statements of a script define, except subclasses of the earlier class."""
    counts = Counter(name for statement in ast.parse(text).body for name in defined_names(statement))
    return [name for name, count in counts.items() if count > 1 and f"class {name}({name}):" not in text]


def write_scripts(cases: list[Cell], folder: Path) -> Iterator[tuple[Cell, str]]:
    """Yield the script of each cell, then check all in ``folder`` for undefined and unused names."""
    for number, case in enumerate(cases):
        script = render_cell_script(make_record(case), get_claims(case.engine, case.stage), "x.py")
        path = folder / f"{number}.py"
        path.write_text(script.text)
        assert parse_repro(path).signature == script.signature
        own = script.text.partition("from __future__")[2]
        assert not re.search(r"^ *(from|import) zharness", own, re.MULTILINE) or case.engine == "reference", case.id
        assert not twice_defined(script.text), case.id
        yield case, script.text
    ruff = shutil.which("ruff") or str(Path(sys.executable).with_name("ruff"))
    # Of a name that is imported and, elsewhere, the variable of a loop, nothing is wrong but the style.
    found = subprocess.run(
        [ruff, "check", "--isolated", "--select", "F,E9", "--ignore", "F402", "--output-format", "concise", folder],
        capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout


def test_every_law_with_a_plain_side_gives_a_script_without_undefined_and_idle_names(tmp_path: Path) -> None:
    cases = cells_to_export(whole=False)
    assert len(cases) > 50
    for case, text in write_scripts(cases, tmp_path):
        made = "Engine" if is_self_comparison(LAWS[case.law].steps) else "Plain"
        is_imported = made == "Engine" and case.engine == "reference"  # the script imports the reference's class
        assert is_imported or asked_of_engines(text) <= find_methods(made, text), case.id


@pytest.mark.exhaustive
def test_every_other_law_gives_a_script_with_its_own_judge(tmp_path: Path) -> None:
    cases = cells_to_export(whole=True)
    assert len(cases) > 20
    for case, text in write_scripts(cases, tmp_path):
        judge = LAWS[case.law].judge.__name__
        assert f"def {judge}(" in text, case.id
        # The judge of windows is defined inside the function that makes it.
        assert f"\njudge = {judge}\n" in text or re.search(r"^judge = make_\w+_judge\(", text, re.MULTILINE), case.id


@pytest.mark.parametrize("text", ["state.resume[ddp-zero0-w2-fp32-mlp-sgd]", "training.grads[ddp-zero0-w2-fp16-mlp]"])
def test_a_cell_with_more_than_its_plain_side_can_tell_has_its_law_s_judge(text: str) -> None:
    case = Cell.parse(text)
    assert "def judge_" in render_cell_script(make_record(case), get_claims(case.engine, case.stage), "x.py").text


def ended(text: str, folder: Path) -> tuple[int, str]:
    """Run a script as the only rank and return its exit code and last line."""
    path = folder / "script.py"
    path.write_text(text)
    rendezvous = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = programs.run(str(path), folder=folder, environment={**os.environ, **rendezvous})
    return done.returncode, done.stdout.splitlines()[-1]


def test_the_long_script_of_a_cell_that_holds_shows_it_when_the_engine_breaks(tmp_path: Path) -> None:
    case = Cell.parse("training.sgd_step[ddp-zero0-w1-fp32-mlp]")
    script = render_cell_script(make_record(case, Verdict.PASS, ""), get_claims("ddp", 0), "x.py")
    assert ended(script.text, tmp_path) == (0, script.success_line)
    step = "self._scaler.step(self._optimizer)"
    assert script.text.count(step) == 1
    status, line = ended(script.text.replace(step, f"({step}, {step})[0]"), tmp_path)
    assert (status, line.partition(": rank")[0]) == (1, "repro: REPRODUCED"), line


def test_a_play_under_options_beyond_fp32_has_its_scene_in_the_script() -> None:
    case = Cell.parse("backward.joint_loss[reference-zero0-w2-fp32-blocks]")
    scene = render_function(LAWS[case.law].observe, ScriptWriter(case.engine, WHOLE))
    assert scene.startswith("make_scenario_observer(scenario=Scenario(script=")


def test_what_no_script_can_say_is_refused_by_its_type() -> None:
    with pytest.raises(UsageError, match=r"a script cannot contain .*, which is a object"):
        render_literal({"a": [object()]}, DefinitionCollection(), [])


def test_a_script_shows_the_wrong_number_that_its_cell_shows(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    cell = "training.grads[zharness.mutants:never_reduces-zero0-w2-fp32-mlp]"
    run = programs.run("-m", "zharness", "export", "--standalone", "-o", str(script), cell, spares=1)
    assert run.returncode == 0, run.stderr
    assert "the script: reproduced" in run.stderr
    # One number, found twice: by the harness's judge, and by the script's own few lines.
    wrong = re.search(r"seen on rank 0\) expected \S+, got ([\d.e-]+\d)", run.stderr)
    assert wrong is not None, run.stderr
    assert run.stderr.count(wrong[1]) == 2, run.stderr
    assert script.read_text().startswith('"""training.grads does not hold on zharness.mutants:never_reduces')


@pytest.mark.exhaustive
def test_a_script_accepts_both_ways_to_divide_by_a_window_of_three(tmp_path: Path) -> None:
    # DeepSpeed divides each loss by three; its gradients are not those of plain PyTorch divided by three afterwards.
    cell = "training.accumulation[deepspeed-zero1-w1-fp32-mlp-engine]"
    run = programs.run("-m", "zharness", "export", "--standalone", "-o", str(tmp_path / "holds.py"), cell, spares=1)
    assert run.returncode == 0, run.stderr
    assert "the script: not reproduced" in run.stderr


@pytest.mark.exhaustive
def test_the_long_script_of_a_user_s_model_casts_weights_as_the_engine_does(tmp_path: Path) -> None:
    # With one cast for all uses, the plain side of the script would differ from a right engine.
    cell = "precision.autocast_states[reference-zero3-w2-fp32-suites.model.zoo_parts:gru]"
    run = programs.run("-m", "zharness", "export", "--standalone", "-o", str(tmp_path / "gru.py"), cell, spares=1)
    assert run.returncode == 0, run.stderr
    assert "the script: not reproduced" in run.stderr


def test_a_script_that_shows_something_else_is_not_passed_off_as_the_cell() -> None:
    record = make_record(Cell.parse("training.grads[ddp-zero0-w2-fp32-mlp]"))
    assert is_faithful(record, ScriptResult(REPRODUCED, "x"))
    assert not is_faithful(record, ScriptResult(NOT_REPRODUCED, "x"))
    assert not is_faithful(record, ScriptResult("failed otherwise", "x"))
    assert not is_faithful(make_record(record.cell, Verdict.PASS), ScriptResult(REPRODUCED, "x"))
    died = make_record(record.cell, Verdict.CRASH, "rank 0 was ended by a signal: SIGSEGV")
    assert is_faithful(died, ScriptResult("failed otherwise", "Signal 11 (SIGSEGV)"))


def test_the_list_says_of_every_law_what_its_script_is() -> None:
    output = render_law_table()
    assert all(name in output for name in LAWS)
    assert re.search(r"training.grads +short", output)
    assert re.search(r"state.consolidate +long, with the law's own judge", output)


def test_the_signature_of_a_crash_is_the_part_of_its_words_that_stays() -> None:
    case = Cell.parse("torch_func.vjp[deepspeed-zero1-w2-fp32-mlp]")
    cause = "rank 1 raised: RuntimeError: The size of tensor a (0) must match the size of tensor b (5)"
    assert extract_signature(make_record(case, Verdict.CRASH, cause)) == "RuntimeError: The size of tensor a"
    assert extract_signature(make_record(case)) == "plain PyTorch gives"


def test_the_signature_of_a_wrong_number_is_the_name_of_what_is_wrong() -> None:
    found = make_record(Cell.parse("training.grads[ddp-zero0-w2-fp32-mlp]"))
    wrong = Mismatch(0, Part.REDUCTION, "first.weight", (1,), None, 0, 0, 1.0, 2.0, 0.0, 1, 1, 1)
    assert extract_signature(replace(found, divergence=wrong)) == "first.weight"


def test_a_law_without_moving_steps_is_written_in_bf16_with_the_wire_that_the_engine_declares() -> None:
    case = Cell.parse("training.grads[deepspeed-zero1-w2-bf16-mlp]")
    claims = get_claims("deepspeed", 1)
    text = render_cell_script(make_record(case), claims, "x.py").text
    assert "DTYPE = torch.bfloat16" in text
    assert f"REDUCE_DTYPE = {DTYPES[claims.reduce_dtypes.get('bf16', 'bf16')]}" in text
    assert 'EngineConfig(stage=1, dtype="bf16"' in text
    assert "EXACT = False" in text


@pytest.mark.parametrize(
    ("check", "variant", "exact"),
    [("grads", "", True), ("accumulation", "-caller", False), ("trajectory", "-sgd", False)],
)
def test_a_script_compares_bitwise_where_weights_stay_integers_and_nothing_divides_by_three(
    check: str, variant: str, exact: bool
) -> None:
    case = Cell.parse(f"training.{check}[ddp-zero0-w2-fp32-exact{variant}]")
    assert f"EXACT = {exact}" in render_cell_script(make_record(case), get_claims("ddp", 0), "x.py").text


def test_a_law_that_moves_weights_is_written_in_bf16_with_the_weights_that_the_optimizer_has() -> None:
    case = Cell.parse("training.trajectory[deepspeed-zero1-w2-bf16-mlp-sgd]")
    text = render_cell_script(make_record(case), get_claims("deepspeed", 1), "x.py").text
    assert "safe_get_full_fp32_param" in text
    assert "Return the optimizer's weights in the model's dtype." in text


def test_a_user_s_model_on_fsdp2_has_the_nodes_of_its_groups_in_the_plain_side_too() -> None:
    case = Cell.parse("training.grads[fsdp2-zero3-w2-fp32-suites.model.tiny:perceptron]")
    text = render_cell_script(make_record(case), get_claims("fsdp2", 3), "x.py").text
    assert "OPTIONS = {'grouping': 'block'}" in text
    assert "module.register_forward_pre_hook(insert_junction, with_kwargs=True)" in text
    assert "class Junction(torch.autograd.Function)" in text


def test_what_is_saved_is_held_against_the_engine_itself() -> None:
    case = Cell.parse("state.resume[deepspeed-zero2-w2-fp32-mlp-sgd]")
    text = render_cell_script(make_record(case), get_claims("deepspeed", 2), "x.py").text
    assert 'BASELINE_NAME = "the engine that never stopped"' in text
    assert "class Plain" not in text


def test_definitions_come_with_what_they_use_and_before_it() -> None:
    collection = DefinitionCollection()
    collection.add("zharness.workload.nets", "FusedLossNet")
    names = list(collection.texts)
    assert names.index("FusedLinearLoss") < names.index("FusedLossNet")
    assert "FEATURES" in names
    assert collection.imports["nn"] == "from torch import nn"


def test_the_second_of_two_definitions_with_one_name_gets_its_module_as_prefix() -> None:
    collection = DefinitionCollection()
    assert collection.add("zharness.law_kit.construction", "clone_tensors") == "clone_tensors"
    assert collection.add("zharness.engines.torch_checkpoint", "clone_tensors") == "torch_checkpoint_clone_tensors"
    assert collection.texts["torch_checkpoint_clone_tensors"].startswith("def torch_checkpoint_clone_tensors(")
    collection.add("zharness.engines.torch_checkpoint", "load_shards")
    assert " torch_checkpoint_clone_tensors(" in collection.texts["load_shards"]


def test_several_names_that_one_statement_defines_do_not_meet_others_in_one_script() -> None:
    collection = DefinitionCollection(_definition_sites={"FOLDER_NAME": ("elsewhere", "FOLDER_NAME")})
    with pytest.raises(HarnessFault, match="one script cannot hold both"):
        collection.add("zharness.engines.torch_checkpoint", "FOLDER_NAME")


def test_what_nothing_uses_is_cut_out() -> None:
    text = (
        "def used():\n    return 1\n\n\ndef idle():\n    return idle2()\n\n\ndef idle2():\n    pass\n\n\nprint(used())"
    )
    assert "idle" not in prune_unused(text)
    assert "def used" in prune_unused(text)
    assert render_imports(
        ["import os", "import torch", "from torch import nn", "import sys"], frozenset({"sys", "nn"})
    ) == ("import sys\n\nfrom torch import nn")
