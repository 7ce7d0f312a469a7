"""scripts/gpu.sh on a CPU: its sections, limits and files, with a python3 that notes the commands it is given."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zharness.cell import Cell
from zharness.cli.check import check
from zharness.device.gpu_memory import GpuMemory
from zharness.run import Record, Verdict
from zharness.world import server as ranks

SCRIPTS = Path(__file__).parents[2] / "scripts"
FIGURES = ("doctor", "mutants", "default", "torch", "steps")  # those that the figures come from
SECTIONS = (*FIGURES, "deepspeed", "dtypes", "nccl", "ranks", "tf32", "options", "fused_adam")


def run_script(folder: Path, *sections: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run gpu.sh with a python3 that is a stand-in for all commands but the last, which joins the results."""
    stand_in = folder / "bin" / "python3"
    stand_in.parent.mkdir(exist_ok=True)
    (stand_in.parent / "nvcc").touch(mode=0o755)
    stand_in.write_text(
        f'#!/bin/sh\n[ -z "$NOTES" ] || echo "$@" >>"$NOTES"\n'
        'case "$*" in *" --target "*) mkdir "$(echo "$*" | sed "s/.* --target //; s/ .*//")" ;; esac\n'
        f'case "$*" in *missing_packages.py*) exit ;; *gpu_results.py*) exec {sys.executable} "$@" ;; '
        '*"mutants import"*) [ -z "$NO_NAMES" ] && printf "%s\\n" reads_early '
        "forwards_in_tf32 backwards_in_tf32; exit ;; "
        '*bench_gpu.py*) [ -z "$BREAKS" ] || exit 1 ;; *" check "*) [ -z "$BREAKS" ] || exit 1 ;; esac\necho "said"\n'
    )
    stand_in.chmod(0o755)
    path = f"{stand_in.parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "ZHARNESS_DEVICE": "cpu", "PYTHONPATH": str(SCRIPTS.parent), **variables}
    command = ["bash", str(SCRIPTS / "gpu.sh"), str(folder / "out"), *sections]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[str]]]:
    """Run every section; return the output and what ran: name, exit code, seconds and command of each."""
    folder = tmp_path_factory.mktemp("gpu")
    done = run_script(folder, ZHARNESS_GPU_LAWS="training.grads double_backward")
    assert done.returncode == 0, done.stderr
    lines = (folder / "out" / "sections.tsv").read_text().splitlines()
    return done.stdout, [line.split("\t") for line in lines]


def test_every_section_runs_a_command_that_exists(whole: tuple[str, list[list[str]]]) -> None:
    _, ran = whole
    names = [name.split("-")[0].removesuffix("_build") for name, *_ in ran]
    assert list(dict.fromkeys(names)) == [*SECTIONS, "page"]
    assert {status for _, status, *_ in ran} == {"0"}
    checks = [shlex.split(command) for *_, command in ran if " check " in command]
    assert len(checks) == 13
    for command in checks:
        with check.make_context("check", command[4:]) as context:  # raises for an option that does not exist
            assert context.params["patterns"] == ("training.grads", "double_backward")
    [mutants] = [command for name, _, _, command in ran if name == "mutants"]
    assert "reads_early" in mutants
    assert {"--jobs", "--jsonl"} <= set(mutants.split()), "one mutant at a time takes minutes, and a cut run shows none"
    [steps] = [command for name, _, _, command in ran if name == "steps"]
    assert {"--size", "100M"} <= set(shlex.split(steps))


def read_limits() -> dict[str, int]:
    """Return the seconds of each section."""
    table = (SCRIPTS / "gpu.sh").read_text().partition("declare -A LIMIT=(")[2].partition("\n)")[0]
    return {name[1:-1]: int(seconds) for name, seconds in (p.split("=") for p in table.split() if p.startswith("["))}


