"""The law of work: how many functions Python calls in a training, by the number of tensors and of trainings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zharness.checks.accumulation import FROZEN
from zharness.checks.bench import Bench, number
from zharness.checks.trial import Trial
from zharness.parity import Comparison, Part, between

COUNTS = (10, 100, 1000)
REGIONS = (10, 30, 100)
LEARNT = 2  # backwards; in the second DeepSpeed's stage 3 plans, with n^2 calls once, by the order of the first


class Pointwise(nn.Module):
    """``count`` parameters of one element, all read in one forward."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * torch.cat(list(self.weights)).sum()


class Recomputed(nn.Module):
    """``count`` layers of one parameter, each in a checkpoint of its own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LayerNorm(2, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.sum()


def observe_hook_count(bench: Bench) -> None:
    for name, model, counts in (("calls", Pointwise, COUNTS), ("recomputed", Recomputed, REGIONS)):
        for count in counts:
            engine = bench.around(model(count), optimizer=FROZEN)
            for _ in range(LEARNT):
                engine.backward(engine(torch.ones(2, 2)))
                engine.zero_grad()
            found = calls(engine.backward, engine(torch.ones(2, 2)))
            bench.record(name, {"calls": number(found)}, count)
            engine.close()
    engine = bench.around(Pointwise(COUNTS[0]), optimizer=FROZEN)

    def train(inputs: Tensor) -> None:
        engine.backward(engine(inputs))
        engine.step()
        engine.zero_grad()

    for at in range(GROWN):
        bench.record("trained", {"calls": number(calls(train, torch.ones(2, 2)))}, at)
    engine.close()


GROWN = 8  # trainings with one engine, of which the last makes no more calls than the one after those that may learn


def calls(backward: Callable[[Tensor], None], loss: Tensor) -> int:
    """How many functions, of Python or of C, Python code calls while ``backward(loss)`` runs."""
    seen = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        backward(loss)
    finally:
        sys.setprofile(before)
    return seen


def judge_hook_count(trial: Trial) -> Iterator[Comparison]:
    """O(parameters): from 100 to 1000 tensors, less than one more call for each further tensor than from 10 to 100.

    So too with as many checkpoints, at 10, 30 and 100 of them. One, because lists and buckets grow in steps: what they
    cost is a part of a call for each tensor. With a + bn + cn^2 calls the two slopes differ by c times (1000 - 10), for
    checkpoints c times (100 - 10), so what makes one call for every pair of them is far above it. Nor do calls grow
    with the trainings of one engine: by less than one for each tensor.
    """
    for rank in range(trial.world_size):
        early, late = (trial.copies("trained", at)[rank]["calls"] for at in (LEARNT, GROWN - 1))
        yield between(trial.place("trained", Part.REDUCTION, 0, rank), number(0), late, early + COUNTS[0] - 1)
    for name, counts in (("calls", COUNTS), ("recomputed", REGIONS)):
        for rank in range(trial.world_size):
            few, some, many = (trial.copies(name, count)[rank]["calls"] for count in counts)
            each = (some - few) / (counts[1] - counts[0])
            allowed = some + (each + 1) * (counts[2] - counts[1])
            yield between(trial.place(name, Part.REDUCTION, 0, rank), torch.zeros_like(allowed), many, allowed)
