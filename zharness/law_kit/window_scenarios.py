"""Define window scenarios, which are scripts of several optimizer steps that run on the engine and on plain PyTorch.

A script trains one micro-batch of an accumulation window. Its argument ``participant`` is the engine or the plain
model. After each window the optimizer, SGD with a learning rate of 1, makes a step, and the weights are compared with
those of plain PyTorch. A scenario may add momentum and weight decay, which are integers too. Weights, inputs and losses
are integers. The loss is multiplied by every number by which the engine divides, so that gradients are sums over ranks
and micro-batches, and weights stay integers. The judge runs each window in float64 too, and raises HarnessFault if a
number was rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from zharness.engines.protocol import AccumulationOwner, Engine, Feature, GroupSpec, OptimizerSpec
from zharness.law_kit.backward_calls import call_backward
from zharness.law_kit.optimizers import UNIT_LR_SGD
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.law_kit.scenarios import NamedTensors, Participant, make_engine_participant
from zharness.law_kit.setting import BackwardCall
from zharness.parity.certificate import is_power_of_two

WindowScript = Callable[[Participant, int, int], NamedTensors | None]


@dataclass(frozen=True)
class WindowScenario:
    """A script of several accumulation windows, with its settings.

    - ``train(participant, window, micro)`` runs forward and backward of micro-batch ``micro`` of window ``window``. It
      may return values, which must be bitwise equal to plain PyTorch's. If the engine owns the accumulation, the script
      never calls ``zero_grad``, because the engine begins the next window itself.
    - ``windows`` is the number of accumulation windows, and ``micro_batches`` the number of micro-batches in a window.
    - ``owner``, the engine or its caller, owns the accumulation.
    - ``is_uneven`` says that ranks may use different parameters.
    - ``clip`` is the norm to which gradients are clipped, or None.
    - ``momentum``, ``weight_decay`` and ``groups`` are those of the optimizer; a group overrides nothing.
    - ``frozen_at_start`` names the submodules that are frozen when the engine is built.
    - ``reads_inside`` says that all full gradients are read after each micro-batch of a window except the last.
    - ``before_step(participant, window)`` runs after the last micro-batch of a window, and
      ``after_step(participant, window)`` runs after the optimizer step.
    - ``backward_call`` is the call by which ``backward`` of the engine's participant runs.
    - ``in_no_sync`` says that all micro-batches of a window except the last run inside the engine's ``no_sync``.
    - ``wrong_scripts`` maps a hint to a script that gives the gradients of a wrong engine.
    - ``features`` are the features that the script needs in addition to the features of its settings.
    """

    train: WindowScript
    windows: int = 3
    micro_batches: int = 1
    owner: AccumulationOwner = AccumulationOwner.CALLER
    is_uneven: bool = False
    clip: float | None = None
    momentum: int = 0
    weight_decay: int = 0
    groups: tuple[GroupSpec, ...] = ()
    frozen_at_start: tuple[str, ...] = ()
    reads_inside: bool = False
    before_step: Callable[[Participant, int], None] | None = None
    after_step: Callable[[Participant, int], None] | None = None
    backward_call: BackwardCall = BackwardCall.ENGINE
    in_no_sync: bool = False
    wrong_scripts: Mapping[str, WindowScript] = field(default_factory=dict)
    features: tuple[Feature, ...] = ()

    @property
    def divisor(self) -> int:
        """The number by which the engine divides the sum of gradients over the micro-batches of a window."""
        return self.micro_batches if self.owner is AccumulationOwner.ENGINE else 1

    @property
    def optimizer(self) -> OptimizerSpec:
        """The optimizer: SGD with a learning rate of 1, with the momentum and the weight decay of this scenario."""
        kept = {"momentum": float(self.momentum), "weight_decay": float(self.weight_decay)}
        arguments = {**UNIT_LR_SGD.args, **{key: value for key, value in kept.items() if value}}
        return replace(UNIT_LR_SGD, args=arguments, groups=self.groups)

    def freeze_at_start(self, model: nn.Module) -> nn.Module:
        """Freeze the submodules of ``model`` that are frozen when the engine is built, and return the model."""
        for name in self.frozen_at_start:
            model.get_submodule(name).requires_grad_(False)
        return model

    def get_loss_factor(self, world_size: int) -> int:
        """Return the factor by which each loss is multiplied, so that the engine's mean is a sum."""
        return world_size * self.divisor


