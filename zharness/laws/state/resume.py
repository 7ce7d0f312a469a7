"""Define the law state.resume: an engine that loads a checkpoint continues like the engine that saved it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from zharness.engines.protocol import Engine, Feature, OptimizerSpec
from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, ModelScope, Variant
from zharness.law_kit.law_steps import LawSteps, StepsKind
from zharness.law_kit.optimizer_step import RecordedStep, compare_ranks_after_step
from zharness.law_kit.optimizers import TRAJECTORY_OPTIMIZERS
from zharness.law_kit.process_state import compare_process_state, read_process_state
from zharness.law_kit.rank_actions import shared_folder
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.record_comparisons import compare_records
from zharness.law_kit.setting import SettingSupport
from zharness.laws.state.common import RESHARD_OPTIMIZER, SAVE_STEP, record_snapshot, run_eval_forward, train_steps
from zharness.parity import Comparison, Part, Tier, compare_bitwise
from zharness.parity.compare import check_names, is_bitwise_equal

CONTINUED_STEPS = range(SAVE_STEP, SAVE_STEP + 2)
# The number of snapshots of weights, master weights and optimizer state that a rank records: two before the load
# ("forgotten", "unsaved"), and for both engines one before each continued step and one after the last step.
RECORDED_SNAPSHOTS = 2 + 2 * (len(CONTINUED_STEPS) + 1)
RECORDED_BUFFERS = 3  # buffers of the loading engine before and after the load, and of the engine that saved

IDLE_NUMEL = 3

SOURCE_HINT = "it is the buffer that rank {} saved"
UNLOADED_BUFFER_HINT = "it is the buffer from before the load"
UNLOADED_HINT = "it is the value from before the load"
UNLOADED_WEIGHTS_HINT = "the forward used the weights from before the load"

# Options with which an optimizer keeps more state, or that a load may reset to their defaults.
RESUMED_OPTIMIZERS = {
    **TRAJECTORY_OPTIMIZERS,
    "amsgrad": OptimizerSpec("adamw", {"lr": 1e-2, "amsgrad": True, "maximize": True}),
    "centered": OptimizerSpec("rmsprop", {"lr": 1e-2, "centered": True, "momentum": 0.5}),
}

FALLING_SCHEDULE = (
    1.0,
    0.5,
    0.25,
    0.125,
    0.0625,
)  # a different factor for every step, and one more after the last step


FROZEN_LAYER = "first"


def build_engine_with_buffer(ctx: RankContext, optimizer: OptimizerSpec, frozen_factor: float = 1.0) -> Engine:
    """Build an engine around a model with a buffer.

    In the law variant "idle" the model has an unused parameter. In "transposed" it has weights that are not contiguous.
    In "frozen" it has a frozen layer, whose weights are multiplied by ``frozen_factor``.
    """
    model = ctx.spec.model(ctx.seed)
    model.register_buffer("seen", torch.zeros(()))
    if ctx.variant == "transposed":
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data = parameter.detach().t().contiguous().t()
    if ctx.variant == "idle":
        model.register_parameter("idle", nn.Parameter(torch.ones(IDLE_NUMEL)))
    if ctx.variant == "frozen":
        for parameter in model.get_submodule(FROZEN_LAYER).requires_grad_(False).parameters():
            parameter.data *= frozen_factor
    return ctx.build_engine_around(model, optimizer=optimizer)


def observe_resume(ctx: RankContext) -> None:
    """Save a checkpoint of one engine, load it into another, and record how both continue training."""
    buffers_differ = ctx.variant == "buffers"  # buffers differ between ranks, like running statistics
    optimizer = replace(RESUMED_OPTIMIZERS.get(ctx.variant, RESHARD_OPTIMIZER), schedule=FALLING_SCHEDULE)
    never, resumed = build_engine_with_buffer(ctx, optimizer), build_engine_with_buffer(ctx, optimizer, -1.0)
    train_steps(ctx, never, range(SAVE_STEP), "before")
    train_steps(ctx, resumed, range(CONTINUED_STEPS.stop, CONTINUED_STEPS.stop + 1), "before-load")
    run_eval_forward(ctx, resumed, "before-load")
    record_snapshot(ctx, resumed, SAVE_STEP, "before-load")
    ctx.record("buffers-before-load", dict(resumed.module.named_buffers()))
    # This line assigns a new tensor to the buffer, as a forward that recomputes a statistic does. It does not assign
    # the attribute, because a compiled module looks up attributes in the module that it wraps.
    registered = never.module._buffers
    registered["seen"] = torch.full_like(cast(Tensor, registered["seen"]), 1 + ctx.rank * buffers_differ)
    record_snapshot(ctx, never, SAVE_STEP, "unsaved")
    with shared_folder() as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(ctx.rank)
        ctx.record("switches", read_process_state(), 0)
        never.save(folder)
        ctx.record("switches", read_process_state(), 1)
        resumed.load(folder)
        ctx.record("switches", read_process_state(), 2)
    ctx.record("shared", {"shared": torch.tensor(shares_buffers(ctx))})
    for engine, label in ((never, "never"), (resumed, "resumed")):
        ctx.record(f"buffers-{label}", dict(engine.module.named_buffers()))
    for engine, label in ((never, "never"), (resumed, "resumed")):
        if label == "never" and shares_buffers(ctx):
            continue_from_buffers(never, resumed)
        run_eval_forward(ctx, engine, label)
        for step in CONTINUED_STEPS:
            record_snapshot(ctx, engine, step, label)
            train_steps(ctx, engine, range(step, step + 1), label)
        record_snapshot(ctx, engine, CONTINUED_STEPS.stop, label)
        engine.close()


def shares_buffers(ctx: RankContext) -> bool:
    """Return whether a checkpoint of the engine holds each buffer once, not once for each rank."""
    return ctx.capabilities.refusal(Feature.RANK_BUFFERS) is not None


def continue_from_buffers(never: Engine, resumed: Engine) -> None:
    """Copy the buffers that ``resumed`` has loaded into ``never``, so that both continue from the same buffers."""
    loaded = dict(resumed.module.named_buffers())
    with torch.no_grad():
        for name, buffer in never.module.named_buffers():
            buffer.copy_(loaded[name])


def compare_loaded_buffers(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that each rank loaded its own buffers, or those of one rank if a checkpoint holds each buffer once."""
    saved, loaded = ctx.rank_records("buffers-never"), ctx.rank_records("buffers-resumed")
    before_load = ctx.rank_records("buffers-before-load")
    for rank, record in enumerate(loaded):
        check_names("what a rank reports as buffers-resumed", saved[rank], record)
    shared = bool(ctx.rank_records("shared")[0]["shared"])
    expected = [saved[find_source(saved, loaded)]] * len(saved) if shared else saved
    for rank, record in enumerate(loaded):
        for name, buffer in expected[rank].items():
            comparison = compare_bitwise(ctx.location(name, Part.GATHER, 0, rank), buffer, record[name])
            comparison = hint_if_equal(comparison, before_load[rank][name], record[name], UNLOADED_BUFFER_HINT)
            source = find_source([{name: each[name]} for each in saved], [{name: record[name]}])
            yield hint_if_equal(comparison, saved[source][name], record[name], SOURCE_HINT.format(source))


