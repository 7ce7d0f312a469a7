"""Define the law state.several_saves: each checkpoint of one engine restores the state that was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from zharness.engines.protocol import Engine, Feature, require_full_state_dict, require_gathered
from zharness.engines.tensor_access import require_read_out, require_write_in
from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.optimizers import ADAMW
from zharness.law_kit.rank_actions import shared_folder
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.law_kit.record_comparisons import compare_records
from zharness.laws.access.common import new_values, read_state, trained_names, write_copy
from zharness.laws.access.write_in import new_state_values
from zharness.laws.circumstances.common import ALL_EXPERTS
from zharness.laws.state.common import record_snapshot
from zharness.laws.state.resume import UNLOADED_BUFFER_HINT
from zharness.parity import Comparison, Part, Tier, compare_bitwise
from zharness.parity.attribution import is_close_to_mean, is_rounded_to
from zharness.parity.baseline import run_backward
from zharness.parity.compare import is_bitwise_equal
from zharness.workload.exact_blocks import HIDDEN, make_wide
from zharness.workload.exact_mlp import WIDTH

STEPS = 3
BEFORE_ANY_STEP, FROZEN, IDLE, FLOAT64 = "before_any_step", "frozen", "idle", "float64"
UNFROZEN = "unfrozen"  # the layer that is frozen when the engine is built is unfrozen before the step SPECIAL_STEP
EDITED, WRITTEN = "edited", "written"  # weights or optimizer state are changed between the last step and the save
SPECIAL_STEP = 1  # the step in which an expert is frozen, or idle
CHANGED_STEP = 2  # the number of steps after which weights or state are changed, and a checkpoint is saved
EXPERT = 1
WIDE_EXPERT = 2  # the expert whose weights are float64
WIDE_VALUE = 0.1  # no dtype narrower than float64 holds this value exactly
FROZEN_AT_START = "last"
# The number of steps of each checkpoint, in the order in which the checkpoints are loaded. The one of STEPS overwrites
# the checkpoint that was saved before the step SPECIAL_STEP.
LOADS = {
    BEFORE_ANY_STEP: (2, 0, STEPS),
    **dict.fromkeys(("", FROZEN, UNFROZEN, IDLE, FLOAT64, EDITED, WRITTEN), (2, STEPS)),
}
OVERWRITTEN = {"": SPECIAL_STEP}  # the number of steps of a checkpoint that is saved and never loaded
OWN, OTHER = "own", "other"  # the engine that saved the checkpoints, and a second engine that loads them
PARTS = {
    "params": Part.GATHER,
    "full": Part.GATHER,
    "masters": Part.OPTIMIZER,
    "facts": Part.OPTIMIZER,
    "buffers": Part.GATHER,
}
UNLOADED_WEIGHT_HINT = "it is the weight from before the load"
NARROW_GRAD_HINT = "of the step's gradients in the engines that saved and loaded, one alone was reduced in bf16"
UNLOADED_HINTS = {"params": UNLOADED_WEIGHT_HINT, "full": UNLOADED_WEIGHT_HINT, "buffers": UNLOADED_BUFFER_HINT}
# Values that no narrower dtype holds exactly; every step changes them.
BUFFERS: Mapping[str, Tensor] = {
    "count": torch.tensor([2**53 - 64]),
    "mean": torch.tensor([1.0 / 3]),
    "wide": torch.tensor([1e300, 1 / 3], dtype=torch.float64),
}


@torch.no_grad()
def build_wide_expert(seed: int) -> nn.Module:
    """Return an expert with float64 weights, whose values depend on ``seed`` and cannot be represented in float32."""
    expert = make_wide(nn.Linear(HIDDEN, WIDTH))
    for parameter in expert.parameters():
        parameter.fill_(WIDE_VALUE / (seed + 1))
    return expert


def build_engine(ctx: RankContext, seed: int) -> Engine:
    """Build an engine around a model of the seed ``seed`` with the buffers BUFFERS and a frozen layer."""
    model = ctx.spec.model(seed)
    if ctx.variant == FLOAT64:
        model.get_submodule("experts").register_module(str(WIDE_EXPERT), build_wide_expert(seed))
    model.get_submodule(FROZEN_AT_START).requires_grad_(False)
    for name, value in BUFFERS.items():
        model.register_buffer(name, value.clone())
    # DeepSpeed links optimizer state to weights before later groups have state; this error would hide all others here.
    optimizer = replace(ADAMW, groups=()) if ctx.variant == WRITTEN else ADAMW
    return ctx.build_engine_around(model, optimizer=optimizer)


@contextmanager
def freeze(engine: Engine) -> Iterator[None]:
    """Freeze an expert of the model while the ``with`` block runs."""
    layer = engine.module.get_submodule(f"experts.{EXPERT}")
    layer.requires_grad_(False)
    yield
    layer.requires_grad_(True)


def freeze_if(ctx: RankContext, engine: Engine, steps: int) -> AbstractContextManager[None]:
    """Return a context that, in the variant FROZEN, freezes an expert for saves and loads around SPECIAL_STEP."""
    return freeze(engine) if ctx.variant == FROZEN and steps in (SPECIAL_STEP, SPECIAL_STEP + 1) else nullcontext()


def train(ctx: RankContext, engine: Engine, step: int, label: str) -> None:
    """Make step number ``step``, and change every buffer. In the variant ``unfrozen`` a layer is unfrozen first.

    In this variant, gradients are recorded if the engine reduces them in another dtype: the forward in which the layer
    was frozen may have chosen the dtype of its gradients.
    """
    if ctx.variant == UNFROZEN and step >= SPECIAL_STEP:
        engine.module.get_submodule(FROZEN_AT_START).requires_grad_(True)
    is_idle = ctx.variant == IDLE and step == SPECIAL_STEP
    route = [expert for expert in ALL_EXPERTS if expert != EXPERT or not is_idle]
    batch = ctx.batch(step)
    with freeze(engine) if ctx.variant == FROZEN and step == SPECIAL_STEP else nullcontext():
        engine.backward(ctx.spec.loss(engine(batch.inputs, route=route), batch.target))
        if ctx.variant == UNFROZEN and ctx.config.dtype in ctx.capabilities.reduce_dtypes:
            ctx.record(f"grads-{label}", engine.full_grads(), step)
        engine.step()
        engine.zero_grad()
    with torch.no_grad():
        for name, value in BUFFERS.items():
            engine.module.get_buffer(name).copy_(value + step + 1 if name == "count" else value / (step + 2))


def discard_backward(ctx: RankContext, engine: Engine) -> None:
    """Run a backward and discard its gradients, so that all following steps sum over ranks in the same order."""
    batch = ctx.batch(STEPS)
    engine.backward(ctx.spec.loss(engine(batch.inputs, route=ALL_EXPERTS), batch.target))
    engine.zero_grad()


def record_state(ctx: RankContext, engine: Engine, steps: int, label: str) -> None:
    """Record everything that a checkpoint contains, and the buffers, as of ``steps`` steps."""
    record_snapshot(ctx, engine, steps, label)
    ctx.record(f"full-{label}", require_full_state_dict(engine).full_state_dict(), steps)
    ctx.record(f"buffers-{label}", {name: engine.module.get_buffer(name) for name in BUFFERS}, steps)


def observe_several_saves(ctx: RankContext) -> None:
    """Save checkpoints before some steps and after the last one, and load most of them into two engines.

    After each load except the last, train the step that followed the checkpoint when it was saved.
    """
    saved, unsaved = build_engine(ctx, ctx.seed), build_engine(ctx, ctx.seed + 1)
    with shared_folder() as root:
        for steps in range(STEPS + 1):
            if steps == CHANGED_STEP:
                change_before_save(ctx, saved)
            record_state(ctx, saved, steps, "saved")
            if is_saved(ctx.variant, steps):
                with freeze_if(ctx, saved, steps):
                    save_or_load(ctx, saved, saved.save, find_folder(root, steps), f"save-{steps}")
            if steps == 0 and ctx.capabilities.order_settles and ctx.data_size > 2:
                discard_backward(ctx, saved)
            if steps < STEPS:
                train(ctx, saved, steps, "saved")
        train(ctx, unsaved, STEPS + 1, OTHER)
        record_state(ctx, unsaved, STEPS + 1, OTHER)
        for label, engine in ((OWN, saved), (OTHER, unsaved)):
            for steps in LOADS[ctx.variant]:
                with freeze_if(ctx, engine, steps):
                    save_or_load(ctx, engine, engine.load, find_folder(root, steps), f"load-{label}-{steps}")
                record_state(ctx, engine, steps, f"{label}-{steps}")
                if steps < STEPS:
                    train(ctx, engine, steps, f"{label}-{steps}")
                    record_state(ctx, engine, steps + 1, f"{label}-{steps}")
            engine.close()


def change_before_save(ctx: RankContext, engine: Engine) -> None:
    """In the variant ``edited`` edit every weight, and in ``written`` write every entry of optimizer state."""
    if ctx.variant == EDITED:
        values = new_values(engine.full_params(), ctx.seed)
        with require_gathered(engine).gathered(list(values)) as weights, torch.no_grad():
            for name, value in values.items():
                weights[name].copy_(value)
    if ctx.variant == WRITTEN:
        access = require_write_in(engine)
        state = read_state(require_read_out(engine), trained_names(engine), ADAMW)
        for path, value in new_state_values(state, ctx.seed).items():
            name, _, key = path.rpartition("/")
            write_copy(partial(access.write_optimizer_state, name, key), value)


def is_saved(variant: str, steps: int) -> bool:
    """Return whether the law variant saves a checkpoint after ``steps`` steps."""
    return steps in LOADS[variant] or steps == OVERWRITTEN.get(variant)


def save_or_load(ctx: RankContext, engine: Engine, call: Callable[[Path], None], folder: Path, label: str) -> None:
    """Call ``save`` or ``load`` on ``folder``, and record before and after which parameters require a gradient."""
    ctx.record(f"trained-before-{label}", read_requires_grad(engine))
    call(folder)
    ctx.record(f"trained-after-{label}", read_requires_grad(engine))


def read_requires_grad(engine: Engine) -> dict[str, Tensor]:
    """Return, for each parameter of the model, whether it requires a gradient."""
    parameters = engine.module.named_parameters()
    return {f"requires_grad of {name}": scalar(parameter.requires_grad) for name, parameter in parameters}


def find_folder(root: Path, steps: int) -> Path:
    """Return the folder of the checkpoint of ``steps`` steps; the last checkpoint uses the folder of SPECIAL_STEP."""
    folder = root / str(SPECIAL_STEP if steps == STEPS else steps)
    folder.mkdir(exist_ok=True)
    return folder


def judge_several_saves(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare weights, optimizer state and buffers after each load, and after the step that follows, bitwise.

    Neither ``save`` nor ``load`` may change which parameters require a gradient.
    """
    loads = [f"load-{label}-{steps}" for label in (OWN, OTHER) for steps in LOADS[ctx.variant]]
    saves = [f"save-{steps}" for steps in range(STEPS + 1) if is_saved(ctx.variant, steps)]
    for call in (*saves, *loads):
        yield from compare_records(ctx, f"trained-before-{call}", f"trained-after-{call}", 0, 0, Part.LOCAL_GRADIENT)
    for label in (OWN, OTHER):
        for steps in LOADS[ctx.variant]:
            for made in (steps, steps + 1) if steps < STEPS else (steps,):
                add_cause = hint_unloaded if made == steps else hint_narrow_grad
                for what, part in PARTS.items():
                    saved, loaded = f"{what}-saved", f"{what}-{label}-{steps}"
                    for comparison in compare_records(ctx, saved, loaded, made, made, part):
                        yield add_cause(ctx, comparison, what, label, steps)
                yield from compare_states(ctx, f"state-{label}-{steps}", made)


