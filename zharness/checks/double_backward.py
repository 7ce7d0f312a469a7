"""The laws of more than one backward on one graph."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zharness.checks.accumulation import FROZEN
from zharness.checks.bench import Bench
from zharness.checks.law import Check
from zharness.checks.optimizer_step import Moment, everyone_agrees, judge_step
from zharness.checks.trial import Trial
from zharness.engines.protocol import Engine, Feature
from zharness.parity import Comparison, Tier
from zharness.workload import Batch


def second_loss(output: Tensor) -> Tensor:
    """Another loss on the same forward: linear in the output with integer factors, so exact on the exact model."""
    return 2 * output.sum(dim=-1).mean()


def spelled(engine: Engine, variant: str, loss: Tensor, retain_graph: bool) -> None:
    """One backward in the spelling that ``variant`` names."""
    if variant == "tensor":
        torch.autograd.backward(loss, retain_graph=retain_graph)
    elif variant == "scale":
        torch.autograd.backward(engine.scale(loss), retain_graph=retain_graph)
    else:
        engine.backward(loss, retain_graph=retain_graph)


def observe_retained_then_zero_grad(bench: Bench) -> None:
    engine = bench.engine(optimizer=FROZEN)
    batch = bench.batch(0)
    bench.record("params", engine.full_params(), 0)
    bench.record_state("state", engine, 0)
    output = engine(batch.inputs)
    spelled(engine, bench.variant, bench.spec.loss(output, batch.target), retain_graph=True)
    engine.zero_grad()
    spelled(engine, bench.variant, second_loss(output), retain_graph=False)
    bench.record("second", engine.full_grads())
    engine.step()
    engine.zero_grad()
    bench.record("params", engine.full_params(), 1)
    bench.record_state("state", engine, 1)
    spelled(engine, bench.variant, bench.loss(engine, 1), retain_graph=False)
    bench.record("next", engine.full_grads())
    engine.close()


def judge_retained_then_zero_grad(trial: Trial) -> Iterator[Comparison]:
    def objective(output: Tensor, _batch: Batch) -> Tensor:
        return second_loss(output)

    second = trial.locals(0, objective=objective)
    first = trial.locals(0)
    suspects = {
        "the gradient of the first loss": [first],
        "the sum of both losses' gradients": [first, second],
    }
    yield from trial.reduced("second", [second], exact=trial.exact(range(1), objective), suspects=suspects)
    yield from judge_step(trial, FROZEN, trial.copies("second")[0], Moment(0))
    yield from everyone_agrees(trial, Moment(1))
    following = trial.locals(1)
    yield from trial.same_loss(1, following)
    yield from trial.reduced("next", [following], exact=trial.exact(range(1, 2)))


CHECKS = (
    Check(
        name="double_backward.retained_then_zero_grad",
        law="backward of one loss on a retained graph, zero_grad, backward of another: the other's gradient alone",
        tier=Tier.STAGED,
        models=("mlp", "transformer", "exact", "fused"),
        observe=observe_retained_then_zero_grad,
        judge=judge_retained_then_zero_grad,
        needs=(Feature.RETAIN_GRAPH,),
        variants=(
            ("", (Feature.ENGINE_BACKWARD,)),
            ("tensor", (Feature.TENSOR_BACKWARD,)),
            ("scale", (Feature.SCALE_BACKWARD,)),
        ),
    ),
)
