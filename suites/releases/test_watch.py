"""Cells over releases: where a law flips, what changed since a record, and what a change broke."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from suites.run.test_covering import claims_of_registry
from suites.warm import programs
from zharness.cell import Cell
from zharness.errors import UsageError
from zharness.mesh import Mesh
from zharness.releases import compare_releases, history, index, repros
from zharness.releases.bisect import Outcome
from zharness.releases.claimed_meshes import require_mesh_of_any
from zharness.releases.prepared_release import PreparedRelease
from zharness.run import Record, Request
from zharness.run.changes import ChangeKind, classify_change
from zharness.run.check_loop import RunResult
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.plan import plan
from zharness.run.record import Verdict
from zharness.run.record_reader import load_records
from zharness.run.verdicts import apply_expected_failure

PASS, FAIL, CRASH, UNSUPPORTED, ERROR = (
    Verdict.PASS,
    Verdict.FAIL,
    Verdict.CRASH,
    Verdict.UNSUPPORTED,
    Verdict.ERROR,
)
CASE = Cell("training.grads", "deepspeed", 1, 2, "fp32", "mlp")
OTHER = replace(CASE, stage=2)
Story = Mapping[str, Mapping[Cell, Verdict | tuple[Verdict, str]]]


def record(case: Cell, verdict: Verdict, cause: str = "", release: str = "1.0") -> Record:
    return Record(case, 0, verdict, release, "2.13.0", cause=cause or verdict.value)


class Engine:
    """Releases of an engine, each with the outcomes of its cells."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.asked: list[str] = []

    def measure(self, request: Request) -> list[Record]:
        (text,) = request.engines
        release = text.partition("==")[2]
        self.asked.append(release)
        if release not in self.story:
            raise UsageError(f"deepspeed=={release} cannot be fetched")
        return [
            record(replace(case, engine=text), *(shown if isinstance(shown, tuple) else (shown,)), release=release)
            for case, shown in self.story[release].items()
        ]

    def matrix(self, *releases: str, known: tuple[Record, ...] = ()) -> int:
        return compare_releases.run_matrix(
            compare_releases.spell_releases("deepspeed", releases, False), Request(("training",)), self.measure, known
        )


def test_a_matrix_says_between_which_releases_a_cell_flipped(capsys: pytest.CaptureFixture[str]) -> None:
    fake = Engine({
        "1": {CASE: PASS, OTHER: PASS},
        "2": {CASE: (CRASH, "boom"), OTHER: PASS},
        "3": {CASE: UNSUPPORTED, OTHER: PASS},
        "4": {CASE: PASS, OTHER: PASS},
    })  # fmt: skip
    assert fake.matrix("1", "2", "3", "4") == 0
    out = capsys.readouterr().out
    assert "BROKEN between 1 and 2: training.grads[deepspeed-zero1-w2-fp32-mlp]\n  boom\n" in out
    assert "MENDED between 2 and 4: training.grads[deepspeed-zero1-w2-fp32-mlp]" in out
    assert "again: zharness check 'training.grads[deepspeed==2-zero1-w2-fp32-mlp]'" in out
    assert out.splitlines()[2].split() == [
        "training.grads",
        "zero1-w2-fp32-mlp",
        "pass",
        "crash",
        "unsupported",
        "pass",
    ]
    assert out.endswith("2 cells on 4 releases: 1 flip, 1 do not\n")


def test_cells_that_went_the_same_way_share_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    Engine({"1": {CASE: PASS, OTHER: PASS}}).matrix("1")
    assert "training.grads  2 cells, stages 1,2  pass" in capsys.readouterr().out


def test_a_release_that_cannot_be_had_is_told_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    fake = Engine({"1": {CASE: PASS}, "3": {CASE: FAIL}})
    assert fake.matrix("1", "2", "3") == 3
    out = capsys.readouterr().out
    assert "NOT RUN deepspeed==2: deepspeed==2 cannot be fetched" in out
    assert "BROKEN between 1 and 3" in out


def test_no_release_at_all_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="deepspeed==8 cannot be fetched; deepspeed==9 cannot be fetched"):
        Engine({}).matrix("8", "9")


def test_a_fault_of_the_harness_is_its_exit_code() -> None:
    assert Engine({"1": {CASE: ERROR}}).matrix("1") == 3


