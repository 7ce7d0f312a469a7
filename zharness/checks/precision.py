"""The laws of loss scales, wires, masters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from zharness.checks import autocast
from zharness.checks.accumulation import FROZEN
from zharness.checks.autocast import (
    AUTOCAST,
    LOW,
    REDUCING,
    SGD,
    WIDE,
    check,
    crossed,
    each_once,
    everyone,
    kind,
    reduced,
    same,
)
from zharness.checks.bench import Bench, number
from zharness.checks.dtypes import DTYPES
from zharness.checks.optimizer_step import Moment, everyone_agrees, judge_step, published
from zharness.checks.state import same_records, shared_folder
from zharness.checks.trajectory import told_by
from zharness.checks.trial import Trial
from zharness.checks.wide_sums import judge_wide_sums, observe_wide_sums, refused
from zharness.engines.protocol import Absent, Engine, Feature, OptimizerSpec
from zharness.parity import Comparison, Part, identical

ADAMW = OptimizerSpec(name="adamw", args={"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1})
STEPS = 6
# A factor of its own for every step: a schedule that a skipped step moves on shows in the rate of the next.
SCALED = replace(ADAMW, schedule=tuple(2.0**-made for made in range(STEPS)))
FP16 = {"fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 6, "loss_scale_window": 2}}
RESUMED, RESUMED_AT = "resumed", 3  # after a step that was skipped, and half a window on
SCALERS: Mapping[str, tuple[Mapping[str, Any], float, int]] = {
    "fp16": (FP16, 2.0**6, 2),
    RESUMED: (FP16, 2.0**6, 2),
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "fp16"}}, 2.0**16, 2000),
}


class OneColumn(torch.autograd.Function):
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


def overflow(step: int, rank: int, world_size: int) -> Overflow:
    """The first rank's gradients overflow at step 1, some of the last one's at step 4."""
    return {(1, 0): Overflow.WHOLE, (4, world_size - 1): Overflow.PART}.get((step, rank), Overflow.NONE)


def output_of(model: Callable[..., Tensor], inputs: Tensor, bad: Overflow) -> Tensor:
    """The forward of a model, or an engine."""
    return model(inputs, through=OneColumn.apply) if bad is Overflow.PART else model(inputs)


def times_infinity(loss: Tensor, bad: Overflow) -> Tensor:
    """``loss``, infinite where all of its gradients are to be."""
    return loss * (torch.inf if bad is Overflow.WHOLE else 1.0)


def observe_scaler(bench: Bench) -> None:
    options, _, _ = SCALERS[bench.variant]
    engine = bench.engine(optimizer=SCALED, options=options)
    for step in range(STEPS):
        if bench.variant == RESUMED and step == RESUMED_AT:
            engine = moved(bench, engine, bench.engine(optimizer=SCALED, options=options))
        bench.record_trained(engine, step)
        bad, batch = overflow(step, bench.rank, bench.world_size), bench.batch(step)
        loss = bench.spec.loss(output_of(engine, batch.inputs, bad), batch.target)
        engine.backward(times_infinity(loss, bad))
        bench.record("grads", engine.full_grads(), step)
        engine.step()
        engine.zero_grad()
        seen = engine.observe()
        scale, skipped = (x if isinstance(x, (int, float)) else -1 for x in (seen.loss_scale, seen.skipped_steps))
        bench.record("scaler", {"scale": number(scale), "skipped": number(skipped)}, step)
        rates = () if isinstance(seen.learning_rates, Absent) else seen.learning_rates
        bench.record("rates", {str(group): number(rate) for group, rate in enumerate(rates)}, step)
    bench.record_trained(engine, STEPS)
    engine.close()


def moved(bench: Bench, engine: Engine, other: Engine) -> Engine:
    """``other``, gone on from what ``engine`` saved at its end; and what both tell of themselves. Collective."""
    bench.record("told", told_by(engine), 0)
    with shared_folder() as folder:
        engine.save(folder)
        engine.close()
        other.load(folder)
    bench.record("told", told_by(other), 1)
    return other


def holds(trial: Trial, step: int, rank: int, scale: float) -> bool:
    """Whether plain PyTorch's gradient of one rank's scaled loss is finite, on the weights that the engine had."""
    low = replace(trial.baseline, dtype=trial.dtype if trial.variant == "autocast" else torch.float16)
    model, batch = low.module(trial.copies("params", step)[0]), trial.baseline.batch(rank, step)
    bad = overflow(step, rank, trial.world_size)
    with torch.autocast("cpu", torch.float16, enabled=trial.variant == "autocast"):
        output = output_of(model, batch.inputs.to(low.dtype), bad)
    loss = times_infinity(low.objective(output, batch), bad)
    (loss * torch.tensor(scale)).backward()  # type: ignore[no-untyped-call]
    return all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def judge_scaler(trial: Trial) -> Iterator[Comparison]:
    """torch.amp.GradScaler itself, fed with one number that is finite whenever every rank's own plain gradients are."""
    _, initial, window = SCALERS[trial.variant]
    scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=window)
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(torch.zeros(()))
    skipped = 0
    for step in range(STEPS):
        grads = trial.copies("grads", step)[0]
        finite = all(holds(trial, step, rank, scaler.get_scale()) for rank in range(trial.world_size))
        summed = all(bool(grad.isfinite().all()) for grad in grads.values())
        yield identical(trial.place("loss", Part.REDUCTION, step), number(finite), number(summed))
        weight.grad = torch.tensor(1.0 if finite else torch.inf)
        scaler.step(optimizer)
        scaler.update()
        skipped += not finite
        for rank, copy in enumerate(trial.copies("scaler", step)):
            place = trial.place("loss", Part.OPTIMIZER, step, rank)
            yield identical(place, number(scaler.get_scale()), copy["scale"])
            yield identical(place, number(skipped), copy["skipped"])
        if step == RESUMED_AT and trial.variant == RESUMED:
            yield from same_records(trial, "told", "told", 0, 1, Part.OPTIMIZER)
        moment = Moment(step, "masters", skipped=skipped)
        if finite:
            yield from judge_step(trial, SCALED, grads, moment)
        else:
            yield from unmoved(trial, step)
        yield from rates_told(trial, step, step + 1 - skipped)
        yield from everyone_agrees(trial, Moment(step + 1, "masters"))
        yield from published(trial, Moment(step + 1, "masters"), "params")


