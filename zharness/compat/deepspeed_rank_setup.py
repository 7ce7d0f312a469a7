"""Prepare a rank for a DeepSpeed test: set environment variables, initialize deepspeed.comm, create directories."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zharness.compat.launcher_variables import delete_launcher_variables
from zharness.device import rank_device
from zharness.engines.deepspeed_process import import_deepspeed
from zharness.errors import UsageError
from zharness.pytest_ranks.fixtures import make_shared_tmp_path
from zharness.pytest_ranks.rank_protocol import RANKS_BASE_DIR
from zharness.world import current_rank, exchange


@dataclass(frozen=True)
class DistributedSettings:
    """Those attributes of a DistributedTest or DistributedFixture that its ranks need."""

    backend: str
    init_distributed: bool
    set_dist_env: bool
    requires_cuda_env: bool


@contextmanager
def prepare_rank(settings: DistributedSettings, *, is_pooled: bool = False) -> Iterator[None]:
    """Context manager that prepares this rank for a DeepSpeed test and restores the environment variables on exit.

    A rank of a pool that keeps its process group gets no new ``MASTER_PORT``, because a changed environment would end
    the pool.
    """
    device = rank_device(current_rank().rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NCCL_DEBUG", raising=False)
        if not (is_pooled and settings.init_distributed):
            patch.setenv("MASTER_PORT", find_common_port())
        deepspeed = import_deepspeed_if_installed(device.type)
        skip_without_devices(deepspeed, device, settings)
        if settings.init_distributed:
            init_distributed(deepspeed, settings)
        if not settings.set_dist_env:
            delete_launcher_variables(patch)
        yield


def find_common_port() -> str:
    """Return on all ranks the same port, which is free on rank 0, for tests that call ``init_process_group``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(exchange(probe.getsockname()[1])[0])


def import_deepspeed_if_installed(device_type: str) -> Any:
    """Import deepspeed with the log level that its tests expect, and return the module; None if it is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    deepspeed = import_deepspeed(device_type)
    log_level = os.environ.get("DEEPSPEED_LOG_LEVEL", os.environ.get("DLTS_LOG_LEVEL", "WARNING"))
    logging.getLogger("DeepSpeed").setLevel(log_level.upper())
    return deepspeed


def skip_without_devices(deepspeed: Any, device: torch.device, settings: DistributedSettings) -> None:
    """Skip the test if there is no accelerator or fewer GPUs than ranks, as DeepSpeed's own classes do."""
    if deepspeed is None or not settings.requires_cuda_env:
        return
    if not deepspeed.accelerator.get_accelerator().is_available():
        pytest.skip("only supported in accelerator environments.")
    if device.type == "cuda" and torch.cuda.device_count() < current_rank().world_size:
        pytest.skip(
            f"not enough GPUs are available: {current_rank().world_size} required, {torch.cuda.device_count()} found"
        )


def init_distributed(deepspeed: Any, settings: DistributedSettings) -> None:
    """Make deepspeed.comm use this rank's process group. Raises UsageError if the test requires another backend."""
    backend = dist.get_backend()
    if settings.backend not in ("", backend):
        raise UsageError(f"got backend {settings.backend!r}; the process group of these ranks uses {backend!r}")
    if deepspeed is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        # The names of the shared memory of DeepSpeed's CPU collectives contain the port, which a pool does not have.
        patch.setenv("MASTER_PORT", find_common_port())
        deepspeed.init_distributed(dist_backend=backend, verbose=False)


def test_directory(request: pytest.FixtureRequest) -> Path:
    """Return the directory that all ranks of one test share."""
    return make_shared_tmp_path(request)


def class_directory(request: pytest.FixtureRequest) -> Path:
    """Return the directory that all tests of one class share, on all ranks. Raises UsageError outside of a rank."""
    node = request.node
    base = node.config.stash.get(RANKS_BASE_DIR, None)
    if base is None:
        raise UsageError("class_tmpdir exists only on ranks, but this test runs in pytest's own process")
    path: Path = base / f"{node.name}-{zlib.crc32(node.nodeid.encode()):08x}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