@pytest.mark.parametrize(
    ("patterns", "mesh"),
    [(("mesh.norm",), Mesh.parse("tp2")), (("mesh.norm[deepspeed-zero1-w2.tp2-fp32-exact]",), Mesh())],
    ids=["options", "a cell id"],
)
def test_cells_of_a_release_that_lacks_the_axis_are_unsupported(patterns: tuple[str, ...], mesh: Mesh) -> None:
    releases = ["deepspeed==0.17.0", "deepspeed==0.19.8"]
    request = require_mesh_of_any(releases, Request(patterns, stages=(1,), models=("exact",), mesh=mesh))
    old, new = (plan(history.request_for_engine(request, release), claims_of_registry) for release in releases)
    assert {planned.unsupported_reason for planned in old} == {
        "deepspeed==0.17.0 does not claim the axis tp at stage 1"
    }
    assert not all(planned.unsupported_reason for planned in new)


def test_a_mesh_is_compared_by_the_command_line(tmp_path: Path) -> None:
    options = ("--mesh", "rep2", "--law", "mesh.norm", "--stage", "2", "--model", "exact", "--jsonl", "records.jsonl")
    done = programs.run("-m", "zharness", "compare", "reference", "reference", *options, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 cells compared, 0 only before, 0 only now: the change breaks 0" in done.stdout
    assert {each.cell.mesh.label for each in load_records([tmp_path / "records.jsonl"]).records} == {"rep2"}


def test_the_reason_is_printed_why_a_release_supports_no_cell(capsys: pytest.CaptureFixture[str]) -> None:
    lacking = (UNSUPPORTED, "deepspeed==1 does not claim the axis tp at stage 1")
    Engine({"1": {CASE: lacking, OTHER: lacking}, "2": {CASE: PASS, OTHER: UNSUPPORTED}}).matrix("1", "2")
    out = capsys.readouterr().out
    assert f"ALL UNSUPPORTED on 1: {lacking[1]}\n" in out
    assert out.count("ALL UNSUPPORTED") == 1


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (record(CASE, PASS), record(CASE, FAIL), ChangeKind.NEWLY_BROKEN),
        (record(CASE, CRASH), record(CASE, PASS), ChangeKind.HOLDS_AGAIN),
        (record(CASE, CRASH, "boom"), record(CASE, CRASH, "bang"), ChangeKind.FAILS_DIFFERENTLY),
        (record(CASE, CRASH, "boom"), record(CASE, FAIL, "boom"), ChangeKind.FAILS_DIFFERENTLY),
        (record(CASE, PASS), record(CASE, Verdict.UNDETERMINED), ChangeKind.INCONCLUSIVE),
        (record(CASE, PASS), record(CASE, Verdict.CONTRACT), None),
        (record(CASE, UNSUPPORTED), record(CASE, FAIL), ChangeKind.NEW_FAILURE),
        (record(CASE, UNSUPPORTED), record(CASE, PASS), None),
        (record(CASE, CRASH, "got 0.5 at /a/b/x.py:3"), record(CASE, CRASH, "got 1e-07 at /c/x.py:44"), None),
    ],
)
def test_what_counts_as_a_change(before: Record, after: Record, kind: ChangeKind | None) -> None:
    assert classify_change(before, after) is kind


def test_the_same_release_as_recorded_is_compared_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    known = (record(CASE, FAIL, release="1"), record(CASE, PASS, release="2"))
    assert Engine({"1": {CASE: FAIL}, "2": {CASE: PASS}}).matrix("1", "2", known=known) == 0
    assert "no cell changed" in capsys.readouterr().out


def test_a_release_that_was_not_recorded_is_compared_with_the_newest(capsys: pytest.CaptureFixture[str]) -> None:
    known = (record(CASE, PASS, release="0.9"), record(OTHER, FAIL, release="0.10"), record(CASE, PASS, release="0.10"))
    assert Engine({"0.11": {CASE: FAIL, OTHER: PASS}}).matrix("0.11", known=known) == 1
    out = capsys.readouterr().out
    assert (
        "NEWLY BROKEN training.grads[deepspeed==0.11-zero1-w2-fp32-mlp]\n  0.10: pass: pass\n  0.11: fail: fail" in out
    )
    assert "HOLDS AGAIN training.grads[deepspeed==0.11-zero2-w2-fp32-mlp]" in out
    assert "2 cells changed: 1 newly broken, 1 holds again\n" in out
    assert out.endswith("0.11: 2 cells compared, 0 only before, 0 only now\n")


def test_cells_of_one_side_alone_are_counted_and_none_in_common_is_wrong_usage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = (record(CASE, PASS, release="1"), record(replace(CASE, stage=3), PASS, release="1"))
    assert Engine({"1": {CASE: PASS, OTHER: PASS}}).matrix("1", known=known) == 0
    assert "1: 1 cells compared, 1 only before, 1 only now" in capsys.readouterr().out
    engine = Engine({"1": {OTHER: PASS}, "2": {CASE: PASS}})
    with pytest.raises(
        UsageError, match="nothing was compared: the 2 cells of the earlier run and the 1 of this run have none"
    ):
        engine.matrix("1", known=known)
    with pytest.raises(UsageError, match="nothing was compared: the 1 cells of the earlier run and the 1 of this run"):
        compare_releases.compare_releases("deepspeed==1", "deepspeed==2", Request(), engine.measure, ())


