"""Mutants that save or restore optimizer state and schedules wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zharness.engines import (
    EngineConfig,
    fsdp2,
    zero1,
)
from zharness.engines.reference import ReferenceEngine
from zharness.engines.torch_engine import TorchEngine
from zharness.mutants import seams, seams_engines
from zharness.mutants.mutant import (
    ALL_STAGES,
    FaultKind,
    Origin,
    Target,
    mutant,
    mutant_factory,
)
from zharness.mutants.wrapper import EngineWrapper, SpoiledLoad
from zharness.parity import Part


@mutant(
    FaultKind.STATE,
    Target("state.resume", Part.OPTIMIZER, variant="adamw", parameter="*/exp_avg*"),
    Target("state.resume", Part.OPTIMIZER, variant="sgd", parameter="*/momentum_buffer"),
    origin=Origin.STATE,
)
class DropsMoments(SpoiledLoad):
    """Restores weights and step counts at load, but sets the optimizer's moments to zero."""

    def spoil(self) -> None:
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if key != "step":
                    value.zero_()


@mutant(
    FaultKind.STATE, Target("state.resume", Part.OPTIMIZER, variant="adamw", parameter="*/step"), origin=Origin.STATE
)
class RestartsCounts(SpoiledLoad):
    """Resets step counts to 0 at load, so that Adam corrects its moments for a bias that they no longer have."""

    def spoil(self) -> None:
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"].zero_()


@mutant(
    FaultKind.STATE, Target("state.resume", None, variant="idle", cause="unknown ['idle/exp_avg'"), origin=Origin.STATE
)
class MakesUpState(SpoiledLoad):
    """Creates moments of zero at load for a parameter that has no moments in the checkpoint."""

    def spoil(self) -> None:
        for group in self.optimizer.param_groups:
            for leaf in group["params"]:
                if leaf not in self.optimizer.state:
                    zeros = {key: torch.zeros_like(leaf) for key in ("exp_avg", "exp_avg_sq")}
                    self.optimizer.state[leaf] = {"step": torch.zeros(()), **zeros}


@mutant(
    FaultKind.STATE,
    Target("state.resume", Part.OPTIMIZER, variant="sgd"),
    Target("state.universal", Part.OPTIMIZER, variant="flat"),
    origin=Origin.STATE,
)
class RestartsTheSchedule(SpoiledLoad):
    """Returns to the learning rate of the first step at load."""

    def spoil(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"]


@mutant(FaultKind.STATE, Target("state.universal", Part.OPTIMIZER, variant="shaped"), origin=Origin.STATE)
class SwapsMoments(SpoiledLoad):
    """Swaps Adam's first and second moments at load."""

    def spoil(self) -> None:
        for state in self.optimizer.state.values():
            if "exp_avg" in state:
                state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


@mutant(
    FaultKind.STATE,
    Target("state.resume", Part.OPTIMIZER, variant="adamw", parameter="*/exp_avg*"),
    origin=Origin.CIRCUMSTANCES,
)
class SavingRoundsMoments(EngineWrapper):
    """Rounds the optimizer's own moments to bf16 when it saves them."""

    wraps = "ddp"

    def save(self, path: Path) -> None:
        for state in self.optimizer.state.values():
            for key in state.keys() & {"exp_avg", "exp_avg_sq", "momentum_buffer"}:
                state[key].copy_(state[key].bfloat16())
        self.base.save(path)


@mutant(
    FaultKind.STATE,
    Target("parameters.any_order", None, model="changing", variant="saved", cause="what a rank reports as state"),
    origin=Origin.ORDERS,
)
class LoadsStateForAll(EngineWrapper):
    """Creates optimizer state at load for parameters that had no state, as if they had been used."""

    def load(self, path: Path) -> None:
        self.base.load(path)
        for leaf in seams.leaves(self.base).values():
            state = self.optimizer.state[leaf]
            if not state:
                state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(leaf), exp_avg_sq=torch.zeros_like(leaf))


@mutant(
    FaultKind.STATE,
    Target("training.any_order", None, variant="saved", cause="what a rank reports as state"),
    origin=Origin.ORDERS,
)
class EditsForgetMoments(EngineWrapper):
    """Drops the optimizer state of a weight that the caller edits, as if the weight were a new parameter."""

    def gathered(self, names: Any) -> Any:
        for name in names:
            self.optimizer.state.pop(seams.leaves(self.base)[name], None)
        return self.base.gathered(names)


class _LoadLagsSchedule(ReferenceEngine):
    def load(self, path: Path) -> None:
        super().load(path)
        schedule = seams_engines.schedule(self)
        if schedule is not None:
            schedule.last_epoch = max(0, schedule.last_epoch - 1)