def test_the_figures_fit_two_commands_of_ten_minutes_in_a_quarter_of_an_hour(
    whole: tuple[str, list[list[str]]],
) -> None:
    seconds = [command.split("--max-seconds ")[1].split()[0] for *_, command in whole[1] if "--max-seconds" in command]
    assert all(int(each) >= 10 for each in seconds), "a check of a few seconds starts one cell for each job"
    limits = read_limits()
    assert set(limits) == {*SECTIONS, "page"}
    first = FIGURES[:-1]
    assert sum(limits[name] for name in (*first, "page")) <= 590
    start = 120  # a machine that is lent has to boot, and the clone to travel
    assert start + sum(limits[name] for name in (*FIGURES, "page", "page")) <= 900
    assert limits["default"] >= 300, "what takes longer misses the figure, and must show by how much"


@pytest.mark.exhaustive
def test_side_sections_run_a_few_laws_unless_all_are_asked_for(tmp_path: Path) -> None:
    for variables, words in (({}, "training.grads training.trajectory"), ({"ZHARNESS_GPU_LAWS": "all"}, "--engine")):
        assert run_script(tmp_path, "nccl", **variables).returncode == 0
        *_, command = (tmp_path / "out" / "sections.tsv").read_text().splitlines()[-2].split("\t")
        assert command.startswith(f"python3 -m zharness check {words}")


@pytest.mark.parametrize("section", ["steps", pytest.param("nccl", marks=pytest.mark.exhaustive)])
def test_a_command_that_ends_with_1_and_no_records_is_a_failure(section: str, tmp_path: Path) -> None:
    assert run_script(tmp_path, section, BREAKS="1").returncode == 1
    if section == "nccl":
        cell = Cell.parse("training.grads[ddp-zero0-w1-fp32-mlp]")
        record = Record(cell, 0, Verdict.FAIL, "1", "2", cause="a wrong number")
        (tmp_path / "out" / "nccl.jsonl").write_text(json.dumps(record.as_json()))
        assert run_script(tmp_path, section, BREAKS="1").returncode == 0, "the page shows the records"


def test_without_names_no_mutants_run(tmp_path: Path) -> None:
    done = run_script(tmp_path, "mutants", NO_NAMES="1")
    assert (done.returncode, "their names cannot be read" in done.stderr) == (1, True)
    assert "-m zharness mutants" not in (tmp_path / "out" / "sections.tsv").read_text()


def test_a_spent_budget_leaves_sections_out_and_says_so(tmp_path: Path) -> None:
    done = run_script(tmp_path, "doctor", "nccl", ZHARNESS_GPU_BUDGET="0")
    assert done.returncode == 0, done.stderr
    assert "nccl: left out, as the budget is spent" in done.stdout
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(each["name"], each["exit"]) for each in results["sections"]] == [
        ("doctor", "left out"),
        ("nccl", "left out"),
    ]


def test_what_is_left_on_the_device_is_noted(tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\ncase "$*" in *memory.used*) echo 700 ;; *compute-apps*) echo 4711; echo 4712 ;; esac\n')
    tool.chmod(0o755)
    assert run_script(tmp_path, "doctor").returncode == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["device"] == {when: {"mib": 700, "processes": 2} for when in ("before", "after")}
    with tarfile.open(tmp_path / "out" / "all.tar.gz") as archive:
        assert {"./results.json", "./device.tsv", "./doctor.log"} <= set(archive.getnames())


def test_the_archive_is_written_outside_the_folder_that_it_packs(tmp_path: Path) -> None:
    listing = tmp_path / "listing"
    compress = tmp_path / "bin" / "gzip"
    compress.parent.mkdir()
    compress.write_text(f'#!/bin/sh\nls -a {tmp_path / "out"} >{listing}\nexec {shutil.which("gzip")} "$@"\n')
    compress.chmod(0o755)
    done = run_script(tmp_path, "doctor")
    assert done.returncode == 0, done.stderr
    names = set(listing.read_text().split())
    assert {"doctor.log", "results.json"} <= names
    assert not [name for name in names if ".tar" in name], "tar fails if it reads the folder as the archive appears"
    assert (tmp_path / "out" / "all.tar.gz").stat().st_size > 0


