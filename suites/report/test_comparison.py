"""Compare two runs, and read files in which some lines are not records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from suites.report.made_up import failed
from zharness.cell import Cell
from zharness.cli import cli
from zharness.errors import UsageError
from zharness.report.comparison import DifferenceKind, compare_runs, render_comparison
from zharness.run.record import Record, Verdict, open_record_file
from zharness.run.record_reader import load_records

CELL = Cell("training.grads", "deepspeed", 3, 2, "fp32", "mlp")
PASSED = Record(CELL, 0, Verdict.PASS, "0.18.8", "2.13.0")


def at(stage: int, verdict: Verdict = Verdict.PASS, cause: str = "", engine: str = "deepspeed") -> Record:
    return replace(PASSED, cell=replace(CELL, stage=stage, engine=engine), verdict=verdict, cause=cause)


def differences(before: Sequence[Record], after: Sequence[Record]) -> list[tuple[DifferenceKind, int]]:
    return [(each.kind, each.latest_record.cell.stage) for each in compare_runs(before, after).differences]


def test_differences_are_listed_the_worst_first() -> None:
    before = [at(0), at(1, Verdict.FAIL), at(2), at(3, Verdict.UNSUPPORTED), at(5, Verdict.UNSUPPORTED), at(6)]
    after = [at(4), at(7, Verdict.HANG), at(3), at(5, Verdict.CRASH), at(1), at(0, Verdict.FAIL), at(6)]
    assert differences(before, after) == [
        (DifferenceKind.NEWLY_BROKEN, 0),
        (DifferenceKind.NEW_FAILURE, 7),
        (DifferenceKind.NEW_FAILURE, 5),
        (DifferenceKind.NEWLY_HOLDING, 3),
        (DifferenceKind.NEWLY_HOLDING, 1),
        (DifferenceKind.REMOVED, 2),
        (DifferenceKind.ADDED, 4),
    ]


def test_releases_are_compared_unless_one_run_has_several() -> None:
    old, new = at(0, engine="deepspeed==0.18.8"), at(0, Verdict.FAIL, engine="deepspeed==0.19.8")
    assert differences([old], [new]) == [(DifferenceKind.NEWLY_BROKEN, 0)]
    assert differences([old, new], [old, replace(new, verdict=Verdict.PASS)]) == [(DifferenceKind.NEWLY_HOLDING, 0)]


def test_runs_that_share_no_cell_are_refused() -> None:
    with pytest.raises(
        UsageError, match="nothing to compare: the earlier run has 1 cells, the later 1, and they share none"
    ):
        compare_runs([at(0)], [at(1)])


def test_the_terminal_shows_both_outcomes_and_counts_cells_beyond_a_limit() -> None:
    text = render_comparison(
        compare_runs([at(stage) for stage in range(10)], [at(stage, Verdict.FAIL, "wrong") for stage in range(10)])
    )
    assert text.startswith("NEWLY BROKEN 10\n  training.grads[deepspeed-zero0-w2-fp32-mlp]\n    0.18.8: pass\n")
    assert "    0.18.8: fail: wrong\n    again: zharness check 'training.grads[deepspeed-zero0-w2-fp32-mlp]'" in text
    assert text.count("again:") == 8
    assert "... and 2 more, by law: training.grads 2" in text
    assert text.endswith("10 cells compared: 10 newly broken")


def written(path: Path, records: Sequence[Record]) -> Path:
    with open_record_file(path) as file:
        for record in records:
            file.add(record)
    return path


def test_a_broken_line_is_skipped_and_listed_with_its_number(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", [at(0), at(1)])
    good, other = path.read_bytes().splitlines()
    later = json.dumps({**json.loads(other), "schema": 99}).encode()
    path.write_bytes(b"\n".join([good, b'{"schema": 2, "case"', b"\xff\xfe", later, b"[" * 100_000, other]) + b"\n")
    done = CliRunner().invoke(cli, ["report", str(path), "--html", str(tmp_path / "p.html")], standalone_mode=False)
    assert (done.exception, done.return_value) == (None, 2), "the skipped line may have been the failure"
    assert done.output.endswith("exit code 2: every record is as expected, but 4 lines could not be read\n")
    for number in (2, 3, 4, 5):
        assert f"SKIPPED {path}, line {number}: " in done.output
    found = load_records([path])
    assert len(found.records) == 2
    assert len(found.skipped_lines) == 4
    assert (tmp_path / "p.html").exists()


EVIDENCE = failed(at(0).cell, "1.0").as_json()["evidence"]
WRONG = [
    ("cause", ["x"]),
    ("seconds", "1"),
    ("seed", True),
    ("notes", "why"),
    ("tier", 3),
    ("divergence", {"step": 0}),
    ("evidence", {**EVIDENCE, "heat": 5}),
    ("evidence", {**EVIDENCE, "shape": [0]}),
    ("evidence", {**EVIDENCE, "heat": {**EVIDENCE["heat"], "rows": EVIDENCE["heat"]["rows"] + 1}}),
    ("evidence", {**EVIDENCE, "layers": [{"name": "first", "ratio": "large"}]}),
]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_a_line_with_values_of_wrong_types_is_skipped(key: str, value: object, tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", [at(0), at(1)])
    good, other = path.read_text().splitlines()
    path.write_text(f"{good}\n{json.dumps({**json.loads(other), key: value})}\n")
    found = load_records([path])
    assert len(found.records) == 1
    assert "line 2: not a zharness record" in found.skipped_lines[0]


def test_a_file_without_any_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "other").write_text("not\nours\n")
    with pytest.raises(UsageError, match=r"no record in .*empty; `zharness check --jsonl FILE` writes records"):
        load_records([tmp_path / "empty"])
    with pytest.raises(UsageError, match=r"the first line that is not a record: .*other, line 1"):
        load_records([tmp_path / "other"])


def test_the_command_prints_changes_first(tmp_path: Path) -> None:
    new, old = written(tmp_path / "new", [at(0, Verdict.FAIL, "wrong")]), written(tmp_path / "old", [at(0)])
    done = CliRunner().invoke(cli, ["report", str(new), "--against", str(old)], standalone_mode=False)
    assert (done.exception, done.return_value) == (None, 1)
    assert done.output.startswith("NEWLY BROKEN 1\n")
    assert "1 cells compared: 1 newly broken" in done.output