@mutant_factory(
    FaultKind.STATE,
    Target("state.resume", Part.OPTIMIZER, variant="adamw"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_1,
)
def load_lags_the_schedule(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Restores the learning rates at load, but sets the schedule's own step count one step back.

    The first step after a load is right; from the second step on, every factor is used one step too late.
    """
    return seams.build(model, config, _LoadLagsSchedule)


class _LoadsOnRank0(TorchEngine):
    def load(self, path: Path) -> None:
        local = seams_engines.optimizer(self).optim
        kept = {
            param: {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
            for param, state in local.state.items()
        }
        super().load(path)
        if dist.get_rank() != 0:
            local.state.clear()
            local.state.update(kept)


@mutant_factory(
    FaultKind.STATE,
    Target("state.resume", Part.OPTIMIZER, variant="adamw"),
    wraps="zero1",
    stages=(1,),
    origin=Origin.BLIND_2,
)
def zero1_load_fills_rank_0_only(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Makes ``load`` over ZeroRedundancyOptimizer restore only the optimizer state of rank 0.

    The other ranks keep the state that they had before the load, which is empty in a new process. Momentum and step
    counts of their parameters then start again.
    """
    engine = zero1.factory(model, config)
    engine.__class__ = _LoadsOnRank0
    return engine


class _FirstRanksState(TorchEngine):
    def load(self, path: Path) -> None:
        super().load(path)
        if dist.get_rank():
            seams_engines.optimizer(self).optim.state.clear()


@mutant_factory(
    FaultKind.STATE,
    Target("state.resume", None, variant="adamw", cause="state-resumed has the wrong names"),
    wraps="zero1",
    stages=(1,),
    origin=Origin.BLIND_3,
)
def load_keeps_first_ranks_state(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Makes ``load`` over ZeroRedundancyOptimizer restore only the state of parameters that rank 0 updates.

    After ``load``, momentum, moments and step counts of all parameters that other ranks update start again.
    """
    engine = zero1.factory(model, config)
    engine.__class__ = _FirstRanksState
    return engine


@mutant_factory(
    FaultKind.STATE,
    Target("state.resume", Part.OPTIMIZER, variant="adamw"),
    wraps="fsdp2",
    stages=(2, 3),
    origin=Origin.BLIND_4,
)
def fsdp2_base_rates_after_load(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Sets the schedule's initial learning rates to the current, decayed rates in ``load`` over FSDP2.

    From the second step after ``load``, the learning rates are too small: the schedule applies its decay once more.
    """

    class Loads(TorchEngine):
        def load(self, path: Path) -> None:
            super().load(path)
            rates = [float(group["lr"]) for group in seams_engines.optimizer(self).param_groups]
            seams_engines.schedule(self).base_lrs = rates

    engine = fsdp2.factory(model, config)
    engine.__class__ = Loads
    return engine


class _OldRates(ReferenceEngine):
    def load(self, path: Path) -> None:
        groups = seams_engines.optimizer(self).param_groups
        before = [group["lr"] for group in groups]
        super().load(path)
        for group, rate in zip(seams_engines.optimizer(self).param_groups, before, strict=True):
            group["lr"] = rate


@mutant_factory(
    FaultKind.STATE,
    Target("state.resume", Part.OPTIMIZER, variant="adamw", parameter="learning rate*"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_5,
)
def first_rate_after_load(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Restores the schedule's step count at load, but does not change the groups' learning rates until its next step.

    The first step after a load uses the learning rate of the engine that loads instead of the saved learning rate.
    """
    return seams.build(model, config, _OldRates)


@mutant_factory(
    FaultKind.STATE,
    Target("training.any_order", None, variant="saved_first", cause="reports as state has the wrong names"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_6,
)
def load_merges_the_optimizer_state(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Does not clear a parameter's optimizer state at load if the checkpoint has no state for the parameter.

    If a run returns to a checkpoint from before a parameter's first gradient, training continues with moments from
    after the checkpoint.
    """

    class Merging(ReferenceEngine):
        def load(self, path: Path) -> None:
            state = seams_engines.optimizer(self).state
            before = {leaf: dict(leaf_state) for leaf, leaf_state in state.items() if leaf_state}
            super().load(path)
            state = seams_engines.optimizer(self).state
            for leaf, leaf_state in before.items():
                if not state.get(leaf):
                    state[leaf] = leaf_state

    return seams.build(model, config, Merging)


@mutant(
    FaultKind.STATE,
    Target("state.several_saves", Part.OPTIMIZER, model="experts", variant="unfrozen", parameter="last*"),
    origin=Origin.BLIND_11,
)
class LoadsNoStateOfLateWeights(SpoiledLoad):
    """Drops at load the optimizer state of weights that were frozen when the engine was built."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        self.late = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        super().__init__(model, config)

    def spoil(self) -> None:
        for name in self.late:
            self.optimizer.state.pop(seams.leaves(self.base)[name], None)
