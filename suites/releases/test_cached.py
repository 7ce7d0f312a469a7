"""The release cache lists and removes its own entries and touches nothing else."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from zharness.cli import cli
from zharness.errors import UsageError
from zharness.releases import cache_entries, cache_table, checkout, overlay, usage_locks


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZHARNESS_CACHE", str(tmp_path))
    monkeypatch.setattr(overlay, "_install", lambda folder, wanted: made_up(folder, wanted.release))
    for release in ("1.0", "2.0"):
        overlay.ensure_overlay("made_up", release)
    usage_locks._LOCK_FILES.clear()  # as when the process that ran on them has ended
    return tmp_path / "releases"


def made_up(folder: Path, release: str) -> None:
    (folder / "made_up").mkdir()
    (folder / "made_up" / "__init__.py").write_text(f"__version__ = {release!r}\n" + "#" * 1_000_000)


def cleaned(wanted: Sequence[str]) -> str:
    return cache_table.render_cleaned(list(cache_entries.clean_cache(wanted)))


def subjects() -> list[str]:
    return [entry.subject for entry in cache_entries.list_entries()]


def test_what_is_cached_is_listed_with_its_size() -> None:
    output = cache_table.render_entries(())
    assert "made_up==1.0  Python 3." in output
    assert output.endswith("MB")
    assert cache_table.render_entries(("made_up==2.0",)).count("made_up==") == 1


def test_one_release_is_removed_and_the_size_that_was_freed_is_told(cache: Path) -> None:
    output = cleaned(("made_up==1.0",))
    assert output.splitlines()[0].startswith("made_up==1.0 (Python 3.")
    assert "freed 1.0 MB of" in output
    assert subjects() == ["made_up==2.0"]
    assert not [entry for entry in cache.iterdir() if entry.is_dir() and "1.0" in entry.name]


def test_what_this_package_did_not_make_is_left_alone(cache: Path) -> None:
    (cache / "somebody").mkdir()
    (cache / ".made_up-3.0.building-abc").mkdir()
    cleaned(())
    assert [entry.name for entry in cache.iterdir() if entry.is_dir()] == ["somebody"]


def test_a_release_that_is_being_built_is_left_alone(cache: Path) -> None:
    (place,) = (entry.path for entry in cache_entries.list_entries() if entry.subject == "made_up==1.0")
    with overlay.build_lock(place):
        assert "not removed: another process is building it" in cleaned(("made_up==1.0",))
        done = CliRunner().invoke(cli, ["releases", "--clean", "made_up==1.0"], standalone_mode=False)
        assert done.return_value == 3
    assert "made_up==1.0" in subjects()


def test_a_release_that_a_process_runs_on_is_left_alone() -> None:
    overlay.ensure_overlay("made_up", "1.0")
    assert cleaned(()).splitlines()[0].endswith("not removed: a process uses it")
    assert subjects() == ["made_up==1.0"]


def test_a_release_is_in_use_until_the_ranks_forked_from_its_process_are_gone() -> None:
    place = overlay.ensure_overlay("made_up", "1.0")
    ends = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ends[1])
        os.read(ends[0], 1)  # until the parent lets go
        os._exit(0)
    usage_locks._LOCK_FILES.clear()
    with usage_locks.try_exclusive(place) as ours:
        assert not ours
    os.close(ends[1])
    os.waitpid(child, 0)
    with usage_locks.try_exclusive(place) as ours:
        assert ours


def test_a_release_that_is_not_cached_is_named_beside_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"in the cache 'made_up==9\.9'; did you mean 'made_up==1\.0' or "):
        cleaned(("made_up==9.9",))


def test_a_checkout_is_removed_by_any_spelling_of_its_path(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, half = cache.parent / "checkouts" / "made_up-0123", cache.parent / "checkouts" / ".made_up-4.building-x"
    for folder in (room, half):
        folder.mkdir(parents=True)
    (room / checkout.STAMP_FILE).write_text(f"made_up@{tmp_path / 'sources'}")
    monkeypatch.chdir(cache)
    assert cleaned(("made_up@../sources",)).startswith(f"made_up@{tmp_path / 'sources'} (")
    cleaned(())
    assert not [entry for entry in room.parent.iterdir() if entry.is_dir()]


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOLCK, errno.EACCES])
def test_a_cache_that_cannot_be_locked_is_run_on_all_the_same(
    number: int, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(usage_locks.fcntl, "flock", refuse)
    usage_locks.mark_in_use(cache / "made_up")
    assert cache / "made_up" not in usage_locks._LOCK_FILES


def test_another_fault_of_the_cache_is_told(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(usage_locks.fcntl, "flock", refuse)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        usage_locks.mark_in_use(cache / "made_up")