def test_an_unknown_section_is_refused(tmp_path: Path) -> None:
    done = run_script(tmp_path, "docter")
    assert done.returncode == 2
    assert "unknown section 'docter'; expected doctor mutants" in done.stderr


def test_the_results_have_the_records_of_a_section_that_was_cut(tmp_path: Path, capsys) -> None:
    cell = Cell.parse("training.grads[reference-zero3-w2-tf32-mlp]")
    note = "in the engine's process, torch has no deterministic algorithm for put_"
    passed = Record(cell, 0, Verdict.PASS, "1", "2", notes=(note,), gpu_memory=(GpuMemory(1, 2), GpuMemory(3, 2)))
    failed = replace(passed, cell=replace(cell, engine="ddp", stage=0), verdict=Verdict.FAIL, cause="a wrong number")
    lines = [json.dumps(record.as_json()) for record in (passed, failed)]
    (tmp_path / "tf32.jsonl.partial").write_text(f"{lines[0]}\n{lines[1]}\n{lines[0][:50]}")
    (tmp_path / "steps.json").write_text(json.dumps({"size": "100M", "dtype": "bf16", "rows": [{"engine": "ddp"}]}))
    for _ in range(2):  # the page may be made again
        done = subprocess.run(
            [sys.executable, str(SCRIPTS / "gpu_results.py"), str(tmp_path)], capture_output=True, text=True, check=True
        )
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["cells"] == [
        {"section": "tf32", "engine": "ddp", "dtype": "tf32", "ranks": 2, "fail": 1},
        {"section": "tf32", "engine": "reference", "dtype": "tf32", "ranks": 2, "pass": 1},
    ]
    assert [each["cause"] for each in results["unexpected"]] == ["a wrong number"]
    assert results["nondeterministic"] == [note]
    assert results["largest_memory_of_a_rank"]["allocated"] == {"mib": 3.0, "cell": passed.cell.id}
    page = (tmp_path / "page.html").read_text()
    assert "Median step, 100M bf16" in page
    assert cell.id in page
    assert "tf32" in done.stdout


def test_the_results_have_the_figures(tmp_path: Path) -> None:
    reference = Cell.parse("training.grads[reference-zero3-w2-fp32-mlp]")
    kill = Cell.parse("training.grads[zharness.mutants:reads_early-zero3-w2-fp32-mlp]")
    runs = {
        "default.jsonl": Record(reference, 0, Verdict.PASS, "1", "2"),
        "nccl.jsonl": Record(replace(reference, engine="ddp", stage=0, world_size=1), 0, Verdict.FAIL, "1", "2"),
        "mutants/kills.jsonl": Record(kill, 0, Verdict.FAIL, "1", "2"),
    }
    (tmp_path / "mutants").mkdir()
    for name, record in runs.items():
        (tmp_path / name).write_text(json.dumps(record.as_json()) + "\n")
    (tmp_path / "default.log").write_text("STOPPED after 1 of 2 cells\n")
    (tmp_path / "sections.tsv").write_text(
        "default\t0\t292\tcheck\nmutants\t124\t75\tzharness mutants reads_early reads_late --scope targets\n"
    )
    subprocess.run([sys.executable, str(SCRIPTS / "gpu_results.py"), str(tmp_path)], check=True, capture_output=True)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["figures"] == {
        "default": {"seconds": 292, "whole": False},
        "mutants": {"reads_early": ["training.grads"], "reads_late": []},
        "judged": {
            "reference": {"judged": 1, "unexpected": 0},
            "fsdp2": {"judged": 0, "unexpected": 0},
            "ddp": {"judged": 1, "unexpected": 1},
        },
    }
    assert [each["cell"] for each in results["unexpected"]] == [runs["nccl.jsonl"].cell.id], "no mutant is among them"
    assert re.search(r"reads_late +LIVES", (tmp_path / "page.html").read_text())


