"""Implement the helper functions that DeepSpeed's test files import from ``unit.common``, under the same names."""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from zharness.device import compute_device_type
from zharness.engines.deepspeed_process import import_deepspeed
from zharness.world import assert_together, exchange

_assert_close = torch.testing.assert_close  # the test that calls it chooses the tolerances


def get_test_path(filename: str) -> str:
    """Search the folder of the calling test file, then its parent folders, for ``filename``, and return the path.

    If no folder contains the file, return the path that the file would have next to the calling test file.
    """
    folder = Path(inspect.stack()[1].filename).parent
    existing = (path / filename for path in (folder, *folder.parents) if (path / filename).exists())
    return str(next(existing, folder / filename))


def get_xdist_worker_id() -> int | None:
    """Return the number of this pytest-xdist worker; None if this process is not a worker."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    return None if worker is None else int(worker.removeprefix("gw"))


def get_master_port(base_port: int = 29500, port_range_size: int = 1000) -> str:
    """Return the first free port of this process's range of ports; each pytest-xdist worker has its own range.

    Ranks that call this function at the same time get the same port. Raises OSError if no port in the range is free.
    """
    first = base_port + port_range_size * (get_xdist_worker_id() or 0)
    for port in range(first, first + port_range_size):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return str(port)
    raise OSError(f"no port from {first} to {first + port_range_size - 1} is free")


def get_start_method_for_platform(preferred: str = "forkserver") -> str:
    """Return the preferred multiprocessing start method if the platform supports it, else ``spawn``."""
    return preferred if preferred in multiprocessing.get_all_start_methods() else "spawn"


def is_rocm_pytorch() -> bool:
    """Return whether torch was built for AMD's GPUs."""
    return getattr(torch.version, "hip", None) is not None


def set_accelerator_visible() -> None:
    """Rotate ``CUDA_VISIBLE_DEVICES`` by the number of the pytest-xdist worker, so that workers use different GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(index) for index in range(torch.cuda.device_count())] if visible is None else visible.split(",")
    first = (get_xdist_worker_id() or 0) % max(len(devices), 1)
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([*devices[first:], *devices[:first]])


def get_accelerator() -> Any:
    """Return DeepSpeed's accelerator. Raises MissingEngine if DeepSpeed is not installed."""
    return import_deepspeed(compute_device_type()).accelerator.get_accelerator()


def preferred_dtype() -> torch.dtype:
    """Return the first of bfloat16, float16 and float32 that DeepSpeed's accelerator supports."""
    accelerator = get_accelerator()
    if accelerator.is_bf16_supported():
        return torch.bfloat16
    return torch.float16 if accelerator.is_fp16_supported() else torch.float32


class EnableDeterminism:
    """Context manager that seeds all random generators and makes torch use deterministic algorithms.

    The seed of the generators is ``seed`` plus the local rank. On exit, the context manager restores the states of the
    generators, torch's setting and the environment variables.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed + int(os.environ.get("LOCAL_RANK", "0"))
        self._restore_callbacks: list[Callable[[], object]] = []

    def __enter__(self) -> EnableDeterminism:
        before = os.environ.copy()
        variables = ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG")
        self._restore_callbacks = [
            functools.partial(random.setstate, random.getstate()),
            functools.partial(np.random.set_state, np.random.get_state()),
            functools.partial(torch.set_rng_state, torch.get_rng_state()),
            functools.partial(
                torch.use_deterministic_algorithms,
                torch.are_deterministic_algorithms_enabled(),
                warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            *(functools.partial(set_variable, name, before.get(name)) for name in variables),
        ]
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)
        torch.manual_seed(self.seed)
        os.environ.update(CUDA_LAUNCH_BLOCKING="1", CUBLAS_WORKSPACE_CONFIG=":16:8")
        torch.use_deterministic_algorithms(True)
        return self

    def __exit__(self, *_: object) -> None:
        while self._restore_callbacks:
            self._restore_callbacks.pop()()


def set_variable(name: str, value: str | None) -> None:
    """Set an environment variable to ``value``, or remove the variable if ``value`` is None."""
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value


def enable_determinism(seed: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that makes every call of a function run inside ``EnableDeterminism(seed)``."""

    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with EnableDeterminism(seed):
                return function(*args, **kwargs)

        return wrapper

    return decorator


def reduce_boolean_flags(flag: bool, op: Callable[[list[bool]], bool] = all) -> bool:
    """Apply ``op`` to the list of all ranks' flags and return the result; without a process group, return ``flag``."""
    return op(exchange(bool(flag))) if dist.is_initialized() else flag


def allclose_on_all_ranks(actual: Any, expected: Any, assert_message: str | None = None, **kwargs: Any) -> None:
    """Call ``torch.testing.assert_close`` on every rank, and raise AssertionError on all ranks if any call fails.

    The error names the ranks on which ``assert_close`` failed.
    """
    message = ""
    try:
        _assert_close(actual, expected, **kwargs)
    except AssertionError as error:
        message = f"{assert_message or 'Tensors are not close on all ranks.'} {error}"
    if dist.is_initialized():
        assert_together(not message, message)
    elif message:
        raise AssertionError(message)
