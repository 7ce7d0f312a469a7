"""Define the law mesh.expert_not_finite: an expert whose gradient overflows has one outcome on all ranks.

On ep, a rank holds only its own experts, so each rank detects only an overflow of its own experts.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from zharness.engines.protocol import Feature
from zharness.law_kit.law import Variant
from zharness.law_kit.optimizers import UNIT_LR_SGD
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.circumstances.not_finite import CLIPPED, Outcome, step_and_classify
from zharness.laws.mesh import CLIP, mesh_law
from zharness.laws.mesh_not_finite import VALUES, judge_one_coordinate
from zharness.mesh import EXPERT


def overflow_on_last_rank(ctx: RankContext, module: nn.Module, value: float) -> None:
    """Set an expert's gradient to ``value`` on the only ranks that hold the expert: the last of ep, and its copies."""
    place = ctx.config.mesh.coordinates(ctx.rank, ctx.world_size).get(EXPERT, 0)
    if place == ctx.config.mesh.size(EXPERT) - 1:
        weights = [param for name, param in module.named_parameters() if "experts." in name and param.dim() == 2]
        weights[0].register_hook(partial(torch.full_like, fill_value=value))  # type: ignore[no-untyped-call]


def observe_expert(ctx: RankContext) -> None:
    """Make a step in which the gradient of one expert is infinite or NaN."""
    clip = CLIP if ctx.variant.endswith(CLIPPED) else None
    engine = ctx.build_engine(optimizer=UNIT_LR_SGD, clip=clip)
    overflow_on_last_rank(ctx, engine.module, VALUES[ctx.variant.removesuffix(CLIPPED)])
    ctx.record_weights(engine, 0)
    ctx.train(engine, step=0)
    ctx.record("grads", engine.full_grads())
    outcome = step_and_classify(engine)
    norm = engine.grad_norm() if clip is not None and outcome is Outcome.APPLIED else None
    ctx.record("outcome", {"outcome": scalar(outcome)} | ({} if norm is None else {"norm": scalar(norm)}))
    ctx.record_weights(engine, 1)
    engine.close()


LAWS = (
    mesh_law(
        "expert_not_finite",
        "all ranks apply, all skip or all refuse a gradient that is infinite or NaN in one expert alone",
        observe_expert,
        judge_one_coordinate,
        models=("routed",),
        variants=tuple(
            Variant(f"{value}{suffix}", (Feature.CLIP,) if suffix else ())
            for value in VALUES
            for suffix in ("", CLIPPED)
        ),
        kept_because="the only law of a gradient that is not finite in an expert that only some ranks hold",
    ),
)
