"""Steps with other constants, other moments, other groups or another schedule than was asked for."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mutants.around import Around
from zharness.mutants.mutant import Kind, Mutant, Target
from zharness.parity import Part


class OverDDP(Around):
    """An engine whose optimizer is torch's own over whole parameters."""

    over = "ddp"


class OverFSDP2(Around):
    """An engine whose optimizer is torch's own over sharded parameters."""

    over = "fsdp2"
    stages = (3,)


class WrongEpsilon(OverDDP):
    """AdamW with an epsilon of 1e-7 where 1e-8 was asked for."""

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            if "eps" in group:
                group["eps"] = 1e-7
        self.right.step()


class ForgetsWeightDecay(OverFSDP2):
    """Decays nothing."""

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.0
        self.right.step()


class CouplesWeightDecay(OverDDP):
    """Adds AdamW's decay to the gradient, as Adam does."""

    def step(self) -> None:
        decays = [group["weight_decay"] for group in self.optimizer.param_groups]
        for group, decay in zip(self.optimizer.param_groups, decays, strict=True):
            for parameter in group["params"]:
                if parameter.grad is not None and decay:
                    parameter.grad = parameter.grad + decay * parameter.detach()
            group["weight_decay"] = 0.0
        self.right.step()
        for group, decay in zip(self.optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay


class SwapsTheBetas(OverDDP):
    """Takes the second decay rate of AdamW for the first."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for group in self.optimizer.param_groups:
            if "betas" in group:
                group["betas"] = group["betas"][::-1]


class StepsWithNesterov(OverDDP):
    """Nesterov's momentum where the plain one was asked for."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for group in self.optimizer.param_groups:
            if group.get("momentum"):
                group["nesterov"] = True


class RoundsItsMoments(OverDDP):
    """Keeps its moments with the precision of bf16."""

    def step(self) -> None:
        self.right.step()
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if key != "step" and isinstance(value, Tensor):
                    value.copy_(value.bfloat16())


class IgnoresGroups(OverFSDP2):
    """All parameters are in one group."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, optimizer=replace(config.optimizer, groups=())))


class IgnoresTheSchedule(OverFSDP2):
    """Its learning rate stays what it was at first."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        first = config.optimizer.schedule[:1]
        super().__init__(model, replace(config, optimizer=replace(config.optimizer, schedule=first)))


class SchedulesEveryBackward(Around):
    """Moves its learning-rate schedule on at every backward, not at every step."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss, retain_graph=retain_graph)
        self.right.engine.schedule.step()


class CorrectsAsInTheFirstStep(OverDDP):
    """Its AdamW corrects for bias as if every step were the first."""

    def step(self) -> None:
        self.right.step()
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"].zero_()


class StartsWithMomentum(OverDDP):
    """Starts from momentum that nobody gave it."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for parameter in model.parameters():
            self.optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, 0.25)}


