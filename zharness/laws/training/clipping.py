"""Define the law training.clip_and_norm: the reported norm is that of all gradients, and clipping uses this norm."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from zharness.engines.protocol import Feature, Reduction
from zharness.law_kit.clipping import judge_clip_factor
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import MeshSupport, ModelScope, Variant
from zharness.law_kit.law_steps import LawSteps
from zharness.law_kit.optimizer_step import ClippedSgdStep
from zharness.law_kit.optimizers import UNIT_LR_SGD
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.setting import SettingSupport
from zharness.laws.training.common import MODELS, variation_law
from zharness.parity import Comparison, Part

CLIP_NORMS = (1e-2, 1e6)
SUM = "sum"  # the variant in which gradients are summed over ranks


def observe_clip_and_norm(ctx: RankContext) -> None:
    """Make one step with each clipping norm, and record weights, gradients and the reported norm."""
    reduction = Reduction.SUM if ctx.variant == SUM else Reduction.MEAN
    for at, clip in enumerate(CLIP_NORMS):
        engine = ctx.build_engine(optimizer=UNIT_LR_SGD, clip=clip, reduction=reduction)
        ctx.record_weights(engine, at, "-before")
        ctx.train(engine, 0, f"loss-{at}")
        ctx.record("grads", engine.full_grads(), at)
        engine.step()
        norm = engine.grad_norm()
        ctx.record("norm", {"norm": torch.tensor(torch.nan if norm is None else norm, dtype=torch.float64)}, at)
        ctx.record_weights(engine, at, "-after")
        engine.close()


def judge_clip_and_norm(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the norm with that of all gradients, and the weights with ``weight - factor * grad``.

    The factor is that by which torch.nn.utils.clip_grad_norm_ would clip.
    """
    for at, clip in enumerate(CLIP_NORMS):
        grads, before = ctx.rank_records("grads", at)[0], ctx.rank_records("masters-before", at)[0]
        factor = yield from judge_clip_factor(ctx, "norm", at, grads, clip)
        after = ctx.rank_records("masters-after", at)
        for name, weight in before.items():
            step = ClippedSgdStep(weight, grads.get(name, torch.zeros_like(weight)), factor)
            rank_values, place = [record[name] for record in after], partial(ctx.location, name, Part.OPTIMIZER, at)
            yield from step.compare_in_pieces(ctx, rank_values, place(0)) or (
                step.compare_weight(place(rank), record) for rank, record in enumerate(rank_values)
            )


LAWS = (
    variation_law(
        "clip_and_norm",
        "the reported norm is that of all gradients together, and the step uses the gradients clipped by it",
        observe_clip_and_norm,
        judge_clip_and_norm,
        models=MODELS,
        features=(Feature.CLIP,),
        weights_stay_integers=False,
        variants=(
            Variant(compares_engine_with_itself=True, model_scope=ModelScope.ANY),
            Variant(SUM, (Feature.SUM,), compares_engine_with_itself=True),
        ),
        steps=LawSteps(observe_clip_and_norm),
        setting_support=SettingSupport.WINDOWS_AND_CALLS,
        kept_because="the only law that clips below the norm and compares the norm",
        mesh_support=MeshSupport.ANY,
    ),
)
