"""What ranks need of a GPU, read from a stand-in for nvidia-smi."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from suites.warm import programs
from zharness.cli.options import requested_device
from zharness.device import choose_job_count, require_usable_gpus, require_visible_gpus
from zharness.device.gpu_facts import read_gpus
from zharness.doctor.finding import Severity
from zharness.doctor.machine import inspect_gpus
from zharness.environment import DEVICE_VARIABLE
from zharness.errors import UsageError
from zharness.world import run
from zharness.world.server import RankEnvironment, prepare_process

NVML_VARIABLE = "PYTORCH_NVML_BASED_CUDA_CHECK"


def install_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: str, status: int = 0) -> None:
    """Put an nvidia-smi that prints ``lines`` in front of the PATH, and let torch see one GPU."""
    command = folder / "nvidia-smi"
    command.write_text(f"#!/bin/sh\necho '{lines}'\nexit {status}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def test_a_shared_gpu_with_room_is_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvidia_smi(tmp_path, monkeypatch, "0, NVIDIA H100 80GB HBM3, 580.159.04, Default, 80994, 81559, 9.0")
    require_usable_gpus(48)
    [gpu] = read_gpus()
    assert (gpu.name, gpu.driver, gpu.free_mib) == ("NVIDIA H100 80GB HBM3", "580.159.04", 80994)
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert choose_job_count(2) == 16
    assert choose_job_count(4) == 10, "a cell has its ranks, as many of another pool, and a judge"
    found, service = inspect_gpus([gpu])
    assert found.severity is service.severity is Severity.OK
    assert "room for about 134 processes" in found.observation


def test_little_memory_bounds_the_jobs_and_refuses_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvidia_smi(tmp_path, monkeypatch, "0, NVIDIA T400, 550.1, Default, 4000, 4096, 9.0")
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert choose_job_count(2) == 1
    with pytest.raises(UsageError, match=r"12 processes need about 7200 MiB .* GPU 0 has 4000 MiB free: use fewer"):
        require_usable_gpus(12)


def test_a_gpu_in_exclusive_mode_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvidia_smi(tmp_path, monkeypatch, "0, NVIDIA T400, 550.1, Exclusive_Process, 4000, 4096, 9.0")
    with pytest.raises(UsageError, match=r"GPU 0 is in compute mode Exclusive_Process, .* 'nvidia-smi -c DEFAULT'"):
        require_usable_gpus(2)
    require_visible_gpus()
    with pytest.raises(UsageError, match=r"GPU 0 is in compute mode Exclusive_Process"):
        run(print, world_size=2)
    assert next(inspect_gpus(read_gpus())).severity is Severity.PROBLEM


def test_no_visible_gpu_and_no_cuda_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvidia_smi(tmp_path, monkeypatch, "no devices", status=6)
    assert read_gpus() == ()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UsageError, match=r"torch sees no GPU: .* CUDA_VISIBLE_DEVICES"):
        require_usable_gpus(2)
    with pytest.raises(UsageError, match="torch sees no GPU"):
        require_visible_gpus()
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UsageError, match="this build of torch has no CUDA"):
        require_usable_gpus(2)


def test_the_multi_process_service_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvidia_smi(tmp_path, monkeypatch, "0, NVIDIA T400, 550.1, Default, 4000, 4096, 9.0")
    (tmp_path / "control").touch()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    *_, service = inspect_gpus(read_gpus())
    assert service.severity is Severity.WARNING
    assert "an illegal access in one rank ends every rank" in service.observation


def test_gpus_are_looked_for_by_nvml_before_anything_may_ask_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NVML_VARIABLE, "0")  # restored at the end
    monkeypatch.delenv(NVML_VARIABLE)
    with requested_device("cpu", ""):
        assert NVML_VARIABLE not in os.environ
    with requested_device("cuda", ""):
        assert os.environ[NVML_VARIABLE] == "1"
    monkeypatch.delenv(NVML_VARIABLE)
    (tmp_path / "conftest.py").write_text(f"import os\nassert os.environ['{NVML_VARIABLE}'] == '1'\n")
    (tmp_path / "test_one.py").write_text("def test_one(): pass\n")
    done = programs.run("-m", "pytest", "-q", str(tmp_path), environment={**os.environ, DEVICE_VARIABLE: "cuda"})
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_ranks_without_cuda_are_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    assert prepare_process(RankEnvironment(module="torch", search_path=("/none",))).startswith(
        "the process that started the ranks has asked CUDA's driver for GPUs"
    )
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    assert "CUDA" not in prepare_process(RankEnvironment(module="torch", search_path=("/none",)))
