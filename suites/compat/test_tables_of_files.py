"""The tables of test files are the same on every machine, and a later run replaces or adds rows of a page."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from suites.meta.documents import ROOT


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a module of ``scripts/both_ways``."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return lambda name: importlib.import_module(f"both_ways.{name}")


def both_ways(runs: Any, path: str, processes: int, own_cpu: float, outcome: tuple[str, str]) -> dict[Any, Any]:
    """Return the runs of a file of one test, with 2 CPU seconds of the drop-in."""
    sample, limit, outcomes = 1, 600.0, {"test_it": outcome}
    own = runs.FileRun(path, runs.Way.OWN, sample, 30.0, own_cpu, 0, outcomes, limit, processes)
    swapped = runs.FileRun(path, runs.Way.DROP_IN, sample, 10.0, 2.0, 0, outcomes, limit, 0)
    return {(path, run.way): run for run in (own, swapped)}


def test_a_reason_has_no_temporary_folder(modules: Any) -> None:
    runs, tables = modules("runs"), modules("tables")
    folder = f"/var/cache/{runs.FOLDER_PREFIX}t488c6ka"
    outcomes = {"test_resume": ("failed", f"file {folder}/tests/unit/test_zero.py, line 26: no fixture 'baseline'")}
    run = runs.FileRun("unit/test_zero.py", runs.Way.OWN, 0, 1.0, 1.0, 1, outcomes)
    assert tables.find_reason(run) == "file tests/unit/test_zero.py, line 26: no fixture 'baseline'"


@pytest.fixture
def families(modules: Any) -> list[Any]:
    """Return the families of test files."""
    return [modules("deepspeed").DEEPSPEED, modules("pytorch").PYTORCH]


@pytest.mark.parametrize("seed", [None, 25])
def test_the_tables_of_the_page_are_those_that_the_script_writes(
    modules: Any, families: list[Any], seed: int | None, tmp_path: Path
) -> None:
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    file = tmp_path / "page.md"
    file.write_text(text, encoding="utf-8")
    for family in families:
        page = modules("page").Page(file, family, seed)
        if seed is None:
            assert page.read_tables().timed
        page.write_tables(page.read_tables())
        page.write_whole(page.read_whole())
    assert file.read_text(encoding="utf-8") == text


def write_blocks(page: Any) -> None:
    """Write a page with an empty block for each table."""
    summaries = (*page.summaries, page.whole_summary)
    page.path.write_text("\n".join(f"<summary>{it}</summary>\n\n</details>\n" for it in summaries), encoding="utf-8")


def test_a_later_run_replaces_the_rows_of_its_file_and_no_other(
    modules: Any, families: list[Any], tmp_path: Path
) -> None:
    runs, tables = modules("runs"), modules("tables")
    skips, passes = ("skipped", "Skipped: no device"), ("passed", "")
    first = both_ways(runs, "unit/a.py", 4, 9.0, skips) | both_ways(runs, "unit/b.py", 2, 5.0, passes)
    second = both_ways(runs, "unit/a.py", 3, 3.0, passes) | both_ways(runs, "unit/c.py", 0, 3.0, skips)
    page = modules("page").Page(tmp_path / "page.md", families[0])
    write_blocks(page)
    page.write_tables(tables.compare_ways(first))
    page.write_tables(modules("page").merge_tables(page.read_tables(), tables.compare_ways(second)))
    merged = page.read_tables()
    assert {path: row.ranks for path, row in merged.timed.items()} == {"`a.py`": 3, "`b.py`": 2}
    assert {path: cells[-1] for path, cells in merged.reasons.items()} == {"`c.py`": "no device"}
    assert "2 x or more: 1 of 2 files" in page.path.read_text(encoding="utf-8")


def test_whole_files_are_added_to_those_of_the_page(modules: Any, families: list[Any], tmp_path: Path) -> None:
    runs, whole = modules("runs"), modules("whole")
    page = modules("page").Page(tmp_path / "page.md", families[1])
    write_blocks(page)
    reasons = [{"message": "no device", "kind": "machine", "reason": "asks for a device"}]
    outcomes = {
        "TestIt::test_a": ("passed", ""),
        "TestIt::test_b": ("failed", "no device"),
        "TestIt::test_c": ("skipped", ""),
    }
    for name in ("a", "b"):
        swapped = runs.FileRun(f"test_{name}.py", runs.Way.DROP_IN, 0, 9.0, 2.0, 1, outcomes, on_ranks=[*outcomes])
        recheck = runs.FileRun(f"test_{name}.py", runs.Way.RECHECK, 0, 9.0, 2.0, 1, outcomes)
        both = {(run.path, run.way): run for run in (swapped, recheck)}
        page.write_whole(page.read_whole() + whole.summarize_whole(both, reasons))
    tables = page.read_whole()
    assert tables.rows.keys() == {"`test_a.py`", "`test_b.py`"}
    assert tables.reasons == {("machine", "asks for a device"): (2, 2, 2, 2)}
    assert tables.compared == {"passed": (2, 2), "skipped": (2, 2)}
    text = page.path.read_text(encoding="utf-8")
    assert "| all         | 2 passed, 2 skipped, 2 failed" in text
    assert "2 of 2 tests that pass with the drop-in, and ran with PyTorch's own classes too, pass there." in text


def test_a_page_without_the_tables_is_refused(modules: Any, families: list[Any], tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("no table", encoding="utf-8")
    with pytest.raises(ValueError, match=r"page.md needs this block once, and has it 0 times: DeepSpeed's files"):
        modules("page").Page(tmp_path / "page.md", families[0]).read_tables()


def test_a_seed_draws_the_same_tests_and_more_of_them(modules: Any) -> None:
    draw_names = modules("recording").draw_names
    names = [f"test_it[{number:02}]" for number in range(50)]
    drawn = draw_names(names, 6, 25)
    assert draw_names(names, 12, 25)[:6] == drawn
    assert draw_names([name for name in names if name not in drawn[:2]], 4, 25) == drawn[2:]
    assert draw_names(names, 6, 26) != drawn
    assert draw_names(names, 5, None) == names[::10]


def test_a_run_with_another_seed_is_no_answer(modules: Any) -> None:
    runs = modules("runs")
    run = next(iter(both_ways(runs, "unit/a.py", 4, 9.0, ("passed", "")).values()))
    assert run.answers(runs.Selection(1), 600)
    assert not run.answers(runs.Selection(1, seed=25), 600)
    assert run.answers(runs.Selection(only=("test_it",)), 600)
    assert not run.answers(runs.Selection(only=("test_other",)), 600)


def test_failures_with_the_drop_in_alone_are_sorted_and_checked_with_own_fixtures(modules: Any) -> None:
    runs, whole = modules("runs"), modules("whole")
    outcomes = {
        "test_a[1]": ("failed", "rank 1: no device 3"),
        "test_a[2]": ("failed", "rank 0: no device 4"),
        "test_b": ("failed", "rank 0: planted"),
        "test_c": ("passed", ""),
    }
    swapped = runs.FileRun("unit/a.py", runs.Way.DROP_IN, 0, 9.0, 2.0, 1, outcomes)
    assert whole.choose_rechecks(swapped, passes=0, seed=0) == ("test_a[1]", "test_b")
    own = {"test_a[1]": ("failed", "no device"), "test_b": ("passed", "")}
    recheck = runs.FileRun("unit/a.py", runs.Way.RECHECK, 0, 9.0, 2.0, 1, own)
    both = {(run.path, run.way): run for run in (swapped, recheck)}
    reasons = [{"message": "no device", "kind": "machine", "reason": "asks for a device"}]
    files, failures = whole.render_whole(whole.summarize_whole(both, reasons), "DeepSpeed")
    assert "1 passed, 0 skipped, 3 failed" in files
    assert "asks for a device |       1 |       2 | 1 of 1 fail" in failures
    assert list(whole.find_unsorted(both, reasons, [])) == ["unit/a.py::test_b fails with the drop-in: rank 0: planted"]
    reasons.append({"message": "planted", "kind": "deepspeed", "reason": "planted"})
    assert list(whole.find_unsorted(both, reasons, [])) == [
        "unit/a.py::test_b: passed with its own classes, failed with the drop-in"
    ]


def test_drawn_passes_of_the_drop_in_are_compared_with_own_fixtures(modules: Any) -> None:
    runs, whole, draw_names = modules("runs"), modules("whole"), modules("recording").draw_names
    names = [f"TestIt::test_it[{number}]" for number in range(9)]
    outcomes = {"test_b": ("failed", "no device")} | dict.fromkeys(
        ["TestPlain::test_without_ranks", *names], ("passed", "")
    )
    swapped = runs.FileRun("unit/a.py", runs.Way.DROP_IN, 0, 9.0, 2.0, 1, outcomes, on_ranks=names)
    chosen = whole.choose_rechecks(swapped, passes=3, seed=25)
    assert chosen == ("test_b", *draw_names(names, 3, 25))
    assert set(whole.choose_rechecks(swapped, passes=20, seed=25)) == {"test_b", *names}
    own = {"test_b": ("failed", "no device"), chosen[1]: ("passed", "")}
    own |= {chosen[2]: ("failed", "planted"), chosen[3]: ("skipped", "known")}
    recheck = runs.FileRun("unit/a.py", runs.Way.RECHECK, 0, 9.0, 2.0, 1, own)
    both = {(run.path, run.way): run for run in (swapped, recheck)}
    reasons = [{"message": "no device", "kind": "machine", "reason": "asks for a device"}]
    assert whole.render_whole(whole.summarize_whole(both, reasons), "DeepSpeed")[-1] == (
        "1 of 3 tests that pass with the drop-in, and ran with DeepSpeed's own classes too, pass there."
    )
    assert list(whole.find_unsorted(both, reasons, ["^known$"])) == [
        f"unit/a.py::{chosen[2]}: failed with its own classes, passed with the drop-in"
    ]


def test_a_skip_of_each_reason_with_the_drop_in_is_compared_with_own_fixtures(modules: Any) -> None:
    runs, whole = modules("runs"), modules("whole")
    outcomes = {
        "TestIt::test_a[1]": ("skipped", "Skipped: no device 3"),
        "TestIt::test_a[2]": ("skipped", "Skipped: no device 4"),
        "TestIt::test_b": ("skipped", "Skipped: planted"),
        "test_without_ranks": ("skipped", "Skipped: no ranks"),
    }
    on_ranks = [name for name in outcomes if "::" in name]
    swapped = runs.FileRun("unit/a.py", runs.Way.DROP_IN, 0, 9.0, 2.0, 0, outcomes, on_ranks=on_ranks)
    assert whole.choose_rechecks(swapped, passes=3, seed=25) == ("TestIt::test_a[1]", "TestIt::test_b")
    own = {"TestIt::test_a[1]": ("skipped", "no device 3"), "TestIt::test_b": ("passed", "")}
    recheck = runs.FileRun("unit/a.py", runs.Way.RECHECK, 0, 9.0, 2.0, 0, own)
    both = {(run.path, run.way): run for run in (swapped, recheck)}
    assert whole.summarize_whole(both, []).compared == {"skipped": (1, 2)}
    assert list(whole.find_unsorted(both, [], [])) == [
        "unit/a.py::TestIt::test_b: passed with its own classes, skipped with the drop-in"
    ]
