"""Define the law mesh.buffers: a buffer that forwards in training mode change is each rank's own on every mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines.protocol import Feature
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.optimizers import ZERO_LR_SGD
from zharness.law_kit.rank_actions import eval_mode
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.mesh import SPLIT_IN_PAIRS, mesh_law
from zharness.parity import Comparison, Part, compare_bitwise
from zharness.workload.nested_tensors import collect_tensors

STEPS = 2
EVALUATED = STEPS  # the number of the micro-batch of the evaluation, and of the buffers after it
SUM, COUNT = "seen_sum", "seen_count"  # like a running statistic of batch norm, and its number of batches


def observe_buffers(ctx: RankContext) -> None:
    """Make two steps with a model that adds its inputs to a buffer, evaluate, and record the buffers each time.

    The rate is 0: weights that grow could make the gradients of the second step infinite, which an engine may refuse.
    """
    ctx.record("case", {"own": scalar(ctx.capabilities.refusal(Feature.RANK_BUFFERS) is None)})
    engine = ctx.build_engine_around(add_buffers(ctx.spec.model(ctx.seed)), optimizer=ZERO_LR_SGD)
    for step in range(STEPS):
        ctx.train(engine, step)
        engine.step()
        engine.zero_grad()
        ctx.record("buffers", read_buffers(engine.module), step)
    with eval_mode(engine), torch.no_grad():
        ctx.loss(engine, EVALUATED)
    ctx.record("buffers", read_buffers(engine.module), EVALUATED)
    engine.close()


def add_buffers(model: nn.Module) -> nn.Module:
    """Give ``model`` buffers that each forward in training mode adds its input to, and return the model."""
    model.register_buffer(SUM, torch.zeros(()))
    model.register_buffer(COUNT, torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def add_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Add the sum of the first input, and one, to the buffers of a module in training mode."""
        if module.training:
            module.get_buffer(SUM).add_(sum_first_input((args, kwargs)))
            module.get_buffer(COUNT).add_(1)

    model.register_forward_pre_hook(add_inputs, with_kwargs=True)
    return model


def sum_first_input(inputs: Any) -> Tensor:
    """Return the sum of the first tensor within ``inputs``, in float32."""
    return collect_tensors(inputs)[0].float().sum()


def read_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers that ``add_buffers`` added."""
    return {name: module.get_buffer(name).clone() for name in (SUM, COUNT)}


def judge_buffers(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare each rank's buffers bitwise with those of plain PyTorch on the micro-batches of its data coordinate.

    If the engine does not claim that ranks keep buffers of their own, those of the other data coordinates are compared
    after the first step alone: a later forward may begin with the buffers of rank 0.
    """
    ranks_keep_buffers = bool(ctx.rank_records("case")[0]["own"])
    for rank in range(ctx.world_size):
        at = ctx.data_coordinate(rank)
        total = torch.zeros(())
        for number in range(STEPS + 1):
            if number < STEPS:
                total = total + sum_first_input(ctx.baseline.batch(at, number).inputs)
            if number and at and not ranks_keep_buffers:
                break
            found = ctx.rank_records("buffers", number)[rank]
            count = torch.tensor(min(number + 1, STEPS))
            for name, wanted in ((SUM, total), (COUNT, count)):
                yield compare_bitwise(ctx.location(name, Part.FORWARD, number, rank), wanted, found[name])


LAWS = (
    mesh_law(
        "buffers",
        "buffers that each forward in training mode changes are those of the rank's own micro-batches on every mesh",
        observe_buffers,
        judge_buffers,
        models=SPLIT_IN_PAIRS,
        kept_because="the only law of a mesh with a buffer that forwards change, as those of batch norm",
    ),
)
