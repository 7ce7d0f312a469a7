"""Define the laws of the group ``double_backward``: several backwards on one graph give plain PyTorch's gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines.protocol import Feature, Reduction
from zharness.errors import RoundedScenarioError
from zharness.law_kit.backward_calls import call_backward
from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.law_steps import LawSteps
from zharness.law_kit.optimizer_step import RecordedStep, compare_ranks_after_step, judge_step
from zharness.law_kit.optimizers import ZERO_LR_SGD
from zharness.law_kit.raising_backward import DeliberateError, backward_raises
from zharness.law_kit.rank_actions import second_loss
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.scenario_baseline import collect_grads, make_plain_participant, run_scenario_on_all_ranks
from zharness.law_kit.scenario_judge import judge_after_effects, make_scenario_judge
from zharness.law_kit.scenario_law import BACKWARD_FEATURES, scenario_law
from zharness.law_kit.scenarios import NamedTensors, Participant, Scenario, ScenarioScript
from zharness.law_kit.setting import BackwardCall
from zharness.parity import Comparison, Part, Tier, compare_bitwise
from zharness.parity.baseline import Baseline
from zharness.parity.compare import check_names, is_bitwise_equal
from zharness.workload import Batch

CALLS = {"": BackwardCall.ENGINE, "tensor": BackwardCall.TENSOR, "scale": BackwardCall.SCALE}  # by law variant


def observe_retained_then_zero_grad(ctx: RankContext) -> None:
    """Run backward with a retained graph, zero the gradients, run backward of a second loss, and train another step."""
    engine = ctx.build_engine(optimizer=ZERO_LR_SGD)
    batch = ctx.batch(0)
    ctx.record("params", engine.full_params(), 0)
    ctx.record_optimizer_state("state", engine, 0)
    output = engine(batch.inputs)
    call_backward(engine, ctx.spec.loss(output, batch.target), CALLS[ctx.variant], retain_graph=True)
    engine.zero_grad()
    call_backward(engine, second_loss(output), CALLS[ctx.variant], retain_graph=False)
    ctx.record("second", engine.full_grads())
    engine.step()
    engine.zero_grad()
    ctx.record("params", engine.full_params(), 1)
    ctx.record_optimizer_state("state", engine, 1)
    call_backward(engine, ctx.loss(engine, 1), CALLS[ctx.variant], retain_graph=False)
    ctx.record("next", engine.full_grads())
    engine.close()


def judge_retained_then_zero_grad(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the gradients with those of the second loss alone, and check the step and the next micro-batch."""

    def objective(output: Tensor, _batch: Batch) -> Tensor:
        """Return the second loss, which does not use the batch."""
        return second_loss(output)

    second = ctx.compute_local_grads(0, objective=objective)
    first = ctx.compute_local_grads(0)
    suspects = {
        "the gradient of the first loss": [first],
        "the sum of both losses' gradients": [first, second],
    }
    yield from ctx.compare_reduced_grads(
        "second", [second], exact=ctx.certify_exactness(range(1), objective), suspects=suspects
    )
    yield from judge_step(ctx, ZERO_LR_SGD, ctx.rank_records("second")[0], RecordedStep(0))
    yield from compare_ranks_after_step(ctx, RecordedStep(1))
    following = ctx.compute_local_grads(1)
    yield from ctx.compare_losses(1, following)
    yield from ctx.compare_reduced_grads("next", [following], exact=ctx.certify_exactness(range(1, 2)))


def retained_same_loss(participant: Participant) -> None:
    """Run two backwards of one loss, which give exactly twice the gradient, because doubling does not round."""
    loss = participant.training_loss()
    torch.autograd.backward(loss, retain_graph=True)
    torch.autograd.backward(loss)


def retain_leaks_nothing(participant: Participant) -> NamedTensors:
    """Run two backwards with retained graphs, the second of which raises, then zero the gradients and train again."""
    loss = participant.loss(participant.call(participant.inputs(), run_block=run_with_raising_second_backward))
    torch.autograd.backward(loss, retain_graph=True)
    raised = backward_raises(loss, True)
    participant.zero_grad()
    torch.autograd.backward(participant.training_loss(), retain_graph=True)
    return {"raised": raised}


class RaisesOnSecondBackward(torch.autograd.Function):
    """An autograd.Function that returns a copy of its input. Every backward after the first raises DeliberateError."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        """Return a copy of ``hidden``."""
        ctx.backwards = 0
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return the gradient unchanged in the first backward, and raise DeliberateError in later ones."""
        ctx.backwards += 1
        if ctx.backwards > 1:
            raise DeliberateError
        return grads[0]


