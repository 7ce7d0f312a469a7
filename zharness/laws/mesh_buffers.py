"""Define the law mesh.buffers: each rank's forwards in training mode change the rank's own buffers, on every mesh."""

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
EVALUATED = STEPS  # the number of the evaluation's micro-batch, and of the buffers recorded after it
SUM, COUNT = "seen_sum", "seen_count"  # like a running statistic of batch norm, and its number of batches


def observe_buffers(ctx: RankContext) -> None:
    """Make two steps with a model that adds its inputs to a buffer, evaluate, and record the buffers each time.

    The learning rate is 0: growing weights could make the gradients of the second step infinite, and an engine may
    refuse infinite gradients.
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
    """Add buffers to ``model``, to which each forward in training mode adds its input, and return the model."""
    model.register_buffer(SUM, torch.zeros(()))
    model.register_buffer(COUNT, torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def add_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """In training mode, add the sum of the first input to the buffer SUM, and 1 to the buffer COUNT."""
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

    If the engine does not claim that ranks keep their own buffers, buffers of data coordinates other than 0 are
    compared after the first step only: a later forward may start with the buffers of rank 0.
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
        "on every mesh, buffers that forwards in training mode change depend on the rank's own micro-batches alone",
        observe_buffers,
        judge_buffers,
        models=SPLIT_IN_PAIRS,
        kept_because="the only law of a mesh with a buffer that forwards change, as in batch norm",
    ),
)
