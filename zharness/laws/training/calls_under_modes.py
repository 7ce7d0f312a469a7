"""Define the law training.calls_under_modes: the modes of the caller do not change what a step computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from zharness.device import compute_device_type
from zharness.engines.protocol import Engine, Feature
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.optimizers import ADAMW
from zharness.law_kit.rank_actions import eval_mode
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.law_kit.record_comparisons import compare_records
from zharness.laws.training.common import variation_law
from zharness.parity import Comparison, Part, Tier

MODES: Mapping[str, Callable[[Engine], AbstractContextManager[object]]] = {
    "autocast": lambda _engine: torch.autocast(compute_device_type(), torch.bfloat16),
    "no_grad": lambda _engine: torch.no_grad(),
    "eval": eval_mode,
}
CLIP = 2.0**-6  # far below the norm of the gradients, so that it clips
STEPS = 2
PLAIN, CHANGED = "plain", "changed"


def observe_calls_under_modes(ctx: RankContext) -> None:
    """Train two engines in the same way; call the second engine in the variant's mode, except forward and backward."""
    for label, make_mode in ((PLAIN, lambda _engine: nullcontext()), (CHANGED, MODES[ctx.variant])):
        engine = ctx.build_engine(optimizer=ADAMW, clip=CLIP)
        for step in range(STEPS):
            engine.backward(ctx.loss(engine, step, f"loss-{label}"))
            with make_mode(engine):
                ctx.record(f"grads-{label}", engine.full_grads(), step)
                engine.step()
                norm = engine.grad_norm()
                ctx.record(f"norm-{label}", {} if norm is None else {"norm": scalar(norm)}, step)
                engine.zero_grad()
                ctx.record_training_state(engine, step, f"-{label}")
        engine.close()


def judge_calls_under_modes(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare losses, gradients, norms, weights and optimizer state of both engines bitwise."""
    parts = {"loss": Part.FORWARD, "grads": Part.REDUCTION, "norm": Part.REDUCTION}
    parts |= dict.fromkeys(("params", "masters", "state"), Part.OPTIMIZER)
    for step in range(STEPS):
        for what, part in parts.items():
            yield from compare_records(ctx, f"{what}-{PLAIN}", f"{what}-{CHANGED}", step, step, part)


LAWS = (
    variation_law(
        "calls_under_modes",
        "step, norm and gradients are the same inside the caller's autocast or no_grad, or in evaluation mode",
        observe_calls_under_modes,
        judge_calls_under_modes,
        tier=Tier.EXACT,
        weights_stay_integers=False,
        features=(Feature.CLIP, Feature.PARAM_GROUPS, Feature.SCHEDULE),
        variants=tuple(Variant(name, compares_engine_with_itself=True) for name in MODES),
        sets_autocast=True,
        kept_because="the only law that makes a step inside a mode that the caller has set",
    ),
)
