"""Scenarios: what a caller does with a model, written once and run on the engine and on plain PyTorch.

Every scenario is exact. Weights, inputs and losses are integers over powers of two, and gradients are summed over
ranks. The judge also runs it in float64: where both precisions agree bitwise nothing was rounded, so the engine has to
agree bitwise too, in whatever order it sums. (An engine that averages stays exact where the world size is a power of
two; elsewhere the bound of the reduction applies.) After the scenario the engine makes a step that moves nothing and
trains one ordinary micro-batch, which has to be right as well, and no parameter may stay gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zharness.engines.protocol import (
    AccumulationOwner,
    Capabilities,
    Engine,
    Feature,
    Reduction,
    supports_gathered,
    supports_uneven,
)
from zharness.law_kit.optimizers import ZERO_LR_SGD
from zharness.law_kit.rank_context import RankContext
from zharness.parity.certificate import is_power_of_two
from zharness.workload import Batch, ModelSpec

FOLLOW_UP_MICRO = 1  # the micro-batch of the follow-up training; scripts use others

NamedTensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Participant:
    """The engine or the plain model of one rank, so that one script drives either.

    ``allow_uneven_use()`` is a block in which ranks may use different parameters. ``gather_weights(names)`` is a block
    in which full weights may be edited by name; ``keeps_edits`` says whether this participant's edits last: the plain
    model's and rank 0's do. ``recompute`` is torch.utils.checkpoint.checkpoint on the engine and a plain call on the
    plain model, because gradients have to be the same. ``partner`` is a second engine or model with the same initial
    weights, where the scenario has one.
    """

    call: Callable[..., Any]
    module: Any  # an nn.Module with the attributes of the model
    rank: int
    variant: str
    spec: ModelSpec
    get_batch: Callable[[int], Batch]
    backward: Callable[..., None]
    zero_grad: Callable[[], None]
    step: Callable[[], None]
    allow_uneven_use: Callable[[], AbstractContextManager[Any]]
    gather_weights: Callable[[Sequence[str]], AbstractContextManager[NamedTensors]]
    keeps_edits: bool
    recompute: Callable[..., Any]
    partner: Participant | None = None

    def inputs(self, step: int = 0) -> Tensor:
        """Return the inputs of micro-step ``step``."""
        inputs: Tensor = self.get_batch(step).inputs
        return inputs

    def leaf_inputs(self, step: int = 0) -> Tensor:
        """Return the inputs of micro-step ``step`` as a leaf that requires a gradient."""
        return self.inputs(step).clone().requires_grad_()

    def loss(self, output: Tensor, step: int = 0) -> Tensor:
        """Return the workload's loss of ``output``."""
        return self.spec.loss(output, self.get_batch(step).target)

    def training_loss(self, step: int = 0) -> Tensor:
        """Run the forward of micro-step ``step`` and return its loss."""
        return self.loss(self.call(self.inputs(step)), step)


ScenarioScript = Callable[[Participant], NamedTensors | None]


def train_follow_up(participant: Participant) -> None:
    """Train one ordinary micro-batch after the scenario."""
    participant.backward(participant.training_loss(FOLLOW_UP_MICRO))


class UnusedGrads(Enum):
    """The gradient that an engine may report for a parameter that no rank used; plain PyTorch has none."""

    NONE_IF_CLAIMED = "none where Feature.NO_GRADIENT is claimed, else zeros are accepted"
    ALWAYS_NONE = "none, whatever is claimed"


@dataclass(frozen=True)
class Scenario:
    """A script and its setting: the number of engines, and the micro-batches by which they divide gradients.

    An engine that leaves accumulation to its caller divides nothing.
    """

    script: ScenarioScript
    engine_count: int = 1
    accumulation_steps: int = 1
    unused_grads: UnusedGrads = UnusedGrads.NONE_IF_CLAIMED
    reduction: Reduction = Reduction.SUM


def choose_exact_reduction(preferred: Reduction, world_size: int, capabilities: Capabilities) -> Reduction:
    """Return the reduction that is exact on this engine, sum or mean, and ``preferred`` if both are.

    A mean over three ranks rounds, and so does a sum that the engine computes by scaling such a mean.
    """
    if capabilities.refusal(Feature.SUM) is not None:
        return Reduction.MEAN
    if is_power_of_two(world_size):
        return preferred
    return Reduction.MEAN if capabilities.scaled_sum else Reduction.SUM


def get_detached_weights(module: nn.Module, names: Sequence[str]) -> NamedTensors:
    """Return the named weights without their graph."""
    weights = dict(module.named_parameters())
    return {name: weights[name].detach() for name in names}


def make_scenario_observer(scenario: Scenario) -> Callable[[RankContext], None]:
    """Return an observer that runs the scenario on the engine."""

    def observe(ctx: RankContext) -> None:
        """Run the scenario, a step that moves nothing, and the follow-up training; record values and gradients."""
        owns = scenario.accumulation_steps > 1 and AccumulationOwner.ENGINE in ctx.accumulation_owners()
        owner = AccumulationOwner.ENGINE if owns else AccumulationOwner.CALLER
        divisor = scenario.accumulation_steps if owns else 1
        reduction = choose_exact_reduction(scenario.reduction, ctx.world_size, ctx.capabilities)
        ctx.record(reduction.value, {})
        engines = [
            ctx.build_engine(
                optimizer=ZERO_LR_SGD,
                reduction=reduction,
                accumulation_steps=divisor,
                accumulation_owner=owner,
            )
            for _ in range(scenario.engine_count)
        ]
        # The engine's own claims, which an option may have changed.
        refused = engines[0].capabilities.refusal(Feature.NO_GRADIENT) is not None
        zeros = scenario.unused_grads is UnusedGrads.NONE_IF_CLAIMED and refused
        ctx.record("setting", {"divisor": torch.tensor(divisor), "zeros": torch.tensor(zeros)})
        participant: Participant | None = None
        for engine in reversed(engines):
            participant = make_engine_participant(ctx, engine, participant)
        assert participant is not None
        ctx.record("values", scenario.script(participant) or {})
        for number, engine in enumerate(engines):
            ctx.record("grads", engine.full_grads(), number)
            engine.step()
            engine.zero_grad()
            train_follow_up(make_engine_participant(ctx, engine, None))
            ctx.record("after", engine.full_grads(), number)
            gathered = engine.observe().gathered_bytes
            ctx.record(
                "gathered", {"gathered_bytes": torch.tensor(gathered)} if isinstance(gathered, int) else {}, number
            )
        for engine in engines:
            engine.close()

    return observe


def make_engine_participant(ctx: RankContext, engine: Engine, partner: Participant | None) -> Participant:
    """Return the participant that runs ``engine`` on this rank."""
    return Participant(
        call=engine,
        module=engine.module,
        rank=ctx.rank,
        variant=ctx.variant,
        spec=ctx.spec,
        get_batch=ctx.batch,
        backward=engine.backward,
        zero_grad=engine.zero_grad,
        step=engine.step,
        allow_uneven_use=engine.uneven if supports_uneven(engine) else nullcontext,
        gather_weights=(
            engine.gathered
            if supports_gathered(engine)
            else lambda names: nullcontext(get_detached_weights(engine.module, names))
        ),
        keeps_edits=ctx.rank == 0,
        recompute=checkpoint,
        partner=partner,
    )