def test_a_record_of_another_engine_is_refused() -> None:
    known = (record(replace(CASE, engine="fsdp2"), PASS),)
    with pytest.raises(UsageError, match="the earlier run has no cell of deepspeed"):
        Engine({"1": {CASE: PASS}}).matrix("1", known=known)


def test_the_newest_release_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "list_releases", lambda _: ("0.9", "0.10"))
    assert compare_releases.spell_releases("deepspeed", ("0.9", "@../x"), True) == [
        "deepspeed==0.9",
        "deepspeed@../x",
        "deepspeed==0.10",
    ]


def excuse(upstream: str) -> ExpectedFailure:
    return ExpectedFailure("deepspeed", "training", upstream, "known", "fail", ("fail",))


@pytest.mark.parametrize(
    ("base", "change", "code", "told"),
    [
        ({CASE: PASS}, {CASE: PASS}, 0, "no cell changed"),
        ({CASE: PASS}, {CASE: FAIL}, 1, "the change breaks 1; 0 are broken on both"),
        ({CASE: FAIL}, {CASE: FAIL}, 0, "the change breaks 0; 1 are broken on both"),
        ({CASE: FAIL}, {CASE: PASS}, 0, "HOLDS AGAIN"),
        ({CASE: PASS}, {CASE: ERROR}, 3, "NO LONGER DECIDED"),
        ({CASE: UNSUPPORTED}, {CASE: FAIL}, 1, "NEW FAILURE"),
    ],
    ids=["nothing", "it broke", "broken before", "mended", "harness", "new failure"],
)
def test_a_comparison_fails_on_what_the_change_broke_alone(
    base: Mapping[Cell, Verdict],
    change: Mapping[Cell, Verdict],
    code: int,
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = Engine({"1": base, "2": change})
    assert compare_releases.compare_releases("deepspeed==1", "deepspeed==2", Request(), engine.measure, ()) == code
    assert told in capsys.readouterr().out


def test_what_fails_once_and_not_again_is_told_and_breaks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    first = Engine({"1": {CASE: PASS, OTHER: PASS}, "2": {CASE: Verdict.HANG, OTHER: PASS}})
    second = Engine({"1": {CASE: PASS}, "2": {CASE: PASS}})
    asked: list[tuple[str, ...]] = []

    def measure(request: Request) -> list[Record]:
        asked.append(request.patterns)
        return (first if len(asked) <= 2 else second).measure(request)

    assert compare_releases.compare_releases("deepspeed==1", "deepspeed==2", Request(), measure, ()) == 0
    assert asked[2:] == [(replace(CASE, engine=f"deepspeed=={release}").id,) for release in "12"]
    out = capsys.readouterr().out
    assert f"SEEN ONCE {replace(CASE, engine='deepspeed==2').id}: hang, not in the second run of both" in out
    assert "2 cells compared, 0 only before, 0 only now: the change breaks 0" in out


def test_an_excuse_of_the_users_own_that_went_stale_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine({"1": {CASE: PASS}, "2": {CASE: PASS}})
    mine = replace(excuse("mine#1"), location="mine.toml:3")

    def stale(request: Request) -> list[Record]:
        return [apply_expected_failure(found, mine) for found in engine.measure(request)]

    assert compare_releases.compare_releases("deepspeed==1", "deepspeed==2", Request(), stale, (mine,)) == 0
    told = capsys.readouterr().out
    assert (
        "STALE training.grads[deepspeed==2-zero1-w2-fp32-mlp]: the law holds, but was expected to fail (mine#1)" in told
    )
    assert compare_releases.compare_releases("deepspeed==1", "deepspeed==2", Request(), stale, ()) == 0
    assert "STALE" not in capsys.readouterr().out


def test_what_the_users_own_excuses_cover_is_not_broken_by_the_change(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine({"1": {CASE: PASS}, "2": {CASE: FAIL}})

    def covered(request: Request) -> list[Record]:
        return [replace(found, expected_failure="mine#1") for found in engine.measure(request)]

    own = (excuse("mine#1"),)
    assert compare_releases.compare_releases("deepspeed==1", "deepspeed==2", Request(), covered, own) == 0
    assert "the change breaks 0; 0 are broken on both, 1 excused" in capsys.readouterr().out
    assert (
        compare_releases.compare_releases("deepspeed==1", "deepspeed==2", Request(), covered, (excuse("other#2"),)) == 1
    )


def test_the_base_runs_the_cells_of_a_change_that_are_broken(capsys: pytest.CaptureFixture[str]) -> None:
    third = replace(CASE, stage=3)
    engine = Engine({"1": {CASE: PASS, OTHER: FAIL}, "2": {CASE: FAIL, OTHER: FAIL, third: PASS}})
    requests: list[Request] = []

    def measure(request: Request) -> list[Record]:
        requests.append(request)
        return engine.measure(request)

    def run_changed(request: Request) -> RunResult:
        return RunResult(engine.measure(request), [], ["cells that reach them: 3 of 9", "STOPPED after 3 of 4 cells"])

    call = ("deepspeed==1", "deepspeed==2", Request(), measure, ())
    assert compare_releases.compare_releases(*call, run_changed) == 1
    on_base = tuple(replace(case, engine="deepspeed==2").id for case in (CASE, OTHER))
    assert requests[0].patterns == tuple(text.replace("==2", "==1") for text in on_base)
    assert all(request.patterns == (on_base[0].replace("==2", f"=={n}"),) for n, request in enumerate(requests[1:], 1))
    out = capsys.readouterr().out
    assert "cells that reach them: 3 of 9" in out
    assert "STOPPED after 3 of 4 cells" in out
    assert "3 cells that reach the change run on it, 2 broken, run on the base too: the change breaks 1; 1 are" in out
    engine.asked.clear()
    nothing = compare_releases.compare_releases(*call, lambda request: RunResult([], [], ["0 of 9"]))
    assert (nothing, engine.asked) == (0, [])


def test_a_comparison_with_what_cannot_be_run_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="deepspeed==2 cannot be fetched"):
        compare_releases.compare_releases(
            "deepspeed==1", "deepspeed==2", Request(), Engine({"1": {CASE: PASS}}).measure, ()
        )


def test_halving_runs_the_releases_of_the_index_between_the_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = tuple(f"0.{number}" for number in range(20))
    monkeypatch.setattr(index, "list_releases", lambda _: known)
    told = Engine({release: {CASE: FAIL if number < 12 else PASS} for number, release in enumerate(known)})
    trial = compare_releases.make_cell_trial("deepspeed", Request((CASE.id,)), told.measure)
    assert compare_releases.run_bisect("deepspeed", "0.18", "0.3", trial) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "the first good release is 0.12; the one before, 0.11, is not; 6 runs"
    assert told.asked[:2] == ["0.3", "0.18"]
    with pytest.raises(UsageError, match=r"unknown release of deepspeed '9\.9'; allowed: 0\.0"):
        compare_releases.run_bisect("deepspeed", "0.3", "9.9", trial)


def test_halving_by_a_reproduction_runs_it_on_each_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_releases, "prepare_release", lambda text, _: PreparedRelease(text.partition("==")[2]))
    shown = {"1": repros.ReproVerdict.REPRODUCED, "2": repros.ReproVerdict.NOT_REPRODUCED}
    otherwise = repros.ReproVerdict.FAILED_OTHERWISE

    def run(repro: repros.Repro, text: str, where: PreparedRelease) -> repros.ReproResult:
        return repros.build_result(repro, text, where.release, shown.get(where.release, otherwise), "told")

    monkeypatch.setattr(repros, "run_repro", run)
    trial = compare_releases.make_repro_trial(repros.find_repro("deepspeed", "7913"))
    assert [trial(release)[0] for release in "123"] == [Outcome.BAD, Outcome.GOOD, Outcome.SKIPPED]
    with pytest.raises(UsageError, match="7913 must name one reproduction of fsdp2, but matches none"):
        repros.find_repro("fsdp2", "7913")


@pytest.mark.parametrize(
    ("text", "is_id"),
    [
        ("7913", True),
        ("#7352", True),
        ("8026-func", True),
        ("unused-weights-decay", True),
        ("training", False),
        ("torch_func.*", False),
        (CASE.id, False),
    ],
)
def test_an_id_of_a_reproduction_is_no_pattern_of_checks(text: str, is_id: bool) -> None:
    assert repros.is_repro_id(text) is is_id


def test_a_case_id_among_the_patterns_is_moved_to_the_release() -> None:
    moved = history.request_for_engine(Request((CASE.id, "training.*")), "deepspeed==2")
    assert moved.patterns == ("training.grads[deepspeed==2-zero1-w2-fp32-mlp]", "training.*")
    assert moved.engines == ("deepspeed==2",)
