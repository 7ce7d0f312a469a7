"""The laws of training that are told by varying one thing: the loss's scale, the options, the order of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zharness.checks.accumulation import FROZEN, clipped
from zharness.checks.bench import Bench
from zharness.checks.law import Check
from zharness.checks.looks import judge_looked_at, observe_looked_at
from zharness.checks.modes import judge_modes, observe_modes
from zharness.checks.optimizer_step import Clipped
from zharness.checks.pairwise import rows
from zharness.checks.several_backwards import judge_several_backwards, observe_several_backwards
from zharness.checks.single_step import SGD, evaluating, judge_sgd_step, observe_sgd_step
from zharness.checks.trajectory import forward
from zharness.checks.trial import Trial
from zharness.engines.protocol import Absent, Engine, Feature, OptimizerSpec, Reduction
from zharness.parity import Comparison, Part, Tier, identical, ranks_agree

Observe = Callable[[Bench], None]
Judge = Callable[[Trial], Iterator[Comparison]]

MODELS = ("mlp", "transformer")
POWERS = (0, 3, -2)
MOVING: Mapping[str, Any] = {"integral": False, "own_numbers": ("",)}  # weights that move, as the engine's numbers say
ADAMW = OptimizerSpec(name="adamw", args={"lr": 1e-2})
STEPS = 2


def observe_loss_scale_power(bench: Bench) -> None:
    engine = bench.engine(optimizer=FROZEN)
    for at, power in enumerate(POWERS):
        batch = bench.batch(0)
        engine.backward(bench.spec.loss(engine(batch.inputs), batch.target) * 2.0**power)
        bench.record("grads", engine.full_grads(), at)
        engine.step()
        engine.zero_grad()
    engine.close()


def judge_loss_scale_power(trial: Trial) -> Iterator[Comparison]:
    yield from trial.reduced("grads", [trial.locals()], exact=trial.exact(range(1)))
    for at, power in enumerate(POWERS):
        if not trial.in_one_order():  # DDP packs its buckets anew after the first backward, and so adds otherwise
            yield from trial.reduced("grads", [trial.locals()], at, scale=2.0**power)
            continue
        for rank, copy in enumerate(trial.copies("grads", at)):
            for name, grad in trial.copies("grads")[0].items():
                yield identical(trial.place(name, Part.REDUCTION, at, rank), grad.double() * 2.0**power, copy[name])


def observe_ranks_agree(bench: Bench) -> None:
    engine = bench.engine(optimizer=ADAMW, clip=1.0)
    for step in range(STEPS):
        engine.backward(bench.loss(engine, step))
        engine.step()
        engine.zero_grad()
        bench.record("params", engine.full_params(), step)
        bench.record_state("state", engine, step)
        bench.record("buffers", dict(engine.module.named_buffers()), step)
        bench.record("facts", facts(engine), step)
    engine.close()


def facts(engine: Engine) -> dict[str, Tensor]:
    """The numbers that an engine tells about itself, as far as it tells them."""
    seen = engine.observe()
    told = {"norm": engine.grad_norm(), "loss scale": seen.loss_scale, "skipped steps": seen.skipped_steps}
    return {
        name: torch.tensor(value, dtype=torch.float64)
        for name, value in told.items()
        if value is not None and not isinstance(value, Absent)
    }


def judge_ranks_agree(trial: Trial) -> Iterator[Comparison]:
    for step in range(STEPS):
        for label in ("params", "state", "buffers", "facts"):
            copies = trial.copies(label, step)
            for name in copies[0]:
                yield identical(trial.place(name, Part.GATHER, step), copies[0][name], copies[0][name])
                yield from ranks_agree(trial.place(name, Part.GATHER, step), [copy[name] for copy in copies])


def observe_config_invariance(bench: Bench) -> None:
    for row, options in enumerate([{}, *rows(bench.capabilities.variants)]):
        engine = bench.engine(optimizer=SGD, options=options)
        batch = bench.batch(0)
        engine.backward(bench.spec.loss(engine(batch.inputs), batch.target))
        bench.record("grads", engine.full_grads(), row)
        engine.step()
        bench.record("params", engine.full_params(), row)
        engine.close()


def judge_config_invariance(trial: Trial) -> Iterator[Comparison]:
    local = trial.locals()
    for row in (snapshot.step for snapshot in trial.evidence[0].snapshots if snapshot.label == "grads"):
        yield from trial.reduced("grads", [local], row, trial.exact(range(1)))
        for label, part in (("grads", Part.REDUCTION), ("params", Part.OPTIMIZER)) * trial.in_one_order():
            first = trial.copies(label)[0]
            for rank, copy in enumerate(trial.copies(label, row)):
                for name, tensor in first.items():
                    yield identical(trial.place(name, part, row, rank), tensor, copy[name])


def observe_sum_or_mean(bench: Bench) -> None:
    for reduction in Reduction:
        engine = bench.engine(reduction=reduction)
        engine.backward(bench.loss(engine, 0, f"loss-{reduction.value}"))
        bench.record(f"grads-{reduction.value}", engine.full_grads())
        engine.close()


def judge_sum_or_mean(trial: Trial) -> Iterator[Comparison]:
    local, exact = trial.locals(), trial.exact(range(1))
    yield from trial.reduced("grads-mean", [local], exact=exact)
    yield from trial.reduced("grads-sum", [local], exact=exact, scale=trial.world_size)


WINDOWS = (range(4), range(4, 8))
GIVEN_UP = range(8, 10)
AT_LAST = range(10, 11)


def observe_no_sync(bench: Bench) -> None:
    """Windows of two blocks, two that are given up, a block that raises; what is left behind would show at last."""
    engine = bench.engine(optimizer=FROZEN)
    for at, (first, second, third, last) in enumerate(WINDOWS):
        for block in ((first,), (second, third)):
            with engine.no_sync():
                for step in block:
                    engine.backward(bench.loss(engine, step) / 4)
        engine.backward(bench.loss(engine, last) / 4)
        bench.record("grads", engine.full_grads(), at)
        engine.step()
        engine.zero_grad()
    for step in GIVEN_UP:
        with engine.no_sync():
            engine.backward(bench.loss(engine, step))
        engine.zero_grad()
    with suppress(InterruptedError), engine.no_sync():
        raise InterruptedError
    engine.backward(bench.loss(engine, AT_LAST.start))
    bench.record("grads", engine.full_grads(), len(WINDOWS))
    engine.close()


def judge_no_sync(trial: Trial) -> Iterator[Comparison]:
    for at, steps in enumerate((*WINDOWS, AT_LAST)):
        yield from trial.reduced("grads", [trial.locals(step) for step in steps], at, trial.exact(steps))


CLIPS = (1e-2, 1e6)


def observe_clip_and_norm(bench: Bench) -> None:
    for at, clip in enumerate(CLIPS):
        engine = bench.engine(optimizer=SGD, clip=clip)
        bench.record_weights(engine, at, "-before")
        batch = bench.batch(0)
        engine.backward(bench.spec.loss(batch.through(engine), batch.target))
        bench.record("grads", engine.full_grads(), at)
        engine.step()
        norm = engine.grad_norm()
        bench.record("norm", {"norm": torch.tensor(torch.nan if norm is None else norm, dtype=torch.float64)}, at)
        bench.record_weights(engine, at, "-after")
        engine.close()


def judge_clip_and_norm(trial: Trial) -> Iterator[Comparison]:
    """The norm of the union of all gradients, and w - factor x g, with torch.nn.utils.clip_grad_norm_'s factor."""
    for at, clip in enumerate(CLIPS):
        grads, before = trial.copies("grads", at)[0], trial.copies("masters-before", at)[0]
        factor = yield from clipped(trial, "norm", at, grads, clip)
        after = trial.copies("masters-after", at)
        for name, weight in before.items():
            step = Clipped(weight, grads.get(name, torch.zeros_like(weight)), factor)
            everyone, place = [copy[name] for copy in after], partial(trial.place, name, Part.OPTIMIZER, at)
            yield from step.right_in_pieces(trial, everyone, place(0)) or (
                step.held(place(rank), copy) for rank, copy in enumerate(everyone)
            )