def hint_unloaded(ctx: JudgeContext, comparison: Comparison, what: str, label: str, steps: int) -> Comparison:
    """Add a hint to a mismatch of a buffer or weight that the load of the checkpoint of ``steps`` steps did not change.

    ``what`` is the label of the record that contains the buffer or weight.
    """
    loads = LOADS[ctx.variant]
    at = loads.index(steps)
    if comparison.mismatch is None or what not in UNLOADED_HINTS:
        return comparison
    first = ("saved", STEPS) if label == OWN else (OTHER, STEPS + 1)
    before, made = (f"{label}-{loads[at - 1]}", loads[at - 1] + 1) if at else first
    name, rank = comparison.mismatch.parameter, comparison.mismatch.seen_on
    old = ctx.rank_records(f"{what}-{before}", made)[rank][name]
    loaded = ctx.rank_records(f"{what}-{label}-{steps}", steps)[rank][name]
    hint = UNLOADED_BUFFER_HINT if name in BUFFERS else UNLOADED_HINTS[what]
    return add_hint(comparison, hint) if is_bitwise_equal(old, loaded) else comparison


def hint_narrow_grad(ctx: JudgeContext, comparison: Comparison, _what: str, label: str, steps: int) -> Comparison:
    """Add a hint to a mismatch after the step that follows a load if only one engine reduced its gradient in bf16.

    The two engines are the one that saved the checkpoint of ``steps`` steps and the one that loaded it. Both gradients
    have to equal the mean of the ranks' correct gradients, apart from rounding in bf16.
    """
    if comparison.mismatch is None or not ctx.has_record("grads-saved"):
        return comparison
    name, rank = comparison.mismatch.parameter.partition("/")[0], comparison.mismatch.seen_on
    records = [ctx.rank_records(f"grads-{run}", steps)[rank] for run in ("saved", f"{label}-{steps}")]
    grads = [record[name] for record in records if name in record]
    weights = ctx.rank_records("params-saved", steps)[rank]
    terms = [compute_grads(ctx, weights, data, steps)[name] for data in range(ctx.data_size)]
    are_right = all(is_close_to_mean(grad, terms, 1, torch.bfloat16) for grad in grads)
    are_narrow = [is_rounded_to(torch.bfloat16, grad, terms) for grad in grads]
    is_hinted = are_right and sorted(are_narrow) == [False, True]
    return add_hint(comparison, NARROW_GRAD_HINT) if is_hinted else comparison


