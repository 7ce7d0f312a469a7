"""Define the laws in which the engine returns the gradient, weight and optimizer state of a parameter by name."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from zharness.engines.protocol import Absent, AccumulationOwner, Engine, Feature
from zharness.engines.tensor_access import require_read_out
from zharness.law_kit.accumulation import judge_engine_divided_gradients
from zharness.law_kit.hints import SCALED_HINT, add_hint
from zharness.law_kit.judge_context import JudgeContext, divide_loss_by
from zharness.law_kit.law import Variant
from zharness.law_kit.optimizer_step import (
    RecordedStep,
    compare_published_weights,
    compare_ranks_after_step,
    judge_step,
)
from zharness.law_kit.optimizers import UNIT_LR_SGD, ZERO_LR_SGD
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.law_kit.record_comparisons import compare_record_of_ranks, compare_records
from zharness.laws.access.common import (
    ACCUMULATION_STEPS,
    CLIP,
    OWNER_FEATURES,
    STATE_OPTIMIZERS,
    access_law,
    accumulation_window,
    optimizer_weights,
    read_all,
    read_state,
    train_micro_batch,
    trained_names,
)
from zharness.parity import Comparison, Part, compare_bitwise

CLIPPED, WINDOW = "clipped", "window"
UNFROZEN = "unfrozen"  # the layer that is frozen when the engine is built is unfrozen before the first read
THIRD = 1 / 3  # no dtype narrower than float64 holds this value exactly
STEPS = 2  # the second step shows gradients that the first step left behind
FP16_AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "fp16"}}


def observe_read_grad(ctx: RankContext) -> None:
    """Train two steps of one micro-batch each, and read every gradient between the backward and the step."""
    read_grads_of_steps(ctx, ctx.build_engine(optimizer=ZERO_LR_SGD, clip=CLIP if ctx.variant == CLIPPED else None))


def observe_read_scaled_grad(ctx: RankContext) -> None:
    """Train two steps with a loss that the engine scales, and read every gradient after each backward."""
    read_grads_of_steps(ctx, ctx.build_engine(optimizer=ZERO_LR_SGD, options=FP16_AUTOCAST))


def read_grads_of_steps(ctx: RankContext, engine: Engine) -> None:
    """Train two steps. Before each step, read every gradient, and record the full gradients and the loss scale."""
    access, names = require_read_out(engine), trained_names(engine)
    for step in range(STEPS):
        train_micro_batch(ctx, engine, step)
        ctx.record("grads", read_all(names, access.read_grad), step)
        ctx.record("full_grads", engine.full_grads(), step)
        scale = engine.observe().loss_scale
        ctx.record("scale", {"loss_scale": scalar(1.0 if isinstance(scale, Absent) else scale)}, step)
        engine.step()
        engine.zero_grad()
    engine.close()


def judge_read_grad(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare each gradient that the engine returned by name with the mean of the local gradients over ranks."""
    for step in range(STEPS):
        local = ctx.compute_local_grads(step)
        yield from ctx.compare_losses(step, local)
        yield from ctx.compare_reduced_grads("grads", [local], step, ctx.certify_exactness(range(step, step + 1)))


