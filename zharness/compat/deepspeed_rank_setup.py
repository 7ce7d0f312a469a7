"""What a rank needs before the body of a DeepSpeed test: variables, DeepSpeed's communication, shared directories."""

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

from zharness.engines.deepspeed_process import import_deepspeed
from zharness.errors import UsageError
from zharness.pytest_ranks.fixtures import make_shared_tmp_path
from zharness.pytest_ranks.rank_protocol import RANKS_BASE_DIR
from zharness.world import current_rank, exchange
from zharness.world.rank import rank_device

# What launchers set, and what a test with set_dist_env = False does not get.
LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True)
class DistributedSettings:
    """The attributes of a test class that matter inside its ranks."""

    backend: str
    init_distributed: bool
    set_dist_env: bool
    requires_cuda_env: bool


@contextmanager
def prepare_rank(settings: DistributedSettings, *, reuses_rank: bool = False) -> Iterator[None]:
    """This rank as a DeepSpeed test expects it, until the test is over. ``lives_on`` means for the test after as well.

    A rank that lives on and keeps its group gets no port to form another: what changes its environment ends it.
    """
    me = current_rank()
    device = rank_device(me.rank, me.world_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NCCL_DEBUG", raising=False)
        if not (reuses_rank and settings.init_distributed):
            patch.setenv("MASTER_PORT", master_port())
        deepspeed = import_deepspeed_if_installed(device.type)
        skip_without_devices(deepspeed, device, settings)
        if settings.init_distributed:
            init_distributed(deepspeed, settings)
        if not settings.set_dist_env:
            for name in LAUNCHER_VARIABLES:
                patch.delenv(name, raising=False)
        yield


def master_port() -> str:
    """A port that was free a moment ago, the same on all ranks, for tests that form a group from the environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(exchange(probe.getsockname()[1])[0])


def import_deepspeed_if_installed(device_type: str) -> Any:
    """The deepspeed module, as talkative as the test files expect it; None where it is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    deepspeed = import_deepspeed(device_type)
    wanted = os.environ.get("DEEPSPEED_LOG_LEVEL", os.environ.get("DLTS_LOG_LEVEL", "WARNING"))
    logging.getLogger("DeepSpeed").setLevel(wanted.upper())
    return deepspeed


def skip_without_devices(deepspeed: Any, device: torch.device, settings: DistributedSettings) -> None:
    """Skip on every rank alike where DeepSpeed's own classes do, for want of an accelerator or of enough devices."""
    if deepspeed is None or not settings.requires_cuda_env:
        return
    if not deepspeed.accelerator.get_accelerator().is_available():
        pytest.skip("only supported in accelerator environments.")
    if device.type == "cuda" and torch.cuda.device_count() < current_rank().world_size:
        pytest.skip(
            f"not enough GPUs are available: {current_rank().world_size} required, {torch.cuda.device_count()} found"
        )


def init_distributed(deepspeed: Any, settings: DistributedSettings) -> None:
    """Have deepspeed.comm use the group of the ranks. Raises UsageError for a backend that it has not."""
    backend = dist.get_backend()
    if settings.backend not in ("", backend):
        raise UsageError(f"got backend {settings.backend!r}; the group of these ranks is {backend!r}")
    if deepspeed is not None:
        deepspeed.init_distributed(dist_backend=backend, verbose=False)


def test_directory(request: pytest.FixtureRequest) -> Path:
    """The directory that the ranks of one test share."""
    return make_shared_tmp_path(request)


def class_directory(request: pytest.FixtureRequest) -> Path:
    """The directory that the ranks of all tests of one class share."""
    node = request.node
    base = node.config.stash.get(RANKS_BASE_DIR, None)
    if base is None:
        raise UsageError("class_tmpdir is a directory of ranks; this test runs in pytest's own process")
    path: Path = base / f"{node.name}-{zlib.crc32(node.nodeid.encode()):08x}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