def compute_grads(ctx: JudgeContext, weights: Mapping[str, Tensor], data: int, step: int) -> Mapping[str, Tensor]:
    """Return plain PyTorch's gradients of the micro-batch of a data coordinate, which goes through every expert."""
    model, batch = ctx.baseline.build_module(weights), ctx.baseline.batch(data, step)
    return run_backward(model, ctx.baseline.objective(model(batch.inputs, route=ALL_EXPERTS), batch)).grads


def compare_states(ctx: JudgeContext, label: str, steps: int) -> Iterator[Comparison]:
    """Compare optimizer state bitwise with that of the checkpoint; a missing entry counts as zeros."""
    for rank, (saved, loaded) in enumerate(
        zip(ctx.rank_records("state-saved", steps), ctx.rank_records(label, steps), strict=True)
    ):
        for path in {**saved, **loaded}:
            zeros = torch.zeros_like(saved.get(path, loaded.get(path, torch.empty(()))))
            place = ctx.location(path, Part.OPTIMIZER, steps, rank)
            yield compare_bitwise(place, saved.get(path, zeros), loaded.get(path, zeros))


LAWS = (
    Law(
        name="state.several_saves",
        statement="each of several checkpoints restores the saved state, in the engine that saved it and in another",
        tier=Tier.EXACT,
        models=("experts",),
        observe=observe_several_saves,
        judge=judge_several_saves,
        features=(Feature.CHECKPOINT, Feature.PARAMETERS, Feature.PARAM_GROUPS, Feature.SCHEDULE),
        weights_stay_integers=False,
        dtypes=("fp32",),  # a frozen layer may keep fp32 weights when the others are low precision
        variants=(
            Variant(compares_engine_with_itself=True),
            Variant(BEFORE_ANY_STEP, compares_engine_with_itself=True),
            Variant(FROZEN, (Feature.UNFREEZING,), compares_engine_with_itself=True),
            Variant(UNFROZEN, (Feature.UNFREEZING,), compares_engine_with_itself=True),
            Variant(IDLE, (Feature.NO_GRADIENT,), compares_engine_with_itself=True),
            Variant(FLOAT64, compares_engine_with_itself=True),
            Variant(EDITED, (Feature.EDITS,), compares_engine_with_itself=True),
            Variant(WRITTEN, (Feature.READ_OUT, Feature.WRITE_IN), compares_engine_with_itself=True),
        ),
        kept_because="the only law that saves one engine several times, and loads into one with other frozen weights",
    ),
)
