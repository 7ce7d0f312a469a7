"""Reproductions of real bugs on a release with the bug, on one with the fix, and scripts that fail in another way."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from zharness.errors import UsageError
from zharness.releases import launch, overlay, repro_runs, repro_table, repros
from zharness.releases.prepared_release import PreparedRelease
from zharness.releases.repro_items import ReproFile
from zharness.releases.repro_runs import ReproRun, select_runs
from zharness.releases.repros import ReproResult, ReproVerdict
from zharness.run.record import open_record_file

ROOT = Path(__file__).parents[2]
HERE = PreparedRelease("0.19.8")
HEADER = '''"""A made-up bug.

id: 1
engine: deepspeed
symptom: none
reported: nowhere
affects: >=0.18.3,<=0.19.5
fixed: 0.19.6
broken: 0.18.8
ranks: 1
law: training.grads
signature: the expected error
ok: repro: nothing wrong OK.
"""
'''


def script(folder: Path, body: str = "", header: str = HEADER) -> repros.Repro:
    path = folder / "deepspeed_1_made_up.py"
    path.write_text(header + body)
    return repros.parse_repro(path)


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    # A zombie has ended; only its parent has not asked yet.
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def result(made_up: repros.Repro, release: str, verdict: ReproVerdict, evidence: str = "told") -> ReproResult:
    return repros.build_result(made_up, f"deepspeed=={release}", release, verdict, evidence)


def test_each_side_of_a_bug_shows_what_its_header_says() -> None:
    runs = select_runs(("#7913",), False, ())
    assert [run.engine for run in runs] == ["deepspeed", "deepspeed==0.18.8"]
    gone, before = repro_runs.run_repros(runs)
    assert gone.verdict is ReproVerdict.NOT_REPRODUCED, gone.output
    assert gone.evidence == "repro: grad_and_value over zero3_linear_wrap (LinearFunctionForZeroStage3) OK."
    assert before.verdict is ReproVerdict.REPRODUCED, before.output
    assert "must override the setup_context staticmethod" in before.evidence
    assert before.release == "0.18.8"
    assert repro_table.exit_code([gone, before]) == 0
    assert [run.engine for run in select_runs(("7352",), False, ())] == ["deepspeed"]


OTHERWISE = {
    "raise RuntimeError('the expected error')": "RuntimeError: the expected error",
    "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)": "Signal 11 (SIGSEGV)",
}


def test_a_script_that_ends_otherwise_is_no_reproduction(tmp_path: Path) -> None:
    runs = []
    for number, body in enumerate(OTHERWISE):
        (tmp_path / str(number)).mkdir()
        runs.append(ReproRun(script(tmp_path / str(number), body), "deepspeed"))
    found = repro_runs.run_repros(runs)
    for one, evidence in zip(found, OTHERWISE.values(), strict=True):
        assert one.verdict is ReproVerdict.FAILED_OTHERWISE, one.output
        assert evidence in one.evidence
        assert not one.is_expected
    assert repro_table.exit_code(found) == 3


def test_a_script_past_its_deadline_is_no_reproduction(tmp_path: Path) -> None:
    found = repros.run_repro(script(tmp_path, "import signal\nsignal.pause()"), "deepspeed", HERE, seconds=0.1)
    assert found.verdict is ReproVerdict.FAILED_OTHERWISE
    assert found.evidence == "did not end within 0 s"


def test_what_is_ended_from_another_thread_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_SECONDS", 2.0)
    output = tmp_path / "told"
    os.mkfifo(output)
    body = f"""
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(os.open({str(output)!r}, os.O_WRONLY), b"%9d" % os.getpid())
while True:
    signal.pause()
