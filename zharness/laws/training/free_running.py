"""Define the law training.free_running: differences of gradients explain the differences of weights over many steps.

The judge uses only the engine's gradients, not its weights or optimizer state. The judge starts from the initial
weights and applies the optimizer's formula in all steps. From the difference between each gradient and plain PyTorch's,
it computes a bound on the difference between the engine's weights and the result of the formula.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zharness.engines.protocol import Feature
from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.optimizer_step import compare_step_counts, step_hyperparameters, unflatten
from zharness.law_kit.optimizers import ADAMW
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.record_comparisons import UNBOUNDED_ERROR
from zharness.law_kit.training_run import TrainingRun
from zharness.parity import Comparison, Part, Tier, compare_bitwise, compare_within_bound
from zharness.parity.bounds import BoundedTensor, mean_and_bound
from zharness.parity.compare import check_names
from zharness.parity.replay import propagate_step

STEPS = 5

TRAINING_RUN = TrainingRun(ADAMW, STEPS)


def observe_free_running(ctx: RankContext) -> None:
    """Train several steps, and record the gradients and weights of each step."""
    engine = ctx.build_engine(optimizer=ADAMW)
    ctx.record_training_state(engine, 0)
    for step in range(STEPS):
        engine.backward(ctx.loss(engine, step))
        ctx.record("grads", engine.full_grads(), step)
        engine.step()
        engine.zero_grad()
        ctx.record_weights(engine, step + 1)
    engine.close()


def judge_free_running(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the weights after every step with the result of the optimizer's formula from the initial weights on.

    An element counts as undetermined if its bound exceeds its distance from the initial weight.
    """
    initial = {name: p.detach() for name, p in ctx.baseline.spec.model(ctx.baseline.seed).named_parameters()}
    yield from compare_step_counts(ctx, unflatten(ctx.rank_records("state")[0]), 0, 0)
    for rank, record in enumerate(ctx.rank_records("masters", 0)):
        check_names("full_params", initial, record)
        for name, start in initial.items():
            comparison = compare_bitwise(ctx.location(name, Part.OPTIMIZER, 0, rank), start, record[name])
            yield hint_rounded_start(ctx, comparison, start, record[name])
    free = {name: BoundedTensor.exact(weight) for name, weight in initial.items()}
    states: dict[str, dict[str, BoundedTensor]] = {name: {} for name in free}
    for step in range(STEPS):
        local = ctx.compute_local_grads(step, {name: weight.value.float() for name, weight in free.items()})
        grads = ctx.rank_records("grads", step)[0]
        check_names("full_grads", local[0].grads, grads)
        for name, grad in grads.items():
            mean, _ = mean_and_bound([result.grads[name] for result in local], ctx.reduce_dtype)
            bounded_grad = BoundedTensor(mean, (grad.double() - mean).abs(), initial[name].dtype)
            settings = step_hyperparameters(ADAMW, name, step)
            free[name], states[name] = propagate_step(
                ADAMW.name, free[name], bounded_grad, states[name], step, settings
            )
        for rank, record in enumerate(ctx.rank_records("masters", step + 1)):
            check_names("full_params", free, record)
            for name, weight in free.items():
                place, change = ctx.location(name, Part.OPTIMIZER, step, rank), weight.value - initial[name].double()
                bound = weight.error.nan_to_num(nan=UNBOUNDED_ERROR, posinf=UNBOUNDED_ERROR)
                yield compare_within_bound(place, weight.value, record[name], bound, Tier.STAGED, signal=change)


def hint_rounded_start(ctx: JudgeContext, comparison: Comparison, weight: Tensor, actual: Tensor) -> Comparison:
    """Add a hint to a mismatch if the initial master weights were rounded to the cell's dtype."""
    rounded = torch.equal(weight.to(ctx.dtype).to(actual.dtype), actual)
    return add_hint(comparison, f"they are the initial weights, rounded to {ctx.dtype}") if rounded else comparison


LAWS = (
    Law(
        name="training.free_running",
        statement="over several steps, gradient differences explain all differences of weights from plain PyTorch's",
        tier=Tier.STAGED,
        models=("mlp",),
        observe=observe_free_running,
        judge=judge_free_running,
        features=(Feature.PARAM_GROUPS, Feature.SCHEDULE),
        weights_stay_integers=False,
        judges_split_sums=True,
        variants=(Variant(training_run=TRAINING_RUN),),
        kept_because="needs only gradients and weights, so it can judge an engine that reports no optimizer state",
    ),
)
