"""The overview of all engines in one table, and the command that prints it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from scripts.generate_tables import merge_rows
from zharness.cell import Cell
from zharness.cli import cli
from zharness.mesh import Mesh
from zharness.report.combinations import render_combinations
from zharness.report.overview import outcome_letter, render_contracts, render_overview
from zharness.run.record import Record, Verdict, open_record_file

CELL = Cell("training.grads", "reference", 3, 2, "fp32", "mlp")
PASSED = Record(CELL, 0, Verdict.PASS, "1.0", "2.13.0")
UNSUPPORTED = replace(PASSED, cell=replace(CELL, model="conv"), verdict=Verdict.UNSUPPORTED, cause="not claimed")
FAILED = replace(PASSED, cell=replace(CELL, stage=0), verdict=Verdict.FAIL, cause="a wrong number")


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ((), " "),
        (("pass", "pass"), "."),
        (("pass", "unsupported"), ":"),
        (("unsupported",), "-"),
        (("contract", "pass", "unsupported"), "c"),
        (("excused", "contract"), "x"),
        (("fail", "excused", "pass"), "F"),
        (("undetermined", "pass"), "U"),
        (("leak", "excused", "pass"), "L"),
        (("error", "hang"), "E"),
        (("stale", "error"), "S"),
    ],
)
def test_a_letter_stands_for_the_most_serious_outcome(outcomes: tuple[str, ...], expected: str) -> None:
    assert outcome_letter(outcomes) == expected


def test_every_letter_is_explained() -> None:
    explained = render_overview([PASSED]).rpartition("\n\n")[2]
    assert all(f"{mark}  " in explained for mark in ".:cx-FSUEL")
    assert "FINDINGS" not in explained, "a user's expected failures are not listed in a file of this project"


def test_an_engine_is_a_column_with_a_letter_for_each_stage() -> None:
    other = replace(PASSED, cell=replace(CELL, engine="fsdp2", stage=2))
    table = render_overview([FAILED, PASSED, UNSUPPORTED, other])
    (row,) = (line for line in table.splitlines() if line.startswith("training.grads"))
    assert row.split() == ["training.grads", "F:", "."]


def test_each_mesh_has_a_table_of_the_laws_that_ran_on_it() -> None:
    on_mesh = [replace(record, cell=replace(record.cell, world_size=4, mesh=Mesh.parse("tp2"))) for record in (PASSED,)]
    unsupported = replace(on_mesh[0], cell=replace(on_mesh[0].cell, law="mesh.norm"), verdict=Verdict.UNSUPPORTED)
    plain, meshed = render_overview([PASSED, *on_mesh, unsupported]).split("mesh w4.tp2\n")
    assert "training.grads" in plain
    assert "training.grads" in meshed
    assert "mesh.norm" not in meshed


def test_contracts_name_engine_laws_stages_and_address() -> None:
    differs = replace(PASSED, verdict=Verdict.CONTRACT, cause="it divides", documentation_url="https://example.org/doc")
    table = render_contracts([PASSED, differs])
    assert table.splitlines()[2].split() == (
        ["|", "reference", "|", "training.grads", "|", "3", "|", "it", "divides", "|", "https://example.org/doc", "|"]
    )


def test_the_command_reads_files_and_its_exit_code_is_that_of_the_runs(tmp_path: Path) -> None:
    for name, records in (("good", [PASSED, UNSUPPORTED]), ("bad", [FAILED])):
        with open_record_file(tmp_path / name) as file:
            for record in records:
                file.add(record)

    def report(*names: str) -> tuple[int, str]:
        paths = [str(tmp_path / name) for name in names]
        done = CliRunner().invoke(cli, ["report", *paths], standalone_mode=False)
        assert done.exception is None
        return done.return_value, done.output

    assert report("good")[0] == 0
    code, text = report("good", "bad")
    assert code == 1
    assert "F:" in text


def test_a_combination_counts_laws_and_cells_that_ran_and_the_share_at_tier_x() -> None:
    exact = replace(PASSED, tier="X")
    excused = replace(FAILED, cell=replace(CELL, law="training.kernels"), expected_failure="no report known")
    table = render_combinations([exact, PASSED, UNSUPPORTED, FAILED, excused])
    assert [cell.strip() for cell in table.splitlines()[-1].strip("|").split("|")] == [
        *("reference", "w2", "0, 3", "2", "4", "2", "1", "1", "50%"),
    ]


def test_a_row_of_combinations_replaces_that_of_its_engine_and_mesh_alone() -> None:
    head = "| engine | ranks and mesh | pass |\n| --- | --- | --- |"
    page = f"<summary>counts</summary>\n\n{head}\n| one | w2 | 1 |\n| two | w2 | 2 |\n\n</details>"
    merged = merge_rows(page, "counts", f"{head}\n| one | w4 | 3 |\n| one | w2 | 4 |")
    assert merged == f"{head}\n| one | w2 | 4 |\n| two | w2 | 2 |\n| one | w4 | 3 |"
