"""Define the law pipeline.resume: a pipeline that loads a checkpoint continues like the one that saved it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zharness.engines.protocol import Capabilities, Engine, Feature, OptimizerSpec
from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.optimizer_step import RecordedStep, judge_step
from zharness.law_kit.rank_actions import shared_folder
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.law_kit.record_comparisons import compare_records
from zharness.laws.pipeline import (
    MODELS,
    RANDOM_MODEL,
    SINGLE,
    WINDOW,
    BatchShape,
    pipeline_law,
    select_schedule,
    train_batch,
)
from zharness.laws.pipeline_steps import HALVING, fit_schedule
from zharness.parity import Comparison, Part, compare_bitwise

SAVE_STEP = 1  # the number of steps before the save; one variant makes none
# Two steps: the learning rate of the second step comes from a counter that has to continue.
CONTINUED_STEPS = range(SAVE_STEP, SAVE_STEP + 2)

AROUND_SAVE = "state-around-save"  # the state of the engine that saves, before the save and after the next step


@dataclass(frozen=True)
class Resume:
    """The schedules of the engines that save and load, the steps of each engine before, and the size of a batch.

    With an interleaved schedule, each of two ranks holds modules that another rank holds with other schedules. '' is
    the engine's default schedule.
    """

    saved_by: str = ""
    loaded_by: str = ""
    stepped: bool = True
    shape: BatchShape = WINDOW
    saved_steps: int = SAVE_STEP

    @property
    def schedules(self) -> tuple[str, ...]:
        """The schedules that an engine has to support."""
        return tuple(filter(None, (self.saved_by, self.loaded_by)))


RESUMES: Mapping[str, Resume] = {
    "": Resume(),
    "new_engine": Resume(stepped=False),
    "other_stages": Resume(loaded_by="interleaved"),
    "new_engine_of_other_stages": Resume(saved_by="interleaved", stepped=False),
    "single": Resume(shape=SINGLE),
    "unstepped": Resume(shape=SINGLE, saved_steps=0),
}


def select_optimizer(claims: Capabilities) -> OptimizerSpec:
    """Return the optimizer, with a falling rate if the engine has learning-rate schedules, else a constant rate."""
    return fit_schedule(HALVING, claims)


def make_step(ctx: RankContext, engine: Engine, number: int, shape: BatchShape) -> None:
    """Run batch ``number``, and make a step."""
    train_batch(ctx, engine, number, shape)
    engine.step()
    engine.zero_grad()


def observe_resume(ctx: RankContext) -> None:
    """Save an engine, load the checkpoint into an engine with other weights, and make two steps with each engine.

    As the variant says, the engine that saves has made one step or none, the engine that loads has made two steps or
    none, and both have the same schedule or different ones.
    """
    resume, optimizer = RESUMES[ctx.variant], select_optimizer(ctx.capabilities)
    saved = ctx.build_engine(optimizer=optimizer, options=select_schedule(resume.saved_by))
    loaded = ctx.build_engine_around(
        ctx.spec.model(ctx.seed + 1), optimizer=optimizer, options=select_schedule(resume.loaded_by)
    )
    for number in range(resume.saved_steps):
        make_step(ctx, saved, number, resume.shape)
    for number in CONTINUED_STEPS if resume.stepped else ():
        make_step(ctx, loaded, number, resume.shape)
    ctx.record_training_state(saved, SAVE_STEP, "-unsaved")
    ctx.record_optimizer_state(AROUND_SAVE, saved, SAVE_STEP)
    with shared_folder() as folder:
        saved.save(folder)
        loaded.load(folder)
    for engine, label in ((saved, "-saved"), (loaded, "-loaded")):
        ctx.record_training_state(engine, SAVE_STEP, label)
        for number in CONTINUED_STEPS:
            ctx.record(f"losses{label}", train_batch(ctx, engine, number, resume.shape), number)
            ctx.record(f"grads{label}", engine.full_grads(), number)
            engine.step()
            engine.zero_grad()
            ctx.record_training_state(engine, number + 1, label)
            if engine is saved and number == SAVE_STEP:
                ctx.record_optimizer_state(AROUND_SAVE, saved, SAVE_STEP + 1)
    for engine in (saved, loaded):
        engine.close()


def judge_resume(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that save and load keep weights and state, and compare batches and steps of both engines after the load.

    Before the save, every parameter has to have a momentum. Before the first step, an engine may have no state or a
    state of zeros, so the step after the save is compared with SGD's formula.
    """
    has_state = RESUMES[ctx.variant].saved_steps > 0
    for rank, state in enumerate(ctx.rank_records("state-unsaved", SAVE_STEP)):
        for name in ctx.baseline.parameter_names if has_state else ():
            is_there = scalar(f"{name}/momentum_buffer" in state)
            yield compare_bitwise(ctx.location(name, Part.OPTIMIZER, SAVE_STEP, rank), scalar(1), is_there)
    for label, part in (("saved", Part.OPTIMIZER), ("loaded", Part.GATHER)):
        for kind in ("params", "state") if has_state else ("params",):
            yield from compare_records(ctx, f"{kind}-unsaved", f"{kind}-{label}", SAVE_STEP, SAVE_STEP, part)
    if not has_state:
        first = RecordedStep(SAVE_STEP, "params-saved", AROUND_SAVE, skipped_steps=1)
        grads = ctx.rank_records("grads-saved", SAVE_STEP)[0]
        for comparison in judge_step(ctx, select_optimizer(ctx.claims), grads, first):
            yield add_hint(comparison, "it is the first step, and the engine was saved before it")
    for number in CONTINUED_STEPS:
        yield from compare_records(ctx, "losses-saved", "losses-loaded", number, number, Part.FORWARD)
        for kind in ("params", "state"):
            records = f"{kind}-saved", f"{kind}-loaded"
            yield from compare_records(ctx, *records, number + 1, number + 1, Part.OPTIMIZER)


LAWS = (
    pipeline_law(
        "resume",
        "a pipeline continues like the one whose checkpoint it loads, also with other stages or before the first step",
        observe_resume,
        judge_resume,
        tuple(
            Variant(name, schedules=resume.schedules, micro_batches=resume.shape.micro_batches)
            for name, resume in RESUMES.items()
        ),
        Feature.CHECKPOINT,
        models=(*MODELS, RANDOM_MODEL),
        kept_because="the only law that compares a resumed pipeline with the pipeline that saved",
    ),
)
