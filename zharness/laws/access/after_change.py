"""Define the law access.after_change: reads by name return the tensors that the engine trains with, after any change.

The law reads every tensor, changes weights or optimizer state, reads again, and makes a step. The law finds an engine
that returns an old copy of a tensor, or that looks up optimizer state in another parameter's group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from zharness.engines.protocol import Engine, Feature, GroupSpec, OptimizerSpec, require_gathered
from zharness.engines.tensor_access import require_read_out, require_write_in
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.optimizer_step import (
    RecordedStep,
    compare_published_weights,
    compare_ranks_after_step,
    judge_step,
)
from zharness.law_kit.rank_actions import shared_folder
from zharness.law_kit.rank_context import RankContext, flatten_optimizer_state
from zharness.law_kit.record_comparisons import compare_records
from zharness.laws.access.common import (
    ALIGNED,
    EXACT_ADAM,
    SIMILAR,
    access_law,
    new_values,
    optimizer_weights,
    read_all,
    read_state,
    train_micro_batch,
    trained_names,
    write_copy,
)
from zharness.parity import Comparison, Part

# Layers of one shape are in different groups, so an engine that finds state by shape returns another group's state.
GROUPED_ADAM = OptimizerSpec(
    EXACT_ADAM.name, EXACT_ADAM.args, (GroupSpec("second.*", {"lr": 2.0**-4, "betas": (0.75, 0.5)}),)
)

GROUPS, LOADED, EDITED, IDLE = "groups", "loaded", "edited", "idle"
WRITTEN_PARAM, WRITTEN_STATE = "written_param", "written_state"
WRITTEN_STATE_LOADED = "written_state_loaded"  # state is written before a load and again after it
BEFORE_STEP = "_before_step"  # the end of the names of variants whose change is between backward and step

FEATURES: Mapping[str, tuple[Feature, ...]] = {
    GROUPS: (Feature.PARAM_GROUPS,),
    IDLE: (Feature.NO_GRADIENT,),
    LOADED: (Feature.CHECKPOINT,),
    EDITED: (Feature.EDITS,),
    WRITTEN_PARAM: (Feature.WRITE_IN,),
    WRITTEN_STATE: (Feature.WRITE_IN,),
    WRITTEN_STATE_LOADED: (Feature.WRITE_IN, Feature.CHECKPOINT),
    WRITTEN_PARAM + BEFORE_STEP: (Feature.WRITE_IN,),
    WRITTEN_STATE + BEFORE_STEP: (Feature.WRITE_IN,),
}

LOADING = (LOADED, WRITTEN_STATE_LOADED)

WRITTEN_MODELS = (SIMILAR, ALIGNED)  # an engine may fail only on padded shards, which only SIMILAR has

BEFORE, CHANGED, AFTER = range(3)  # the times at which everything is read


def observe_after_change(ctx: RankContext) -> None:
    """Make a step, read every tensor, make the change of the law variant, read again, make a step, and read again."""
    with shared_folder() if ctx.variant in LOADING else nullcontext() as folder:
        engine = ctx.build_engine(optimizer=find_optimizer(ctx.variant))
        train_micro_batch(ctx, engine, 0)
        engine.step()
        engine.zero_grad()
        record_readings(ctx, engine, BEFORE)
        if folder is not None:
            engine.save(folder)
        change = partial(make_change, ctx, engine, folder)
        for action in reversed_if(
            ctx.variant.endswith(BEFORE_STEP), change, partial(train_micro_batch, ctx, engine, 1)
        ):
            action()
        ctx.record("grads", engine.full_grads())
        engine.step()
        engine.zero_grad()
        record_readings(ctx, engine, AFTER)
        ctx.record("params", {name: engine.full_params()[name] for name in trained_names(engine)}, AFTER)
        engine.close()


def find_optimizer(variant: str) -> OptimizerSpec:
    """Return the optimizer of a law variant."""
    return GROUPED_ADAM if variant == GROUPS else EXACT_ADAM


def reversed_if(condition: bool, *actions: Callable[[], None]) -> tuple[Callable[[], None], ...]:
    """Return ``actions``, in reversed order if ``condition`` is true."""
    return actions[::-1] if condition else actions


def make_change(ctx: RankContext, engine: Engine, folder: Path | None) -> None:
    """Make the change of the law variant, record the weights and state that it should give, and read everything."""
    weights, state = optimizer_weights(engine), full_state(engine)
    match ctx.variant.removesuffix(BEFORE_STEP):
        case "written_param":
            weights = new_values(weights, ctx.seed)
            for name, value in weights.items():
                write_copy(partial(require_write_in(engine).write_param, name), value)
        case "written_state":
            state |= write_moments(engine, new_moments(state, ctx.seed))
        case "written_state_loaded":
            assert folder is not None
            write_moments(engine, new_moments(state, ctx.seed + 1))
            engine.load(folder)
            state |= write_moments(engine, new_moments(state, ctx.seed))
        case "edited":
            weights = edit_weights(ctx, engine, weights)
        case "idle":
            engine.step()
            engine.zero_grad()
        case "loaded":
            assert folder is not None
            train_micro_batch(ctx, engine, 2)
            engine.step()
            engine.zero_grad()
            record_readings(ctx, engine, AFTER + 1)
            engine.load(folder)
    ctx.record("expected-weights", weights)
    ctx.record("expected-state", state)
    record_readings(ctx, engine, CHANGED)


def new_moments(state: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return new positive values for every entry of optimizer state except the step counts."""
    moments = {path: value for path, value in state.items() if not path.endswith("/step")}
    return {path: value.abs() for path, value in new_values(moments, seed).items()}