def judge_read_scaled_grad(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare gradients read by name to the result of ``full_grads()``, which other laws judge under a loss scale."""
    for step in range(STEPS):
        scale = float(ctx.rank_records("scale", step)[0]["loss_scale"])
        for comparison in compare_records(ctx, "full_grads", "grads", step, step, Part.REDUCTION):
            mismatch = comparison.mismatch
            is_scaled = mismatch is not None and mismatch.actual == mismatch.expected * scale
            yield add_hint(comparison, SCALED_HINT) if is_scaled else comparison


def observe_read_grad_at_boundary(ctx: RankContext) -> None:
    """Read every gradient at the boundaries of two accumulation windows."""
    observe_windows(ctx, AccumulationOwner(ctx.variant), reads_inside=False)


def observe_read_grad_in_window(ctx: RankContext) -> None:
    """Read every gradient after each micro-batch of two accumulation windows."""
    observe_windows(ctx, AccumulationOwner(ctx.variant), reads_inside=True)


def observe_windows(ctx: RankContext, owner: AccumulationOwner, reads_inside: bool) -> None:
    """Train two accumulation windows, and read every gradient at their boundaries.

    If ``reads_inside`` is true, also read every gradient after each micro-batch inside the accumulation windows.
    """
    optimizer = UNIT_LR_SGD if reads_inside else ZERO_LR_SGD
    engine = ctx.build_engine(optimizer=optimizer, accumulation_steps=ACCUMULATION_STEPS, accumulation_owner=owner)
    access, names = require_read_out(engine), trained_names(engine)
    for boundary in range(STEPS):
        ctx.record("params", engine.full_params(), boundary)
        record_before_step(ctx, engine, boundary)
        first, last = accumulation_window(boundary)
        for micro in (first, last):
            loss = ctx.loss(engine, micro)
            engine.backward(loss if owner is AccumulationOwner.ENGINE else loss / ACCUMULATION_STEPS)
            if micro == last or reads_inside:
                ctx.record("grads" if micro == last else "inside", read_all(names, access.read_grad), boundary)
            if micro == last or owner is AccumulationOwner.ENGINE:
                engine.step()
        engine.zero_grad()
    record_before_step(ctx, engine, STEPS)
    engine.close()


def record_before_step(ctx: RankContext, engine: Engine, boundary: int) -> None:
    """Record the weights from which the step of an accumulation window starts, and no optimizer state."""
    ctx.record("weights", optimizer_weights(engine), boundary)
    ctx.record("state", {}, boundary)


def judge_windows(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare each reading of a gradient with the mean over ranks of the gradient that is accumulated at this point.

    Each loss is divided by the number of micro-batches in the accumulation window. If gradients were read inside the
    window, the step of the window has to apply the gradients that were read last.
    """
    for boundary in range(STEPS):
        window, params = accumulation_window(boundary), ctx.rank_records("params", boundary)[0]
        divided = [ctx.compute_local_grads(micro, params, weigh=divide_loss_by(ACCUMULATION_STEPS)) for micro in window]
        exact = ctx.certify_exactness(window) and not (boundary and ctx.has_record("inside"))  # a step rounds weights
        if ctx.has_record("inside"):
            yield from ctx.compare_reduced_grads("inside", divided[:1], boundary, exact)
        if ctx.variant == AccumulationOwner.ENGINE.value:
            yield from judge_engine_divided_gradients(ctx, "grads", boundary, window, params, divided, exact)
        else:
            yield from ctx.compare_reduced_grads("grads", divided, boundary, exact, scale=ACCUMULATION_STEPS)
        if ctx.has_record("inside"):
            yield from judge_step(
                ctx, UNIT_LR_SGD, ctx.rank_records("grads", boundary)[0], RecordedStep(boundary, "weights")
            )


def observe_read_param(ctx: RankContext) -> None:
    """Read every weight before training, after a backward and after the step.

    One law variant also reads every weight inside an accumulation window. Another records the frozen weights of the
    model, builds the engine around the model, and unfreezes the weights before the first read.
    """
    in_window = ctx.variant == WINDOW
    accumulation = {"accumulation_steps": ACCUMULATION_STEPS, "accumulation_owner": AccumulationOwner.ENGINE}
    model = ctx.spec.model(ctx.seed)
    frozen = set_thirds(model) if ctx.variant == UNFROZEN else {}
    engine = ctx.build_engine_around(model, optimizer=UNIT_LR_SGD, **(accumulation if in_window else {}))
    if ctx.variant == UNFROZEN:
        engine.module.requires_grad_(True)
    access, names = require_read_out(engine), trained_names(engine)
    ctx.record("weights", optimizer_weights(engine) | frozen)
    read = read_all(names, access.read_param)
    ctx.record("read", read, 0)
    for copy in read.values():
        copy.fill_(torch.nan)  # the caller owns the tensors that a read returned
    if in_window:
        train_micro_batch(ctx, engine, 0)
        engine.step()
        ctx.record("read_in_window", read_all(names, access.read_param))
    train_micro_batch(ctx, engine, 1)
    ctx.record("read_after_backward", read_all(names, access.read_param))
    ctx.record("grads", engine.full_grads())
    ctx.record("state", {}, 0)
    engine.step()
    ctx.record("read", read_all(names, access.read_param), 1)
    engine.zero_grad()
    ctx.record("params", {name: weight for name, weight in engine.full_params().items() if name in names}, 1)
    ctx.record("state", {}, 1)
    engine.close()


@torch.no_grad()
def set_thirds(model: nn.Module) -> dict[str, Tensor]:
    """Fill the frozen parameters of ``model`` with a value that no narrow dtype holds, and return copies of them."""
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: parameter.fill_(THIRD).clone() for name, parameter in frozen.items()}


