"""The laws of loss scales, wires, masters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines.protocol import Absent, Engine, Feature, OptimizerSpec
from zharness.law_kit.dtypes import DTYPES
from zharness.law_kit.fp32_accumulation import is_config_refused, judge_fp32_accumulation, observe_fp32_accumulation
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.optimizer_step import (
    RecordedStep,
    compare_published_weights,
    compare_ranks_after_step,
    judge_step,
)
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws import precision_autocast
from zharness.laws.precision_autocast import (
    AUTOCAST_OPTIONS,
    LOW_DTYPE,
    REDUCE_COLLECTIVES,
    SGD,
    WIDE_DTYPE,
    compare_values_and_dtypes,
    compute_baseline_locals,
    count_sent_elements,
    dtype_index,
    judge_reduced_gradients,
    judge_sent_once,
    precision_law,
)
from zharness.laws.state import compare_records, shared_folder
from zharness.laws.training_accumulation import ZERO_LR_SGD
from zharness.laws.training_trajectory import collect_engine_facts
from zharness.parity import Comparison, Part, compare_bitwise

ADAMW = OptimizerSpec(name="adamw", args={"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1})
STEPS = 6
# A factor of its own for every step: a schedule that a skipped step moves on shows in the rate of the next.
SCHEDULED_ADAMW = replace(ADAMW, schedule=tuple(2.0**-made for made in range(STEPS)))
FP16_OPTIONS = {"fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 6, "loss_scale_window": 2}}
RESUMED_VARIANT, RESUME_STEP = "resumed", 3  # after a step that was skipped, and half a window on
SCALER_SETTINGS: Mapping[str, tuple[Mapping[str, Any], float, int]] = {
    "fp16": (FP16_OPTIONS, 2.0**6, 2),
    RESUMED_VARIANT: (FP16_OPTIONS, 2.0**6, 2),
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "fp16"}}, 2.0**16, 2000),
}


class InfiniteFirstColumnGrad(torch.autograd.Function):
    """Passes its input through; the gradient of its first column is infinite, and no other number is changed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        spoilt = grads[0].clone()
        spoilt[:, 0] = torch.inf
        return spoilt


class Overflow(Enum):
    """Which of a rank's gradients are infinite in a step.

    PART: those of one row of the first layer, and of one element of its bias. Where gradients are sharded one rank owns
    them, from which alone the others learn that the step is to be skipped.
    """

    NONE = "none"
    PART = "of one row"
    WHOLE = "all"


def get_planned_overflow(step: int, rank: int, world_size: int) -> Overflow:
    """The first rank's gradients overflow at step 1, some of the last one's at step 4."""
    return {(1, 0): Overflow.WHOLE, (4, world_size - 1): Overflow.PART}.get((step, rank), Overflow.NONE)


def run_overflowing_forward(model: Callable[..., Tensor], inputs: Tensor, overflow_kind: Overflow) -> Tensor:
    """The forward of a model, or an engine."""
    return model(inputs, through=InfiniteFirstColumnGrad.apply) if overflow_kind is Overflow.PART else model(inputs)


def apply_loss_overflow(loss: Tensor, overflow_kind: Overflow) -> Tensor:
    """``loss``, infinite where all of its gradients are to be."""
    return loss * (torch.inf if overflow_kind is Overflow.WHOLE else 1.0)


def observe_scaler(ctx: RankContext) -> None:
    options, _, _ = SCALER_SETTINGS[ctx.variant]
    engine = ctx.build_engine(optimizer=SCHEDULED_ADAMW, options=options)
    for step in range(STEPS):
        if ctx.variant == RESUMED_VARIANT and step == RESUME_STEP:
            engine = save_and_resume(ctx, engine, ctx.build_engine(optimizer=SCHEDULED_ADAMW, options=options))
        ctx.record_training_state(engine, step)
        bad, batch = get_planned_overflow(step, ctx.rank, ctx.world_size), ctx.batch(step)
        loss = ctx.spec.loss(run_overflowing_forward(engine, batch.inputs, bad), batch.target)
        engine.backward(apply_loss_overflow(loss, bad))
        ctx.record("grads", engine.full_grads(), step)
        engine.step()
        engine.zero_grad()
        seen = engine.observe()
        scale, skipped = (x if isinstance(x, (int, float)) else -1 for x in (seen.loss_scale, seen.skipped_steps))
        ctx.record("scaler", {"scale": scalar(scale), "skipped": scalar(skipped)}, step)
        rates = () if isinstance(seen.learning_rates, Absent) else seen.learning_rates
        ctx.record("rates", {str(group): scalar(rate) for group, rate in enumerate(rates)}, step)
    ctx.record_training_state(engine, STEPS)
    engine.close()


