"""GPU memory of ranks: counted beside the cell, bounded by an equal share, and a context's cost by measurement.

No GPU is needed: torch's counters are stand-ins, as is nvidia-smi.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from suites.world.test_gpu_facts import install_nvidia_smi
from zharness.cell import Cell
from zharness.device import choose_job_count, share_gpu_memory
from zharness.device.gpu_facts import CONTEXT_VARIABLE, read_gpus
from zharness.device.gpu_memory import (
    LEAST_SHARE_MIB,
    MIB,
    SHARE_VARIABLE,
    GpuMemory,
    begin_count,
    bound_memory,
    choose_share,
    measure_context_mib,
    read_peaks,
)
from zharness.doctor.finding import Severity
from zharness.doctor.machine import inspect_context
from zharness.errors import UsageError
from zharness.run import Record, Verdict
from zharness.run.record import parse_record

H100 = "0, NVIDIA H100 80GB HBM3, 580.159.04, Default, 80994, 81559, 9.0"
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def fractions(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let torch see a GPU of 80 GiB on which this process took 3 and held 5 MiB; return the bounds that are set."""
    found: list[float] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * MIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 5 * MIB)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 1024 * MIB)
    )
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: found.append(fraction))
    return found


def test_a_process_without_cuda_counts_nothing() -> None:
    begin_count()
    assert read_peaks() is None


@pytest.mark.usefixtures("fractions")
def test_the_peaks_of_a_rank_are_in_its_record() -> None:
    begin_count()
    peaks = read_peaks()
    assert peaks == GpuMemory(3.0, 5.0)
    cell = Cell.parse("training.grads[reference-zero3-w2-fp32-mlp]")
    record = replace(Record(cell, 0, Verdict.PASS, "1.0", "2.13.0"), gpu_memory=(peaks, peaks))
    line = json.dumps(record.as_json())
    assert json.loads(line)["gpu_memory"] == [[3.0, 5.0], [3.0, 5.0]]
    assert parse_record(line).gpu_memory == (peaks, peaks)
    older = {key: value for key, value in json.loads(line).items() if key != "gpu_memory"}
    assert parse_record(json.dumps(older)).gpu_memory == ()


def test_processes_share_the_free_memory_without_their_contexts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_nvidia_smi(tmp_path, monkeypatch, H100)
    assert choose_share(read_gpus(), 48) == 80994 // 48 - 600
    assert choose_share(read_gpus(), 134) == LEAST_SHARE_MIB
    with share_gpu_memory(48):
        assert int(os.environ[SHARE_VARIABLE]) == 80994 // 48 - 600
    assert SHARE_VARIABLE not in os.environ
    monkeypatch.setenv(SHARE_VARIABLE, "4000")
    with share_gpu_memory(48):
        assert os.environ[SHARE_VARIABLE] == "4000", "the user's own"


def test_a_share_bounds_what_torch_takes(fractions: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARE_VARIABLE, raising=False)
    bound_memory(DEVICE)
    assert fractions == []
    for share in ("8192", "999999"):
        monkeypatch.setenv(SHARE_VARIABLE, share)
        bound_memory(DEVICE)
    assert fractions == [0.1, 1.0]
    monkeypatch.setenv(SHARE_VARIABLE, "4 GB")
    with pytest.raises(UsageError, match="ZHARNESS_GPU_MIB is '4 GB'; expected the MiB"):
        bound_memory(DEVICE)


def test_the_jobs_follow_from_the_measured_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvidia_smi(tmp_path, monkeypatch, "0, NVIDIA T400, 550.1, Default, 4000, 4096, 9.0")
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert choose_job_count(2) == 1
    monkeypatch.setenv(CONTEXT_VARIABLE, "300")
    assert choose_job_count(2) == 1
    monkeypatch.setenv(CONTEXT_VARIABLE, "100")
    assert choose_job_count(2) == 2
    for context in (100, 300, 600):
        monkeypatch.setenv(CONTEXT_VARIABLE, str(context))
        processes = 3 * choose_job_count(2)
        share = choose_share(read_gpus(), processes)
        assert share is not None
        assert processes * (context + share) <= 4000


def test_a_context_costs_what_is_missing_beside_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zharness.device.gpu_memory.CONTEXT_SCRIPT", "print(20, flush=True); input()")
    free = iter([80000, 79500])
    assert measure_context_mib(lambda: next(free)) == 480
    monkeypatch.setattr("zharness.device.gpu_memory.CONTEXT_SCRIPT", "raise SystemExit")
    assert measure_context_mib(lambda: 80000) is None


def test_doctor_tells_a_context_that_is_larger_than_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvidia_smi(tmp_path, monkeypatch, H100)
    [gpu] = read_gpus()
    found = inspect_context(gpu, 900)
    assert (found.severity, found.observation) == (
        Severity.WARNING,
        "900 MiB beside a process's tensors; 600 MiB are planned",
    )
    assert "ZHARNESS_CONTEXT_MIB=900" in found.remedy
    assert inspect_context(gpu, 520).severity is inspect_context(gpu, None).severity is Severity.OK
