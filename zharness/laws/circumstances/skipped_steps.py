"""Define laws of a step that is skipped because of an overflow: it changes nothing that a later step uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from zharness.engines.protocol import AccumulationOwner, Engine, Feature
from zharness.law_kit.clipping import judge_clip_factor
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.optimizer_step import RecordedStep, compare_ranks_after_step, judge_step
from zharness.law_kit.optimizers import ADAMW
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.circumstances.common import ALL_EXPERTS
from zharness.laws.circumstances.not_finite import Outcome, step_and_classify
from zharness.parity import Comparison, Part, Tier, compare_bitwise

CLIP = 2.0**-6  # far below the norm of the gradients, so that it clips
BAD_STEP, STEPS = 1, 4


@dataclass(frozen=True)
class OverflowRun:
    """The clipping and the accumulation window of a training in which one micro-batch overflows on rank 0.

    In the step ``element_step``, rank 0's gradient of ``element_layer``'s bias overflows in one element, which another
    rank may own. The step ``idle_step`` does not use the expert IDLE_EXPERT.
    """

    clip: float | None = None
    window: int = 1
    bad_micro: int = 0
    element_step: int | None = None
    element_layer: str = "last"
    idle_step: int | None = None

    @property
    def bad_steps(self) -> tuple[int, ...]:
        """Return the steps with an overflow."""
        return (BAD_STEP,) if self.element_step is None else (BAD_STEP, self.element_step)


RUNS: Mapping[str, OverflowRun] = {
    "": OverflowRun(),
    "clipped": OverflowRun(clip=CLIP),
    "first_of_2_by_engine": OverflowRun(window=2),
    "last_of_2_by_engine": OverflowRun(clip=CLIP, window=2, bad_micro=1),
    "one_element": OverflowRun(element_step=BAD_STEP + 1),
}
IDLE_EXPERT = 1
# The step before the idle step is skipped although the idle expert's gradients are finite: one element of another
# gradient overflows.
IDLE_RUN = OverflowRun(element_step=STEPS - 2, element_layer="first", idle_step=STEPS - 1)


def observe_skipped_step(ctx: RankContext) -> None:
    """Train the steps of the law variant."""
    train_run(ctx, RUNS[ctx.variant])


def observe_idle_after_skipped(ctx: RankContext) -> None:
    """Train steps; the last step does not use a weight that the skipped step before it used."""
    train_run(ctx, IDLE_RUN)


def train_run(ctx: RankContext, run: OverflowRun) -> None:
    """Train steps, of which some overflow on rank 0. Stop after a step with an overflow that the engine applies."""
    owner = AccumulationOwner.ENGINE if run.window > 1 else AccumulationOwner.CALLER
    engine = ctx.build_engine(optimizer=ADAMW, clip=run.clip, accumulation_steps=run.window, accumulation_owner=owner)
    for step in range(STEPS):
        ctx.record_training_state(engine, step)
        for micro in range(run.window):
            bad = step == BAD_STEP and micro == run.bad_micro and ctx.data_coordinate == 0
            loss = compute_loss(ctx, engine, run, step, micro)
            if step == run.element_step:
                factor = torch.inf if ctx.data_coordinate == 0 else 1.0
                bias = cast(Tensor, engine.module.get_submodule(run.element_layer).bias)
                loss = loss + factor * bias[-1]
            engine.backward(loss * torch.inf if bad else loss)
            if micro + 1 < run.window:
                engine.step()
        if step not in run.bad_steps:
            ctx.record("grads", engine.full_grads(), step)
        outcome = step_and_classify(engine)
        ctx.record("outcome", {"outcome": scalar(outcome)}, step)
        if run.clip is not None and step not in run.bad_steps:
            norm = engine.grad_norm()
            ctx.record("norm", {} if norm is None else {"norm": scalar(norm)}, step)
        if run.window == 1:  # an engine that owns the window begins the next one itself, also after a skipped step
            engine.zero_grad()
        if step in run.bad_steps and outcome is Outcome.APPLIED:
            finite = {name: scalar(bool(weight.isfinite().all())) for name, weight in engine.full_params().items()}
            ctx.record("finite", finite, step)
            break
    else:
        ctx.record_training_state(engine, STEPS)
    engine.close()


def compute_loss(ctx: RankContext, engine: Engine, run: OverflowRun, step: int, micro: int) -> Tensor:
    """Run the forward of a micro-batch and return its loss; experts are routed only in a run with an idle step."""
    if run.idle_step is None:
        return ctx.loss(engine, step * run.window + micro)
    route = [expert for expert in ALL_EXPERTS if expert != IDLE_EXPERT or step != run.idle_step]
    batch = ctx.batch(step)
    return ctx.spec.loss(engine(batch.inputs, route=route), batch.target)


def judge_skipped_step(ctx: JudgeContext) -> Iterator[Comparison]:
    """Judge the steps of the law variant."""
    yield from judge_run(ctx, RUNS[ctx.variant])


def judge_idle_after_skipped(ctx: JudgeContext) -> Iterator[Comparison]:
    """Judge the steps; the last step must not move the idle weight."""
    yield from judge_run(ctx, IDLE_RUN)


def judge_run(ctx: JudgeContext, run: OverflowRun) -> Iterator[Comparison]:
    """Check that the bad steps changed neither weights nor state, and judge every other step with its norm.

    If the engine applies the first bad step, no weight may be finite after it. Otherwise it may apply no bad step.
    """
    outcome = ctx.rank_records("outcome", BAD_STEP)[0]["outcome"]
    for step in range(BAD_STEP + 1 if outcome == Outcome.APPLIED else STEPS):
        if step in run.bad_steps:
            yield from judge_overflow(ctx, step, outcome)
            continue
        for rank, record in enumerate(ctx.rank_records("outcome", step)):
            place = ctx.location("outcome", Part.OPTIMIZER, step, rank)
            yield compare_bitwise(place, scalar(Outcome.APPLIED), record["outcome"])
        grads = ctx.rank_records("grads", step)[0]
        factor = yield from judge_clip_factor(ctx, "norm", step, grads, 0.0 if run.clip is None else run.clip)
        skipped = sum(bad < step for bad in run.bad_steps)
        yield from judge_step(ctx, ADAMW, grads, RecordedStep(step, "masters", skipped_steps=skipped), factor)
        yield from compare_ranks_after_step(ctx, RecordedStep(step + 1))


def judge_overflow(ctx: JudgeContext, step: int, outcome: Tensor) -> Iterator[Comparison]:
    """Check that the bad step ``step`` ended like the first one on every rank, and what it changed."""
    for rank, record in enumerate(ctx.rank_records("outcome", step)):
        yield compare_bitwise(ctx.location("outcome", Part.OPTIMIZER, step, rank), outcome, record["outcome"])
    if outcome == Outcome.APPLIED:
        for rank, record in enumerate(ctx.rank_records("finite", step)):
            for name, is_finite in record.items():
                place = ctx.location(f"finiteness of {name}", Part.OPTIMIZER, step, rank)
                yield compare_bitwise(place, scalar(False), is_finite)
        return
    for label in ("params", "masters", "state"):
        before, after = ctx.rank_records(label, step)[0], ctx.rank_records(label, step + 1)[0]
        for name, tensor in before.items():
            yield compare_bitwise(ctx.location(name, Part.OPTIMIZER, step), tensor, after[name])


LAWS = (
    Law(
        name="values.skipped_step",
        statement="a step skipped because of an overflow changes no weight, state, norm, schedule or later step",
        tier=Tier.STAGED,
        models=("mlp",),
        observe=observe_skipped_step,
        judge=judge_skipped_step,
        features=(Feature.PARAM_GROUPS, Feature.SCHEDULE),
        weights_stay_integers=False,
        variants=tuple(
            Variant(
                name,
                (
                    *((Feature.CLIP,) if run.clip is not None else ()),
                    *((Feature.ENGINE_ACCUMULATION,) if run.window > 1 else ()),
                    *((Feature.OUTSIDE_FORWARD,) if run.element_step is not None else ()),
                ),
                compares_engine_with_itself=True,
            )
            for name, run in RUNS.items()
        ),
        dtypes=("bf16", "fp16"),
        kept_because="the only law that judges the steps before and after an overflow under a static loss scale",
    ),
    Law(
        name="values.idle_after_skipped",
        statement="a step does not move an unused weight, even if the previous step used the weight and was skipped",
        tier=Tier.STAGED,
        models=("experts",),
        observe=observe_idle_after_skipped,
        judge=judge_idle_after_skipped,
        features=(
            Feature.PARAMETERS,
            Feature.PARAM_GROUPS,
            Feature.SCHEDULE,
            Feature.OUTSIDE_FORWARD,
            Feature.NO_GRADIENT,
        ),
        weights_stay_integers=False,
        variants=(Variant(compares_engine_with_itself=True),),
        dtypes=("bf16", "fp16"),
        kept_because="the only idle weights after a skipped step, whose gradients an engine may have kept",
    ),
)
