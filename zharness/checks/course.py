"""A training of several steps: what is asked of the engine, and how it went there and with the plain model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from zharness.checks.trial import Trial, grad_of
from zharness.engines.optimizers import build, schedule
from zharness.engines.protocol import OptimizerSpec
from zharness.parity.bounds import of_many
from zharness.parity.exhibit import Curve, number

SHOWN = 6  # digits of a loss or a norm


@dataclass(frozen=True)
class Course:
    """A training: its optimizer, its steps, the norm to which gradients are clipped, the micro-batches of a step."""

    optimizer: OptimizerSpec
    steps: int
    clip: float | None = None
    accumulation: int = 1

    def micros(self, step: int) -> range:
        """The micro-steps of one step."""
        return range(step * self.accumulation, (step + 1) * self.accumulation)


@dataclass(frozen=True)
class Step:
    """The mean of all losses of one step, and the 2-norm of the whole gradient before it is clipped."""

    loss: float
    norm: float


def curves(trial: Trial, course: Course) -> dict[str, Curve]:
    """Loss and gradient norm in every step, of the engine and of the plain model trained on its own from the start.

    The engine has to have recorded "loss" at each micro-step and "grads" at each step. They part by rounding too, the
    more the longer they run, so they are there to be looked at: nothing is judged by them.
    """
    engine, baseline = taken(trial, course), trained(trial, course)
    return {
        "loss": curve((step.loss for step in engine), (step.loss for step in baseline)),
        "norm": curve((step.norm for step in engine), (step.norm for step in baseline)),
    }


def curve(engine: Iterable[float], baseline: Iterable[float]) -> Curve:
    return {
        "engine": [number(value, SHOWN) for value in engine],
        "baseline": [number(value, SHOWN) for value in baseline],
    }


def taken(trial: Trial, course: Course) -> list[Step]:
    """What the engine reported."""
    found = []
    for step in range(course.steps):
        losses = [copy["loss"] for micro in course.micros(step) for copy in trial.copies("loss", micro)]
        found.append(Step(mean(losses), float(norm_of(trial.copies("grads", step)[0]))))
    return found


def trained(trial: Trial, course: Course) -> list[Step]:
    """The plain model's own training, on float32 masters where its dtype is narrower."""
    weights = {
        name: p.detach().clone() for name, p in trial.baseline.spec.model(trial.baseline.seed).named_parameters()
    }
    optimizer = build(weights, course.optimizer)
    rates = schedule(optimizer, course.optimizer)
    found = []
    for step in range(course.steps):
        local = [one for micro in course.micros(step) for one in trial.locals(micro, weights)]
        for name in {name: None for one in local for name in one.grads}:
            grads = [grad_of(one, name, [local]).to(weights[name].dtype) for one in local]
            weights[name].grad = torch.stack(grads).mean(0)
        trainable = [weight for weight in weights.values() if weight.grad is not None]
        whole = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        found.append(Step(mean([one.loss for one in local]), float(norm_of(whole))))
        if course.clip is not None:
            torch.nn.utils.clip_grad_norm_(trainable, course.clip)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
    return found


def mean(losses: Sequence[Tensor]) -> float:
    return float(torch.stack([loss.double() for loss in losses]).mean())


def norm_of(grads: Mapping[str, Tensor]) -> Tensor:
    """The 2-norm of all elements together, in float64."""
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads.values()]
    return torch.stack(norms).square().sum().sqrt()


def norm_and_bound(grads: Mapping[str, Tensor], dtypes: Iterable[torch.dtype] | None = None) -> tuple[Tensor, Tensor]:
    """The 2-norm of all elements together, in float64, and how far a sum of squares may be from it.

    The sum is in float32, or in what is wider among ``dtypes``, the gradients' own unless they are given; in bf16 so
    many terms have no bound.
    """
    whole = norm_of(grads)
    own = [grad.dtype for grad in grads.values()] if dtypes is None else dtypes
    wide = reduce(torch.promote_types, own, torch.float32)
    return whole, whole * of_many(sum(grad.numel() for grad in grads.values()), wide)
