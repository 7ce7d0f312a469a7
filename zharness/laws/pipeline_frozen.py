"""Define the law pipeline.frozen: freezing weights of some stages changes no gradient of the other weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from zharness.engines.protocol import Feature
from zharness.law_kit.frozen_weights import freeze, leave_out_grads
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.optimizer_step import RecordedStep, compare_ranks_after_step, judge_step
from zharness.law_kit.program_suspects import scale_local_grads
from zharness.law_kit.rank_context import RankContext
from zharness.laws.pipeline import (
    DEFAULT_SHAPE,
    SCHEDULES,
    SINGLE,
    BatchShape,
    compare_micro_losses,
    compute_batch,
    pipeline_law,
    require_exact_batch,
    require_schedule,
    run_batch,
    select_schedule,
)
from zharness.laws.pipeline_steps import fit_schedule, select_steps
from zharness.parity import Comparison
from zharness.parity.baseline import LocalResult

# Patterns of the weight names in the first and in the last of two stages; each stage has two blocks of ``chain``.
FIRST_STAGE, LAST_STAGE = ("blocks.[01].*",), ("blocks.[23].*",)
NOTHING: tuple[str, ...] = ()


@dataclass(frozen=True)
class Freezing:
    """The names of the weights that are frozen in each step, the schedule, and the size of a batch."""

    steps: tuple[tuple[str, ...], ...]
    schedule: str = ""
    shape: BatchShape = SINGLE

    def find_frozen(self, step: int, names: Set[str]) -> set[str]:
        """Return the names of ``names`` that are frozen in a step."""
        return {name for name in names if any(fnmatchcase(name, pattern) for pattern in self.steps[step])}


def freeze_twice(*patterns: str) -> Freezing:
    """Return a freezing of two steps of one micro-batch each, in which the weights ``patterns`` are frozen."""
    return Freezing((patterns, patterns))


# One batch of several micro-batches for each schedule. If stages are in DDP, some schedules, such as GPipe, would crash
# in a second batch (see FINDINGS.md), which would hide the errors that this law is about.
BY_SCHEDULE: Mapping[str, Freezing] = {
    f"{place}_{schedule}": Freezing((patterns,), schedule, DEFAULT_SHAPE)
    for schedule in SCHEDULES
    for place, patterns in {"first": ("blocks.0.*",), "last": ("blocks.3.*",), "half": LAST_STAGE}.items()
}
FROZEN: Mapping[str, Freezing] = {
    "first": freeze_twice(*FIRST_STAGE),
    "last": freeze_twice(*LAST_STAGE),
    "layers": freeze_twice("blocks.0.*", "blocks.2.*"),
    "biases": freeze_twice("*.bias"),
    **BY_SCHEDULE,
}
CHANGED: Mapping[str, Freezing] = {
    "last_later": Freezing((NOTHING, LAST_STAGE, NOTHING)),
    "layer_later": Freezing((NOTHING, ("blocks.1.*",), NOTHING)),
    "unfrozen": Freezing((("blocks.2.*",), NOTHING)),
}
FREEZINGS = {**FROZEN, **CHANGED}


def freeze_for_step(model: nn.Module, freezing: Freezing, step: int) -> nn.Module:
    """Set requires_grad to False for the weights that the step freezes, and to True for the rest; return ``model``."""
    return freeze(model, freezing.find_frozen(step, {name for name, _ in model.named_parameters()}))


def observe_frozen(ctx: RankContext) -> None:
    """Make steps with weights frozen before the engine is built; in some variants, change them between steps."""
    freezing = FREEZINGS[ctx.variant]
    model = freeze_for_step(ctx.spec.model(ctx.seed), freezing, 0)
    options = select_schedule(freezing.schedule)
    optimizer = fit_schedule(select_steps(ctx.config.mesh), ctx.capabilities)
    engine = ctx.build_engine_around(model, optimizer=optimizer, options=options)
    ctx.record_training_state(engine, 0)
    for step in range(len(freezing.steps)):
        if ctx.variant in CHANGED:
            freeze_for_step(engine.module, freezing, step)
        run_batch(ctx, engine, step, freezing.shape)
        engine.step()
        engine.zero_grad()
        ctx.record_training_state(engine, step + 1)
    engine.close()


def suspect_last_alone(micros: list[list[LocalResult]]) -> dict[str, list[list[LocalResult]]]:
    """Return, by hint, the local gradients of the last micro-batches alone, without those of the first ones."""
    count = len(micros)
    scaled = scale_local_grads(micros, 1 / count)
    return {
        f"the gradient of the last {left} of {count} micro-batches alone": scaled[count - left :]
        for left in range(1, count)
    }


def judge_frozen(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare losses, and gradients and steps of trained weights; frozen weights must have neither.

    The gradients of the first batch are compared bitwise if exactness is certified.
    """
    freezing, optimizer = FREEZINGS[ctx.variant], fit_schedule(select_steps(ctx.mesh), ctx.claims)
    names = ctx.baseline.parameter_names
    idle = dict.fromkeys(names, 0)
    for step in range(len(freezing.steps)):
        frozen = freezing.find_frozen(step, set(names))
        weights = ctx.rank_records("params", step)[0]
        micros = compute_batch(ctx, step, weights, freezing.shape)
        require_exact_batch(ctx, step, weights, freezing.shape)
        yield from compare_micro_losses(ctx, micros, step)
        exact = ctx.certify_exactness(range(freezing.shape.micro_batches)) if step == 0 else False
        trained = [[leave_out_grads(local, frozen) for local in row] for row in micros]
        yield from ctx.compare_reduced_grads("grads", trained, step, exact, suspects=suspect_last_alone(trained))
        grads = ctx.rank_records("grads", step)[0]
        yield from judge_step(ctx, optimizer, grads, RecordedStep(step, idle_steps=dict(idle)))
        yield from compare_ranks_after_step(ctx, RecordedStep(step + 1))
        idle = {name: count + (name in frozen) for name, count in idle.items()}


LAWS = (
    pipeline_law(
        "frozen",
        "a stage passes gradients on, trains its other weights, and leaves the frozen weights unchanged",
        observe_frozen,
        judge_frozen,
        tuple(
            Variant(
                name,
                (Feature.UNFREEZING,) if name in CHANGED else (),
                schedules=require_schedule(freezing.schedule),
                micro_batches=freezing.shape.micro_batches,
            )
            for name, freezing in FREEZINGS.items()
        ),
        Feature.PARAMETERS,
        models=("chain",),
        kept_because="the only law of a pipeline with frozen weights",
    ),
)
