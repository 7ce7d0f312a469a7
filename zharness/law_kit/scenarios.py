"""Define scenarios, which are scripts of calls that run on the engine and on plain PyTorch.

Every scenario is exact: weights, inputs and losses are integers divided by powers of two, and gradients are summed over
ranks. The judge also runs the scenario in float64. If the results in both precisions are bitwise equal, no operation
rounded, so the engine has to be bitwise equal too, in whatever order it sums. An engine that averages gradients is
exact if the world size is a power of two; at other world sizes, its gradients may differ by the bound on the rounding
errors of the reduction. After the scenario, the engine makes a step with learning rate 0 and trains one ordinary
micro-batch. The gradients of this micro-batch have to be right too, and no parameter may stay gathered.
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
from zharness.law_kit.setting import SettingSupport
from zharness.parity.certificate import is_power_of_two
from zharness.workload import Batch, ModelSpec

FOLLOW_UP_MICRO = 1  # the micro-batch of the follow-up training; scripts use others

NamedTensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Participant:
    """The engine or the plain model of one rank, with methods through which one script can run on both.

    ``tensor_backward(loss)`` is ``loss.backward()``, or ``backward(loss)`` on an engine that claims no other backward.
    ``allow_uneven_use()`` returns a context manager in which ranks may use different parameters.
    ``gather_weights(names)`` returns a context manager in which full weights can be edited by name. ``keeps_edits``
    says whether such edits are kept: always on the plain model, and only on rank 0 on the engine. ``recompute`` is
    torch.utils.checkpoint.checkpoint on the engine and a plain call on the plain model, because both have to give the
    same gradients. ``partner`` is a second engine or plain model with the same initial weights, or None if the scenario
    uses only one.
    """

    call: Callable[..., Any]
    module: Any  # an nn.Module with the attributes of the model
    rank: int
    variant: str
    spec: ModelSpec
    get_batch: Callable[[int], Batch]
    backward: Callable[..., None]
    tensor_backward: Callable[..., None]
    zero_grad: Callable[[], None]
    step: Callable[[], None]
    allow_uneven_use: Callable[[], AbstractContextManager[Any]]
    gather_weights: Callable[[Sequence[str]], AbstractContextManager[NamedTensors]]
    keeps_edits: bool
    recompute: Callable[..., Any]
    partner: Participant | None = None

    def inputs(self, step: int = 0) -> Tensor:
        """Return the inputs of micro-batch ``step``."""
        inputs: Tensor = self.get_batch(step).inputs
        return inputs

    def leaf_inputs(self, step: int = 0) -> Tensor:
        """Return a copy of the inputs of micro-batch ``step`` that is a leaf tensor with ``requires_grad=True``."""
        return self.inputs(step).clone().requires_grad_()

    def loss(self, output: Tensor, step: int = 0) -> Tensor:
        """Return the loss of ``output`` for the target of micro-batch ``step``."""
        return self.spec.loss(output, self.get_batch(step).target)

    def training_loss(self, step: int = 0) -> Tensor:
        """Run the forward of micro-batch ``step`` and return its loss."""
        return self.loss(self.call(self.inputs(step)), step)


ScenarioScript = Callable[[Participant], NamedTensors | None]


def train_follow_up(participant: Participant) -> None:
    """Run forward and backward of one ordinary micro-batch after the scenario."""
    participant.backward(participant.training_loss(FOLLOW_UP_MICRO))


class UnusedGrads(Enum):
    """The gradients that an engine may report for a parameter that no rank used. In plain PyTorch ``.grad`` is None."""

    NONE_IF_CLAIMED = "none where Feature.NO_GRADIENT is claimed, else zeros are accepted"
    ALWAYS_NONE = "none, whatever is claimed"


@dataclass(frozen=True)
class Scenario:
    """A script with its settings: the number of engines, the number of micro-batches in a step, and the reduction.

    If the engine leaves accumulation to its caller, gradients are not divided by the number of micro-batches. In a cell
    with an accumulation window, the script runs once in each micro-batch of the window. A scenario with ``own_window``
    never runs in such a cell, because its script calls the optimizer step itself or its judge expects one micro-batch.
    """

    script: ScenarioScript
    engine_count: int = 1
    accumulation_steps: int = 1
    unused_grads: UnusedGrads = UnusedGrads.NONE_IF_CLAIMED
    reduction: Reduction = Reduction.SUM
    own_window: bool = False

    @property
    def setting_support(self) -> SettingSupport:
        """The settings for which the scenario's law is stated.

        If the scenario has several micro-batches in a step or an ``own_window``, these are only engine options.
        """
        has_window = self.own_window or self.accumulation_steps > 1
        return SettingSupport.OPTIONS_ONLY if has_window else SettingSupport.WINDOWS


def choose_exact_reduction(preferred: Reduction, world_size: int, capabilities: Capabilities) -> Reduction:
    """Return the reduction, sum or mean, that is exact on this engine, or ``preferred`` if both are exact.

    A mean over three ranks rounds, and so does a sum that the engine computes from such a mean.
    """
    if capabilities.refusal(Feature.SUM) is not None:
        return Reduction.MEAN
    if is_power_of_two(world_size):
        return preferred
    return Reduction.MEAN if capabilities.scaled_sum else Reduction.SUM


def get_detached_weights(module: nn.Module, names: Sequence[str]) -> NamedTensors:
    """Return the weights ``names`` of ``module``, detached from their graph."""
    weights = dict(module.named_parameters())
    return {name: weights[name].detach() for name in names}


def make_scenario_observer(scenario: Scenario) -> Callable[[RankContext], None]:
    """Return a function that runs the scenario on the engine and records the results."""

    def observe(ctx: RankContext) -> None:
        """Run the scenario, a step with learning rate 0, and one more micro-batch; record values and gradients."""
        repeats = ctx.setting.accumulation_steps
        micro_batches = scenario.accumulation_steps * repeats
        claims_window = AccumulationOwner.ENGINE in ctx.accumulation_owners() and not ctx.capabilities.engine_windows
        owns = ctx.setting.owner is AccumulationOwner.ENGINE if repeats > 1 else micro_batches > 1 and claims_window
        owner = AccumulationOwner.ENGINE if owns else AccumulationOwner.CALLER
        divisor = micro_batches if owns else 1
        reduction = choose_exact_reduction(scenario.reduction, ctx.data_size, ctx.capabilities)
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
        # These are the engine's own claims: an option may have changed the claims of the registry.
        refused = engines[0].capabilities.refusal(Feature.NO_GRADIENT) is not None
        zeros = scenario.unused_grads is UnusedGrads.NONE_IF_CLAIMED and refused
        ctx.record("setting", {"divisor": torch.tensor(divisor), "zeros": torch.tensor(zeros)})
        participant: Participant | None = None
        for engine in reversed(engines):
            participant = make_engine_participant(ctx, engine, participant)
        assert participant is not None
        for repeat in range(repeats):
            ctx.record("values", scenario.script(participant) or {}, repeat)
            if owns and repeat < repeats - 1:
                for engine in engines:
                    engine.step()
        for number, engine in enumerate(engines):
            ctx.record("grads", engine.full_grads(), number)
            engine.step()
            engine.zero_grad()
            for repeat in range(repeats):
                train_follow_up(make_engine_participant(ctx, engine, None))
                if owns and repeat < repeats - 1:
                    engine.step()
            ctx.record("after", engine.full_grads(), number)
            gathered = engine.observe().gathered_bytes
            ctx.record(
                "gathered", {"gathered_bytes": torch.tensor(gathered)} if isinstance(gathered, int) else {}, number
            )
        for engine in engines:
            engine.close()

    return observe


def make_engine_participant(ctx: RankContext, engine: Engine, partner: Participant | None) -> Participant:
    """Wrap ``engine`` in a Participant, the interface through which scripts call engines and plain models."""
    return Participant(
        call=engine,
        module=engine.module,
        rank=ctx.data_coordinate,
        variant=ctx.variant,
        spec=ctx.spec,
        get_batch=ctx.batch,
        backward=engine.backward,
        tensor_backward=(
            torch.autograd.backward if engine.capabilities.refusal(Feature.TENSOR_BACKWARD) is None else engine.backward
        ),
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