def make_window_observer(scenarios: Mapping[str, WindowScenario]) -> Callable[[RankContext], None]:
    """Return a function that runs the scenario of the law variant on the engine and records the weights."""

    def observe(ctx: RankContext) -> None:
        """Train every accumulation window, and record the weights before each window and after the last window."""
        scenario = scenarios[ctx.variant]
        # If an engine computes a mean before it adds several backwards, the mean rounds unless the divisor is a power
        # of two.
        exact = is_power_of_two(ctx.data_size) or not ctx.capabilities.scaled_sum
        ctx.record("setting", {"exact": scalar(exact)})
        engine = ctx.build_engine_around(
            scenario.freeze_at_start(ctx.spec.model(ctx.seed)),
            optimizer=scenario.optimizer,
            accumulation_steps=scenario.micro_batches,
            accumulation_owner=scenario.owner,
            clip=scenario.clip,
        )
        train_windows(ctx, engine, scenario)
        gathered = engine.observe().gathered_bytes
        ctx.record("gathered", {"gathered_bytes": torch.tensor(gathered)} if isinstance(gathered, int) else {})
        engine.close()

    return observe


def train_windows(ctx: RankContext, engine: Engine, scenario: WindowScenario, suffix: str = "") -> None:
    """Train every accumulation window of ``scenario`` on ``engine``, and record weights and values.

    The labels of the records end in ``suffix``.
    """
    participant = make_engine_participant(ctx, engine, None)
    if scenario.backward_call is not BackwardCall.ENGINE:
        participant = replace(participant, backward=partial(call_backward, engine, call=scenario.backward_call))
    participant = scale_losses(participant, scenario, ctx.data_size)
    engine_owns = scenario.owner is AccumulationOwner.ENGINE
    for window in range(scenario.windows):
        ctx.record(f"params{suffix}", engine.full_params(), window)
        for micro in range(scenario.micro_batches):
            deferred = scenario.in_no_sync and micro + 1 < scenario.micro_batches
            with (
                participant.allow_uneven_use() if scenario.is_uneven else nullcontext(),
                engine.no_sync() if deferred else nullcontext(),
            ):
                values = scenario.train(participant, window, micro)
            ctx.record(f"values{suffix}", values or {}, window * scenario.micro_batches + micro)
            if scenario.reads_inside and micro + 1 < scenario.micro_batches:
                engine.full_grads()
            if engine_owns and micro + 1 < scenario.micro_batches:
                engine.step()
        if scenario.before_step is not None:
            scenario.before_step(participant, window)
        engine.step()
        if scenario.clip is not None:
            norm = engine.grad_norm()
            ctx.record(f"norm{suffix}", {} if norm is None else {"norm": scalar(norm)}, window)
        if scenario.after_step is not None:
            scenario.after_step(participant, window)
        if not engine_owns or scenario.micro_batches == 1:
            engine.zero_grad()
    ctx.record(f"params{suffix}", engine.full_params(), scenario.windows)


def scale_losses(participant: Participant, scenario: WindowScenario, world_size: int) -> Participant:
    """Return ``participant`` with backwards that multiply every loss by the scenario's loss factor."""
    factor = scenario.get_loss_factor(world_size)

    def multiply_loss(backward: Callable[..., None]) -> Callable[..., None]:
        """Return a function that runs ``backward`` of the loss times the scenario's loss factor."""
        return lambda loss, **options: backward(loss * factor, **options)

    return replace(
        participant,
        backward=multiply_loss(participant.backward),
        tensor_backward=multiply_loss(participant.tensor_backward),
    )