def rates_told(trial: Trial, step: int, made: int) -> Iterator[Comparison]:
    """The learning rate that each group reports is the schedule's behind as many steps as were made."""
    wanted = number(SCALED.args["lr"] * SCALED.schedule[min(made, STEPS - 1)])
    for rank, copy in enumerate(trial.copies("rates", step)):
        for group, rate in copy.items():
            yield identical(trial.place(f"learning rate of group {group}", Part.OPTIMIZER, step, rank), wanted, rate)


def unmoved(trial: Trial, step: int) -> Iterator[Comparison]:
    """A skipped step changes neither weights nor state."""
    for label in ("masters", "state"):
        before, after = trial.copies(label, step)[0], trial.copies(label, step + 1)[0]
        for name, tensor in before.items():
            yield identical(trial.place(name, Part.OPTIMIZER, step), tensor, after[name])


WIRES: Mapping[str, tuple[Mapping[str, Any], torch.dtype]] = {
    "first": ({"communication_data_type": "bf16"}, LOW),
    "second": ({}, WIDE),
}


def observe_comm_dtype(bench: Bench) -> None:
    engines = {name: bench.engine(optimizer=FROZEN, options=options) for name, (options, _) in WIRES.items()}
    before = {name: crossed(engine, REDUCING) for name, engine in engines.items()}
    for name, engine in engines.items():
        engine.backward(bench.loss(engine, 0, f"loss-{name}"))
    for name, engine in engines.items():
        bench.record(f"grads-{name}", engine.full_grads())
        after = crossed(engine, REDUCING)
        bench.record(f"reduced-{name}", {dtype: after[dtype] - before[name][dtype] for dtype in after})
        engine.close()


