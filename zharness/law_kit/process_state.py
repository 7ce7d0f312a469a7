"""Record and compare the settings and random number generators of the process, which an engine must not change."""

from __future__ import annotations

import gc
import random
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from zharness import torch_private as private
from zharness.device import compute_device_type, is_gpu_requested
from zharness.device.float32_products import read_matmul_precision
from zharness.law_kit.judge_context import JudgeContext
from zharness.parity import Comparison, Part, compare_bitwise

RANDOM_STATE = "random state"
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def read_process_state() -> dict[str, Tensor]:
    """Return, as tensors, the settings of this process and thread and the states of the random number generators."""
    device_type = compute_device_type()
    values = {
        "gradient mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "torch.autocast": torch.is_autocast_enabled(device_type),
        "torch.autocast's cache": torch.is_autocast_cache_enabled(),
        "torch.autocast's dtype": FLOAT_DTYPES.index(torch.get_autocast_dtype(device_type)),
        "default dtype": FLOAT_DTYPES.index(torch.get_default_dtype()),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "precision of matrix products": zlib.crc32(read_matmul_precision().encode()),
        "multithreaded backward": private.is_backward_multithreaded(),
        "garbage collection": gc.isenabled(),
        "number of threads": torch.get_num_threads(),
        "constructors of torch.nn": zlib.crc32(repr(find_constructors()).encode()),
        "Python's random state": zlib.crc32(repr(random.getstate()).encode()),
    }
    settings = {name: torch.tensor(float(value), dtype=torch.float64) for name, value in values.items()}
    on_gpu = {f"{RANDOM_STATE} of the GPU": torch.cuda.get_rng_state().double()} if is_gpu_requested() else {}
    return {**settings, RANDOM_STATE: torch.get_rng_state().double(), **on_gpu}


def find_constructors() -> list[int]:
    """Return the ``id`` of each ``__init__`` that a class of torch.nn defines itself.

    An engine that replaces a constructor keeps the original function alive, so Python gives its ``id`` to no other
    object.
    """
    classes = (value for value in vars(nn).values() if isinstance(value, type))
    return [id(vars(value).get("__init__")) for value in classes]


def compare_process_state(ctx: JudgeContext, label: str, steps: range) -> Iterator[Comparison]:
    """Check that the process state that each rank recorded under ``label`` is the same in all ``steps``."""
    for rank, before in enumerate(ctx.rank_records(label, steps[0])):
        for step in steps[1:]:
            after = ctx.rank_records(label, step)[rank]
            for name, value in before.items():
                yield compare_bitwise(ctx.location(name, Part.GATHER, 0, rank), value, after[name])