def test_missing_packages_are_those_that_the_project_names(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = importlib.import_module("missing_packages")
    script.main()
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(script, "is_installed", lambda requirement: requirement.startswith("click"))
    script.main()
    missing = capsys.readouterr().out.split()
    assert {"allpairspy>=2.5", "tqdm>=4.66"} <= set(missing)
    assert not any(requirement.startswith(("torch", "click")) for requirement in missing)
    monkeypatch.undo()
    assert not script.is_installed("no-such-package>=1")


def test_all_wheels_of_the_folder_are_installed(tmp_path: Path) -> None:
    wheels, notes = tmp_path / "wheels", tmp_path / "notes"
    wheels.mkdir()
    variables = {"ZHARNESS_GPU_WHEELS": str(wheels), "NOTES": str(notes)}
    done = run_script(tmp_path, "doctor", **variables)
    assert done.returncode == 2
    assert done.stderr.strip() == f"gpu.sh: ZHARNESS_GPU_WHEELS names {wheels}, which has no wheel"
    for name in ("deepspeed", "hjson"):
        (wheels / f"{name}-1-py3-none-any.whl").touch()
    assert run_script(tmp_path, "doctor", **variables).returncode == 0
    [command] = [line for line in notes.read_text().splitlines() if " pip " in line]
    assert "--no-index" in command.split()
    assert {Path(word).name.split("-")[0] for word in command.split() if word.endswith(".whl")} == {
        "deepspeed",
        "hjson",
    }


# What a machine sees that has a clone and no installed zharness.
HIDE_ZHARNESS = """
import importlib.metadata

find = importlib.metadata.Distribution.from_name

def from_name(name):
    if name == "zharness":
        raise importlib.metadata.PackageNotFoundError(name)
    return find(name)

importlib.metadata.Distribution.from_name = from_name
"""


def test_a_clone_that_is_not_installed_has_the_reference_engine(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE_ZHARNESS)
    path = os.pathsep.join((str(tmp_path), str(SCRIPTS.parent)))
    command = [sys.executable, "-m", "zharness", "check", "training.grads[reference-zero3-w2-fp32-mlp]"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    hidden = [sys.executable, "-c", "from importlib.metadata import version; version('zharness')"]
    done = subprocess.run(hidden, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert "PackageNotFoundError" in done.stderr, "zharness was not hidden"


def test_step_times_are_measured_on_ranks_and_a_problem_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    bench, timing, work = (
        importlib.import_module(name) for name in ("bench_gpu", "engines_bench.timing", "engines_bench.work")
    )
    plan = timing.Plan(work.SIZES["tiny"], 2, 1, 2, 8, False, "bf16")
    [row] = bench.time_team([("ddp", 0)], plan, 2, 60.0)
    assert (row["engine"], row["ranks"]) == ("ddp", 2)
    assert row["ms"] == row["plain ms"] * row["ratio"]
    timed = ranks.run(timing.time_steps, (("ddp", 0),), replace(plan, rounds=9, deadline=0.0), world_size=2)
    assert {len(each) for each in timed[0][timing.PLAIN]} == {1}
    assert len(timed[0][timing.PLAIN]) == 1, "one round of one step, as there is no time"
    [broken] = bench.time_team([("ddp", 0)], replace(plan, dtype="fp64"), 2, 60.0)
    assert "fp64" in broken["problem"]


def test_deepspeed_is_timed_with_its_own_buckets_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    work = importlib.import_module("engines_bench.work")
    monkeypatch.setattr(work, "model", lambda size: None)
    monkeypatch.setattr(work.engines, "get", lambda name: lambda model, config: config)
    for device, options in (("cuda", {"zero_optimization": {"reduce_bucket_size": 500_000_000}}), ("cpu", {})):
        monkeypatch.setattr(work, "this_device", lambda device=device: torch.device(device))
        assert work.build("deepspeed", 2, work.SIZES["tiny"], 2).options == options
    monkeypatch.setattr(work, "this_device", lambda: torch.device("cuda"))
    assert work.build("ddp", 0, work.SIZES["tiny"], 2, **work.precision("ddp", "bf16")).options == {
        "torch_autocast": {"enabled": True, "dtype": "bf16"}
    }
