"""Overlays are complete or absent, built by one process at a time, and errors are one clear sentence."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from zharness.errors import UsageError
from zharness.releases import index, launch, overlay


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZHARNESS_CACHE", str(tmp_path))
    return tmp_path / "releases"


def made_up(folder: Path, wanted: overlay.Stamp, body: str = "") -> None:
    """Write what pip would install for a package without dependencies."""
    package = folder / wanted.distribution
    package.mkdir()
    (package / "__init__.py").write_text(f"{body}\n__version__ = {wanted.release!r}\n")


def left_in(cache: Path) -> list[str]:
    return [entry.name for entry in cache.iterdir() if not entry.name.endswith(".lock")]


def test_the_release_of_torch_is_told_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    output = overlay.torch_version()
    assert "torch" not in sys.modules
    monkeypatch.undo()
    assert output == torch.__version__


def test_an_unknown_release_names_the_newest_ones(cache: Path) -> None:
    with pytest.raises(UsageError, match=r"deepspeed==9\.9\.9 does not exist; the newest of \d+ releases are: .*0\.19"):
        overlay.ensure_overlay("deepspeed", "9.9.9")
    assert left_in(cache) == []


def test_without_a_network_it_says_what_to_try(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        UsageError, match=r"deepspeed==0\.18\.7 cannot be downloaded: .*no network.*python -m pip download"
    ):
        overlay.ensure_overlay("deepspeed", "0.18.7")
    assert left_in(cache) == []


def test_a_full_disk_is_told_with_the_folder_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path, wanted: overlay.Stamp) -> None:
        made_up(folder, wanted)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(overlay, "_install", full)
    with pytest.raises(
        UsageError, match=r"made_up 1\.0 cannot be put into .*: No space left on device; .*ZHARNESS_CACHE"
    ):
        overlay.ensure_overlay("made_up", "1.0")
    assert left_in(cache) == []


def test_a_pip_that_found_the_disk_full_is_told_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    output = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    done = subprocess.CompletedProcess([], 1, output)
    monkeypatch.setattr(overlay, "run_isolated", lambda *_: done)
    with pytest.raises(UsageError, match=r"made_up==1\.0 does not fit on the disk of .*ZHARNESS_CACHE"):
        overlay.ensure_overlay("made_up", "1.0")


def test_a_release_for_another_python_is_told_with_the_python_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    output = (
        "ERROR: Ignored the following versions that require a different python version: "
        "0.9 Requires-Python >=3.99; 1.0 Requires-Python >=3.98,<4\n"
        "ERROR: Could not find a version that satisfies the requirement made_up==1.0 (from versions: 0.7, 0.8)"
    )
    monkeypatch.setattr(overlay, "run_isolated", lambda *_: subprocess.CompletedProcess([], 1, output))
    with pytest.raises(UsageError, match=r"made_up==1\.0 needs Python >=3\.98,<4, and this is 3\."):
        overlay.ensure_overlay("made_up", "1.0")


def test_a_release_that_does_not_install_is_told_with_what_it_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    output = (
        "      Traceback (most recent call last):\n"
        "      ValueError: CPU_Accelerator requires intel_extension_for_pytorch\n"
        "error: metadata-generation-failed\n"
        "× Encountered error while generating package metadata."
    )
    monkeypatch.setattr(overlay, "run_isolated", lambda *_: subprocess.CompletedProcess([], 1, output))
    with pytest.raises(
        UsageError, match=r"cannot be installed: ValueError: CPU_Accel.*; see .*: python -m pip download"
    ):
        overlay.ensure_overlay("made_up", "1.0")


def test_what_outlives_its_launcher_is_ended_too() -> None:
    code = (
        "import subprocess, sys\n"
        "code = 'import signal; signal.pause()'\n"
        "print(subprocess.Popen([sys.executable, '-c', code], start_new_session=True).pid)\n"
    )
    done = overlay.run_isolated([sys.executable, "-c", code], None, 60.0, "the launcher")
    stat = Path(f"/proc/{int(done.stdout)}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_second_interrupt_still_ends_what_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout, monkeypatch.context() as patched:
        assert child.stdout.readline() == b"deaf\n"
        patched.setattr(subprocess.Popen, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            launch.terminate_tree(child, "")
    assert child.wait(60.0) == -signal.SIGKILL


def test_who_waits_for_another_install_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overlay, "_INSTALL_SECONDS", 0.0)
    monkeypatch.setattr(overlay, "_IMPORT_SECONDS", 0.0)
    with (
        overlay.build_lock(tmp_path / "place"),
        pytest.raises(UsageError, match="another process has been building place for too long"),
        overlay.build_lock(tmp_path / "place"),
    ):
        pass
    assert "waiting for another process that builds place" in capsys.readouterr().err


def test_a_cache_that_is_no_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ZHARNESS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UsageError, match=r"made_up 1\.0 cannot be put into .*: Not a directory"):
        overlay.ensure_overlay("made_up", "1.0")


def test_the_index_that_cannot_be_reached_is_told_with_what_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(UsageError, match=r"no network; .*try: python -m pip index versions no-such-package"):
        index.list_releases("no-such-package")


def test_releases_sort_as_versions_do() -> None:
    assert index.sort_releases(["0.10.0", "0.9.1", "0.9"]) == ("0.9", "0.9.1", "0.10.0")
    with pytest.raises(UsageError, match="Invalid version: 'master'"):
        index.sort_releases(["master"])


@pytest.mark.parametrize(("name", "release"), [("deepspeed", "../0.18.8"), ("../deepspeed", "0.18.8"), ("-r", "1")])
def test_neither_name_nor_release_is_a_path_or_an_option(name: str, release: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        overlay.ensure_overlay(name, release)


def test_an_interrupted_install_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folder: Path, wanted: overlay.Stamp) -> None:
        made_up(folder, wanted)
        raise KeyboardInterrupt

    monkeypatch.setattr(overlay, "_install", interrupted)
    with pytest.raises(KeyboardInterrupt):
        overlay.ensure_overlay("made_up", "1.0")
    assert left_in(cache) == []


def test_a_killed_install_is_cleared_by_the_next_one(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import os, signal\n"
        "from zharness.releases import overlay\n"
        "def killed(folder, wanted):\n"
        "    (folder / 'half').touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "overlay._install = killed\n"
        "overlay.ensure_overlay('made_up', '1.0')\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert [name.partition(".building-")[1] for name in left_in(cache)] == [".building-"]
    monkeypatch.setattr(overlay, "_install", made_up)
    place = overlay.ensure_overlay("made_up", "1.0")
    assert left_in(cache) == [place.name]


def test_torch_is_installed_with_what_it_needs_and_an_engine_over_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def recorded(command: list[str], env: Mapping[str, str], *_: object) -> NoReturn:
        commands.append(command)
        assert not env["PIP_CONSTRAINT"], "it names the release of the environment"
        raise UsageError("no network")

    monkeypatch.setattr(overlay, "run_isolated", recorded)
    monkeypatch.setenv("PIP_CONSTRAINT", "constraints.txt")
    for distribution in ("torch", "made_up"):
        with pytest.raises(UsageError, match="no network"):
            overlay.ensure_overlay(distribution, "1.0")
    assert ["--no-deps" in command for command in commands] == [False, True]


def test_the_cache_holds_what_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not overlay.is_cached("made_up", "1.0")
    monkeypatch.setattr(overlay, "_install", made_up)
    overlay.ensure_overlay("made_up", "1.0")
    assert overlay.is_cached("made_up", "1.0")


def test_two_who_want_the_same_release_build_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []
    together = threading.Barrier(2)

    def counted(folder: Path, wanted: overlay.Stamp) -> None:
        built.append(folder)
        made_up(folder, wanted)

    def wanted() -> Path:
        together.wait()
        return overlay.ensure_overlay("made_up", "1.0")

    monkeypatch.setattr(overlay, "_install", counted)
    with ThreadPoolExecutor(2) as pool:
        places = {pool.submit(wanted), pool.submit(wanted)}
    assert len({place.result() for place in places}) == 1
    assert len(built) == 1


def test_a_release_that_does_not_import_is_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path, wanted: overlay.Stamp) -> None:
        made_up(folder, wanted, "raise ImportError('this torch is too new')")

    monkeypatch.setattr(overlay, "_install", broken)
    with pytest.raises(
        UsageError, match=r"made_up 1\.0 cannot be imported with torch .*: ImportError: this torch is too new"
    ):
        overlay.ensure_overlay("made_up", "1.0")
    assert left_in(cache) == []


def test_a_release_that_another_one_hides_is_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(folder: Path, wanted: overlay.Stamp) -> None:
        made_up(folder, wanted, "__version__ = '0.9'\n__file__ = 'elsewhere'")

    monkeypatch.setattr(overlay, "_install", other)
    with pytest.raises(UsageError, match="remove any other folder with this package"):
        overlay.ensure_overlay("made_up", "1.0")
    assert left_in(cache) == []


def test_a_version_may_end_in_a_space_as_those_of_unpacked_archives_do(tmp_path: Path) -> None:
    made_up(tmp_path, overlay.Stamp("made_up", "1.0 ", "", ""))
    assert (
        overlay.import_and_get_version(tmp_path, "made_up", overlay.overlay_environment(tmp_path), "made_up", "")
        == "1.0"
    )


def test_an_overlay_for_another_torch_is_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlay, "_install", made_up)
    place = overlay.ensure_overlay("made_up", "1.0")
    stamp = place / ".zharness-overlay.json"
    stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "torch": "1.0"}))
    (place / "old").touch()
    assert overlay.ensure_overlay("made_up", "1.0") == place
    assert not (place / "old").exists()


def test_a_whole_overlay_needs_no_installer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlay, "_install", made_up)
    place = overlay.ensure_overlay("made_up", "1.0")
    monkeypatch.delattr(overlay, "_install")
    assert overlay.ensure_overlay("made_up", "1.0") == place


def test_a_child_finds_the_overlay_first_and_keeps_its_own_extension_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "behind")
    monkeypatch.setattr(overlay, "_install", made_up)
    one, other = overlay.ensure_overlay("made_up", "1.0"), overlay.ensure_overlay("made_up", "2.0")
    env = overlay.overlay_environment(one)
    assert env["PYTHONPATH"].split(os.pathsep) == [str(one), "behind"]
    assert env["TORCH_EXTENSIONS_DIR"] != overlay.overlay_environment(other)["TORCH_EXTENSIONS_DIR"]
    code = "import made_up; print(made_up.__version__)"
    output = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout
    assert output.strip() == "1.0"
