"""The command line as a user sees it: exit codes, one sentence for wrong input, and nothing left after Ctrl-C.

Most commands run as forks of a Python that has imported torch. A few start as in a shell: a law that holds, the one
that Ctrl-C ends, and those that must start without torch.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

import pytest

from suites.warm import programs
from suites.warm.program_request import find_descendants, is_alive
from suites.warm.programs import Program
from zharness.cli import main
from zharness.cli.name_index import INDEX_FILE, build_index, compute_fingerprint, load_index
from zharness.errors import UsageError
from zharness.run.record import open_record_file

ROOT = Path(__file__).parents[2]
ARGUMENTS = ("-c", "from zharness.cli import main; main()")
COMMAND = [sys.executable, *ARGUMENTS]


def started(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a new Python, as a shell does."""
    return subprocess.run([*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)


def forked(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a fork of a Python that has imported torch."""
    return programs.run(*ARGUMENTS, *arguments)


def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in this process, for what it says without starting a rank: torch is imported here already."""
    out, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        patch.setattr(os, "fork", no_fork)
        patch.setattr(signal, "signal", lambda *_: None)  # the handlers of this process are the test session's
        patch.setattr(sys, "argv", ["zharness", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    assert isinstance(ended.value.code, int)
    return subprocess.CompletedProcess(arguments, ended.value.code, out.getvalue(), errors.getvalue())


def no_fork() -> NoReturn:
    """Fail a test whose command starts a process."""
    raise AssertionError("the command starts a process: test it with started()")


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_law_that_holds_gives_exit_0_a_matrix_and_a_record(tmp_path: Path) -> None:
    done = started("check", "training.grads", "--stage", "0,3", "--model", "exact", "--jsonl", str(tmp_path / "r"))
    assert done.returncode == 0, done.stderr
    assert "stage 3, 2 ranks, fp32" in done.stdout
    found = records(tmp_path / "r")
    assert {(r["stage"], r["verdict"], r["tier"], r["ratio"]) for r in found} == {
        (0, "pass", "X", 0),
        (3, "pass", "X", 0),
    }
    assert not list(tmp_path.glob("*.partial"))


def test_a_broken_law_gives_exit_1_the_first_divergence_and_the_command_to_run_it_again(tmp_path: Path) -> None:
    engine = "zharness.mutants:never_reduces"
    done = forked("check", "training.grads", "--model", "mlp", "--engine", engine, "--jsonl", str(tmp_path / "r"))
    assert done.returncode == 1, done.stderr
    assert "step 0, reduction: first.weight[" in done.stdout
    assert "it is the gradient of rank 0 alone, not reduced" in done.stdout
    (record,) = records(tmp_path / "r")
    assert record["command"] in done.stdout
    assert record["divergence"]["part"] == "reduction"  # type: ignore[index]
    again = forked(*str(record["command"]).replace("'", "").split()[1:])
    assert again.returncode == 1
    assert record["divergence"]["words"] in again.stdout  # type: ignore[index]


def test_a_fault_in_the_optimizer_step_is_reported_as_part_optimizer() -> None:
    engine = "zharness.mutants:wrong_epsilon"
    done = forked("check", "training.trajectory", "--model", "mlp", "--engine", engine)
    assert done.returncode == 1, done.stderr
    assert "step 0, optimizer: " in done.stdout


@pytest.mark.parametrize("module", ["cli", "engines", "releases.repro_runs", "releases.repro_table"])
def test_modules_for_reproductions_do_not_import_torch(module: str) -> None:
    code = f"import sys, zharness.{module}; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=300).returncode == 0


def test_an_engine_whose_package_is_missing_says_what_to_install() -> None:
    hide = (
        "import importlib.metadata as m; real = m.version\n"
        "def version(name):\n"
        "    if name == 'deepspeed': raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version\n"
        "from zharness.cli import main; main()"
    )
    done = programs.run("-c", hide, "check", "--engine", "deepspeed")
    assert done.returncode == 2
    assert "engine 'deepspeed' is not installed" in done.stderr
    assert 'pip install "zharness[deepspeed]"' in done.stderr
    listed = programs.run("-c", hide, "list", "engines")
    assert "not installed" in listed.stdout
    assert 'pip install "zharness[deepspeed]"' in listed.stdout


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the list of processes is read from /proc")
def test_ctrl_c_ends_every_rank_exits_130_and_keeps_what_was_finished(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    arguments = ["check", "--jobs", "1", "--jsonl", str(path)]
    process = subprocess.Popen([*COMMAND, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    partial = tmp_path / "records.jsonl.partial"
    while process.poll() is None and not (partial.exists() and partial.read_text().count("\n") >= 2):
        os.sched_yield()
    ranks = find_descendants(process.pid)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert b"interrupted" in errors
    assert re.search(rb"INTERRUPTED after \d+ of \d+ cells", output), "the table so far is printed"
    assert b"reference 0.1.0\nlaw " in output
    assert b"Traceback" not in errors
    assert ranks
    assert not [pid for pid in ranks if is_alive(pid)]
    assert len(records(path)) >= 2
    assert not partial.exists()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the end of other programs' processes is read from a pidfd")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_command_however_it_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "records.jsonl.partial"
    arguments = ["check", "--jsonl", str(tmp_path / "records.jsonl")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with (
        open(os.devnull, "wb") as devnull,
        Program([*ARGUMENTS, *arguments], devnull, devnull, ROOT, environment) as process,
    ):
        while process.poll() is None and not (path.exists() and path.read_text().count("\n") >= 2):
            os.sched_yield()
        pidfds = {os.pidfd_open(pid) for pid in find_descendants(process.pid)}
        process.send_signal(number)
        process.wait(timeout=60)
        assert pidfds
        alive = set(pidfds)
        while alive and (ready := wait(alive, timeout=30)):
            alive -= set(ready)  # type: ignore[arg-type]
        assert not alive
        assert not process.wait_for_leftovers()
    assert not list(tmp_path.glob("zharness-*")), "temporary files are removed"
    for pidfd in pidfds:
        os.close(pidfd)


FAST = [
    ["list", "laws"],
    ["list", "models"],
    ["list", "mutants", "--json"],
    ["list", "engines"],
    ["check", "traning.grads"],
    ["check", "--engine", "deepsped"],
    ["check", "--modle", "mlp"],
]


@pytest.mark.parametrize("arguments", FAST, ids=" ".join)
def test_lists_and_mistakes_are_answered_without_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from zharness.cli import main\n"
        "try: main()\n"
        "except SystemExit: sys.exit(1 if 'torch' in sys.modules else 0)"
    )
    load_index()  # writes the cache if the sources have changed since the index was generated
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 0, "torch was imported"


def test_the_index_of_names_is_that_of_the_laws() -> None:
    recorded = json.loads(INDEX_FILE.read_text())
    built = asdict(build_index(compute_fingerprint()))  # a stale one makes the first `zharness list` import torch
    assert recorded == built, "run `python -m zharness.cli.name_index`"


def test_two_runs_cannot_write_one_file_of_records(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with open_record_file(path), pytest.raises(UsageError, match="another run is writing it"), open_record_file(path):
        pass
    with open_record_file(path):
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["records.jsonl"]


def test_help_names_the_options() -> None:
    done = run_here("check", "--help")
    assert done.returncode == 0
    for word in ("PATTERN", "--engine", "--stage", "--world-size", "--dtype", "--jsonl", "--seed", "--timeout"):
        assert word in done.stdout


def test_the_list_of_laws_is_filtered_and_names_the_mutants_that_each_has_to_kill() -> None:
    (row,) = json.loads(run_here("list", "laws", "training.grads", "--long", "--json").stdout)
    assert (row["group"], row["tier"]) == ("training", "S")
    assert "never_reduces" in row["kills"].split(", ")
    done = run_here("list", "laws", "nonsense")
    assert (done.returncode, "unknown law 'nonsense'" in done.stderr) == (2, True)
    assert run_here("list", "checks").stdout == run_here("list", "laws").stdout, "the older name"


@pytest.mark.parametrize("what", ["engines", "laws", "checks", "models", "mutants", "repros"])
def test_lists_are_tables_and_json(what: str) -> None:
    assert run_here("list", what).returncode == 0
    rows = json.loads(run_here("list", what, "--json").stdout)
    assert rows
    assert all(isinstance(value, str) for row in rows for value in row.values())
