"""The helpers that DeepSpeed's test files import beside its classes, with the same names and meanings."""

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

from zharness.engines.deepspeed_process import import_deepspeed
from zharness.world import assert_together, exchange
from zharness.world.rank import is_gpu_requested

_assert_close = torch.testing.assert_close  # its tolerances come from the caller: here nobody knows what is computed


def get_test_path(filename: str) -> str:
    """The path of a file that lies beside the calling test file, or in the nearest directory above that has it.

    Where none has it, the path beside the caller.
    """
    beside = Path(inspect.stack()[1].filename).parent
    found = (folder / filename for folder in (beside, *beside.parents) if (folder / filename).exists())
    return str(next(found, beside / filename))


def get_xdist_worker_id() -> int | None:
    """The number of this pytest-xdist worker; None outside of one."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    return None if worker is None else int(worker.removeprefix("gw"))


def get_master_port(base_port: int = 29500, port_range_size: int = 1000) -> str:
    """The first port that is free now, in a range of its own for each pytest-xdist worker.

    Raises OSError when none is. Ranks that ask at the same time are told the same port.
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
    """The preferred way to start processes where the platform has it, else ``spawn``."""
    return preferred if preferred in multiprocessing.get_all_start_methods() else "spawn"


def is_rocm_pytorch() -> bool:
    """Whether torch was built for AMD's GPUs."""
    return getattr(torch.version, "hip", None) is not None


def set_accelerator_visible() -> None:
    """Put another GPU first for each pytest-xdist worker, so that workers do not crowd on one."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = [str(index) for index in range(torch.cuda.device_count())] if listed is None else listed.split(",")
    first = (get_xdist_worker_id() or 0) % max(len(found), 1)
    if found:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([*found[first:], *found[:first]])


def accelerator() -> Any:
    """DeepSpeed's accelerator. Raises MissingEngine where DeepSpeed is not installed."""
    device = "cuda" if is_gpu_requested() else "cpu"
    return import_deepspeed(device).accelerator.get_accelerator()


def preferred_dtype() -> torch.dtype:
    """bfloat16, float16 or float32: the first that DeepSpeed's accelerator supports."""
    if accelerator().is_bf16_supported():
        return torch.bfloat16
    return torch.float16 if accelerator().is_fp16_supported() else torch.float32


class EnableDeterminism:
    """Within it, random numbers follow from ``seed`` and the rank, and torch uses deterministic algorithms only."""

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
            functools.partial(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()),
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
    """Set a variable of the environment; None removes it."""
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value


def enable_determinism(seed: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: the function runs within ``EnableDeterminism(seed)``."""

    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with EnableDeterminism(seed):
                return function(*args, **kwargs)

        return wrapper

    return decorator


def reduce_boolean_flags(flag: bool, op: Callable[[list[bool]], bool] = all) -> bool:
    """``op`` of every rank's flag, the same on all; ``flag`` itself where there is no process group."""
    return op(exchange(bool(flag))) if dist.is_initialized() else flag


def allclose_on_all_ranks(actual: Any, expected: Any, assert_message: str | None = None, **kwargs: Any) -> None:
    """torch.testing.assert_close on which all ranks fail together. Raises AssertionError that names the ranks."""
    trouble = ""
    try:
        _assert_close(actual, expected, **kwargs)
    except AssertionError as error:
        trouble = f"{assert_message or 'Tensors are not close on all ranks.'} {error}"
    if dist.is_initialized():
        assert_together(not trouble, trouble)
    elif trouble:
        raise AssertionError(trouble)
