"""`zharness export --form issue|pytest` writes what a maintainer can paste."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from suites.warm import programs

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
    ("cell_id", "style"), [(BROKEN, "class LawTest(MultiProcessTestCase):"), (BROKEN_DEEPSPEED, "(DistributedTest):")]
)
def test_a_test_fails_in_the_style_of_the_suite_of_the_engine(cell_id: str, style: str, tmp_path: Path) -> None:
    path = tmp_path / "test_law.py"
    code, _, errors = export(cell_id, "--form", "pytest", "-o", str(path))
    assert code == 0, errors
    text = path.read_text()
    assert style in text
    assert "zharness" not in text
    assert "it fails as the cell does, with exit code 1" in errors


def test_a_law_that_holds_is_no_issue() -> None:
    code, _, errors = export("training.grads[ddp-zero0-w2-fp32-mlp]", "--form", "issue")
    assert (code, errors.count("\n")) == (2, 1), errors
    assert "there is nothing to report of training.grads[ddp-zero0-w2-fp32-mlp]: its verdict is pass" in errors


def test_a_published_form_takes_no_standalone() -> None:
    code, _, errors = export(BROKEN, "--form", "pytest", "--standalone")
    assert code == 2
    assert "leave out --standalone and --no-verify" in errors
