"""scripts/setup_repro.sh with a fake pip and launcher: what it leaves on disk, and how it judges a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "setup_repro.sh"
HEADER = '''"""A made-up bug.

id: 1
engine: deepspeed
affects: >=0.0.2,<=0.0.3
fixed: {fixed}
broken: {broken}
ranks: 1
signature: the expected error
ok: fine
"""
'''
# An interpreter whose pip makes a package of the version $INSTALLS, and whose launcher's one rank has a log of its own.
PYTHON = f"""#!/usr/bin/env bash
set -euo pipefail
case "$*" in
    "-m pip install"*)
        while [[ $1 != --target ]]; do shift; done
        mkdir "$2/deepspeed"
        printf '__version__ = "%s"\\n' "$INSTALLS" >"$2/deepspeed/__init__.py"
        eval "${{MEANWHILE:-}}" ;;
    "-m torch.distributed.run"*)
        eval "${{MEANWHILE_RUNNING:-}}"
        logs=${{3#--log-dir=}}
        mkdir -p "$logs/run/attempt_0/0"
        printf 'repro: REPRODUCED: the expected error' >"$logs/run/attempt_0/0/stdout.log"
        printf 'and a line of the launcher\\n'
        exit 1 ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


class Stage:
    """A prepared environment with the fake interpreter, and one script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ends: list[IO[str]] = []
        self.room = folder / "setup_repro" / "torch-0-deepspeed"
        python = self.room / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON)
        python.chmod(0o755)
        (self.room / "complete").touch()

    def begin(self, broken: str = "0.0.2", fixed: str = "not yet", **env: str) -> subprocess.Popen[str]:
        made_up = self.folder / "made_up.py"
        made_up.write_text(HEADER.format(broken=broken, fixed=fixed))
        read, write = os.pipe()
        own = {"TOLD": str(write), "ZHARNESS_CACHE": str(self.folder), "TMPDIR": str(self.folder), "INSTALLS": broken}
        # A session of its own: its Ctrl-C is not ours.
        running = subprocess.Popen(
            [str(SCRIPT), "--torch", "0", str(made_up)], env={**os.environ, **own, **env}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[write], start_new_session=True,
        )  # fmt: skip
        os.close(write)
        self.ends.append(os.fdopen(read))
        return running

    def read_logged_line(self) -> str:
        """Return the line that the latest run wrote to $TOLD; empty if it wrote none."""
        return self.ends[-1].readline()

    def left(self) -> list[str]:
        """Return unfinished installs and logs that were not removed."""
        return [path.name for path in [*self.room.rglob(".building-*"), *self.folder.glob("tmp.*")]]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    for end in made.ends:
        end.close()


def ended(running: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        output, errors = running.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        raise
    return running.returncode, output, errors


def test_a_release_that_shows_its_bug_is_told_from_the_log_of_a_rank(stage: Stage) -> None:
    code, output, errors = ended(stage.begin())
    assert (code, output) == (0, "deepspeed 0.0.2: reproduced: repro: REPRODUCED: the expected error\n"), errors
    assert not stage.left()


def test_a_release_with_the_fix_that_shows_the_bug_is_not_what_the_header_says(stage: Stage) -> None:
    code, output, _ = ended(stage.begin("0.0.2", "0.0.2"))
    assert (code, output.count(": reproduced:")) == (1, 2)


def test_a_release_of_which_the_header_says_nothing_fails_nobody(stage: Stage) -> None:
    code, output, _ = ended(stage.begin("0.0.10"))
    assert (code, "(the header says nothing of this release)" in output) == (0, True)


def test_another_release_than_was_asked_for_is_not_tried_and_not_kept(stage: Stage) -> None:
    code, output, errors = ended(stage.begin(INSTALLS="0.0.9"))
    assert (code, output) == (2, "")
    assert "got version 0.0.9 where deepspeed 0.0.2 was installed" in errors
    assert not list((stage.room / "releases").iterdir())


def test_an_install_that_fails_leaves_nothing_behind_nor_what_a_killed_one_left(stage: Stage) -> None:
    (stage.room / "releases" / ".building-killed").mkdir(parents=True)
    code, _, errors = ended(stage.begin(MEANWHILE="exit 1"))
    assert (code, "cannot be installed" in errors) == (2, True)
    assert not stage.left()


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("moment", ["MEANWHILE", "MEANWHILE_RUNNING"])
def test_ctrl_c_ends_it_and_leaves_nothing_behind(stage: Stage, moment: str) -> None:
    never = stage.folder / "never"
    os.mkfifo(never)
    running = stage.begin(**{moment: f"echo here >&$TOLD; read <{never}"})
    assert stage.read_logged_line() == "here\n"
    os.killpg(running.pid, signal.SIGINT)
    assert ended(running)[0] == 130
    assert not stage.left()


def test_a_second_run_waits_for_the_first(stage: Stage) -> None:
    go = stage.folder / "go"
    os.mkfifo(go)
    first = stage.begin(MEANWHILE_RUNNING=f"echo here >&$TOLD; read <{go}")
    assert stage.read_logged_line() == "here\n"
    second = stage.begin()
    assert second.stderr is not None
    assert "waiting for another run" in second.stderr.readline()
    go.write_text("\n")
    assert (ended(first)[0], ended(second)[0]) == (0, 0)
