"""The law of accumulation: several micro-batches, one boundary, one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from zharness.checks.bench import Bench, number
from zharness.checks.course import norm_and_bound
from zharness.checks.optimizer_step import (
    NO_CLIPPING,
    Factor,
    Moment,
    everyone_agrees,
    judge_step,
    norm_told,
    published,
)
from zharness.checks.trial import Trial, divided_by, until_wrong
from zharness.engines.protocol import AccumulationOwner, Engine, Feature, OptimizerSpec
from zharness.parity import Comparison, Part, within
from zharness.parity.baseline import Local
from zharness.parity.certificate import Exactness, is_power_of_two
from zharness.workload.foreign import is_foreign

# Of two, a division is exact; of three, it rounds. A caller's window of one is what every other law of training has.
ACCUMULATIONS = {AccumulationOwner.ENGINE: (1, 2, 3), AccumulationOwner.CALLER: (2, 3)}
BOUNDARIES = 2
# A step that moves nothing but its momentum, which tells how often it was made, and on which gradient.
FROZEN = OptimizerSpec(name="sgd", args={"lr": 0.0, "momentum": 0.5})
MOVING = OptimizerSpec(name="sgd", args={"lr": 0.05, "momentum": 0.5}, schedule=(1.0, 0.5))
FROZEN_AND_MOVING = {"frozen": FROZEN, "moving": MOVING}
CLIP = 0.1  # below the norm of the mean of a window's gradients


def observe_accumulation(bench: Bench) -> None:
    owner = AccumulationOwner(bench.variant)
    own_kernels = bench.config.stage in bench.capabilities.own_kernels
    # Kernels of the engine's own are judged by exact arithmetic alone: integer weights, and no thirds of them.
    chosen = "frozen" if own_kernels else "moving"
    windows = [steps for steps in ACCUMULATIONS[owner] if is_power_of_two(steps) or not own_kernels]
    # Of anyone's model, which may be large, one window: that whose division rounds.
    for steps in windows[-1:] if is_foreign(bench.spec.name) else windows:
        observe_boundaries(bench, owner, chosen, steps)


def observe_boundaries(bench: Bench, owner: AccumulationOwner, chosen: str, steps: int) -> None:
    """Train BOUNDARIES boundaries of ``steps`` micro-batches on an engine of their own."""
    label = f"{chosen}-{steps}"
    clips = (
        chosen == "moving" and owner is AccumulationOwner.ENGINE and bench.capabilities.refusal(Feature.CLIP) is None
    )
    clip, optimizer = CLIP if clips else None, FROZEN_AND_MOVING[chosen]
    engine = bench.engine(accumulation_steps=steps, accumulation_owner=owner, optimizer=optimizer, clip=clip)
    spellings = spellings_of(bench, engine, owner, steps)
    for boundary in range(BOUNDARIES):
        bench.record_trained(engine, boundary, f"-{label}")
        window, backward = range(boundary * steps, (boundary + 1) * steps), spellings[boundary % len(spellings)]
        accumulate(bench, engine, owner, window, f"loss-{label}", backward)
        bench.record(f"grads-{label}", engine.full_grads(), boundary)
        engine.step()
        if clip is not None:
            norm = engine.grad_norm()
            bench.record(f"norm-{label}", {} if norm is None else {"norm": number(norm)}, boundary)
        engine.zero_grad()
    bench.record_trained(engine, BOUNDARIES, f"-{label}")
    engine.close()


def spellings_of(
    bench: Bench, engine: Engine, owner: AccumulationOwner, steps: int
) -> Sequence[Callable[[Tensor], object]]:
    """How the backwards of one window after the other are spelled: by scale, too, where the engine divides and that is
    exact. By a third, DeepSpeed's scale rounds the loss otherwise than its backward does, and otherwise than the two
    that it is held against."""
    scales = bench.capabilities.refusal(Feature.SCALE_BACKWARD) is None and is_power_of_two(steps)
    if owner is AccumulationOwner.ENGINE and scales:
        return engine.backward, lambda loss: torch.autograd.backward(engine.scale(loss))
    return (engine.backward,)


def accumulate(
    bench: Bench,
    engine: Engine,
    owner: AccumulationOwner,
    window: range,
    label: str,
    backward: Callable[[Tensor], object],
) -> None:
    """Forward and ``backward`` of every micro-step of ``window``, up to the boundary but not over it."""
    for micro in window:
        loss = bench.loss(engine, micro, label)
        backward(loss if owner is AccumulationOwner.ENGINE else loss / len(window))
        if owner is AccumulationOwner.ENGINE and micro != window[-1]:
            engine.step()


def judge_accumulation(trial: Trial) -> Iterator[Comparison]:
    for chosen, optimizer in FROZEN_AND_MOVING.items():
        for steps in ACCUMULATIONS[AccumulationOwner(trial.variant)]:
            label = f"{chosen}-{steps}"
            if trial.recorded(f"grads-{label}"):
                for boundary in range(BOUNDARIES):
                    yield from judge_boundary(trial, label, boundary, steps)
                    moment = Moment(boundary, f"masters-{label}", f"state-{label}")
                    grads = trial.copies(f"grads-{label}", boundary)[0]
                    factor = yield from clipped(trial, f"norm-{label}", boundary, grads)
                    yield from judge_step(trial, optimizer, grads, moment, factor)
                    after = Moment(boundary + 1, moment.params, moment.state)
                    yield from everyone_agrees(trial, after)
                    yield from published(trial, after, f"params-{label}")


def clipped(
    trial: Trial, label: str, step: int, grads: Mapping[str, Tensor], limit: float = CLIP
) -> Generator[Comparison, None, Factor]:
    """On every rank the norm recorded under ``label`` is that of all ``grads`` together; the factor by which
    torch.nn.utils.clip_grad_norm_ clips them to ``limit``, 1 where it does not.

    That an engine which clips reports none is told by training.clip_and_norm, which records it as NaN. What it clips by
    is then known as well as a norm is: DeepSpeed's stage 0 averages it over ranks, which rounds once more for each.
    """
    if not trial.recorded(label):
        return NO_CLIPPING
    norm, error = norm_and_bound(grads)
    reported = yield from reported_norm(trial, label, step, norm, error)
    return Factor.within(limit, norm, error, reported)


def reported_norm(
    trial: Trial, label: str, step: int, norm: Tensor, error: Tensor
) -> Generator[Comparison, None, Tensor | None]:
    """On every rank the norm recorded under ``label`` is ``norm``, within ``error``; rank 0's, if there is one."""
    reported = [copy.get("norm") for copy in trial.copies(label, step)]
    for rank, each in enumerate(reported):
        if each is not None:
            yield norm_told(within(trial.place("norm", Part.REDUCTION, step, rank), norm, each, error))
    return reported[0]