def run_with_raising_second_backward(block: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Run ``block`` such that the second backward raises DeliberateError after it has run through ``block``."""
    guarded: Tensor = RaisesOnSecondBackward.apply(hidden)  # type: ignore[no-untyped-call]
    return block(guarded)


def step_between_retained_backwards(participant: Participant) -> NamedTensors:
    """Run a second backward after an optimizer step. Plain PyTorch raises here: the step modified the weights."""
    loss = participant.training_loss()
    participant.backward(loss, retain_graph=True)
    participant.step()
    try:
        participant.backward(loss)
        refused = torch.zeros(1)
    except NotImplementedError:  # a RuntimeError too, but not the refusal of this backward
        raise
    except RuntimeError:
        refused = torch.ones(1)
    participant.zero_grad()
    torch.autograd.backward(participant.training_loss(2))
    return {"refused": refused}


def gradient_penalty(participant: Participant) -> NamedTensors:
    """Run backward of a loss plus a penalty on the gradient of a nonlinear function with respect to the input."""
    return penalize_input_gradient(participant)


def penalize_input_gradient(participant: Participant, *, create_graph: bool = True) -> NamedTensors:
    """Run backward of ``gradient_penalty``. Without ``create_graph``, the penalty is a constant."""
    leaf = participant.leaf_inputs()
    output = participant.call(leaf)
    square = output.clamp(-2, 2).pow(2).sum()
    (input_grad,) = torch.autograd.grad(square, leaf, create_graph=create_graph, retain_graph=True)
    # Divided by 16 like the loss. Otherwise the sum of penalty and loss needs more than 24 bits for 1 % of the seeds.
    torch.autograd.backward(input_grad.pow(2).sum() / 16 + participant.loss(output))
    assert leaf.grad is not None
    return {"input": input_grad, "penalty": leaf.grad}


GRADIENT_PENALTY_SCENARIO = Scenario(gradient_penalty)
FIRST_ORDER_HINT = "it is the gradient of the loss alone, without the second-order term of the penalty"


def judge_gradient_penalty(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare values and gradients; add a hint if the input's gradient is that of the loss without the penalty."""
    for comparison in make_scenario_judge(GRADIENT_PENALTY_SCENARIO)(ctx):
        mismatch = comparison.mismatch
        if mismatch is None or mismatch.parameter != "penalty":
            yield comparison
            continue
        coordinate = ctx.data_coordinate(mismatch.seen_on)
        participant = make_plain_participant(ctx.baseline, ctx.variant, coordinate, ctx.dtype, None)
        constant = penalize_input_gradient(participant, create_graph=False)["penalty"]
        penalty = ctx.rank_records("values", mismatch.step)[mismatch.seen_on]["penalty"]
        yield add_hint(comparison, FIRST_ORDER_HINT) if is_bitwise_equal(constant, penalty) else comparison


OWN_GRADIENTS, REDUCED_GRADIENTS = "own", "reduced"
BATCHED = "_batched"  # the end of the names of variants in which one call computes the gradients of several losses
FACTORS = (1.0, 2.0)  # the factors of the losses in such a call


def add_gradient_penalty(
    loss: Tensor, module: nn.Module, variant: str, grad_scale: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss plus the sum of squares of its weight gradients. Also return these gradients by name.

    The gradients are multiplied by ``grad_scale`` before they are squared. In a batched variant, they have one row for
    each factor of FACTORS, by which the loss is multiplied.
    """
    weights = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    is_batched = variant.endswith(BATCHED)
    raw_grads = torch.autograd.grad(
        loss,
        list(weights.values()),
        loss.new_tensor(FACTORS) if is_batched else None,
        create_graph=True,
        allow_unused=True,
        is_grads_batched=is_batched,
    )
    grads = {name: grad_scale * grad for name, grad in zip(weights, raw_grads, strict=True) if grad is not None}
    return loss + torch.stack([grad.square().sum() for grad in grads.values()]).sum(), grads


def weight_penalty(participant: Participant) -> NamedTensors:
    """Run backward of a loss plus a penalty on its weight gradients.

    Return the weight gradients in the law variants in which they are the gradients of this rank's own loss, else
    nothing.
    """
    total, grads = add_gradient_penalty(participant.training_loss(), participant.module, participant.variant)
    torch.autograd.backward(total)
    return {f"of {name}": grad for name, grad in grads.items() if participant.variant.startswith(OWN_GRADIENTS)}


# The reduction is the mean: with the sum, an engine that forgets to divide in the second backward would be right.
WEIGHT_PENALTY_SCENARIO = Scenario(weight_penalty, reduction=Reduction.MEAN)


def judge_weight_penalty(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the gradients with those of all ranks' losses plus a penalty on the reduced gradients.

    The gradients in the penalty and the gradients of the total loss are both divided by the engine's divisor: the
    number of ranks if the engine averages over ranks, times the number of micro-batches if the engine owns
    accumulation. All micro-batches of a window are the same.
    """
    if ctx.variant.startswith(OWN_GRADIENTS):
        yield from make_scenario_judge(WEIGHT_PENALTY_SCENARIO)(ctx)
        return
    ranks = 1 if ctx.has_record(Reduction.SUM.value) else ctx.data_size
    share, repeats = 1 / (ranks * int(ctx.rank_records("setting")[0]["divisor"])), ctx.setting.accumulation_steps
    expected, wide = (
        {
            name: repeats * grad
            for name, grad in compute_penalty_gradients(ctx.baseline, ctx.variant, share, dtype).items()
        }
        for dtype in (ctx.dtype, torch.float64)
    )
    if any(not torch.equal(grad.double(), wide[name]) for name, grad in expected.items()):
        raise RoundedScenarioError("the penalty is not exact on plain PyTorch, so no engine can be judged by it")
    for rank, record in enumerate(ctx.rank_records("grads")):
        check_names("full_grads", expected, record)
        for name, grad in expected.items():
            yield compare_bitwise(ctx.location(name, Part.REDUCTION, rank=rank), grad, record[name])
    yield from judge_after_effects(ctx, run_scenario_on_all_ranks(ctx, WEIGHT_PENALTY_SCENARIO), 0)


def compute_penalty_gradients(
    baseline: Baseline, variant: str, grad_scale: float, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return plain PyTorch's gradients of the sum of all ranks' losses plus a penalty, multiplied by ``grad_scale``.

    The penalty is the sum of squares of the losses' gradients, which are also multiplied by ``grad_scale``.
    """
    module = baseline.build_module().to(dtype)
    participants = [make_plain_participant(baseline, variant, rank, dtype, None) for rank in range(baseline.data_size)]
    losses = [participant.loss(module(participant.inputs())) for participant in participants]
    total, _ = add_gradient_penalty(torch.stack(losses).sum(), module, variant, grad_scale)
    torch.autograd.backward(grad_scale * total)
    return dict(collect_grads(module))


# These scripts call loss.backward(), as users of retained graphs do.
RETAINED_FEATURES = (*BACKWARD_FEATURES, Feature.TENSOR_BACKWARD, Feature.RETAIN_GRAPH)


def retained_law(script: ScenarioScript, statement: str, *, kept_because: str, own_window: bool = False) -> Law:
    """Build the law of a scenario in which a backward retains the graph."""
    scenario = Scenario(script, own_window=own_window)
    return scenario_law("double_backward", scenario, statement, kept_because=kept_because, features=RETAINED_FEATURES)


LAWS = (
    retained_law(
        retained_same_loss,
        "two backwards on one retained graph give exactly twice the gradient",
        kept_because="doubling is exact on every model, so a lost or an extra contribution shows",
    ),
    retained_law(
        retain_leaks_nothing,
        "a backward that retained its graph, or raised, does not affect the next step",
        kept_because="compares the next step, while retained_same_loss compares gradients",
    ),
    retained_law(
        step_between_retained_backwards,
        "a backward raises if a step has written the weights since its forward, as in plain PyTorch",
        own_window=True,
        kept_because="the only law of this group in which the right outcome is an error",
    ),
    replace(
        retained_law(
            gradient_penalty,
            "backward of a penalty on a gradient from autograd.grad(create_graph=True) gives plain PyTorch's gradients",
            kept_because="the only backward through the gradient of an input",
        ),
        judge=judge_gradient_penalty,
    ),
    replace(
        scenario_law(
            "double_backward",
            WEIGHT_PENALTY_SCENARIO,
            "a penalty on weight gradients, local or reduced as the engine claims, gives plain PyTorch's gradients",
            features=RETAINED_FEATURES,
            variants=(
                *(Variant(f"{OWN_GRADIENTS}{end}", (Feature.OWN_WEIGHT_GRADIENTS,)) for end in ("", BATCHED)),
                *(
                    Variant(f"{REDUCED_GRADIENTS}{end}", (Feature.REDUCED_WEIGHT_GRADIENTS,), exact_by_sum=True)
                    for end in ("", BATCHED)
                ),
            ),
            kept_because="the only backward through the gradients of weights",
        ),
        judge=judge_weight_penalty,
    ),
    Law(
        name="double_backward.retained_then_zero_grad",
        statement="after a retained backward and zero_grad, backward of another loss gives that loss's gradient alone",
        tier=Tier.STAGED,
        models=("mlp", "transformer", "exact", "fused"),
        observe=observe_retained_then_zero_grad,
        judge=judge_retained_then_zero_grad,
        features=(Feature.RETAIN_GRAPH,),
        variants=(
            Variant("", (Feature.ENGINE_BACKWARD,)),
            Variant("tensor", (Feature.TENSOR_BACKWARD,)),
            Variant("scale", (Feature.SCALE_BACKWARD,)),
        ),
        steps=LawSteps(observe_retained_then_zero_grad),
        kept_because="tries every way to call backward, on every model: a released engine fails this law",
    ),
)