def judge_read_param(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare weights read before the step with the initial weights, and weights read after it with SGD's formula."""
    for label in ("read", "read_in_window", "read_after_backward"):
        if ctx.has_record(label):
            yield from compare_records(ctx, "weights", label, 0, 0, Part.GATHER)
    yield from judge_step(ctx, UNIT_LR_SGD, ctx.rank_records("grads")[0], RecordedStep(0, "read"))
    after = RecordedStep(1, "read")
    yield from compare_ranks_after_step(ctx, after)
    yield from compare_published_weights(ctx, after, "params")


def observe_read_frozen(ctx: RankContext) -> None:
    """Read frozen parameters: gradients after a backward, and weights and optimizer state after the step."""
    optimizer = STATE_OPTIMIZERS["momentum"]
    engine = ctx.build_engine(optimizer=optimizer)
    access, params = require_read_out(engine), engine.full_params()
    frozen = [name for name in params if name not in trained_names(engine)]
    train_micro_batch(ctx, engine, 0)
    ctx.record("grads", read_all(frozen, access.read_grad))
    engine.step()
    engine.zero_grad()
    ctx.record("expected", {name: params[name] for name in frozen})
    ctx.record("read", read_all(frozen, access.read_param))
    ctx.record("state", read_state(access, frozen, optimizer))
    engine.close()


def judge_read_frozen(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that gradients and state of frozen parameters are absent or 0, and that weights did not change."""
    for rank, (expected, read) in enumerate(zip(ctx.rank_records("expected"), ctx.rank_records("read"), strict=True)):
        for name, weight in expected.items():
            read_weight = read.get(name, weight)
            yield compare_bitwise(ctx.location(name, Part.GATHER, 0, rank), weight.to(read_weight.dtype), read_weight)
    for label in ("grads", "state"):
        for rank, record in enumerate(ctx.rank_records(label)):
            for name, tensor in record.items():
                yield compare_bitwise(
                    ctx.location(name, Part.REDUCTION, 0, rank), tensor.new_zeros(()), tensor.abs().sum()
                )


def observe_read_state(ctx: RankContext) -> None:
    """Read the optimizer's state after each of two steps, and record the numbers from which the steps computed it.

    The tensors that were read after the first step are recorded again after the second step: the second step must not
    change them, because a read returns copies.
    """
    optimizer = STATE_OPTIMIZERS[ctx.variant]
    engine = ctx.build_engine(optimizer=optimizer)
    access, names = require_read_out(engine), trained_names(engine)
    ctx.record("weights", optimizer_weights(engine), 0)
    ctx.record("read", {}, 0)
    kept: list[dict[str, Tensor]] = []
    for step in range(STEPS):
        train_micro_batch(ctx, engine, step)
        ctx.record("grads", engine.full_grads(), step)
        engine.step()
        engine.zero_grad()
        kept.append(read_state(access, names, optimizer))
        ctx.record("read", kept[-1], step + 1)
        ctx.record("weights", optimizer_weights(engine), step + 1)
    ctx.record("kept", kept[0])
    engine.close()


def judge_read_state(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the state after each step with the optimizer's formula, applied to the numbers from before the step.

    The copy that was read after the first step must not have changed in the second.
    """
    yield from compare_records(ctx, "read", "kept", 1, 0, Part.OPTIMIZER)
    for step in range(STEPS):
        grads = ctx.rank_records("grads", step)[0]
        yield from judge_step(ctx, STATE_OPTIMIZERS[ctx.variant], grads, RecordedStep(step, "weights", "read"))
        yield from compare_record_of_ranks(ctx, "read", step + 1, step)


LAWS = (
    access_law(
        "read_grad",
        "a gradient read by name before the step is the named parameter's: reduced, full, unscaled and unclipped",
        observe_read_grad,
        judge_read_grad,
        features=(Feature.READ_OUT,),
        variants=(Variant(), Variant(CLIPPED, (Feature.CLIP,))),
        kept_because="the only law that reads gradients with the engine's own function",
    ),
    access_law(
        "read_scaled_grad",
        "a gradient read under a dynamic loss scale is unscaled, and is the gradient that the step applies",
        observe_read_scaled_grad,
        judge_read_scaled_grad,
        features=(Feature.READ_OUT, Feature.AUTOCAST_SCALER),
        variants=(Variant(compares_engine_with_itself=True),),
        dtypes=("fp32",),  # torch.autocast chooses the dtype of each operation
        kept_because="the only law that reads gradients under a loss scale",
    ),
    access_law(
        "read_accumulated_grad",
        "a gradient read at an accumulation boundary is the mean over the window's micro-batches",
        observe_read_grad_at_boundary,
        judge_windows,
        features=(Feature.READ_OUT,),
        variants=tuple(Variant(owner.value, (feature,)) for owner, feature in OWNER_FEATURES.items()),
        kept_because="the only law that reads gradients of several micro-batches",
    ),
    access_law(
        "read_grad_in_window",
        "a gradient read inside an accumulation window is the reduced sum so far, and reading it changes nothing",
        observe_read_grad_in_window,
        judge_windows,
        features=(Feature.READ_OUT, Feature.WINDOW_READ_OUT),
        variants=tuple(Variant(owner.value, (feature,)) for owner, feature in OWNER_FEATURES.items()),
        kept_because="the only law that reads gradients before the boundary",
    ),
    access_law(
        "read_param",
        "a weight read by name before, during or after a step is the named weight that the optimizer updates",
        observe_read_param,
        judge_read_param,
        features=(Feature.READ_OUT,),
        variants=(
            Variant(compares_engine_with_itself=True),
            Variant(WINDOW, (Feature.ENGINE_ACCUMULATION,), compares_engine_with_itself=True),
            Variant(UNFROZEN, (Feature.PARAMETERS, Feature.UNFREEZING), compares_engine_with_itself=True),
        ),
        weights_stay_integers=False,
        kept_because="the only law that reads weights with the engine's own function",
    ),
    access_law(
        "read_frozen",
        "reading a frozen parameter returns its weight or None, and no gradient or optimizer state",
        observe_read_frozen,
        judge_read_frozen,
        features=(Feature.READ_OUT,),
        variants=(Variant(compares_engine_with_itself=True),),
        weights_stay_integers=False,
        kept_because="the only law that reads parameters that the optimizer does not update",
    ),
    access_law(
        "read_state",
        "optimizer state read by name after a step is the state of the named parameter",
        observe_read_state,
        judge_read_state,
        features=(Feature.READ_OUT,),
        variants=tuple(
            Variant(
                name,
                (Feature.PARAM_GROUPS, Feature.SCHEDULE) if name == "groups" else (),
                compares_engine_with_itself=True,
            )
            for name in STATE_OPTIMIZERS
        ),
        weights_stay_integers=False,
        kept_because="the only law that reads optimizer state with the engine's own function",
    ),
)
