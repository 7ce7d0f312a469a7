"""Define the laws in which the engine replaces gradients, weights and optimizer state by new tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from zharness.engines.protocol import AccumulationOwner, Engine, Feature, OptimizerSpec
from zharness.engines.tensor_access import require_read_out, require_shard_access, require_write_in
from zharness.law_kit.clipping import judge_clip_factor
from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext, divide_loss_by
from zharness.law_kit.law import Variant
from zharness.law_kit.optimizer_step import (
    RecordedStep,
    compare_published_weights,
    compare_ranks_after_step,
    judge_step,
)
from zharness.law_kit.optimizers import UNIT_LR_SGD
from zharness.law_kit.rank_actions import eval_mode
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.law_kit.record_comparisons import (
    STALE_FORWARD_HINT,
    compare_record_of_ranks,
    compare_records,
    matches_plain_loss,
)
from zharness.laws.access.common import (
    ACCUMULATION_STEPS,
    ALIGNED,
    CLIP,
    OWNER_FEATURES,
    SIMILAR,
    STATE_OPTIMIZERS,
    access_law,
    new_values,
    optimizer_weights,
    own_shard,
    read_all,
    read_state,
    train_micro_batch,
    trained_names,
    write_copy,
)
from zharness.parity import Comparison, Part, compare_bitwise
from zharness.parity.baseline import LocalResult
from zharness.parity.compare import check_names
from zharness.workload.exact_blocks import make_wide

ONE, TWICE, CLIPPED, SHARD, CLIPPED_SHARD = "one", "twice", "clipped", "shard", "clipped_shard"
IDLE = "idle"  # the variant writes the gradients of a layer that the step does not use
IDLE_LAYER = "third."
INSIDE = "inside_"  # the start of the names of variants that write inside an accumulation window, before its last batch
BEFORE_FORWARD, BEFORE_STEP, FORWARD, FORWARD_SHARD = "before_forward", "before_step", "forward", "forward_shard"
FLOAT64 = "float64"  # WIDE_LAYER has float64 weights, and gets values that no narrower dtype holds
WIDE_LAYER = "third"
EVALUATED = "evaluated"  # FORWARD plus a forward in evaluation mode before and after the write
# Shards of ``similar`` are padded and shards of ``aligned`` are not: an engine may fail on padded shards alone.
WRITTEN_MODELS = (SIMILAR, ALIGNED)
SHARD_VARIANTS = (SHARD, CLIPPED_SHARD, FORWARD_SHARD)
FORWARD_VARIANTS = (FORWARD, FORWARD_SHARD, EVALUATED)
UNWRITTEN_HINT = "it is the gradient from before the write"
OLD_NORM_HINT = "it is the norm of the gradients from before the write"


def observe_write_grad(ctx: RankContext) -> None:
    """Replace gradients before the step, read the new gradients, and record norm and weights after the step."""
    owner = find_owner(ctx.variant)
    accumulation = {} if owner is None else {"accumulation_steps": ACCUMULATION_STEPS, "accumulation_owner": owner}
    clip = CLIP if ctx.variant.startswith(CLIPPED) else None
    engine = ctx.build_engine(optimizer=UNIT_LR_SGD, clip=clip, **accumulation)
    weights = optimizer_weights(engine)
    ctx.record("weights", weights, 0)
    ctx.record("state", {}, 0)
    written = new_values(weights, ctx.seed)
    ctx.record("written", written)
    for micro in range(1 if owner is None else ACCUMULATION_STEPS):
        batch = ctx.batch(micro)
        output = engine(batch.inputs, with_third=False) if ctx.variant == IDLE else batch.feed(engine)
        loss = ctx.spec.loss(output, batch.target)
        engine.backward(loss / ACCUMULATION_STEPS if owner is AccumulationOwner.CALLER else loss)
        if ctx.variant.startswith(INSIDE) and micro + 1 < ACCUMULATION_STEPS:
            write_grads(ctx, engine, written)
        if owner is AccumulationOwner.ENGINE and micro + 1 < ACCUMULATION_STEPS:
            engine.step()
    ctx.record("grads", engine.full_grads())
    if not ctx.variant.startswith(INSIDE):
        write_before_step(ctx, engine, written)
    ctx.record("read", read_all(trained_names(engine), require_read_out(engine).read_grad))
    engine.step()
    if clip is not None:
        norm = engine.grad_norm()
        ctx.record("norm", {} if norm is None else {"norm": scalar(norm)})
    engine.zero_grad()
    ctx.record("weights", optimizer_weights(engine), 1)
    ctx.record("state", {}, 1)
    engine.close()


def find_owner(variant: str) -> AccumulationOwner | None:
    """Return the accumulation owner of a law variant of ``write_grad``, or None if the variant has no window."""
    return next((owner for owner in AccumulationOwner if owner.value == variant.removeprefix(INSIDE)), None)


def write_before_step(ctx: RankContext, engine: Engine, values: Mapping[str, Tensor]) -> None:
    """Replace the gradients by ``values`` at the end of the accumulation window, as the law variant says."""
    if ctx.variant == TWICE:
        write_grads(ctx, engine, new_values(values, ctx.seed + 1))
    write_grads(ctx, engine, select_written(ctx.variant, values))


def select_written(variant: str, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the entries of ``values`` that the law variant writes: one entry, those of an idle layer, or all."""
    if variant == IDLE:
        return {name: value for name, value in values.items() if name.startswith(IDLE_LAYER)}
    return dict([list(values.items())[len(values) // 2]]) if variant == ONE else values


def write_grads(ctx: RankContext, engine: Engine, values: Mapping[str, Tensor]) -> None:
    """Replace gradients by ``values``: write this rank's shards in the law variants of shards, else full tensors."""
    if ctx.variant in SHARD_VARIANTS:
        shards = require_shard_access(engine)
        for name, value in values.items():
            shards.write_grad_shard(name, own_shard(engine, name, value, shards.read_grad_shard(name)))
    else:
        for name, value in values.items():
            write_copy(partial(require_write_in(engine).write_grad, name), value)


def judge_write_grad(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that the engine returns the new gradients, and that the norm, the clipping and the update use them.

    If they were written inside the accumulation window, the gradient of the last micro-batch is added to them.
    """
    if ctx.variant.startswith(INSIDE):
        yield from judge_written_inside(ctx)
        return
    if ctx.variant == IDLE:  # an engine may need an option for weights that a step does not use, as DDP does
        for comparison in compare_record_of_ranks(ctx, "grads", 0, 0):
            yield add_hint(comparison, "the ranks report different gradients")
    records = zip(ctx.rank_records("grads"), ctx.rank_records("written"), ctx.rank_records("read"), strict=True)
    for rank, (before, values, read) in enumerate(records):
        expected = {**before, **select_written(ctx.variant, values)}
        check_names("read_grad", expected, {name: grad for name, grad in read.items() if name in expected})
        for name, grad in expected.items():
            place, read_grad = ctx.location(name, Part.REDUCTION, 0, rank), read[name]
            comparison = compare_bitwise(place, grad.to(read_grad.dtype), read_grad)
            is_old = name in before and torch.equal(before[name].to(read_grad.dtype), read_grad)
            yield add_hint(comparison, UNWRITTEN_HINT) if is_old else comparison
    grads_before = ctx.rank_records("grads")[0]
    grads = {**grads_before, **select_written(ctx.variant, ctx.rank_records("written")[0])}
    factor = yield from judge_clip_factor(ctx, "norm", 0, grads, CLIP, {OLD_NORM_HINT: grads_before})
    yield from judge_step(ctx, UNIT_LR_SGD, grads, RecordedStep(0, "weights"), factor)
    yield from compare_ranks_after_step(ctx, RecordedStep(1, "weights"))


def judge_written_inside(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that the step's gradients are the written gradients plus the gradient of the window's last micro-batch."""
    micros = range(ACCUMULATION_STEPS)
    divided = [ctx.compute_local_grads(micro, weigh=divide_loss_by(ACCUMULATION_STEPS)) for micro in micros]
    written = LocalResult(divided[0][0].loss, dict(ctx.rank_records("written")[0]))
    rows = [[written] * ctx.data_size, divided[-1]]
    suspects = {
        "the gradient as if nothing had been written": divided,
        "the gradient that was written, without the last micro-batch": rows[:1],
        "the gradient of the last micro-batch, without what was written": rows[1:],
    }
    exact = ctx.certify_exactness(micros) if ctx.dtype is torch.float32 else False
    scale = float(ACCUMULATION_STEPS)  # compare_reduced_grads divides by the number of rows
    for label in ("read", "grads"):
        yield from ctx.compare_reduced_grads(label, rows, exact=exact, scale=scale, suspects=suspects)
    yield from judge_step(ctx, UNIT_LR_SGD, ctx.rank_records("read")[0], RecordedStep(0, "weights"))
    yield from compare_ranks_after_step(ctx, RecordedStep(1, "weights"))


def observe_write_param(ctx: RankContext) -> None:
    """Replace every weight before the forward or before the step, read the new weights, and train a step."""
    engine = ctx.build_engine_around(build_model(ctx), optimizer=UNIT_LR_SGD)
    written = new_values(optimizer_weights(engine), ctx.seed)
    if ctx.variant == FLOAT64:
        written = add_third(written)
    if ctx.variant == BEFORE_STEP:
        train_micro_batch(ctx, engine, 0)
        grads = engine.full_grads()
    if ctx.variant == EVALUATED:
        evaluate(ctx, engine, 0)
    write_params(ctx, engine, written)
    ctx.record("weights", written, 0)
    ctx.record("read", read_all(written, require_read_out(engine).read_param))
    if ctx.variant in FORWARD_VARIANTS:
        ctx.record("params", engine.full_params())
    if ctx.variant == EVALUATED:
        evaluate(ctx, engine, 1)
    if ctx.variant != BEFORE_STEP:
        train_micro_batch(ctx, engine, 0)
        grads = engine.full_grads()
    ctx.record("grads", grads)
    engine.step()
    engine.zero_grad()
    ctx.record("weights", optimizer_weights(engine), 1)
    ctx.record("params", {name: weight for name, weight in engine.full_params().items() if name in written}, 1)
    for step in range(2):
        ctx.record("state", {}, step)
    engine.close()


def build_model(ctx: RankContext) -> nn.Module:
    """Return the model, in which the layer WIDE_LAYER has float64 weights in the variants ``float64``."""
    model = ctx.spec.model(ctx.seed)
    if ctx.variant.endswith(FLOAT64):
        layer = model.get_submodule(WIDE_LAYER)
        assert isinstance(layer, nn.Linear)
        model.register_module(WIDE_LAYER, make_wide(layer))
    return model


def add_third(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``values`` plus a third, each rounded to its own dtype."""
    return {name: value + 1 / 3 for name, value in values.items()}


def evaluate(ctx: RankContext, engine: Engine, time: int) -> None:
    """Run a forward in evaluation mode without gradients, and record its loss, before (0) or after (1) the write."""
    with eval_mode(engine), torch.no_grad():
        ctx.loss(engine, time, "evaluated")


def write_params(ctx: RankContext, engine: Engine, values: Mapping[str, Tensor]) -> None:
    """Replace weights by ``values``: write this rank's shards in the law variant of shards, else full tensors."""
    if ctx.variant in SHARD_VARIANTS:
        shards = require_shard_access(engine)
        for name, value in values.items():
            shards.write_param_shard(name, own_shard(engine, name, value, shards.read_param_shard(name)))
    else:
        for name, value in values.items():
            write_copy(partial(require_write_in(engine).write_param, name), value)


def judge_write_param(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that the engine returns the new weights, and that the step uses them.

    In the variants FORWARD, FORWARD_SHARD and EVALUATED, the forward has to use the new weights too.
    """
    yield from compare_records(ctx, "weights", "read", 0, 0, Part.GATHER)
    if ctx.variant in FORWARD_VARIANTS:
        params = ctx.rank_records("params")[0]
        if ctx.variant == EVALUATED:
            yield from judge_evaluations(ctx, {**params, **ctx.rank_records("weights")[0]})
        yield from compare_published_weights(ctx, RecordedStep(0, "weights"), "params")
        local = ctx.compute_local_grads(0, {**params, **ctx.rank_records("weights")[0]})
        yield from ctx.compare_losses(0, local)
        yield from ctx.compare_reduced_grads("grads", [local])
    yield from judge_step(ctx, UNIT_LR_SGD, ctx.rank_records("grads")[0], RecordedStep(0, "weights"))
    after = RecordedStep(1, "weights")
    yield from compare_ranks_after_step(ctx, after)
    yield from compare_published_weights(ctx, after, "params")


def judge_evaluations(ctx: JudgeContext, written: Mapping[str, Tensor]) -> Iterator[Comparison]:
    """Compare the forwards in evaluation mode before and after the write; ``written`` are the weights after it."""
    for time, weights in enumerate((None, written)):
        expected = [ctx.baseline.run_forward(at, time, weights) for at in range(ctx.data_size)]
        for comparison in ctx.compare_losses(time, expected, "evaluated"):
            mismatch = comparison.mismatch
            is_stale = mismatch is not None and matches_plain_loss(ctx, time, mismatch, None)
            yield add_hint(comparison, f"{STALE_FORWARD_HINT} the write") if is_stale else comparison


def observe_write_state(ctx: RankContext) -> None:
    """Replace the optimizer's state after the first step, read the new state, and make the second step."""
    optimizer = find_optimizer(ctx.variant)
    engine = ctx.build_engine_around(build_model(ctx), optimizer=optimizer)
    names = trained_names(engine)
    train_micro_batch(ctx, engine, 0)
    engine.step()
    engine.zero_grad()
    written = new_state_values(read_state(require_read_out(engine), names, optimizer), ctx.seed)
    if ctx.variant.endswith(FLOAT64):
        written = add_third(written)
    for path, value in written.items():
        name, _, key = path.rpartition("/")
        write_state(ctx, engine, name, key, value)
    ctx.record("written", written, 1)
    ctx.record("read", read_state(require_read_out(engine), names, optimizer), 1)
    ctx.record("weights", optimizer_weights(engine), 1)
    train_micro_batch(ctx, engine, 1)
    ctx.record("grads", engine.full_grads())
    engine.step()
    engine.zero_grad()
    ctx.record("weights", optimizer_weights(engine), 2)
    ctx.record("written", read_state(require_read_out(engine), names, optimizer), 2)
    engine.close()


def find_optimizer(variant: str) -> OptimizerSpec:
    """Return the optimizer of a law variant of ``write_state``; the variant's name begins with the optimizer's."""
    return STATE_OPTIMIZERS[variant.partition("_")[0]]


def new_state_values(state: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return new values for the entries of optimizer state; second moments get positive values."""
    return {path: value.abs() if path.endswith("_sq") else value for path, value in new_values(state, seed).items()}


def write_state(ctx: RankContext, engine: Engine, name: str, key: str, value: Tensor) -> None:
    """Replace an entry of optimizer state by ``value``: write a shard in variants of shards, else a full tensor."""
    if ctx.variant.endswith(SHARD):
        shards = require_shard_access(engine)
        shard = own_shard(engine, name, value, shards.read_optimizer_state_shard(name, key))
        shards.write_optimizer_state_shard(name, key, shard)
    else:
        write_copy(partial(require_write_in(engine).write_optimizer_state, name, key), value)


def judge_write_state(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that the engine returns the new state, and that the second step starts from it."""
    yield from compare_records(ctx, "written", "read", 1, 1, Part.OPTIMIZER)
    optimizer = find_optimizer(ctx.variant)
    yield from judge_step(ctx, optimizer, ctx.rank_records("grads")[0], RecordedStep(1, "weights", "written"))
    for label in ("weights", "written"):
        yield from compare_record_of_ranks(ctx, label, 2, 1)


def write_variant(name: str = "", *features: Feature) -> Variant:
    """Return a law variant that writes full tensors, or shards if its name ends in ``shard``."""
    written = (Feature.SHARD_ACCESS,) if name.endswith(SHARD) else (Feature.WRITE_IN,)
    return Variant(name, (*written, *features), compares_engine_with_itself=True)


LAWS = (
    access_law(
        "write_grad",
        "after a gradient is replaced before the step, reads return the new gradient, and norm, clip and step use it",
        observe_write_grad,
        judge_write_grad,
        features=(Feature.READ_OUT,),
        models=WRITTEN_MODELS,
        variants=(
            write_variant(),
            write_variant(ONE),
            write_variant(TWICE),
            write_variant(IDLE),
            write_variant(CLIPPED, Feature.CLIP),
            *(write_variant(owner.value, feature) for owner, feature in OWNER_FEATURES.items()),
            *(
                Variant(f"{INSIDE}{owner.value}", (Feature.WRITE_IN, Feature.WINDOW_WRITE_IN, feature))
                for owner, feature in OWNER_FEATURES.items()
            ),
            write_variant(SHARD),
            write_variant(CLIPPED_SHARD, Feature.CLIP),
        ),
        weights_stay_integers=False,
        kept_because="the only law in which the caller replaces gradients",
    ),
    access_law(
        "write_param",
        "after a weight is replaced, reads return the new weight, and the next step starts from it",
        observe_write_param,
        judge_write_param,
        features=(Feature.READ_OUT,),
        models=WRITTEN_MODELS,
        variants=(
            *map(write_variant, (BEFORE_FORWARD, BEFORE_STEP, SHARD, FLOAT64)),
            *(write_variant(name, Feature.WRITE_IN_FORWARD) for name in FORWARD_VARIANTS),
        ),
        weights_stay_integers=False,
        kept_because="the only law that replaces the weights of the optimizer with the engine's own function",
    ),
    access_law(
        "write_state",
        "after an entry of optimizer state is replaced, reads return the new value, and the next step starts from it",
        observe_write_state,
        judge_write_state,
        features=(Feature.READ_OUT,),
        models=WRITTEN_MODELS,
        variants=(
            *(write_variant(f"{name}{suffix}") for name in ("momentum", "adam") for suffix in ("", f"_{SHARD}")),
            write_variant(f"adam_{FLOAT64}"),
        ),
        weights_stay_integers=False,
        kept_because="the only law in which the caller replaces optimizer state",
    ),
)