"""
    made_up = replace(script(tmp_path, body), ranks=2)
    running = launch.CommandGroup()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(repros.run_repro, made_up, "deepspeed", HERE, 100.0, running)
        ranks = os.open(output, os.O_RDWR)  # also to write, so that the first rank's end is not the end of the file
        pids = [int(os.read(ranks, 9)) for _ in range(2)]
        running.terminate()
        assert future.result().verdict is ReproVerdict.FAILED_OTHERWISE
    assert not [pid for pid in pids if alive(pid)]
    with pytest.raises(KeyboardInterrupt):
        repros.run_repro(made_up, "deepspeed", HERE, 100.0, running)


def test_what_needs_cuda_is_not_run_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlay, "has_cuda", bool)
    made_up = script(tmp_path, header=HEADER.replace("ranks: 1", "ranks: 1\nneeds: cuda"))
    found = repros.run_repro(made_up, "deepspeed", HERE)
    assert found.verdict is ReproVerdict.UNSUPPORTED
    assert found.evidence == "needs CUDA, and this machine has none"
    assert repro_table.exit_code([found]) == 0


def test_a_release_that_cannot_be_had_leaves_the_others_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("ZHARNESS_CACHE", str(tmp_path / "cache"))
    made_up = script(tmp_path)
    monkeypatch.setattr(repros, "run_repro", lambda *_: result(made_up, "0.19.8", ReproVerdict.NOT_REPRODUCED))
    gone, here = repro_runs.run_repros([ReproRun(made_up, "deepspeed==0.18.8"), ReproRun(made_up, "deepspeed")])
    assert gone.verdict is ReproVerdict.NOT_RUN
    assert "deepspeed==0.18.8 cannot be downloaded" in gone.evidence
    assert here.verdict is ReproVerdict.NOT_REPRODUCED, here.output
    assert repro_table.exit_code([gone, here]) == 3
    with pytest.raises(UsageError, match=r"deepspeed==0\.18\.8 cannot be downloaded"):
        repro_runs.run_repros([ReproRun(made_up, "deepspeed==0.18.8")])


def test_a_checkout_that_is_none_leaves_the_others_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = script(tmp_path)
    monkeypatch.setattr(repros, "run_repro", lambda *_: result(made_up, "0.19.8", ReproVerdict.NOT_REPRODUCED))
    nowhere = f"deepspeed@{tmp_path}/nowhere"
    gone, here = repro_runs.run_repros([ReproRun(made_up, nowhere), ReproRun(made_up, "deepspeed")])
    assert (gone.verdict, gone.release, gone.expected_verdict) == (ReproVerdict.NOT_RUN, "@", None)
    assert "expected a source checkout" in gone.evidence
    assert gone.command == f"zharness repro 1 --on {nowhere}"
    assert here.verdict is ReproVerdict.NOT_REPRODUCED


def test_an_engine_that_is_not_installed_is_asked_for_again_by_its_name(tmp_path: Path) -> None:
    gone = repros.build_result(script(tmp_path), "deepspeed", "", ReproVerdict.NOT_RUN, "told")
    assert gone.command == "zharness repro 1 --on deepspeed"


def test_the_releases_asked_for_take_the_place_of_the_headers(tmp_path: Path) -> None:
    on = ("deepspeed==0.19.0", "deepspeed", "deepspeed==0.19.0")
    assert [run.engine for run in select_runs(("7913",), False, on)] == ["deepspeed==0.19.0", "deepspeed"]
    assert {run.repro.engine for run in select_runs((), True, on)} == {"deepspeed"}
    with pytest.raises(UsageError, match="reproduction 7913 runs on deepspeed, not on fsdp2"):
        select_runs(("7913",), False, ("fsdp2",))
    with pytest.raises(UsageError, match="no reproduction was named"):
        select_runs((), False, on)


def test_a_table_in_markdown_has_a_row_for_each_bug(tmp_path: Path) -> None:
    linked = replace(script(tmp_path), reported="https://example.org/1", symptom="a|b")
    shown, absent = (
        result(linked, "0.18.8", ReproVerdict.REPRODUCED),
        result(linked, "0.19.8", ReproVerdict.NOT_REPRODUCED),
    )
    unable = result(linked, "0.1.0", ReproVerdict.NOT_RUN)
    row = repro_table.render_markdown([absent, shown, unable]).splitlines()[-1]
    assert [cell.strip() for cell in row.split(" | ")] == [
        "| [1](https://example.org/1)",
        "a\\|b",
        "deepspeed 0.18.8",
        "deepspeed 0.19.8",
        "deepspeed 0.1.0: not run |",
    ]


def test_of_many_runs_the_table_explains_the_unexpected_alone(tmp_path: Path) -> None:
    made_up = script(tmp_path)
    right = [result(made_up, "0.18.8", ReproVerdict.REPRODUCED, "as always")] * repro_table.MAX_PRINTED_RUNS
    wrong = result(made_up, "0.19.8", ReproVerdict.REPRODUCED, "back again")
    output = repro_table.render_repro_results([*right, wrong])
    assert "back again" in output
    assert "as always" not in output
    assert "as always" in repro_table.render_repro_results(right)
    assert repro_table.render_summary([*right, wrong], 3.0) == "11 runs in 3.0 s: 11 reproduced; 1 not as expected"


def test_a_line_of_json_has_the_verdict_and_what_was_expected(tmp_path: Path) -> None:
    with open_record_file(tmp_path / "runs.jsonl") as file:
        file.add(result(script(tmp_path), "0.19.8", ReproVerdict.REPRODUCED))
    (line,) = map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines())
    assert (line["repro"], line["release"], line["verdict"]) == ("1", "0.19.8", "reproduced")
    assert (line["expected"], line["as_expected"]) == ("not reproduced", False)


def test_pytest_collects_an_item_for_each_side_and_imports_no_script() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "repro/deepspeed_7913_torch_func_linear.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[:2] == [
        f"repro/deepspeed_7913_torch_func_linear.py::{side}" for side in ("installed", "0.18.8")
    ], done.stderr


def test_pytest_takes_the_releases_from_its_option(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = ["deepspeed==0.19.0", "deepspeed@../DeepSpeed", "deepspeed", "fsdp2"]
    monkeypatch.setattr(request.config.option, "zharness_engine", requested)
    path = ROOT / "repro" / "deepspeed_7913_torch_func_linear.py"
    items = ReproFile.from_parent(request.session, path=path).collect()
    assert [item.name for item in items] == ["0.19.0", "@../DeepSpeed", "installed"]


def test_the_marker_needs_the_signature_beside_it(tmp_path: Path) -> None:
    made_up = script(tmp_path)
    assert repros.judge_output(made_up, 1, f"x\n{repros.MARKER}the expected error!\ny")[0] is ReproVerdict.REPRODUCED
    assert (
        repros.judge_output(made_up, 1, f"{repros.MARKER}another error\nthe expected error")[0]
        is ReproVerdict.FAILED_OTHERWISE
    )
    assert repros.judge_output(made_up, 0, "repro: nothing wrong OK.")[0] is ReproVerdict.NOT_REPRODUCED
    assert repros.judge_output(made_up, 1, "repro: nothing wrong OK.")[0] is ReproVerdict.FAILED_OTHERWISE
    assert repros.judge_output(made_up, 0, "repro: nothing wrong OK. Or is there?")[0] is ReproVerdict.FAILED_OTHERWISE
    assert repros.judge_output(made_up, 0, "all is well") == (
        ReproVerdict.FAILED_OTHERWISE,
        "all is well (the launcher ended with 0)",
    )
    no_module = "ModuleNotFoundError: No module named 'deepspeed'"
    verdict, evidence = repros.judge_output(made_up, 1, f"Traceback\n{no_module}\nx.ChildFailedError: \n===")
    assert verdict is ReproVerdict.FAILED_OTHERWISE
    assert evidence.startswith(no_module)


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("0.18.2", None),
        ("0.18.3", ReproVerdict.REPRODUCED),
        ("0.19.5", ReproVerdict.REPRODUCED),
        ("0.19.6", ReproVerdict.NOT_REPRODUCED),
        ("0.19.10", ReproVerdict.NOT_REPRODUCED),
        ("1.0.0+cpu", ReproVerdict.NOT_REPRODUCED),
        ("0.18.3rc1", None),
        ("0.19.6rc1", None),
        ("0.19.6.0", ReproVerdict.NOT_REPRODUCED),
        ("0.18.3.0", ReproVerdict.REPRODUCED),
        ("", None),
    ],
)
def test_the_header_says_what_a_release_should_show(
    tmp_path: Path, release: str, expected: ReproVerdict | None
) -> None:
    assert script(tmp_path).expected_verdict(release) is expected


def test_an_open_bug_is_expected_on_every_later_release() -> None:
    assert repros.find_repros("7352")[0].expected_verdict("99.0") is ReproVerdict.REPRODUCED


@pytest.mark.parametrize(
    ("line", "instead", "complaint"),
    [
        ("law: training.grads\n", "", "lacks the lines law:"),
        ("ranks: 1", "ranks: two", "got the line ranks: two"),
        ("ranks: 1", "ranks: 1\nneeds: luck", "got the line needs: luck; allowed: cuda"),
        ("affects: >=0.18.3,<=0.19.5", "affects: older ones", "got the line affects: older ones"),
        ("affects: >=0.18.3,<=0.19.5", "affects: <=0.19.x", "got the line affects: <=0.19.x"),
        ("fixed: 0.19.6", "fixed: soon", "got fixed and broken releases soon, 0.18.8"),
    ],
)
def test_a_wrong_header_is_named(tmp_path: Path, line: str, instead: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        script(tmp_path, header=HEADER.replace(line, instead))


def test_another_torch_is_a_side_where_it_is_asked_for_or_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = {"engine: deepspeed": "engine: fsdp2", ">=0.18.3,<=0.19.5": "<=1.0.0", "0.19.6": "1.0.1", "0.18.8": "0.9.0"}
    header = HEADER
    for line, instead in lines.items():
        header = header.replace(line, instead)
    of_torch = script(tmp_path, header=header)
    monkeypatch.setenv("ZHARNESS_CACHE", str(tmp_path / "cache"))
    assert of_torch.default_releases() == ("fsdp2",)
    monkeypatch.setattr(repros, "get_installed_version", lambda _: "0.9.1")
    assert of_torch.default_releases() == ("fsdp2",), "neither side is here, and what is here is no side"
    monkeypatch.setattr(repros, "get_installed_version", lambda _: "0.9.0")
    assert of_torch.default_releases() == ("fsdp2==0.9.0",), "the installed one is a side by its number"
    monkeypatch.undo()
    monkeypatch.setattr(overlay, "is_cached", lambda *_: True)
    assert of_torch.default_releases() == ("fsdp2", "fsdp2==0.9.0")


def test_an_unknown_reproduction_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown reproduction '1234'; allowed: 102197, .*zharness list repros"):
        repros.find_repros("1234")


def test_several_scripts_of_one_issue_are_found_by_its_number(tmp_path: Path) -> None:
    for word in ("func", "autograd"):
        header = HEADER.replace("id: 1\n", f"id: 1-{word}\n")
        (tmp_path / f"deepspeed_1_{word}.py").write_text(header)
    assert [found.id for found in repros.find_repros("#1", tmp_path)] == ["1-autograd", "1-func"]
    assert [found.id for found in repros.find_repros("1-func", tmp_path)] == ["1-func"]


def test_an_id_is_given_once(tmp_path: Path) -> None:
    (tmp_path / "ddp_1_made_up.py").write_text(HEADER.replace("engine: deepspeed", "engine: ddp"))
    script(tmp_path)
    with pytest.raises(UsageError, match="both have the id 1"):
        repros.load_catalogue(tmp_path)


def test_a_folder_without_scripts_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"found no reproduction in .*; install zharness again"):
        repros.load_catalogue(tmp_path)


def test_every_script_stands_alone() -> None:
    for found in repros.load_catalogue():
        text = found.path.read_text()
        body = text.split('"""', maxsplit=2)[2]
        assert "zharness" not in text, f"{found.path.name} must run where only torch and {found.engine} are installed"
        assert f"--nproc_per_node={found.ranks} repro/{found.path.name}" in text
        # By the issue where there is one: ids of one issue are told apart by a word behind its number.
        issue = found.id.partition("-")[0]
        assert found.path.name.startswith(f"{found.engine}_{issue}_" if issue.isdecimal() else f"{found.engine}_")
        for said in (found.signature, found.ok):
            assert said in body, f"{found.path.name}: the code lacks the header's {said!r}"


@pytest.mark.parametrize(
    ("steps", "code"),
    [([3.25] * 4, 0), ([6.5] * 3 + [3.25], 1), ([6.5] * 4, 1), ([3.25, 3.25, 6.5, 3.25], 2), ([float("nan")] * 4, 2)],
)
def test_a_gathered_loss_is_reproduced_by_exact_multiples_alone(steps: list[float], code: int) -> None:
    pytest.importorskip("deepspeed")
    (found,) = (each for each in repros.load_catalogue() if each.id == "gathered-loss-times-parts")
    assert runpy.run_path(str(found.path))["judge_steps"](steps, 2) == code