FORWARDS: dict[str, Callable[[Engine], AbstractContextManager[object]]] = {
    "eval": evaluating,
    "no_grad": lambda _: torch.no_grad(),
    "inference": lambda _: torch.inference_mode(),
}


def observe_forward_alone(bench: Bench) -> None:
    """A forward without backward before each backward, and before a step: weights move, which no certificate is of."""
    engine = bench.engine(optimizer=SGD)
    for step in range(STEPS):
        bench.record("params", engine.full_params(), step)
        with FORWARDS[bench.variant](engine):
            bench.loss(engine, 10 + step)
        gathered = engine.observe().gathered_bytes
        if not isinstance(gathered, Absent):
            bench.record("left", {"gathered": torch.tensor(gathered)}, step)
        engine.backward(bench.loss(engine, step))
        bench.record("grads", engine.full_grads(), step)
        with FORWARDS[bench.variant](engine):
            bench.loss(engine, 20 + step)
        engine.step()
        engine.zero_grad()
    engine.close()


def judge_forward_alone(trial: Trial) -> Iterator[Comparison]:
    for step in range(STEPS):
        params = trial.copies("params", step)[0]
        for at in (10 + step, 20 + step):
            yield from forward(trial, step, trial.locals(at, params), at)
        if trial.recorded("left"):
            for rank, copy in enumerate(trial.copies("left", step)):
                yield identical(trial.place("gathered", Part.GATHER, step, rank), torch.tensor(0), copy["gathered"])
        local = trial.locals(step, params)
        yield from trial.same_loss(step, local)
        yield from trial.reduced("grads", [local], step)