def write_moments(engine: Engine, moments: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace the optimizer's entries ``moments``, whose keys are ``parameter/key``, and return ``moments``."""
    for path, value in moments.items():
        name, _, key = path.rpartition("/")
        write_copy(partial(require_write_in(engine).write_optimizer_state, name, key), value)
    return moments


@torch.no_grad()
def edit_weights(ctx: RankContext, engine: Engine, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Edit every trained weight on rank 0, write other values on the other ranks, and return the values of rank 0."""
    edited = new_values(weights, ctx.seed)
    with require_gathered(engine).gathered(list(edited)) as gathered:
        for name, value in edited.items():
            gathered[name].copy_(value if ctx.rank == 0 else torch.full_like(value, 7.0))
    return edited


def full_state(engine: Engine) -> dict[str, Tensor]:
    """Return the optimizer state of every trained parameter as a flat dictionary with keys ``parameter/key``."""
    names = set(trained_names(engine))
    state = flatten_optimizer_state(engine.full_optimizer_state())
    return {path: value for path, value in state.items() if path.rsplit("/", 1)[0] in names}


def record_readings(ctx: RankContext, engine: Engine, time: int) -> None:
    """Read every weight and every entry of optimizer state by name, and record the full tensors too."""
    access, names = require_read_out(engine), trained_names(engine)
    ctx.record("read-weights", read_all(names, access.read_param), time)
    ctx.record("weights", optimizer_weights(engine), time)
    read = read_state(access, names, EXACT_ADAM)
    ctx.record("read-state", read, time)
    state = full_state(engine)
    ctx.record("moments", {path: state[path] for path in read}, time)
    ctx.record("state", state, time)


def judge_after_change(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare tensors read by name with the full tensors and with the result of the change, and judge the step."""
    writes_weights = ctx.variant.removesuffix(BEFORE_STEP) == WRITTEN_PARAM
    for time in (BEFORE, CHANGED, AFTER):
        if time == CHANGED:
            yield from compare_records(ctx, "expected-weights", "read-weights", 0, time, Part.GATHER)
            yield from compare_records(ctx, "expected-state", "state", 0, time, Part.OPTIMIZER)
        if not (time == CHANGED and writes_weights):  # the model may use a written weight only after the next step
            yield from compare_records(ctx, "weights", "read-weights", time, time, Part.GATHER)
        yield from compare_records(ctx, "moments", "read-state", time, time, Part.OPTIMIZER)
    grads = ctx.rank_records("grads")[0]
    yield from judge_step(ctx, find_optimizer(ctx.variant), grads, RecordedStep(CHANGED, "read-weights"))
    after = RecordedStep(AFTER, "read-weights")
    yield from compare_ranks_after_step(ctx, after)
    yield from compare_published_weights(ctx, after, "params")


LAWS = (
    access_law(
        "after_change",
        "reads by name return the tensors that the engine trains with after a write, an edit, a load and an idle step",
        observe_after_change,
        judge_after_change,
        features=(Feature.READ_OUT,),
        models=WRITTEN_MODELS,
        variants=tuple(
            Variant(name, features, compares_engine_with_itself=True) for name, features in FEATURES.items()
        ),
        dtypes=("fp32",),  # on 4 ranks an edited weight is rounded to bf16 before the step
        weights_stay_integers=False,
        kept_because="the only law that reads the same tensors before and after changes that are not steps",
    ),
)
