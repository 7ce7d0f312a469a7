"""The temporary files of a run on a user's model are announced, and have to fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from suites.model import large
from zharness import engines
from zharness.cell import Cell
from zharness.engines.torch_engine import LOW_PRECISION_DTYPES
from zharness.errors import UsageError
from zharness.laws.state.resume import RECORDED_BUFFERS, RECORDED_SNAPSHOTS
from zharness.run.model_files import (
    FreeSpace,
    Storage,
    count_fitting_cells,
    estimate_file_bytes,
    explain_files_too_large,
    find_file_problem,
    format_file_bytes,
)
from zharness.run.model_memory import GIB, ModelSize
from zharness.run.observe_and_judge import observe
from zharness.world.limits import is_in_memory

FULL = ModelSize(1 << 24, 1 << 26)
GIB_LEFT = FULL.estimate_memory(2) + GIB


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("engine", "dtype", "factory"),
    [("ddp", "fp32", "of_4_mib"), ("reference", "bf16", "of_4_mib"), ("ddp", "fp32", "with_large_buffers")],
)
def test_the_files_of_a_cell_are_at_most_the_estimate(
    engine: str, dtype: str, factory: str, shared_tmp_path: Path
) -> None:
    """The ranks of state.resume write the snapshots that the estimate counts, beside which it counts a checkpoint."""
    cell = Cell("state.resume", engine, 0, 2, dtype, f"suites.model.large:{factory}", "adamw")
    claims = engines.capabilities(engine, 0)
    assert claims is not None
    observe(cell, 0, str(shared_tmp_path), claims, {})
    dist.barrier()
    written = sum(path.stat().st_size for path in shared_tmp_path.rglob("*") if path.is_file())
    model = getattr(large, factory)()[0].to(LOW_PRECISION_DTYPES.get(dtype, torch.float32))
    size = ModelSize.measure(model, dtype)
    estimate = estimate_file_bytes(size, 2, 3)
    buffers = 2 * size.buffer_bytes
    checkpoint = (estimate - (RECORDED_BUFFERS + 1) * buffers) / (RECORDED_SNAPSHOTS + 1) + buffers
    assert estimate - checkpoint <= written <= estimate


def test_a_longer_training_records_more_and_a_frozen_weight_has_no_optimizer_state() -> None:
    short, long = (estimate_file_bytes(FULL, 2, steps) for steps in (3, 20))
    weights = FULL.parameter_bytes
    assert (short, long) == (2 * 9 * 3 * weights, 2 * (21 * 3 + 20) * weights)
    frozen = ModelSize(1 << 24, 1 << 26, frozen_parameters=1 << 24, frozen_bytes=1 << 26)
    assert estimate_file_bytes(frozen, 2, 3) == 2 * 9 * weights


def test_files_on_a_full_disk_or_in_memory_are_refused() -> None:
    full_disk = FreeSpace(Path("/scratch"), Storage.DISK, GIB, GIB_LEFT)
    refusal = "record up to 3.4 GiB for one law in /scratch, where only 1.0 GiB are free; set TMPDIR"
    assert refusal in explain_files_too_large(FULL, 2, 3, full_disk)
    in_memory = FreeSpace(Path("/scratch"), Storage.MEMORY, 100 * GIB, GIB_LEFT)
    assert "set TMPDIR to a folder on a disk" in explain_files_too_large(FULL, 2, 3, in_memory)
    on_disk = FreeSpace(Path("/scratch"), Storage.DISK, 6 * GIB, GIB_LEFT)
    assert not explain_files_too_large(FULL, 2, 3, on_disk)
    assert (count_fitting_cells(FULL, 2, 3, on_disk), count_fitting_cells(FULL, 2, 3, in_memory)) == (1, 0)
    with pytest.raises(UsageError, match=r"where only 1\.0 GiB are free; set TMPDIR"):
        find_file_problem("m:f", FULL, 2, 3, full_disk, ignore_memory_limit=False)
    warning = find_file_problem("m:f", FULL, 2, 3, full_disk, ignore_memory_limit=True)
    assert warning.startswith("WARNING m:f: ranks record")


@pytest.mark.parametrize(("size", "text"), [(1, "1 MiB"), (5 << 20, "5 MiB"), (GIB // 5, "0.2 GiB")])
def test_a_size_that_gib_would_round_to_nothing_is_in_mib(size: int, text: str) -> None:
    assert format_file_bytes(size) == text


def test_the_innermost_file_system_tells_where_files_are(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    inner = tmp_path / "inner"
    inner.mkdir()
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\ntmpfs {inner} tmpfs rw 0 0\nbroken\n")
    assert is_in_memory(inner / "folder", mounts)
    assert not is_in_memory(tmp_path, mounts)
    assert not is_in_memory(tmp_path, tmp_path / "nowhere")
