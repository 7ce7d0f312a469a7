"""The static site: the order of releases, histories, findings, badges, its folder and the command line."""

from __future__ import annotations

import html
import json
import os
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from suites.site.many_runs import ISSUE, MARKUP, RETAINED, TORCH, make, many_runs
from suites.warm import programs
from zharness.cli import cli
from zharness.errors import UsageError
from zharness.laws import LAWS
from zharness.run import Record, Verdict
from zharness.run.shipped_failures import expected_failures_for
from zharness.site import command
from zharness.site.columns import Column, sort_columns
from zharness.site.contracts import collect_contracts
from zharness.site.folder import MARKER
from zharness.site.history import describe_command, follow_law
from zharness.site.programs import read_program
from zharness.site.table import build_rows, count_laws


def write_records(path: Path, records: list[Record]) -> Path:
    """Write a file of records."""
    path.write_text("".join(json.dumps(record.as_json()) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    records = many_runs()
    paths = [write_records(folder / "a.jsonl", records[:4]), write_records(folder / "b.jsonl", records[4:])]
    assert command.build_site(paths, folder / "out") == 0
    return folder / "out"


class Links(HTMLParser):
    """Collects the addresses in a page's elements, and its ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value for name, value in attrs if name in ("href", "src") and value]
        self.ids += [value for name, value in attrs if name == "id" and value]


def test_releases_are_sorted_as_versions_and_engines_as_in_the_records() -> None:
    assert [column.title for column in sort_columns(many_runs())] == [
        f"reference 0.1.0 with torch {TORCH}",
        f"deepspeed 0.9.5 with torch {TORCH}",
        f"deepspeed 0.18.8 with torch {TORCH}",
        f"deepspeed 0.19.8 with torch {TORCH}",
        f"ddp {TORCH}",
    ]


def test_a_square_has_the_worst_outcome_and_says_if_the_law_fails_in_this_engine_only() -> None:
    records = [*many_runs(), make("deepspeed", "0.19.8", RETAINED, Verdict.FAIL), *many_runs()[2:3]]
    columns = sort_columns(records)
    rows = {row.name: row.squares for row in build_rows(records, columns)}
    assert list(rows) == ["training", "training.grads", "double_backward", RETAINED, "torch_func", "torch_func.grad"]
    assert [square.outcome for square in rows["training.grads"]] == ["pass", "pass", "fail", "pass", "pass"]
    assert [square.fails_here_only for square in rows["training.grads"]] == [False, False, True, False, False]
    assert [square.fails_here_only for square in rows["training"]] == [False, False, True, False, False]
    assert not any(square.fails_here_only for square in rows[RETAINED]), "two engines break it"
    assert not any(square.fails_here_only for square in rows["torch_func.grad"]), "it holds on no other engine"
    assert rows["training.grads"][3].counts == "2 pass"
    tallies = count_laws(build_rows(records, columns), columns)
    assert [tally.counts for tally in tallies] == [
        "2 hold, 0 broken",
        "1 hold, 0 broken",
        "0 hold, 1 broken",
        "1 hold, 2 broken",
        "1 hold, 1 broken",
    ]


def test_a_history_says_when_a_cell_broke_and_when_it_was_mended() -> None:
    records = [record for record in many_runs() if record.cell.law == "training.grads"]
    histories = {history.engine: history for history in follow_law(records, sort_columns(records))}
    (cell,) = histories["deepspeed"].striking
    assert cell.name == "deepspeed-zero0-w2-fp32-mlp"
    assert cell.events == (
        "broke in 0.18.8, held in 0.9.5",
        "was mended in 0.19.8, was broken in 0.18.8",
    )
    assert not histories["ddp"].striking
    assert len(histories["ddp"].quiet) == 1


def test_a_cell_that_was_never_seen_to_hold_is_broken_in_all_releases() -> None:
    versions = ("0.18.8", "0.19.8", "0.19.9")
    verdicts = (Verdict.FAIL, Verdict.ERROR, Verdict.CRASH)
    records = [
        make("deepspeed", version, "training.grads", verdict)
        for version, verdict in zip(versions, verdicts, strict=True)
    ]
    (history,) = follow_law(records, sort_columns(records))
    assert history.striking[0].events == ("broken in all 2 releases",), "an error of the harness is no verdict"


def test_a_version_that_was_run_with_two_releases_of_torch_is_named_with_them() -> None:
    record = make("deepspeed", "0.19.8", "training.grads", Verdict.PASS)
    records = [record, replace(record, verdict=Verdict.FAIL, torch_version="2.14.0")]
    (history,) = follow_law(records, sort_columns(records))
    (event,) = history.striking[0].events
    assert event == f"broke in 0.19.8 with torch 2.14.0, held in 0.19.8 with torch {TORCH}"


def test_cells_that_fail_alike_but_for_numbers_are_one_cause() -> None:
    first = make("ddp", TORCH, "training.grads", Verdict.FAIL, "expected 1, got 2")
    others = [
        replace(first, cell=replace(first.cell, world_size=4), cause="expected 3, got 4"),
        replace(first, cell=replace(first.cell, world_size=8), cause="expected nothing"),
        replace(first, cell=replace(first.cell, model="exact"), verdict=Verdict.PASS, stale_reason="delete it"),
        replace(first, cell=replace(first.cell, dtype="bf16"), verdict=Verdict.UNSUPPORTED),
    ]
    records = [first, *others]
    (history,) = follow_law(records, sort_columns(records))
    assert [[cell.name for cell in cause.cells] for cause in history.causes] == [
        ["ddp-zero0-w2-fp32-mlp", "ddp-zero0-w4-fp32-mlp"],
        ["ddp-zero0-w8-fp32-mlp"],
        ["ddp-zero0-w2-fp32-exact"],
    ]
    assert [cell.name for cell in history.quiet] == ["ddp-zero0-w2-bf16-mlp"]


@pytest.mark.parametrize(
    ("engine", "version", "named"),
    [
        ("deepspeed", "0.18.8", "deepspeed==0.18.8"),
        ("deepspeed==0.18.8", "0.18.8", "deepspeed==0.18.8"),
        ("ddp", "2.13.0+cpu", "ddp==2.13.0"),
        ("deepspeed@/home/me/DeepSpeed", "0.19.8+abc", "deepspeed@DeepSpeed"),
        ("reference", "0.1.0", "reference"),
        ("zharness.mutants:never_reduces", "0.1.0", "zharness.mutants:never_reduces"),
    ],
)
def test_a_command_names_the_release_that_failed(engine: str, version: str, named: str) -> None:
    record = make(engine, version, "training.grads", Verdict.FAIL)
    assert describe_command(record) == f"zharness check 'training.grads[{named}-zero0-w2-fp32-mlp]'"


def test_every_link_of_the_site_leads_to_a_file_or_an_issue(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) == 1 + 3 + 2
    for page in pages:
        links = Links(page.read_text(encoding="utf-8"))
        assert len(links.ids) == len(set(links.ids))
        for address in links.addresses:
            path, _, anchor = address.partition("#")
            if address.startswith(("data:", "https://github.com/")):
                continue
            assert not path or (page.parent / unquote(path)).is_file(), f"{page}: {address}"
            assert not anchor or anchor in links.ids


def test_a_page_loads_nothing_and_escapes_what_records_say(site: Path) -> None:
    law = (site / "laws" / "training.grads.html").read_text(encoding="utf-8")
    assert MARKUP not in law
    assert "a wrong number &lt;img" in law
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert "default-src &#39;none&#39;" in text
        assert "unsafe" not in text.partition("</head>")[0].partition("<style>")[0]


def test_a_finding_has_its_reason_its_issue_and_its_reproductions(site: Path) -> None:
    (page,) = (site / "findings").glob("pytorch-pytorch-47260-*.html")
    text = page.read_text(encoding="utf-8")
    assert 'href="https://github.com/pytorch/pytorch/issues/47260"' in text
    assert "DDP prepares its reducer once a forward" in text
    assert "zharness repro 47260" in text
    assert f"zharness check &#39;{RETAINED}[ddp==2.13.0-zero0-w2-fp32-mlp]&#39;" in text
    assert ISSUE in (site / "laws" / f"{RETAINED}.html").read_text(encoding="utf-8")
    (unreported,) = (site / "findings").glob("deepspeed-*.html")
    assert "is not one of this release of zharness" in unreported.read_text(encoding="utf-8")


def test_a_contract_has_its_documentation_its_remedy_and_its_cells(tmp_path: Path) -> None:
    entry, record = next(
        (entry, replace(record, cause=entry.reason, documentation_url=entry.documented))
        for entry in expected_failures_for("ddp")
        for record in (make("ddp", TORCH, law, Verdict.CONTRACT) for law in LAWS)
        if entry.remedy and entry.covers_cell(record.cell, record.engine_version)
    )
    written = write_records(tmp_path / "r.jsonl", [record])
    assert command.build_site([written], tmp_path / "out") == 0
    (page,) = (tmp_path / "out" / "contracts").glob("ddp-*.html")
    text = html.unescape(page.read_text(encoding="utf-8"))
    assert entry.reason in text
    assert f'href="{entry.documented}"' in text
    assert all(f"{name} = {value}" in text for name, value in entry.remedy.items())
    for linking in ("index.html", f"laws/{record.cell.law}.html"):
        assert f"contracts/{page.name}" in (tmp_path / "out" / linking).read_text(encoding="utf-8")


def test_a_contract_has_the_remedy_of_each_of_its_cells(tmp_path: Path) -> None:
    entry = next(each for each in expected_failures_for("fsdp2") if each.remedy == {"in_root": ["head"]})
    record = make("fsdp2", TORCH, RETAINED, Verdict.CONTRACT, entry.reason)
    cells = [replace(record.cell, model=model) for model in ("fused", "changing", "mlp")]
    records = [replace(record, cell=cell, documentation_url=entry.documented) for cell in cells]
    (contract,) = collect_contracts(records)
    assert [(dict(remedy.options), remedy.cells) for remedy in contract.remedies] == [
        ({"in_root": ["head"]}, (cells[0].id,)),
        ({"in_root": ["by_attribute"]}, (cells[1].id,)),
    ]
    command.build_site([write_records(tmp_path / "r.jsonl", records)], tmp_path / "out")
    (page,) = (tmp_path / "out" / "contracts").glob("fsdp2-*.html")
    text = html.unescape(page.read_text(encoding="utf-8"))
    first, _, second = text.partition("in_root = ['head']")[2].partition("in_root = ['by_attribute']")
    assert cells[0].id in first
    assert cells[1].id in second


def test_a_finding_has_the_reason_of_the_users_own_file(tmp_path: Path) -> None:
    (tmp_path / "zharness.toml").write_text(
        '[[expected_failure]]\nengine = "deepspeed"\nlaw = "torch_func.grad"\nupstream = "no report known"\n'
        'reason = "the reason of the user"\nverdict = "crash"\nsignatures = ["it crashed"]\n',
        encoding="utf-8",
    )
    write_records(tmp_path / "r.jsonl", many_runs())
    done = programs.run("-m", "zharness", "site", "r.jsonl", "-o", "out", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (page,) = (tmp_path / "out" / "findings").glob("deepspeed-*.html")
    assert "the reason of the user" in page.read_text(encoding="utf-8")


def test_the_page_of_a_law_has_its_program(site: Path) -> None:
    text = html.unescape((site / "laws" / f"{RETAINED}.html").read_text(encoding="utf-8"))
    assert "def retained_same_loss(participant: Participant) -> None:" in text
    programs_of_laws = [read_program(law) for law in LAWS.values()]
    assert all(program.startswith(("def ", "@")) for program in programs_of_laws)
    assert len(set(programs_of_laws)) > 0.9 * len(LAWS)


def test_a_build_of_a_torch_release_counts_as_that_release() -> None:
    assert Column("ddp", "2.8.0", "2.8.0+cu128").torch_note == ""
    assert Column("deepspeed", "0.19.8", "2.8.0+cu128").torch_note == "with torch 2.8.0+cu128"


def test_a_badge_is_an_svg_with_a_title(site: Path) -> None:
    badge = ElementTree.parse(site / "badges" / "deepspeed-0.18.8-with-torch-2.13.0+cpu.svg").getroot()  # noqa: S314
    assert badge.get("aria-label") == f"deepspeed 0.18.8 with torch {TORCH}, laws of zharness: 0 hold, 1 broken"
    texts = [element.text for element in badge.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["laws", "0 hold, 1 broken"]


def test_a_site_replaces_itself_and_nothing_else(tmp_path: Path) -> None:
    records = write_records(tmp_path / "r.jsonl", many_runs())
    fewer = write_records(tmp_path / "fewer.jsonl", many_runs()[:1])
    out = tmp_path / "out"
    out.mkdir()
    command.build_site([records], out)
    command.build_site([fewer], out)
    assert not (out / "laws" / "torch_func.grad.html").exists(), "a page of the earlier site is gone"
    assert set(os.listdir(tmp_path)) == {"r.jsonl", "fewer.jsonl", "out"}, "nothing is left beside the site"
    (out / "CNAME").write_text("example.org")
    before = (out / "index.html").read_text(encoding="utf-8")
    with pytest.raises(UsageError, match=r"has files that `zharness site` did not write, such as 'CNAME'"):
        command.build_site([records], out)
    assert (out / "index.html").read_text(encoding="utf-8") == before
    (out / MARKER).write_text("[]")
    with pytest.raises(UsageError, match="did not write"):
        command.build_site([records], out)


def test_a_site_that_cannot_be_completed_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = write_records(tmp_path / "r.jsonl", many_runs())
    out = tmp_path / "out"
    command.build_site([records], out)
    before = {path: path.read_bytes() for path in out.rglob("*.*")}

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("zharness.site.pages.Site._render_finding", interrupt)
    with pytest.raises(KeyboardInterrupt):
        command.build_site([records], out)
    assert {path: path.read_bytes() for path in out.rglob("*.*")} == before
    assert set(os.listdir(tmp_path)) == {"r.jsonl", "out"}


def test_wrong_usage_is_one_sentence(tmp_path: Path) -> None:
    records = write_records(tmp_path / "r.jsonl", many_runs())
    empty = write_records(tmp_path / "empty.jsonl", [])
    with pytest.raises(UsageError, match=r"found no record in .*empty.jsonl; `zharness check --jsonl FILE` writes"):
        command.build_site([empty], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="which is not a folder"):
        command.build_site([records], records)
    assert records.read_text(encoding="utf-8"), "the file of records is as before"


def test_jinja2_is_asked_for_before_records_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r'needs jinja2.*pip install "zharness\[report\]"'):
        command.build_site([tmp_path / "missing.jsonl"], tmp_path / "out")


def test_a_line_that_is_no_record_is_named_on_the_site_and_in_the_exit_code(tmp_path: Path) -> None:
    records = write_records(tmp_path / "r.jsonl", many_runs())
    records.write_text(records.read_text() + "<b>torn\n")
    code = CliRunner().invoke(cli, ["site", str(records), "-o", str(tmp_path / "out")], standalone_mode=False)
    assert code.return_value == 2, code.output
    index = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert f"r.jsonl, line {len(many_runs()) + 1}: " in index
    assert "<b>torn" not in index


def test_the_command_prints_where_the_site_is(tmp_path: Path) -> None:
    records = write_records(tmp_path / "r.jsonl", many_runs())
    arguments = [sys.executable, "-m", "zharness", "site", str(records), "-o", "out"]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("out/index.html: 9 records, 11 files, ")
    assert done.stderr == ""