def save_and_resume(ctx: RankContext, engine: Engine, target: Engine) -> Engine:
    """``other``, gone on from what ``engine`` saved at its end; and what both tell of themselves. Collective."""
    ctx.record("told", collect_engine_facts(engine), 0)
    with shared_folder() as folder:
        engine.save(folder)
        engine.close()
        target.load(folder)
    ctx.record("told", collect_engine_facts(target), 1)
    return target


def has_finite_grads(ctx: JudgeContext, step: int, rank: int, scale: float) -> bool:
    """Whether plain PyTorch's gradient of one rank's scaled loss is finite, on the weights that the engine had."""
    low = replace(ctx.baseline, dtype=ctx.dtype if ctx.variant == "autocast" else torch.float16)
    model, batch = low.build_module(ctx.rank_records("params", step)[0]), ctx.baseline.batch(rank, step)
    bad = get_planned_overflow(step, rank, ctx.world_size)
    with torch.autocast("cpu", torch.float16, enabled=ctx.variant == "autocast"):
        output = run_overflowing_forward(model, batch.inputs.to(low.dtype), bad)
    loss = apply_loss_overflow(low.objective(output, batch), bad)
    (loss * torch.tensor(scale)).backward()  # type: ignore[no-untyped-call]
    return all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def judge_scaler(ctx: JudgeContext) -> Iterator[Comparison]:
    """torch.amp.GradScaler itself, fed with one number that is finite whenever every rank's own plain gradients are."""
    _, initial, window = SCALER_SETTINGS[ctx.variant]
    scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=window)
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(torch.zeros(()))
    skipped = 0
    for step in range(STEPS):
        grads = ctx.rank_records("grads", step)[0]
        finite = all(has_finite_grads(ctx, step, rank, scaler.get_scale()) for rank in range(ctx.world_size))
        summed = all(bool(grad.isfinite().all()) for grad in grads.values())
        yield compare_bitwise(ctx.location("loss", Part.REDUCTION, step), scalar(finite), scalar(summed))
        weight.grad = torch.tensor(1.0 if finite else torch.inf)
        scaler.step(optimizer)
        scaler.update()
        skipped += not finite
        for rank, copy in enumerate(ctx.rank_records("scaler", step)):
            place = ctx.location("loss", Part.OPTIMIZER, step, rank)
            yield compare_bitwise(place, scalar(scaler.get_scale()), copy["scale"])
            yield compare_bitwise(place, scalar(skipped), copy["skipped"])
        if step == RESUME_STEP and ctx.variant == RESUMED_VARIANT:
            yield from compare_records(ctx, "told", "told", 0, 1, Part.OPTIMIZER)
        moment = RecordedStep(step, "masters", skipped_steps=skipped)
        if finite:
            yield from judge_step(ctx, SCHEDULED_ADAMW, grads, moment)
        else:
            yield from compare_skipped_step(ctx, step)
        yield from compare_learning_rates(ctx, step, step + 1 - skipped)
        yield from compare_ranks_after_step(ctx, RecordedStep(step + 1, "masters"))
        yield from compare_published_weights(ctx, RecordedStep(step + 1, "masters"), "params")


def compare_learning_rates(ctx: JudgeContext, step: int, steps_made: int) -> Iterator[Comparison]:
    """The learning rate that each group reports is the schedule's behind as many steps as were made."""
    wanted = scalar(SCHEDULED_ADAMW.args["lr"] * SCHEDULED_ADAMW.schedule[min(steps_made, STEPS - 1)])
    for rank, copy in enumerate(ctx.rank_records("rates", step)):
        for group, rate in copy.items():
            yield compare_bitwise(
                ctx.location(f"learning rate of group {group}", Part.OPTIMIZER, step, rank), wanted, rate
            )


def compare_skipped_step(ctx: JudgeContext, step: int) -> Iterator[Comparison]:
    """A skipped step changes neither weights nor state."""
    for label in ("masters", "state"):
        before, after = ctx.rank_records(label, step)[0], ctx.rank_records(label, step + 1)[0]
        for name, tensor in before.items():
            yield compare_bitwise(ctx.location(name, Part.OPTIMIZER, step), tensor, after[name])


COMM_DTYPES: Mapping[str, tuple[Mapping[str, Any], torch.dtype]] = {
    "first": ({"communication_data_type": "bf16"}, LOW_DTYPE),
    "second": ({}, WIDE_DTYPE),
}


