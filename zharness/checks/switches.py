"""What is switched for a whole process, thread or generator, and so is its caller's to switch."""

from __future__ import annotations

import gc
import random
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from zharness.checks.trial import Trial
from zharness.parity import Comparison, Part, identical
from zharness.reference import torch_private as private

RANDOM_STATE = "random state"
PRECISIONS = ("highest", "high", "medium")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def switches() -> dict[str, Tensor]:
    """Those of this process and thread as they are now, and the state of its random generators, as numbers."""
    told = {
        "recording of gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "torch.autocast": torch.is_autocast_enabled("cpu"),
        "torch.autocast's cache": torch.is_autocast_cache_enabled(),
        "torch.autocast's dtype": FLOATS.index(torch.get_autocast_dtype("cpu")),
        "default dtype": FLOATS.index(torch.get_default_dtype()),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "detection of anomalies": torch.is_anomaly_enabled(),
        "precision of matrix products": PRECISIONS.index(torch.get_float32_matmul_precision()),
        "threads of a backward": private.backward_has_threads(),
        "collection of garbage": gc.isenabled(),
        "number of threads": torch.get_num_threads(),
        "Python's random state": zlib.crc32(repr(random.getstate()).encode()),
    }
    found = {name: torch.tensor(float(value), dtype=torch.float64) for name, value in told.items()}
    return {**found, RANDOM_STATE: torch.get_rng_state().double()}


def left_alone(trial: Trial, label: str, steps: range) -> Iterator[Comparison]:
    """On every rank the switches recorded under ``label`` are at each of ``steps`` what they were at the first."""
    for rank, before in enumerate(trial.copies(label, steps[0])):
        for step in steps[1:]:
            now = trial.copies(label, step)[rank]
            for name, value in before.items():
                yield identical(trial.place(name, Part.GATHER, 0, rank), value, now[name])