def judge_comm_dtype(trial: Trial) -> Iterator[Comparison]:
    parameters = dict(trial.baseline.spec.model(0).named_parameters())
    sizes = {name: p.numel() for name, p in parameters.items()}
    trained, none = {name for name, p in parameters.items() if p.requires_grad}, set[str]()
    expected = everyone(trial, forward=False)
    for name, (_, dtype) in WIRES.items():
        by_dtype = {"bfloat16": none, "float32": none, "float16": none}
        by_dtype[str(dtype).removeprefix("torch.")] = trained
        yield from each_once(trial, f"reduced-{name}", sizes, by_dtype)
        yield from reduced(trial, f"grads-{name}", expected, trained if dtype == LOW else none)


BF16: Mapping[str, Any] = {"enabled": True}
LOW_MASTERS = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
INVALID: Sequence[Mapping[str, Any]] = (
    {"bf16": {**BF16, "bf16_optimizer_states": True}},
    {"bf16": {**BF16, "bf16_master_weights_and_grads": True}},
    {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
    {"bf16": {**BF16, **LOW_MASTERS}, "fp16": {"fp16_master_weights_and_grads": True}},
    {"bf16": BF16, "fp16": {"enabled": True}},
)


def observe_masters(bench: Bench) -> None:
    low = bench.variant == "low"
    options = {"bf16": {**BF16, **(LOW_MASTERS if low else {})}}
    wrong = [*INVALID, options] if low and bench.config.stage == 0 else INVALID
    accepted = sum(not refused(bench, invalid) for invalid in wrong)
    bench.record("accepted", {"invalid": number(accepted)})
    if len(wrong) > len(INVALID):
        return
    engine, batch = bench.engine(optimizer=ADAMW, options=options), bench.batch(0).to(LOW)
    for step in range(2):
        bench.record_trained(engine, step)
        engine.backward(bench.spec.loss(engine(batch.inputs), batch.target))
        bench.record("grads", engine.full_grads(), step)
        engine.step()
        engine.zero_grad()
    bench.record_trained(engine, 2)
    engine.close()
    if not low and not accepted:  # else it is told already, and what it makes of a mix nobody knows
        observe_wide_sums(bench)


def judge_masters(trial: Trial) -> Iterator[Comparison]:
    """Steps are replayed in the masters' dtype; the model computes with their rounding; gradients are bf16's."""
    for rank, copy in enumerate(trial.copies("accepted")):
        yield identical(trial.place("input", Part.FORWARD, seen_on=rank), number(0), copy["invalid"])
    if not trial.recorded("grads"):
        return
    master = LOW if trial.variant == "low" else WIDE
    half = replace(trial, baseline=replace(trial.baseline, dtype=LOW), dtype=LOW)
    yield from half.reduced("grads", [half.locals(0)])
    yield from judge_wide_sums(trial)
    for step in range(2):
        weights, grads = trial.copies("masters", step)[0], trial.copies("grads", step)[0]
        state = trial.copies("state", step + 1)[0]
        for name, kept in [(name, weights[name]) for name in grads] + list(grads.items()):
            yield identical(trial.place(name, Part.OPTIMIZER, step), kind(torch.zeros((), dtype=master)), kind(kept))
        for name, kept in state.items():
            if kept.dim():
                yield identical(
                    trial.place(name, Part.OPTIMIZER, step), kind(torch.zeros((), dtype=master)), kind(kept)
                )
        yield from judge_step(trial, ADAMW, grads, Moment(step, "masters"))
        yield from everyone_agrees(trial, Moment(step + 1, "masters"))
        yield from published(trial, Moment(step + 1, "masters"), "params")


MODES: Mapping[str, tuple[Mapping[str, Any], torch.dtype, Feature]] = {
    "bf16": ({"bf16": BF16}, LOW, Feature.MASTERS),
    "fp16": ({"fp16": {"enabled": True, "loss_scale": 16}}, torch.float16, Feature.LOSS_SCALER),
    "autocast": (AUTOCAST, WIDE, Feature.AUTOCAST),
}


def observe_buffers(bench: Bench) -> None:
    if bench.variant == "declared":
        observe_declared(bench)
        return
    options, dtype, _ = MODES[bench.variant]
    engine, batch = bench.engine(optimizer=SGD, options=options), bench.batch(0).to(dtype)
    for _ in range(2):
        engine.backward(bench.spec.loss(engine(batch.inputs), batch.target))
        engine.step()
        engine.zero_grad()
    bench.record("buffers", dict(engine.module.named_buffers()))
    bench.record("params", engine.full_params())
    engine.close()


def observe_declared(bench: Bench) -> None:
    """Engines of every dtype that is claimed: it is that of parameters, gradients and wire, and no buffer's."""
    for at, (dtype, of_batch) in enumerate(DTYPES.items()):
        if dtype in bench.capabilities.dtypes:
            engine, batch = bench.engine(optimizer=SGD, dtype=dtype), bench.batch(0).to(of_batch)
            engine.backward(bench.spec.loss(engine(batch.inputs), batch.target))
            engine.step()
            bench.record("buffers", dict(engine.module.named_buffers()), at)
            engine.close()


def judge_declared(trial: Trial) -> Iterator[Comparison]:
    wanted = dict(trial.baseline.spec.model(trial.baseline.seed).named_buffers())
    steps = [snapshot.step for snapshot in trial.evidence[0].snapshots]
    for step, rank in product(steps, range(trial.world_size)):
        for name, tensor in wanted.items():
            yield from same(trial, name, Part.OPTIMIZER, tensor, trial.copies("buffers", step)[rank][name], rank)


def judge_buffers(trial: Trial) -> Iterator[Comparison]:
    if trial.variant == "declared":
        yield from judge_declared(trial)
        return
    model = trial.baseline.spec.model(trial.baseline.seed)
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    for label, expected in (("buffers", dict(model.named_buffers())), ("params", frozen)):
        for rank, copy in enumerate(trial.copies(label)):
            for name, tensor in expected.items():
                yield from same(trial, name, Part.OPTIMIZER, tensor, copy[name], rank)


CHECKS = (
    *autocast.CHECKS,
    replace(
        check(
            "grad_scaler",
            "fp16's loss scale, saved and loaded too, is torch.amp.GradScaler's; one rank's overflow skips on all",
            observe_scaler,
            judge_scaler,
        ),
        needs=(),
        variants=(
            ("fp16", (Feature.LOSS_SCALER,)),
            (RESUMED, (Feature.LOSS_SCALER, Feature.CHECKPOINT)),
            ("autocast", (Feature.AUTOCAST_SCALER,)),
        ),
    ),
    check(
        "comm_dtype",
        "gradients travel in exactly the configured dtype, of two engines in one process each in its own",
        observe_comm_dtype,
        judge_comm_dtype,
        needs=Feature.WIRES,
    ),
    check(
        "master_weights",
        "the optimizer steps on masters, of which weights are the rounding; gradients add up in the dtype asked for",
        observe_masters,
        judge_masters,
        "fp32",
        "low",
        needs=Feature.MASTERS,
    ),
    replace(
        check(
            "buffers_keep_dtype",
            "buffers and frozen parameters keep dtype and value",
            observe_buffers,
            judge_buffers,
        ),
        needs=(),
        variants=(*((mode, (needed,)) for mode, (_, _, needed) in MODES.items()), ("declared", ())),
        own_numbers=(*MODES, "declared"),
    ),
)
