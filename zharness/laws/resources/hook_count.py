"""Define the law resources.hook_count: the number of Python calls in a backward is linear in the parameters.

The number of calls must not grow from step to step either.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zharness.engines.protocol import Feature
from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import MeshSupport
from zharness.law_kit.optimizers import ZERO_LR_SGD
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.resources.common import resource_law
from zharness.mesh import CONTEXT, EXPERT, TENSOR
from zharness.parity import Comparison, Part, compare_within_range
from zharness.parity.comparison import TensorLocation

TRAINED_PARAMETERS = 10

PARAMETER_COUNTS = (300, 500)

CHECKPOINT_COUNTS = (30, 100)

# DeepSpeed's stage 3 may leave the first 100 elements of a model unsharded; layers of this size all cost the same.
LAYER_ELEMENTS = 128

# DeepSpeed's stage 3 makes n^2 calls once, in its second backward, to plan from the order of the first backward.
WARMUP_BACKWARDS = 2


class ScalarParameters(nn.Module):
    """A model with ``count`` parameters of one element; every forward uses all of them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the inputs multiplied by the sum of the parameters."""
        return x.sum() * torch.cat(list(self.weights)).sum()


class CheckpointedLayers(nn.Module):
    """A model with ``count`` layers of one parameter each; activation checkpointing wraps each layer separately."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LayerNorm(LAYER_ELEMENTS, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Run every layer with activation checkpointing, and return the sum of the output."""
        x = x[:, :1].expand(-1, LAYER_ELEMENTS)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.sum()


def add_split_layers(ctx: RankContext, model: nn.Module) -> nn.Module:
    """Add to ``model`` the layers, attention or experts that the mesh splits and no forward calls, and return it."""
    plans = {TENSOR: ctx.config.tp_plan, CONTEXT: ctx.config.cp_plan, EXPERT: ctx.config.ep_plan}
    for name in chain.from_iterable(plans.get(axis, ()) for axis in ctx.config.mesh.axes):
        model.add_module(name, ctx.spec.model(ctx.seed).get_submodule(name))
    return model


def observe_hook_count(ctx: RankContext) -> None:
    """Count the Python calls in a backward on models of several sizes, and in every step of a training."""
    for name, model_class, counts in (
        ("calls", ScalarParameters, PARAMETER_COUNTS),
        ("recomputed", CheckpointedLayers, CHECKPOINT_COUNTS),
    ):
        for count in counts:
            engine = ctx.build_engine_around(add_split_layers(ctx, model_class(count)), optimizer=ZERO_LR_SGD)
            for _ in range(WARMUP_BACKWARDS):
                engine.backward(engine(torch.ones(2, 2, device=ctx.device)))
                engine.zero_grad()
            calls = count_calls(engine.backward, engine(torch.ones(2, 2, device=ctx.device)))
            ctx.record(name, {"calls": scalar(calls)}, count)
            engine.close()
    model = add_split_layers(ctx, ScalarParameters(TRAINED_PARAMETERS))
    engine = ctx.build_engine_around(model, optimizer=ZERO_LR_SGD)

    def train(inputs: Tensor) -> None:
        """Train one optimizer step on ``inputs``."""
        engine.backward(engine(inputs))
        engine.step()
        engine.zero_grad()

    for at in range(TRAINING_STEPS):
        ctx.record("trained", {"calls": scalar(count_calls(train, torch.ones(2, 2, device=ctx.device)))}, at)
    engine.close()


TRAINING_STEPS = 8  # the calls of the last step are compared with those of the first one after the warm-up


def count_calls(function: Callable[[Tensor], None], argument: Tensor) -> int:
    """Return the number of calls of Python and C functions that Python code makes during ``function(argument)``."""
    seen = 0

    def count_call(_frame: FrameType, event: str, _argument: Any) -> None:
        """Count a profiler event if it is a call."""
        nonlocal seen
        seen += event in ("call", "c_call")

    before, collects = sys.getprofile(), gc.isenabled()
    # A garbage collection would run finalizers of an earlier engine's objects, and their calls would be counted.
    gc.disable()
    sys.setprofile(count_call)
    try:
        function(argument)
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return seen


def judge_hook_count(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that the number of calls grows linearly with the number of parameters and of checkpoints.

    From 300 to 500 parameters, the calls may double. A number of a + bn calls grows less, even if up to 100 parameters
    cost less than the others, such as parameters that DeepSpeed's stage 3 does not partition. If the number of calls
    were a + bn + cn^2, the law would fail for c > (a + 100b) / 70,000.

    If the number of checkpoints grows by the factor 100 / 30, the calls may grow by this factor. With cn^2 further
    calls the law would fail for c > a / 3,000. As a is a few hundred calls, and b a few hundred at most, one call for
    every pair of parameters or checkpoints is far above both limits.

    The number of calls in the last training step may exceed that in an earlier step by less than the number of
    parameters.
    """
    for rank in range(ctx.world_size):
        early, late = (ctx.rank_records("trained", at)[rank]["calls"] for at in (WARMUP_BACKWARDS, TRAINING_STEPS - 1))
        yield compare_within_range(
            ctx.location("trained", Part.REDUCTION, 0, rank), scalar(0), late, early + TRAINED_PARAMETERS - 1
        )
    for rank in range(ctx.world_size):
        some, many = (ctx.rank_records("calls", count)[rank]["calls"] for count in PARAMETER_COUNTS)
        yield compare_calls(ctx.location("calls", Part.REDUCTION, 0, rank), many, 2 * some)
        some, many = (ctx.rank_records("recomputed", count)[rank]["calls"] for count in CHECKPOINT_COUNTS)
        allowed = some * CHECKPOINT_COUNTS[1] / CHECKPOINT_COUNTS[0]
        yield compare_calls(ctx.location("recomputed", Part.REDUCTION, 0, rank), many, allowed)


def compare_calls(place: TensorLocation, calls: Tensor, allowed: Tensor) -> Comparison:
    """Compare a number of calls with the range from 0 to ``allowed``."""
    comparison = compare_within_range(place, torch.zeros_like(allowed), calls, allowed)
    return add_hint(comparison, "the calls grow faster than the model")


LAWS = (
    resource_law(
        "hook_count",
        "a backward makes O(parameters) Python calls, with and without checkpointing, and no more in later steps",
        observe_hook_count,
        judge_hook_count,
        Feature.STEADINESS,
        kept_because="the only law that counts calls instead of comparing numbers",
        mesh_support=MeshSupport.OWN_MODELS,
    ),
)