class StepsLate(OverDDP):
    """Applies the gradient of the step before: the first step moves nothing."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.kept: list[Tensor | None] = [None] * len(list(model.parameters()))

    def step(self) -> None:
        fresh = [None if p.grad is None else p.grad.clone() for p in self.module.parameters()]
        for parameter, late in zip(self.module.parameters(), self.kept, strict=True):
            parameter.grad = late
        self.kept = fresh
        self.right.step()


class StepsLateAtEveryStage(Around):
    """Applies the gradient of the step before, of which the optimizer sees this rank's elements."""

    stages = (2,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.kept: dict[str, Tensor] = {}

    def step(self) -> None:
        for name, grad in self.right.engine._gradients.reduced().items():
            late = self.kept.get(name, torch.zeros_like(grad))
            self.kept[name] = grad.clone()
            grad.copy_(late)
        self.right.step()


class IgnoresDampening(OverDDP):
    """SGD that takes every gradient whole into its momentum."""

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["dampening"] = 0.0
        self.right.step()


class ForgetsTheMaximum(OverDDP):
    """AMSGrad that divides by the newest second moment, as Adam does."""

    def step(self) -> None:
        for state in self.optimizer.state.values():
            if "max_exp_avg_sq" in state:
                state["max_exp_avg_sq"].zero_()
        self.right.step()


class SlipsOnOneRank(OverDDP):
    """Rank 1 ends its step a bit away from the others."""

    def step(self) -> None:
        self.right.step()
        if dist.get_rank() == 1:
            with torch.no_grad():
                parameter = next(iter(self.module.parameters()))
                parameter.view(-1)[0] = torch.nextafter(parameter.view(-1)[0], torch.tensor(1e9))


class SlipsOnOneRankOfTheReference(Around):
    """Rank 1 ends its step a bit away from the others, over the reference engine."""

    def step(self) -> None:
        self.right.step()
        if dist.get_rank() == 1:
            with torch.no_grad():
                next(iter(self.module.parameters())).view(-1)[:1].mul_(1 + 2**-22)


class RanksReportOtherNames(Around):
    """Rank 1 reports state of a parameter that no other rank knows."""

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        state: dict[str, dict[str, Tensor]] = self.right.full_optimizer_state()
        return {**state, "ghost": {"exp_avg": torch.ones(3)}} if dist.get_rank() == 1 else state


def trajectory(variant: str, parameter: str = "*", part: Part = Part.OPTIMIZER, model: str = "mlp") -> Target:
    """The law that replays each step."""
    return Target("training.trajectory", part, model, variant, parameter=parameter)


def course(variant: str, parameter: str) -> Target:
    """The law that replays the other optimizers."""
    return Target("training.optimizers", Part.OPTIMIZER, variant=variant, parameter=parameter)


OPTIMIZER = Kind.OPTIMIZER

MUTANTS = (
    Mutant(WrongEpsilon, OPTIMIZER, (trajectory("adamw"),)),
    Mutant(ForgetsWeightDecay, OPTIMIZER, (trajectory("sgd"),)),
    Mutant(CouplesWeightDecay, OPTIMIZER, (trajectory("adamw", "first.weight/exp_avg"),)),
    Mutant(SwapsTheBetas, OPTIMIZER, (trajectory("adamw", "*/exp_avg"),)),
    Mutant(StepsWithNesterov, OPTIMIZER, (trajectory("sgd"),)),
    Mutant(RoundsItsMoments, OPTIMIZER, (trajectory("adamw", "*/exp_avg*"),)),
    Mutant(IgnoresGroups, OPTIMIZER, (trajectory("adamw", "*bias*"),)),
    Mutant(IgnoresTheSchedule, OPTIMIZER, (trajectory("sgd"),)),
    Mutant(SchedulesEveryBackward, OPTIMIZER, (Target("training.accumulation", Part.OPTIMIZER, variant="engine"),)),
    Mutant(CorrectsAsInTheFirstStep, OPTIMIZER, (trajectory("adamw"),)),
    Mutant(StartsWithMomentum, OPTIMIZER, (trajectory("sgd"),)),
    Mutant(
        StepsLate,
        OPTIMIZER,
        (trajectory("adamw", model="transformer"), Target("training.free_running", Part.OPTIMIZER)),
    ),
    Mutant(IgnoresDampening, OPTIMIZER, (course("nesterov", "*bias/momentum_buffer"),)),
    Mutant(ForgetsTheMaximum, OPTIMIZER, (course("adam", "*/max_exp_avg_sq"),)),
    Mutant(StepsLateAtEveryStage, OPTIMIZER, (Target("training.sgd_step", Part.OPTIMIZER),)),
    Mutant(SlipsOnOneRank, Kind.RANKS, (trajectory("sgd", "first.weight", Part.GATHER),)),
    Mutant(
        SlipsOnOneRankOfTheReference,
        Kind.RANKS,
        (Target("training.ranks_agree", Part.GATHER, parameter="first.weight"),),
    ),
    Mutant(
        RanksReportOtherNames,
        Kind.RANKS,
        (Target("training.trajectory", None, variant="sgd", words="unknown ['ghost/exp_avg']"),),
    ),
)
