"""The law of hook counts: how many Python functions a training calls, by number of parameters and of steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zharness.engines.protocol import Feature
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.optimizers import ZERO_LR_SGD
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.resources.common import resource_law
from zharness.parity import Comparison, Part, compare_within_range

PARAMETER_COUNTS = (10, 100, 1000)

CHECKPOINT_COUNTS = (10, 30, 100)

WARMUP_BACKWARDS = (
    2  # backwards; in the second DeepSpeed's stage 3 plans, with n^2 calls once, by the order of the first
)


class ScalarParameters(nn.Module):
    """``count`` parameters of one element, all read in one forward."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * torch.cat(list(self.weights)).sum()


class CheckpointedLayers(nn.Module):
    """``count`` layers of one parameter, each in a checkpoint of its own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LayerNorm(2, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.sum()


def observe_hook_count(ctx: RankContext) -> None:
    for name, model, counts in (
        ("calls", ScalarParameters, PARAMETER_COUNTS),
        ("recomputed", CheckpointedLayers, CHECKPOINT_COUNTS),
    ):
        for count in counts:
            engine = ctx.build_engine_around(model(count), optimizer=ZERO_LR_SGD)
            for _ in range(WARMUP_BACKWARDS):
                engine.backward(engine(torch.ones(2, 2)))
                engine.zero_grad()
            found = count_calls(engine.backward, engine(torch.ones(2, 2)))
            ctx.record(name, {"calls": scalar(found)}, count)
            engine.close()
    engine = ctx.build_engine_around(ScalarParameters(PARAMETER_COUNTS[0]), optimizer=ZERO_LR_SGD)

    def train(inputs: Tensor) -> None:
        engine.backward(engine(inputs))
        engine.step()
        engine.zero_grad()

    for at in range(TRAINING_STEPS):
        ctx.record("trained", {"calls": scalar(count_calls(train, torch.ones(2, 2)))}, at)
    engine.close()


TRAINING_STEPS = (
    8  # trainings with one engine, of which the last makes no more calls than the one after those that may learn
)


def count_calls(function: Callable[[Tensor], None], argument: Tensor) -> int:
    """How many functions, of Python or of C, Python code calls while ``backward(loss)`` runs."""
    seen = 0

    def count_call(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        function(argument)
    finally:
        sys.setprofile(before)
    return seen


def judge_hook_count(ctx: JudgeContext) -> Iterator[Comparison]:
    """O(parameters): from 100 to 1000 tensors, less than one more call for each further tensor than from 10 to 100.

    So too with as many checkpoints, at 10, 30 and 100 of them. One, because lists and buckets grow in steps: what they
    cost is a part of a call for each tensor. With a + bn + cn^2 calls the two slopes differ by c times (1000 - 10), for
    checkpoints c times (100 - 10), so what makes one call for every pair of them is far above it. Nor do calls grow
    with the trainings of one engine: by less than one for each tensor.
    """
    for rank in range(ctx.world_size):
        early, late = (ctx.rank_records("trained", at)[rank]["calls"] for at in (WARMUP_BACKWARDS, TRAINING_STEPS - 1))
        yield compare_within_range(
            ctx.location("trained", Part.REDUCTION, 0, rank), scalar(0), late, early + PARAMETER_COUNTS[0] - 1
        )
    for name, counts in (("calls", PARAMETER_COUNTS), ("recomputed", CHECKPOINT_COUNTS)):
        for rank in range(ctx.world_size):
            few, some, many = (ctx.rank_records(name, count)[rank]["calls"] for count in counts)
            each = (some - few) / (counts[1] - counts[0])
            allowed = some + (each + 1) * (counts[2] - counts[1])
            yield compare_within_range(
                ctx.location(name, Part.REDUCTION, 0, rank), torch.zeros_like(allowed), many, allowed
            )


LAWS = (
    resource_law(
        "hook_count",
        "a backward makes O(parameters) Python calls, with checkpoints and without, and a later one no more",
        observe_hook_count,
        judge_hook_count,
        Feature.STEADINESS,
        kept_because="the only law that counts work instead of numbers",
    ),
)
