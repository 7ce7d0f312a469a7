"""What a run writes besides the terminal: JUnit XML, and the summary of a workflow's step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from zharness import step_summary
from zharness.cell import Cell
from zharness.cli import cli
from zharness.errors import UsageError
from zharness.report import page
from zharness.report.junit import JUNIT_TAGS
from zharness.report.outputs import Outputs
from zharness.run import Record, Verdict
from zharness.run.outcomes import OUTCOME_ORDER

CELL = Cell("training.grads", "reference", 3, 2, "fp32", "mlp")
PASSED = Record(CELL, 0, Verdict.PASS, "1.0", "2.13.0", seconds=0.25)
FAILED = replace(PASSED, verdict=Verdict.FAIL, cause="a wrong\nnumber \x00 & <more>", details="rank 0 said")
EXCUSED = replace(FAILED, verdict=Verdict.CRASH, expected_failure="upstream#1")
ERROR = replace(PASSED, verdict=Verdict.ERROR, cause="a bug")
UNSUPPORTED = replace(PASSED, verdict=Verdict.UNSUPPORTED, cause="not claimed")
STALE = replace(PASSED, stale_reason="delete it")


def test_the_xml_has_a_test_case_for_each_cell_in_pytest_s_form(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    Outputs(junitxml=path).write_reports([PASSED, FAILED, EXCUSED, ERROR, UNSUPPORTED, STALE], 2.5)
    (suite,) = ElementTree.parse(path).getroot()  # noqa: S314 - written a line above
    assert {key: suite.get(key) for key in ("tests", "failures", "errors", "skipped", "time")} == {
        "tests": "6",
        "failures": "2",
        "errors": "1",
        "skipped": "2",
        "time": "2.500",
    }
    tags = [[(child.tag, child.get("type")) for child in case] for case in suite]
    assert tags == [
        [],
        [("failure", None)],
        [("skipped", "pytest.xfail")],
        [("error", None)],
        [("skipped", "pytest.skip")],
        [("failure", None)],
    ]
    assert {case.get("name") for case in suite} == {CELL.id}
    failure = suite[1][0]
    assert failure.get("message") == "fail: a wrong number � & <more>"
    assert failure.text is not None
    assert failure.text.endswith(f"rank 0 said\n\nagain: zharness check '{CELL.id}'")


def test_every_outcome_but_pass_has_a_tag() -> None:
    assert JUNIT_TAGS.keys() == set(OUTCOME_ORDER) - {"pass"}


@pytest.mark.parametrize("option", ["--html", "--junitxml"])
def test_a_file_that_cannot_be_written_is_reported_before_anything_runs(option: str) -> None:
    done = CliRunner().invoke(cli, ["check", "training.grads", option, "/no/such/place/file"])
    assert "cannot write '/no/such/place/file'" in str(done.exception)


def test_a_step_summary_is_appended_if_the_variable_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    monkeypatch.setenv(step_summary.SUMMARY_VARIABLE, str(path))
    notes = ["STOPPED after 2 of 9 cells", "functions changed: 1 (engine/__init__.py:<module>)"]
    Outputs().report_run([PASSED, FAILED], 2.5, coverage=notes)
    text = path.read_text()
    # In a code block, since Markdown would take `__init__` for bold text and drop `<module>`.
    summary = "2 cells in 2.5 s: 1 fail, 1 pass\n\n```\n{}\n{}\n```\n".format(*notes)
    assert text.startswith(f"before\n## zharness\n\n{summary}")
    assert "reference 1.0\n\n| law" in text
    assert "| training.grads | fail 1, pass 1" in text
    assert "<details><summary>Cells that did not pass</summary>\n\n```\nFAIL training.grads" in text


def test_a_step_summary_does_not_exceed_github_s_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.md"
    monkeypatch.setenv(step_summary.SUMMARY_VARIABLE, str(path))
    for _ in range(3):
        step_summary.append_section("title", "ü" * 70 + "\n", "line of text\n" * 50_000)
    assert path.stat().st_size <= step_summary.MAX_SUMMARY_BYTES
    assert path.read_text().endswith(step_summary.TRUNCATION_NOTICE), "no character is cut"


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("text\n" * 99, "text"),
        ("````\n" + "```\n" * 99, "```\n````"),
        ("```\na\n```\n" + "b\n" * 99, "b"),
        (step_summary.render_details("heading", "a\n" * 99), "a\n```\n\n</details>"),
        (step_summary.render_details("heading", "a") + "\n" + "b\n" * 99, "b"),
    ],
    ids=["no block", "an open block", "a closed block", "open details", "closed details"],
)
def test_truncated_markdown_closes_the_open_block(text: str, end: str) -> None:
    truncated = step_summary.truncate_markdown(text, 200)
    assert len(truncated) <= 200
    assert truncated.decode().endswith(f"\n{end}{step_summary.TRUNCATION_NOTICE}")


def test_missing_jinja2_is_reported_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="the HTML page needs jinja2"):
        Outputs(html=tmp_path / "page.html").require_writable()


def test_a_step_summary_that_cannot_be_written_is_only_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(step_summary.SUMMARY_VARIABLE, "/no/such/place/summary.md")
    Outputs().write_reports([PASSED], 1.0)
    assert "cannot append to GITHUB_STEP_SUMMARY='/no/such/place/summary.md'" in capsys.readouterr().err


def test_a_code_block_is_fenced_by_more_backticks_than_it_contains() -> None:
    assert step_summary.render_code_block("a ```` b").startswith("`````\n")
