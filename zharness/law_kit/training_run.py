"""Compute the training curves (loss and gradient norm in each step) of an engine and of plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zharness.engines.optimizers import build, schedule
from zharness.engines.protocol import OptimizerSpec
from zharness.law_kit.default_training import TrainingConfig
from zharness.law_kit.judge_context import BoundedGrads, JudgeContext, get_grad_or_zeros
from zharness.parity.bounds import gamma_or_probabilistic, unit_roundoff
from zharness.parity.mismatch_report import TrainingCurve, round_for_json

SIGNIFICANT_DIGITS = 6  # digits of a loss or a norm


@dataclass(frozen=True)
class TrainingRun:
    """The settings of a training: optimizer, number of steps, norm for clipping, and micro-batches per step."""

    optimizer: OptimizerSpec
    steps: int
    clip: float | None = None
    accumulation: int = 1

    def micro_steps(self, step: int) -> range:
        """Return the numbers of the micro-batches of optimizer step ``step``."""
        return range(step * self.accumulation, (step + 1) * self.accumulation)


@dataclass(frozen=True)
class StepMetrics:
    """The mean loss of one step, and the 2-norm of all unclipped gradients together."""

    loss: float
    norm: float


def build_curves(ctx: JudgeContext, run: TrainingRun) -> dict[str, TrainingCurve]:
    """Return the loss and the gradient norm in every step, for the engine and for a plain model.

    Engine and plain model start from the same initial weights. The engine's evidence has to contain "loss" for each
    micro-batch and "grads" for each step. The curves drift apart by rounding alone, so reports show the curves, but no
    law judges them.
    """
    engine, baseline = collect_engine_metrics(ctx, run), train_baseline(ctx, run)
    return {
        "loss": build_curve((step.loss for step in engine), (step.loss for step in baseline)),
        "norm": build_curve((step.norm for step in engine), (step.norm for step in baseline)),
    }


def build_curve(engine: Iterable[float], baseline: Iterable[float]) -> TrainingCurve:
    """Return the values of the engine and of the baseline, rounded for JSON."""
    return {
        "engine": [round_for_json(value, SIGNIFICANT_DIGITS) for value in engine],
        "baseline": [round_for_json(value, SIGNIFICANT_DIGITS) for value in baseline],
    }


def collect_engine_metrics(ctx: JudgeContext, run: TrainingRun) -> list[StepMetrics]:
    """Return the loss and gradient norm that the engine recorded in each step."""
    metrics = []
    for step in range(run.steps):
        losses = [record["loss"] for micro in run.micro_steps(step) for record in ctx.rank_records("loss", micro)]
        metrics.append(StepMetrics(mean_loss(losses), float(total_norm(ctx.rank_records("grads", step)[0]))))
    return metrics


def train_baseline(ctx: JudgeContext, run: TrainingRun) -> list[StepMetrics]:
    """Train the plain model from its initial weights, and return its loss and gradient norm in each step.

    The training does not use the engine's numbers. If the model's dtype is narrower than float32, the training uses
    float32 master weights.
    """
    weights = {name: p.detach().clone() for name, p in ctx.baseline.spec.model(ctx.baseline.seed).named_parameters()}
    optimizer = build(weights, run.optimizer)
    rates = schedule(optimizer, run.optimizer)
    metrics = []
    for step in range(run.steps):
        results = [result for micro in run.micro_steps(step) for result in ctx.compute_local_grads(micro, weights)]
        for name in {name: None for result in results for name in result.grads}:
            grads = [get_grad_or_zeros(result, name, [results]).to(weights[name].dtype) for result in results]
            weights[name].grad = torch.stack(grads).mean(0)
        trainable = [weight for weight in weights.values() if weight.grad is not None]
        grads_by_name = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        metrics.append(StepMetrics(mean_loss([result.loss for result in results]), float(total_norm(grads_by_name))))
        if run.clip is not None:
            torch.nn.utils.clip_grad_norm_(trainable, run.clip)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
    return metrics


def mean_loss(losses: Sequence[Tensor]) -> float:
    """Return the mean of the losses, computed in float64."""
    return float(torch.stack([loss.double() for loss in losses]).mean())


def total_norm(grads: Mapping[str, Tensor]) -> Tensor:
    """Return the 2-norm of all elements of all gradients together, in float64."""
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads.values()]
    return torch.stack(norms).square().sum().sqrt() if norms else torch.zeros((), dtype=torch.float64)


def total_norm_and_bound(
    grads: Mapping[str, Tensor], dtypes: Iterable[torch.dtype] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the 2-norm of all elements of ``grads`` in float64, and a bound on the error of an engine's norm.

    An engine is assumed to sum the squares of each gradient in float32 or a wider dtype of its own, so that a float32
    gradient beside float64 ones rounds in float32. ``dtypes`` are by default the dtypes of the gradients. A sum of this
    many squares in bf16 would have no rounding bound.
    """
    norm = total_norm(grads)
    grad_dtypes = [grad.dtype for grad in grads.values()] if dtypes is None else dtypes
    wide = max((torch.promote_types(dtype, torch.float32) for dtype in grad_dtypes), key=unit_roundoff)
    return norm, norm * gamma_or_probabilistic(sum(grad.numel() for grad in grads.values()), wide)


def bounded_norm_and_error(grads: BoundedGrads, dtypes: Iterable[torch.dtype]) -> tuple[Tensor, Tensor]:
    """Return the 2-norm of ``grads`` in float64, and a bound on the error of an engine's norm.

    The bound includes the errors of the gradients, whose dtypes in the engine are ``dtypes``.
    """
    norm, rounding = total_norm_and_bound({name: grad.value for name, grad in grads.items()}, dtypes)
    return norm, rounding + total_norm({name: grad.error for name, grad in grads.items()})


def make_training_run(training: TrainingConfig, steps: int) -> TrainingRun:
    """Return a training run of ``steps`` steps with the configured training's optimizer, clipping and accumulation."""
    return TrainingRun(training.optimizer, steps, training.clip, training.accumulation)
