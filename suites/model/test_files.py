"""The temporary files of a run on a user's model are announced, and have to fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from zharness.errors import UsageError
from zharness.run import model_files
from zharness.run.model_files import (
    DISK,
    MEMORY,
    TemporaryFolder,
    count_fitting_cells,
    estimate_file_bytes,
    explain_files_too_large,
    find_file_problem,
)
from zharness.run.model_memory import GIB, ModelSize
from zharness.world.limits import is_in_memory

FULL = ModelSize(1 << 24, 1 << 26)
LOW = ModelSize(1 << 24, 1 << 25, has_masters=True)


def test_the_estimate_is_what_ranks_were_measured_to_record() -> None:
    """Two ranks recorded 2692 MiB in fp32, and 3141 MiB in bf16, for state.resume on a model of 2**24 weights."""
    assert estimate_file_bytes(FULL, 2, 3) == 2 * 7 * 3 * 2**26
    assert 0.99 < estimate_file_bytes(FULL, 2, 3) / (2692 << 20) <= 1
    assert 0.99 < estimate_file_bytes(LOW, 2, 3) / (3141 << 20) <= 1
    assert estimate_file_bytes(FULL, 2, 20) == 2 * (21 * 3 + 20) * 2**26, "a longer training records more"
    frozen = ModelSize(1 << 24, 1 << 26, frozen_parameters=1 << 24, frozen_bytes=1 << 26)
    assert estimate_file_bytes(frozen, 2, 3) == 2 * 7 * 2**26, "a frozen weight has no optimizer state"


def test_files_on_a_full_disk_or_in_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    free = FULL.estimate_memory(2) + GIB
    monkeypatch.setattr(model_files, "available_memory", lambda: free)
    full_disk = TemporaryFolder(Path("/scratch"), GIB, DISK)
    assert "record up to 2.6 GiB for one law in /scratch, where only 1.0" in explain_files_too_large(
        FULL, 2, 3, full_disk
    )
    in_memory = TemporaryFolder(Path("/scratch"), 100 * GIB, MEMORY)
    assert "set TMPDIR to a folder on a disk" in explain_files_too_large(FULL, 2, 3, in_memory)
    on_disk = TemporaryFolder(Path("/scratch"), 6 * GIB, DISK)
    assert not explain_files_too_large(FULL, 2, 3, on_disk)
    assert (count_fitting_cells(FULL, 2, 3, on_disk), count_fitting_cells(FULL, 2, 3, in_memory)) == (1, 0)
    monkeypatch.setattr(model_files, "measure_temporary_folder", lambda: full_disk)
    with pytest.raises(UsageError, match=r"where only 1\.0 GiB are free; set TMPDIR"):
        find_file_problem("m:f", FULL, 2, 3, ignore_memory_limit=False)
    assert find_file_problem("m:f", FULL, 2, 3, ignore_memory_limit=True).startswith("WARNING m:f: ranks record")


def test_the_innermost_file_system_tells_where_files_are(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    inner = tmp_path / "inner"
    inner.mkdir()
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\ntmpfs {inner} tmpfs rw 0 0\nbroken\n")
    assert is_in_memory(inner / "folder", mounts)
    assert not is_in_memory(tmp_path, mounts)
    assert not is_in_memory(tmp_path, tmp_path / "nowhere")