def observe_comm_dtype(ctx: RankContext) -> None:
    engines = {
        name: ctx.build_engine(optimizer=ZERO_LR_SGD, options=options) for name, (options, _) in COMM_DTYPES.items()
    }
    before = {name: count_sent_elements(engine, REDUCE_COLLECTIVES) for name, engine in engines.items()}
    for name, engine in engines.items():
        engine.backward(ctx.loss(engine, 0, f"loss-{name}"))
    for name, engine in engines.items():
        ctx.record(f"grads-{name}", engine.full_grads())
        after = count_sent_elements(engine, REDUCE_COLLECTIVES)
        ctx.record(f"reduced-{name}", {dtype: after[dtype] - before[name][dtype] for dtype in after})
        engine.close()


def judge_comm_dtype(ctx: JudgeContext) -> Iterator[Comparison]:
    parameters = dict(ctx.baseline.spec.model(0).named_parameters())
    sizes = {name: p.numel() for name, p in parameters.items()}
    trained, none = {name for name, p in parameters.items() if p.requires_grad}, set[str]()
    expected = compute_baseline_locals(ctx, forward=False)
    for name, (_, dtype) in COMM_DTYPES.items():
        by_dtype = {"bfloat16": none, "float32": none, "float16": none}
        by_dtype[str(dtype).removeprefix("torch.")] = trained
        yield from judge_sent_once(ctx, f"reduced-{name}", sizes, by_dtype)
        yield from judge_reduced_gradients(ctx, f"grads-{name}", expected, trained if dtype == LOW_DTYPE else none)


