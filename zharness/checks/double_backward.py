"""The laws of more than one backward on one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from zharness.checks.accumulation import FROZEN
from zharness.checks.backward import NEEDS, BrokenOnPurpose, breaks
from zharness.checks.bench import Bench
from zharness.checks.law import Check
from zharness.checks.optimizer_step import Moment, everyone_agrees, judge_step
from zharness.checks.play import Play, Scene, Side, Values, check
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


def retained_same_loss(side: Side) -> None:
    """Doubling is exact, so this is exactly twice the gradient of one backward."""
    loss = side.trained()
    torch.autograd.backward(loss, retain_graph=True)
    torch.autograd.backward(loss)


def retain_leaks_nothing(side: Side) -> Values:
    """Retained backwards, the last of which raises; zero_grad, and nothing of them is left."""
    loss = side.loss(side.call(side.x(), through=breaking_second))
    torch.autograd.backward(loss, retain_graph=True)
    raised = breaks(loss, True)
    side.zero_grad()
    torch.autograd.backward(side.trained(), retain_graph=True)
    return {"raised": raised}


class BreaksTheSecondTime(torch.autograd.Function):
    """Passes its input through; every backward but the first raises."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.backwards = 0
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        ctx.backwards += 1
        if ctx.backwards > 1:
            raise BrokenOnPurpose
        return grads[0]


def breaking_second(block: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    passed: Tensor = BreaksTheSecondTime.apply(hidden)  # type: ignore[no-untyped-call]
    return block(passed)


def step_between_retained_backwards(side: Side) -> Values:
    """Vanilla refuses the second backward, since the weights that it needs were written by the step."""
    loss = side.trained()
    side.backward(loss, retain_graph=True)
    side.step()
    try:
        side.backward(loss)
        refused = torch.zeros(1)
    except RuntimeError:
        refused = torch.ones(1)
    side.zero_grad()
    torch.autograd.backward(side.trained(2))
    return {"refused": refused}


def gradient_penalty(side: Side) -> Values:
    """A penalty on the inputs' gradient of a loss with curvature, beside an ordinary loss."""
    leaf = side.leaf()
    output = side.call(leaf)
    (first,) = torch.autograd.grad(output.clamp(-2, 2).pow(2).sum(), leaf, create_graph=True)
    torch.autograd.backward(first.pow(2).sum() + side.loss(output))
    assert leaf.grad is not None
    return {"input": first, "penalty": leaf.grad}


def retained_law(play: Play, words: str) -> Check:
    name = play.__name__
    return check(f"double_backward.{name}", words, Scene(play), (*NEEDS, Feature.RETAIN_GRAPH))


CHECKS = (
    retained_law(retained_same_loss, "two backwards on one retained graph give exactly twice the gradient"),
    retained_law(retain_leaks_nothing, "a retained backward, or one that raised, leaves nothing for the next step"),
    retained_law(
        step_between_retained_backwards,
        "a backward over weights that a step has written since its forward raises, as vanilla's does",
    ),
    retained_law(gradient_penalty, "autograd.grad with create_graph, then backward of a penalty on it, is vanilla's"),
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
