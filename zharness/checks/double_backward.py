"""The laws of more than one backward on one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zharness.checks.accumulation import FROZEN
from zharness.checks.backward import NEEDS, BrokenOnPurpose, breaks
from zharness.checks.bench import Bench
from zharness.checks.law import Check
from zharness.checks.optimizer_step import Moment, everyone_agrees, judge_step
from zharness.checks.play import (
    Play,
    Scene,
    Side,
    Values,
    check,
    gradients,
    judging,
    left_behind,
    of_plain,
    played_by_all,
)
from zharness.checks.trial import Trial
from zharness.engines.protocol import Engine, Feature, Reduction
from zharness.errors import HarnessFault
from zharness.parity import Comparison, Part, Tier, identical
from zharness.parity.baseline import Baseline
from zharness.parity.compare import check_names
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
    # In the loss's own sixteenths: in units, the sum of both takes more than 24 bits with one seed of a hundred.
    torch.autograd.backward(first.pow(2).sum() / 16 + side.loss(output))
    assert leaf.grad is not None
    return {"input": first, "penalty": leaf.grad}


OWN, REDUCED = "own", "reduced"


def penalised(loss: Tensor, module: nn.Module, share: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """``loss`` plus the squares of its gradients by the weights, times ``share`` before; and those gradients."""
    weights = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    found = torch.autograd.grad(loss, list(weights.values()), create_graph=True, allow_unused=True)
    grads = {name: share * grad for name, grad in zip(weights, found, strict=True) if grad is not None}
    return loss + torch.stack([grad.square().sum() for grad in grads.values()]).sum(), grads


def weight_penalty(side: Side) -> Values:
    """A penalty on the gradients of weights. Where those are a rank's own, they are vanilla's."""
    total, grads = penalised(side.trained(), side.module)
    torch.autograd.backward(total)
    return {f"of {name}": grad for name, grad in grads.items() if side.variant == OWN}


# The mean, since what forgets to divide on the way back is right by the sum.
SCENE = Scene(weight_penalty, reduction=Reduction.MEAN)


def judge_weight_penalty(trial: Trial) -> Iterator[Comparison]:
    """Gradients of gradients that come reduced are those of all ranks' losses and of the penalty on their reduced sum.

    By the mean over N ranks, that sum is divided by N within the penalty, and what the penalty gives is once more.
    """
    if trial.variant == OWN:
        yield from judging(SCENE)(trial)
        return
    share = 1.0 if trial.recorded(Reduction.SUM.value) else 1 / trial.world_size
    expected, wide = (penalty_of_all(trial.baseline, share, dtype) for dtype in (trial.dtype, torch.float64))
    if any(not torch.equal(grad.double(), wide[name]) for name, grad in expected.items()):
        raise HarnessFault("the penalty is not exact, so it can judge no engine")
    for rank, copy in enumerate(trial.copies("grads")):
        check_names("full_grads", expected, copy)
        for name, grad in expected.items():
            yield identical(trial.place(name, Part.REDUCTION, seen_on=rank), grad, copy[name])
    yield from left_behind(trial, played_by_all(trial, SCENE), 0)


def penalty_of_all(baseline: Baseline, share: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """The plain model's gradients of all ranks' losses, with a penalty on ``share`` times their gradients."""
    module = baseline.module().to(dtype)
    sides = [of_plain(baseline, REDUCED, rank, dtype, None) for rank in range(baseline.world_size)]
    losses = [side.loss(module(side.x())) for side in sides]
    torch.autograd.backward(share * penalised(torch.stack(losses).sum(), module, share)[0])
    return dict(gradients(module))


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
    replace(
        check(
            "double_backward.weight_penalty",
            "a penalty on gradients of weights is vanilla's: on a rank's own, or on all ranks', as the engine claims",
            SCENE,
            (*NEEDS, Feature.RETAIN_GRAPH),
            variants=((OWN, (Feature.OWN_WEIGHT_GRADIENTS,)), (REDUCED, (Feature.REDUCED_WEIGHT_GRADIENTS,))),
        ),
        judge=judge_weight_penalty,
        summed=(REDUCED,),
    ),
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