def compare_evaluations(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that the first forward after the load has the loss of the engine that never stopped, on every rank."""
    labels = [f"evaluated-{name}" for name in ("never", "resumed", "before-load")]
    for rank, (never, resumed, before_load) in enumerate(
        zip(*(ctx.rank_records(label, SAVE_STEP) for label in labels), strict=True)
    ):
        check_names("what a rank reports as evaluated-resumed", never, resumed)
        for name, loss in never.items():
            comparison = compare_bitwise(ctx.location(name, Part.FORWARD, SAVE_STEP, rank), loss, resumed[name])
            yield hint_if_equal(comparison, before_load[name], resumed[name], UNLOADED_WEIGHTS_HINT)


def hint_unloaded(ctx: JudgeContext, what: str, comparisons: Iterator[Comparison]) -> Iterator[Comparison]:
    """Add a hint to a mismatch in the first snapshot after the load if the tensor still has its value from before."""
    before, after = (ctx.rank_records(f"{what}-{label}", SAVE_STEP) for label in ("before-load", "resumed"))
    for comparison in comparisons:
        place = comparison.location
        if comparison.mismatch is None or place is None or place.name not in before[place.seen_on]:
            yield comparison
            continue
        before_load, after_load = (records[place.seen_on][place.name] for records in (before, after))
        yield hint_if_equal(comparison, before_load, after_load, UNLOADED_HINT)


def find_source(saved: Sequence[Mapping[str, Tensor]], loaded: Sequence[Mapping[str, Tensor]]) -> int:
    """Return the first rank whose saved buffers equal the most of the buffers that all ranks loaded."""

    def count_equal(source: int) -> int:
        """Return how many buffers of all ranks are bitwise equal to those that the rank ``source`` saved."""
        return sum(is_bitwise_equal(saved[source][name], record[name]) for record in loaded for name in record)

    return max(range(len(saved)), key=count_equal)


def hint_if_equal(comparison: Comparison, suspect: Tensor, actual: Tensor, hint: str) -> Comparison:
    """Add ``hint`` to a mismatch if the actual tensor is ``suspect``."""
    return add_hint(comparison, hint) if is_bitwise_equal(suspect, actual) else comparison


def judge_resume(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that the resumed and the continued engine have bitwise equal losses, weights, state and buffers.

    Saving and loading must not draw random numbers, and saving must not change the engine. The first forward after the
    load is an evaluation, like the last forward before the load, and it has to use the loaded weights.
    """
    yield from compare_process_state(ctx, "switches", range(3))
    yield from compare_loaded_buffers(ctx)
    yield from compare_evaluations(ctx)
    for what in ("params", "masters", "state", "facts"):
        yield from compare_records(ctx, f"{what}-unsaved", f"{what}-never", SAVE_STEP, SAVE_STEP, Part.OPTIMIZER)
    parts = {"params": Part.OPTIMIZER, "masters": Part.OPTIMIZER, "state": Part.OPTIMIZER, "loss": Part.FORWARD}
    parts["facts"] = Part.OPTIMIZER
    for step in (*CONTINUED_STEPS, CONTINUED_STEPS.stop):
        for what, part in parts.items():
            if what == "loss" and step == CONTINUED_STEPS.stop:
                continue
            place = Part.GATHER if step == SAVE_STEP and what == "params" else part
            comparisons = compare_records(ctx, f"{what}-never", f"{what}-resumed", step, step, place)
            yield from hint_unloaded(ctx, what, comparisons) if step == SAVE_STEP and what != "loss" else comparisons
    yield from compare_ranks_after_step(ctx, RecordedStep(CONTINUED_STEPS.stop, "params-resumed", "state-resumed"))


LAWS = (
    Law(
        name="state.resume",
        statement="an engine that loads a checkpoint continues bitwise like the engine that saved it and never stopped",
        tier=Tier.EXACT,
        models=("mlp",),
        observe=observe_resume,
        judge=judge_resume,
        features=(Feature.CHECKPOINT, Feature.PARAM_GROUPS, Feature.SCHEDULE),
        weights_stay_integers=False,
        variants=(
            Variant("adamw", compares_engine_with_itself=True, model_scope=ModelScope.ANY, mesh_dtypes=("bf16",)),
            Variant("sgd", compares_engine_with_itself=True),
            Variant("amsgrad", compares_engine_with_itself=True),
            Variant("centered", compares_engine_with_itself=True),
            Variant("buffers", (Feature.RANK_BUFFERS,), compares_engine_with_itself=True),
            Variant("idle", (Feature.NO_GRADIENT,), compares_engine_with_itself=True),
            Variant("frozen", (Feature.PARAMETERS,), compares_engine_with_itself=True),
            Variant("transposed", (Feature.PARAMETERS,), compares_engine_with_itself=True),
        ),
        steps=LawSteps(observe_resume, StepsKind.SELF_COMPARISON, comparison_part="compare_resumed"),
        setting_support=SettingSupport.WINDOWS_AND_CALLS,
        is_long=True,
        kept_because="the only law that compares a resumed engine bitwise, with schedule, random state and buffers",
    ),
)