def law(name: str, words: str, observe: Observe, judge: Judge, **how: Any) -> Check:
    """A check of this group; ``how`` are further fields of Check."""
    fields = {"tier": Tier.STAGED, "models": MODELS[:1], **how, "needs": (Feature.VARIATIONS, *how.get("needs", ()))}
    return Check(name=f"training.{name}", law=words, observe=observe, judge=judge, **fields)


CHECKS = (
    law(
        "loss_scale_power",
        "a loss times a power of two gives gradients times that power, bitwise",
        observe_loss_scale_power,
        judge_loss_scale_power,
        tier=Tier.EXACT,
        models=MODELS,
        dtypes=("fp32", "bf16"),  # in fp16 a gradient divided by four may underflow, and then loses bits
    ),
    law(
        "sgd_step",
        "SGD at a rate of 1 moves every weight by its reduced gradient, where layout() says, no generator, no switch",
        observe_sgd_step,
        judge_sgd_step,
        models=MODELS,
        **MOVING,
        any_model=("",),
    ),
    law(
        "looked_at",
        "an engine that is asked for all that it shows, at every turn and twice, trains as one that nobody looks at",
        observe_looked_at,
        judge_looked_at,
        tier=Tier.EXACT,
        **MOVING,
    ),
    law(
        "modes",
        "dropout, batch norm and evaluation are vanilla's, on the caller's generator and in the caller's mode",
        observe_modes,
        judge_modes,
        models=("stateful",),
        integral=False,
        dtypes=("fp32",),  # running statistics stay fp32, which a batch norm of lower weights may refuse
    ),
    law(
        "ranks_agree",
        "weights, buffers, optimizer state, norm, loss scale and skipped steps are equal on all ranks after every step",
        observe_ranks_agree,
        judge_ranks_agree,
        tier=Tier.EXACT,
        needs=(Feature.CLIP,),
        **MOVING,
        any_model=("",),
    ),
    law(
        "config_invariance",
        "the engine's variants, any two of them together where they can be, change no number",
        observe_config_invariance,
        judge_config_invariance,
        needs=(Feature.VARIANTS,),
        models=("mlp", "exact"),
    ),
    law(
        "sum_or_mean",
        "gradients are reduced by the mean over ranks or by the sum, as asked",
        observe_sum_or_mean,
        judge_sum_or_mean,
        models=("mlp", "exact", "transformer"),
        needs=(Feature.SUM,),
    ),
    law(
        "no_sync",
        "backwards inside no_sync count with the first one outside, and are forgotten with it",
        observe_no_sync,
        judge_no_sync,
        models=("mlp", "exact"),
        needs=(Feature.NO_SYNC,),
    ),
    law(
        "several_backwards",
        "several forwards, losses and backwards before one step accumulate, at accumulation 1 too",
        observe_several_backwards,
        judge_several_backwards,
        needs=(Feature.RETAIN_GRAPH,),
        variants=(("", ()), *((name, (Feature.ENGINE_ACCUMULATION,)) for name in ("window", "given_up"))),
    ),
    law(
        "clip_and_norm",
        "the reported norm is that of all gradients together, and the step is made with the gradients clipped by it",
        observe_clip_and_norm,
        judge_clip_and_norm,
        models=MODELS,
        needs=(Feature.CLIP,),
        **MOVING,
        any_model=("",),
    ),
    law(
        "forward_alone",
        "a forward without backward leaves nothing behind: in eval mode, under no_grad, in inference mode",
        observe_forward_alone,
        judge_forward_alone,
        variants=tuple((name, ()) for name in FORWARDS),
        any_model=("no_grad",),
    ),
)
