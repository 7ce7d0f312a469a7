"""Define the law training.looked_at: reading an engine's state does not change its training."""

from __future__ import annotations

from collections.abc import Iterator

from zharness.engines.protocol import Engine, OptimizerSpec
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.rank_actions import collect_training_state
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.record_comparisons import compare_records
from zharness.law_kit.setting import SettingSupport
from zharness.laws.training.common import variation_law
from zharness.parity import Comparison, Part, Tier

ADAMW = OptimizerSpec(name="adamw", args={"lr": 1e-2}, schedule=(1.0, 0.5))

STEPS = 2


def observe_looked_at(ctx: RankContext) -> None:
    """Train two engines in the same way, and read everything from one of them between all calls.

    The tensors that were read after the first step are recorded immediately and again at the end: a read returns
    copies, which later steps must not change.
    """
    unseen, seen = ctx.build_engine(optimizer=ADAMW), ctx.build_engine(optimizer=ADAMW)
    for step in range(STEPS):
        ctx.train(unseen, step, "loss-unseen")
        unseen.step()
        unseen.zero_grad()
    for step in range(STEPS):
        query_engine(seen)
        loss = ctx.loss(seen, step, "loss-seen")
        query_engine(seen)
        ctx.backward(seen, loss, step)
        for name in ("once", "twice"):
            ctx.record(f"grads-{name}", seen.full_grads(), step)
            query_engine(seen)
        seen.step()
        query_engine(seen)
        seen.zero_grad()
        if step == 0:
            kept = collect_training_state(seen)
            ctx.record("kept", kept, 0)
    ctx.record("kept", kept, 1)
    for engine, label in ((unseen, "unseen"), (seen, "seen")):
        ctx.record_training_state(engine, STEPS, f"-{label}")
        engine.close()


def query_engine(engine: Engine) -> None:
    """Read everything that an engine can report at any time, and overwrite the returned tensors.

    Every rank has to call this function.
    """
    for tensor in collect_training_state(engine).values():
        tensor.zero_()
    engine.layout()
    engine.observe()
    engine.grad_norm()


def judge_looked_at(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the engines bitwise, because their settings, collectives and orders of summation are the same.

    The tensors that were read after the first step must not have changed afterwards.
    """
    yield from compare_records(ctx, "kept", "kept", 0, 1, Part.OPTIMIZER)
    for step in range(STEPS):
        yield from compare_records(ctx, "loss-unseen", "loss-seen", step, step, Part.FORWARD)
        yield from compare_records(ctx, "grads-once", "grads-twice", step, step, Part.REDUCTION)
    for what in ("params", "masters", "state"):
        yield from compare_records(ctx, f"{what}-unseen", f"{what}-seen", STEPS, STEPS, Part.OPTIMIZER)


LAWS = (
    variation_law(
        "looked_at",
        "an engine whose state is read twice between all calls trains exactly like one whose state is never read",
        observe_looked_at,
        judge_looked_at,
        tier=Tier.EXACT,
        weights_stay_integers=False,
        setting_support=SettingSupport.WINDOWS_AND_CALLS,
        variants=(Variant(compares_engine_with_itself=True),),
        kept_because="the only law that reads everything twice, and compares with an engine whose state is never read",
    ),
)