def divided_by_engine(
    trial: Trial,
    label: str,
    at: int,
    window: range,
    params: Mapping[str, Tensor],
    divided: Sequence[Sequence[Local]],
    exact: bool | Exactness = False,
) -> Iterator[Comparison]:
    """Gradients of the micro-steps ``window`` where the engine divides: the loss, as ``divided`` is, or the gradient.

    The undivided ones are computed only where the others do not fit. Where neither do, it is told of those with which
    more agrees: an engine that is wrong in one place is right in others.
    """
    by_loss = partial(trial.reduced, label, divided, at, exact, scale=len(window))
    found = list(until_wrong(by_loss(explained=False)))
    if right(found) == len(found):
        yield from found
        return
    by_gradient = partial(trial.reduced, label, [trial.locals(micro, params) for micro in window], at, exact)
    found = list(until_wrong(by_gradient(explained=False)))
    if right(found) < len(found):
        found = max(list(by_gradient()), list(by_loss()), key=right)
    yield from found


def right(found: Sequence[Comparison]) -> int:
    """In how many comparisons nothing is wrong."""
    return sum(comparison.mismatch is None for comparison in found)


def judge_boundary(trial: Trial, label: str, boundary: int, steps: int) -> Iterator[Comparison]:
    """One boundary's gradients. An engine that owns the division may divide the loss or the gradient: both are right,
    and by anything but a power of two they round apart, so it has to match one of the two throughout.
    """
    window = range(boundary * steps, (boundary + 1) * steps)
    params: Mapping[str, Tensor] = trial.copies(f"params-{label}", boundary)[0]
    divided = [trial.locals(micro, params, weigh=divided_by(steps)) for micro in window]
    for micro, local in zip(window, divided, strict=True):
        yield from trial.same_loss(micro, local, f"loss-{label}")
    exact = trial.exact(window) and (boundary == 0 or label.startswith("frozen"))
    if trial.variant == AccumulationOwner.ENGINE.value:
        yield from divided_by_engine(trial, f"grads-{label}", boundary, window, params, divided, exact)
    else:
        yield from trial.reduced(f"grads-{label}", divided, boundary, exact, scale=steps)
