"""Mutants that use or report learning rates other than those of the schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines import (
    EngineConfig,
    Observations,
    ddp,
    zero1,
)
from zharness.engines.torch_engine import TorchEngine
from zharness.mutants import seams_engines
from zharness.mutants.mutant import (
    FaultKind,
    Origin,
    Target,
    mutant,
    mutant_factory,
)
from zharness.mutants.wrapper import EngineWrapper, FSDP2Wrapper
from zharness.parity import Part


@mutant(FaultKind.OPTIMIZER, Target("training.trajectory", Part.OPTIMIZER, variant="sgd"), origin=Origin.OPTIMIZERS)
class IgnoresTheSchedule(FSDP2Wrapper):
    """Uses the first learning rate of the schedule for all steps."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        first = config.optimizer.schedule[:1]
        super().__init__(model, replace(config, optimizer=replace(config.optimizer, schedule=first)))


@mutant(
    FaultKind.OPTIMIZER, Target("training.accumulation", Part.OPTIMIZER, variant="engine"), origin=Origin.OPTIMIZERS
)
class SchedulesEveryBackward(EngineWrapper):
    """Advances the learning-rate schedule at every backward in addition to every step."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss, retain_graph=retain_graph)
        seams_engines.schedule(self.base).step()


@mutant(
    FaultKind.OPTIMIZER,
    Target("training.trajectory", Part.OPTIMIZER, variant="sgd", parameter="learning rate*"),
    origin=Origin.CIRCUMSTANCES,
)
class TellsTheFirstRates(EngineWrapper):
    """Always reports the learning rates of the first step, even after the schedule has changed them."""

    wraps = "ddp"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.first = self.base.observe().learning_rates

    def observe(self) -> Observations:
        observations: Observations = self.base.observe()
        return replace(observations, learning_rates=self.first)


@mutant_factory(
    FaultKind.OPTIMIZER,
    Target("training.optimizers", Part.OPTIMIZER, variant="long"),
    wraps="ddp",
    stages=(0,),
    origin=Origin.BLIND_1,
)
def ddp_schedule_wraps(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Restarts the learning-rate schedule at its first factor after its last factor.

    The last factor should be used for all later steps; a warm-up of three factors restarts in the fourth step.
    """
    engine, factors = ddp.factory(model, config), config.optimizer.schedule
    optimizer = seams_engines.optimizer(engine)
    seams_engines.set_schedule(
        engine, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factors[step % len(factors)])
    )
    return engine


@mutant_factory(
    FaultKind.OPTIMIZER,
    Target("training.trajectory", Part.OPTIMIZER, variant="sgd", parameter="*bias"),
    wraps="zero1",
    stages=(1,),
    origin=Origin.BLIND_2,
)
def zero1_stale_rates_of_later_groups(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Copies only the first group's settings to the local optimizer, which updates the parameters of this rank.

    ``observe`` reports the scheduled learning rates, but all groups except the first group use their initial learning
    rates.
    """
    engine = zero1.factory(model, config)

    def wrap(sync: seams_engines.SyncParamGroups) -> seams_engines.SyncParamGroups:
        return lambda source, target: sync(source[:1], target[:1])

    seams_engines.wrap_sync_param_groups(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.OPTIMIZER,
    Target("training.trajectory", Part.OPTIMIZER, variant="sgd", parameter="*bias"),
    wraps="zero1",
    stages=(1,),
    origin=Origin.BLIND_3,
)
def schedule_moves_first_group(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Copies only the first parameter group of ZeroRedundancyOptimizer to the rank's local optimizer.

    The reported learning rate of every group follows the schedule, but only the first group steps with its new rate.
    """
    engine = zero1.factory(model, config)
    local = seams_engines.optimizer(engine).optim

    def wrap(sync: seams_engines.SyncParamGroups) -> seams_engines.SyncParamGroups:
        def sync_first(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
            if target is local.param_groups:
                source, target = source[:1], target[:1]
            sync(source, target)

        return sync_first

    seams_engines.wrap_sync_param_groups(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.OPTIMIZER,
    Target("training.trajectory", Part.OPTIMIZER, variant="adamw"),
    wraps="zero1",
    stages=(1,),
    origin=Origin.BLIND_4,
)
def zero1_rate_of_last_step(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Copies a new learning rate to ZeroRedundancyOptimizer's local optimizer one step too late.

    The learning rates of the steps lag behind the schedule by one step, while ``observe`` reports the scheduled rates.
    """
    engine = zero1.factory(model, config)
    exposed = seams_engines.optimizer(engine)
    local, last_rates = exposed.optim, [group["lr"] for group in exposed.param_groups]
    update = local.step

    def step(*args: Any, **kwargs: Any) -> Any:
        scheduled = [group["lr"] for group in local.param_groups]
        for group, rate in zip(local.param_groups, last_rates, strict=True):
            group["lr"] = rate
        try:
            return update(*args, **kwargs)
        finally:
            for group, rate in zip(local.param_groups, scheduled, strict=True):
                group["lr"] = rate
            last_rates[:] = scheduled

    local.step = step
    return engine


@mutant_factory(
    FaultKind.OPTIMIZER,
    Target("training.trajectory", Part.OPTIMIZER, variant="adamw"),
    wraps="zero1",
    stages=(1,),
    origin=Origin.BLIND_5,
)
def schedule_of_the_outer_optimizer(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Never copies learning rates from ZeroRedundancyOptimizer to the local optimizer that updates the parameters.

    All steps use the first learning rate, while ``observe`` reports the scheduled rate.
    """
    engine = zero1.factory(model, config)
    seams_engines.wrap_sync_param_groups(engine, lambda _: lambda source, target: None)
    return engine


@mutant_factory(
    FaultKind.OPTIMIZER,
    Target("training.trajectory", Part.OPTIMIZER, variant="adamw"),
    wraps="zero1",
    stages=(1,),
    origin=Origin.BLIND_6,
)
def schedule_stays_outside(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Copies changed group settings to ZeroRedundancyOptimizer, but not to the local optimizer that updates.

    ``observe`` reports the scheduled learning rates, but every step uses the initial rates.
    """
    engine = zero1.factory(model, config)
    local = seams_engines.optimizer(engine).optim

    def wrap(sync: seams_engines.SyncParamGroups) -> seams_engines.SyncParamGroups:
        def sync_outwards(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
            if target is not local.param_groups:
                sync(source, target)

        return sync_outwards

    seams_engines.wrap_sync_param_groups(engine, wrap)
    return engine