BF16_OPTIONS: Mapping[str, Any] = {"enabled": True}
LOW_MASTERS_OPTIONS = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
INVALID_OPTIONS: Sequence[Mapping[str, Any]] = (
    {"bf16": {**BF16_OPTIONS, "bf16_optimizer_states": True}},
    {"bf16": {**BF16_OPTIONS, "bf16_master_weights_and_grads": True}},
    {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
    {"bf16": {**BF16_OPTIONS, **LOW_MASTERS_OPTIONS}, "fp16": {"fp16_master_weights_and_grads": True}},
    {"bf16": BF16_OPTIONS, "fp16": {"enabled": True}},
)


def observe_masters(ctx: RankContext) -> None:
    low = ctx.variant == "low"
    options = {"bf16": {**BF16_OPTIONS, **(LOW_MASTERS_OPTIONS if low else {})}}
    wrong = [*INVALID_OPTIONS, options] if low and ctx.config.stage == 0 else INVALID_OPTIONS
    accepted = sum(not is_config_refused(ctx, invalid) for invalid in wrong)
    ctx.record("accepted", {"invalid": scalar(accepted)})
    if len(wrong) > len(INVALID_OPTIONS):
        return
    engine, batch = ctx.build_engine(optimizer=ADAMW, options=options), ctx.batch(0).to(LOW_DTYPE)
    for step in range(2):
        ctx.record_training_state(engine, step)
        engine.backward(ctx.spec.loss(engine(batch.inputs), batch.target))
        ctx.record("grads", engine.full_grads(), step)
        engine.step()
        engine.zero_grad()
    ctx.record_training_state(engine, 2)
    engine.close()
    if not low and not accepted:  # else it is told already, and what it makes of a mix nobody knows
        observe_fp32_accumulation(ctx)


def judge_masters(ctx: JudgeContext) -> Iterator[Comparison]:
    """Steps are replayed in the masters' dtype; the model computes with their rounding; gradients are bf16's."""
    for rank, copy in enumerate(ctx.rank_records("accepted")):
        yield compare_bitwise(ctx.location("input", Part.FORWARD, rank=rank), scalar(0), copy["invalid"])
    if not ctx.has_record("grads"):
        return
    master = LOW_DTYPE if ctx.variant == "low" else WIDE_DTYPE
    half = replace(ctx, baseline=replace(ctx.baseline, dtype=LOW_DTYPE), dtype=LOW_DTYPE)
    yield from half.compare_reduced_grads("grads", [half.compute_local_grads(0)])
    yield from judge_fp32_accumulation(ctx)
    for step in range(2):
        weights, grads = ctx.rank_records("masters", step)[0], ctx.rank_records("grads", step)[0]
        state = ctx.rank_records("state", step + 1)[0]
        for name, kept in [(name, weights[name]) for name in grads] + list(grads.items()):
            yield compare_bitwise(
                ctx.location(name, Part.OPTIMIZER, step), dtype_index(torch.zeros((), dtype=master)), dtype_index(kept)
            )
        for name, kept in state.items():
            if kept.dim():
                yield compare_bitwise(
                    ctx.location(name, Part.OPTIMIZER, step),
                    dtype_index(torch.zeros((), dtype=master)),
                    dtype_index(kept),
                )
        yield from judge_step(ctx, ADAMW, grads, RecordedStep(step, "masters"))
        yield from compare_ranks_after_step(ctx, RecordedStep(step + 1, "masters"))
        yield from compare_published_weights(ctx, RecordedStep(step + 1, "masters"), "params")


PRECISION_MODES: Mapping[str, tuple[Mapping[str, Any], torch.dtype, Feature]] = {
    "bf16": ({"bf16": BF16_OPTIONS}, LOW_DTYPE, Feature.MASTERS),
    "fp16": ({"fp16": {"enabled": True, "loss_scale": 16}}, torch.float16, Feature.LOSS_SCALER),
    "autocast": (AUTOCAST_OPTIONS, WIDE_DTYPE, Feature.AUTOCAST),
}


def observe_buffers(ctx: RankContext) -> None:
    if ctx.variant == "declared":
        observe_declared_dtypes(ctx)
        return
    options, dtype, _ = PRECISION_MODES[ctx.variant]
    engine, batch = ctx.build_engine(optimizer=SGD, options=options), ctx.batch(0).to(dtype)
    for _ in range(2):
        engine.backward(ctx.spec.loss(engine(batch.inputs), batch.target))
        engine.step()
        engine.zero_grad()
    ctx.record("buffers", dict(engine.module.named_buffers()))
    ctx.record("params", engine.full_params())
    engine.close()


def observe_declared_dtypes(ctx: RankContext) -> None:
    """Engines of every dtype that is claimed: it is that of parameters, gradients and wire, and no buffer's."""
    for at, (dtype, of_batch) in enumerate(DTYPES.items()):
        if dtype in ctx.capabilities.dtypes:
            engine, batch = ctx.build_engine(optimizer=SGD, dtype=dtype), ctx.batch(0).to(of_batch)
            engine.backward(ctx.spec.loss(engine(batch.inputs), batch.target))
            engine.step()
            ctx.record("buffers", dict(engine.module.named_buffers()), at)
            engine.close()


def judge_declared_dtypes(ctx: JudgeContext) -> Iterator[Comparison]:
    wanted = dict(ctx.baseline.spec.model(ctx.baseline.seed).named_buffers())
    steps = [snapshot.step for snapshot in ctx.evidence[0].snapshots]
    for step, rank in product(steps, range(ctx.world_size)):
        for name, tensor in wanted.items():
            yield from compare_values_and_dtypes(
                ctx, name, Part.OPTIMIZER, tensor, ctx.rank_records("buffers", step)[rank][name], rank
            )


def judge_buffers(ctx: JudgeContext) -> Iterator[Comparison]:
    if ctx.variant == "declared":
        yield from judge_declared_dtypes(ctx)
        return
    model = ctx.baseline.spec.model(ctx.baseline.seed)
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    for label, expected in (("buffers", dict(model.named_buffers())), ("params", frozen)):
        for rank, copy in enumerate(ctx.rank_records(label)):
            for name, tensor in expected.items():
                yield from compare_values_and_dtypes(ctx, name, Part.OPTIMIZER, tensor, copy[name], rank)


LAWS = (
    *precision_autocast.LAWS,
    replace(
        precision_law(
            "grad_scaler",
            "fp16's loss scale, saved and loaded too, is torch.amp.GradScaler's; one rank's overflow skips on all",
            observe_scaler,
            judge_scaler,
        ),
        needs=(),
        variants=(
            ("fp16", (Feature.LOSS_SCALER,)),
            (RESUMED_VARIANT, (Feature.LOSS_SCALER, Feature.CHECKPOINT)),
            ("autocast", (Feature.AUTOCAST_SCALER,)),
        ),
    ),
    precision_law(
        "comm_dtype",
        "gradients travel in exactly the configured dtype, of two engines in one process each in its own",
        observe_comm_dtype,
        judge_comm_dtype,
        needs=Feature.WIRES,
    ),
    precision_law(
        "master_weights",
        "the optimizer steps on masters, of which weights are the rounding; gradients add up in the dtype asked for",
        observe_masters,
        judge_masters,
        "fp32",
        "low",
        needs=Feature.MASTERS,
    ),
    replace(
        precision_law(
            "buffers_keep_dtype",
            "buffers and frozen parameters keep dtype and value",
            observe_buffers,
            judge_buffers,
        ),
        needs=(),
        variants=(*((mode, (needed,)) for mode, (_, _, needed) in PRECISION_MODES.items()), ("declared", ())),
        self_compared_variants=(*PRECISION_MODES, "declared"),
    ),
)
