"""`zharness export --form issue|pytest` writes what a maintainer can paste."""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from torch.distributed import tensor
from torch.distributed.tensor import parallel

from suites.attached.launches import run_commands
from suites.warm import programs
from zharness import engines
from zharness.cell import Cell
from zharness.engines.tensor_parallel import PLAN_WORDS, make_style
from zharness.errors import UsageError
from zharness.export.cell_script import render_cell_script
from zharness.export.command import parse_exportable_cell
from zharness.export.header import ScriptForm
from zharness.export.published import render_test
from zharness.export.script_writer import render_style
from zharness.run.record import Record, Verdict

BROKEN = "backward.two_outputs_two_backwards[ddp-zero0-w2-fp32-blocks]"
BROKEN_DEEPSPEED = "backward.outputs[deepspeed-zero3-w2-fp32-blocks-dataclass]"


def export(*arguments: str) -> tuple[int, str, str]:
    done = programs.run("-m", "zharness", "export", *arguments)
    return done.returncode, done.stdout, done.stderr


def test_an_issue_has_a_script_without_this_package_what_came_and_versions() -> None:
    code, text, errors = export(BROKEN, "--form", "issue")
    assert code == 0, errors
    assert text.startswith("ddp breaks a law: one backward for each of two outputs gives the sum of both gradients")
    script = text.partition("```python\n")[2].partition("```")[0]
    ast.parse(script)
    assert "zharness" not in script
    assert "REPRODUCED" not in script
    for heading in ("### To reproduce", "### Expected", "### Actual", "### Versions"):
        assert heading in text
    assert "plain PyTorch gives" in text.partition("### Actual")[2]
    assert "it fails as the cell does, with exit code 1: rank " in errors


@pytest.mark.parametrize(
    ("cell_id", "style"),
    [
        pytest.param(BROKEN, "class LawTest(MultiProcessTestCase):", marks=pytest.mark.exhaustive),
        (BROKEN_DEEPSPEED, "(DistributedTest):"),
    ],
)
def test_a_test_fails_in_the_style_of_the_suite_of_the_engine(cell_id: str, style: str, tmp_path: Path) -> None:
    path = tmp_path / "test_law.py"
    code, _, errors = export(cell_id, "--form", "pytest", "-o", str(path))
    assert code == 0, errors
    text = path.read_text()
    assert style in text
    assert "zharness" not in text
    assert "it fails as the cell does, with exit code 1" in errors


# A fault in torch, the cell that shows it, and the class with which PyTorch tests that part. The fault is in the module
# that Python imports at its start, so that it is in every process: of the cell, of pytest and of the test's ranks.
PLANTED = {
    "FSDPTest": (
        "training.grads[fsdp2-zero3-w2-fp32-exact]",
        """
        import torch.distributed.fsdp as part
        right = part.fully_shard

        def wrong(module, *args, **kwargs):
            right(module, *args, **kwargs).set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # as gloo needs it
            return module

        part.fully_shard = wrong
        """,
    ),
    "DTensorTestBase": (
        "training.grads[torch_tp-zero0-w2.tp2-fp32-exact]",
        """
        import torch.distributed.tensor.parallel as part
        right = part.parallelize_module

        def wrong(module, *args, **kwargs):
            right(module, *args, **kwargs).get_submodule("last").register_forward_hook(lambda *call: 2 * call[2])
            return module

        part.parallelize_module = wrong
        """,
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("base", ["FSDPTest", "DTensorTestBase"])
def test_a_test_in_the_style_of_pytorch_fails_before_and_passes_after_the_fault_is_mended(
    base: str, tmp_path: Path
) -> None:
    cell_id, fault = PLANTED[base]
    cell = Cell.parse(cell_id)
    claims = engines.capabilities(cell.engine, cell.stage)
    assert claims is not None
    record = Record(cell, 0, Verdict.FAIL, engine_version="", torch_version="", seconds=0.0, cause="planted")
    text = render_test(render_cell_script(record, claims, "script.py"), cell)
    assert f"class LawTest({base}):" in text
    assert not re.search(r"^\s*(from|import) zharness", text, re.MULTILINE)

    def prepare(folder: Path) -> tuple[list[str], dict[str, str]]:
        (folder / "test_law.py").write_text(text)
        variables = {"PYTHONPATH": str(folder), "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "900"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / "test_law.py")]
        return command, {**os.environ, **variables}

    broken, mended = tmp_path / "broken", tmp_path / "mended"
    for folder in (broken, mended):
        folder.mkdir()
    (broken / "sitecustomize.py").write_text(dedent(fault))
    outputs = run_commands([prepare(broken), prepare(mended)], tmp_path, limit=1000).outputs
    assert "plain PyTorch gives" in outputs[0], outputs[0]
    assert re.search("^1 failed in ", outputs[0], re.MULTILINE), outputs[0]
    assert re.search("^1 passed in ", outputs[1], re.MULTILINE), outputs[1]


@pytest.mark.parametrize(
    ("cell_id", "reason"),
    [
        ("mesh.norm[fsdp2-zero2-w4.tp2-fp32-exact]", "whose law a script without zharness cannot judge on a mesh"),
        ("training.grads[fsdp2-zero3-w4.rep2-fp32-exact]", "whose mesh a script without zharness cannot build"),
        ("training.grads[torch_tp-zero0-w2.tp2-fp32-mlp]", "cannot bound rounding"),
    ],
)
def test_a_mesh_that_no_test_can_build_or_judge_is_refused(cell_id: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        parse_exportable_cell(cell_id, ScriptForm.STANDALONE)


@pytest.mark.parametrize("word", PLAN_WORDS)
def test_a_style_in_a_script_is_the_one_of_the_engine(word: str) -> None:
    names = {name: getattr(tensor, name) for name in ("Replicate", "Shard")}
    names |= {name: getattr(parallel, name) for name in ("ColwiseParallel", "RowwiseParallel", "SequenceParallel")}
    written, right = eval(render_style(word), names), make_style(word)  # noqa: S307 - an expression of our own
    assert type(written) is type(right)
    assert str(vars(written)) == str(vars(right))


def test_a_law_that_holds_is_no_issue() -> None:
    code, _, errors = export("training.grads[ddp-zero0-w2-fp32-mlp]", "--form", "issue")
    assert (code, errors.count("\n")) == (2, 1), errors
    assert "there is nothing to report of training.grads[ddp-zero0-w2-fp32-mlp]: its verdict is pass" in errors


def test_a_published_form_takes_no_standalone() -> None:
    code, _, errors = export(BROKEN, "--form", "pytest", "--standalone")
    assert code == 2
    assert "leave out --standalone and --no-verify" in errors
