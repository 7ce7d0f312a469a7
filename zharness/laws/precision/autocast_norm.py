"""Define the law precision.autocast_norm: under torch_autocast, the reported norm equals plain PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zharness.engines.protocol import Feature
from zharness.law_kit.clipping import hint_missing_norm
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import ModelScope, Variant
from zharness.law_kit.optimizers import ZERO_LR_SGD
from zharness.law_kit.rank_context import RankContext
from zharness.laws.precision.common import (
    AUTOCAST_OPTIONS,
    LOW_DTYPE,
    SAFE_MODULES,
    WIDE_DTYPE,
    compute_baseline_locals,
    judge_reduced_gradients,
    low_precision_parameters,
    precision_law,
)
from zharness.parity import Comparison, Part, compare_within_bound
from zharness.parity.bounds import mean_and_bound, unit_roundoff


def observe_norm(ctx: RankContext) -> None:
    """Train one step with clipping under torch_autocast, and record the gradients and the reported norm."""
    engine = ctx.build_engine(optimizer=ZERO_LR_SGD, options=AUTOCAST_OPTIONS, clip=0.5)
    engine.backward(ctx.loss(engine, 0))
    ctx.record("grads", engine.full_grads())
    engine.step()
    norm = engine.grad_norm()
    ctx.record("norm", {"norm": torch.tensor(float("nan") if norm is None else norm, dtype=torch.float64)})
    engine.close()


def judge_norm(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the reported norm with that of plain PyTorch's gradients.

    By the triangle inequality, the two norms differ by at most the norm of the gradients' bounds, plus the rounding of
    the norm itself.
    """
    expected, low = compute_baseline_locals(ctx), low_precision_parameters(ctx.baseline, SAFE_MODULES)
    yield from judge_reduced_gradients(ctx, "grads", expected, low)
    means, bounds = [], []
    for name in expected[0].grads:
        mean, bound = mean_and_bound(
            [local.grads[name].double() for local in expected], LOW_DTYPE if name in low else WIDE_DTYPE
        )
        means.append(mean.flatten())
        bounds.append(bound.flatten())
    norm = torch.cat(means).norm()
    # The engine computes the norm as the root of a sum of squares in fp32 or wider.
    bound = torch.cat(bounds).norm() + norm * len(torch.cat(means)) * unit_roundoff(WIDE_DTYPE)
    for rank, record in enumerate(ctx.rank_records("norm")):
        yield hint_missing_norm(
            compare_within_bound(ctx.location("norm", Part.OPTIMIZER, rank=rank), norm, record["norm"], bound)
        )


LAWS = (
    precision_law(
        "autocast_norm",
        "under torch_autocast the reported norm is the norm of plain PyTorch's gradients: bf16 has no loss scale",
        observe_norm,
        judge_norm,
        features=(Feature.AUTOCAST, Feature.CLIP),
        variants=(Variant(model_scope=ModelScope.ANY),),
        sets_autocast=True,
        kept_because="the only norm under autocast: a released engine divided it by a loss scale that bf16 lacks",
        weights_stay_integers=True,
    ),
)
