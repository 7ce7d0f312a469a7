"""Mutants whose optimizer uses other constants, moments or parameter groups than configured."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import (
    EngineConfig,
)
from zharness.mutants import seams
from zharness.mutants.mutant import (
    FaultKind,
    Origin,
    Target,
    mutant,
)
from zharness.mutants.wrapper import CountsMicroBatches, DDPWrapper, EngineWrapper, FSDP2Wrapper
from zharness.parity import Part


@mutant(FaultKind.OPTIMIZER, Target("training.trajectory", Part.OPTIMIZER, variant="adamw"), origin=Origin.OPTIMIZERS)
class WrongEpsilon(DDPWrapper):
    """Uses an epsilon of 1e-7 for AdamW instead of the configured 1e-8."""

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            if "eps" in group:
                group["eps"] = 1e-7
        self.base.step()


@mutant(FaultKind.OPTIMIZER, Target("training.trajectory", Part.OPTIMIZER, variant="sgd"), origin=Origin.OPTIMIZERS)
class ForgetsWeightDecay(FSDP2Wrapper):
    """Sets the weight decay of every group to zero."""

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.0
        self.base.step()


@mutant(
    FaultKind.OPTIMIZER,
    Target("training.trajectory", Part.OPTIMIZER, variant="adamw", parameter="first.weight/exp_avg"),
    origin=Origin.OPTIMIZERS,
)
class CouplesWeightDecay(DDPWrapper):
    """Adds AdamW's weight decay to the gradient, as Adam does."""

    def step(self) -> None:
        decays = [group["weight_decay"] for group in self.optimizer.param_groups]
        for group, decay in zip(self.optimizer.param_groups, decays, strict=True):
            for parameter in group["params"]:
                if parameter.grad is not None and decay:
                    parameter.grad = parameter.grad + decay * parameter.detach()
            group["weight_decay"] = 0.0
        self.base.step()
        for group, decay in zip(self.optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay


@mutant(
    FaultKind.OPTIMIZER,
    Target("training.trajectory", Part.OPTIMIZER, variant="adamw", parameter="*/exp_avg"),
    origin=Origin.OPTIMIZERS,
)
class SwapsTheBetas(DDPWrapper):
    """Swaps the two betas (decay rates of the moments) of AdamW."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for group in self.optimizer.param_groups:
            if "betas" in group:
                group["betas"] = group["betas"][::-1]


@mutant(
    FaultKind.OPTIMIZER,
    Target("training.optimizers", Part.OPTIMIZER, variant="adam", parameter="first.*"),
    origin=Origin.CIRCUMSTANCES,
)
class OneSetOfBetas(EngineWrapper):
    """Uses the first group's betas for every group, as a fused optimizer with one set of constants would."""

    wraps = "ddp"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        first, *others = self.optimizer.param_groups
        for group in others:
            group.update({key: first[key] for key in ("betas", "eps") if key in first})


@mutant(FaultKind.OPTIMIZER, Target("training.trajectory", Part.OPTIMIZER, variant="sgd"), origin=Origin.OPTIMIZERS)
class StepsWithNesterov(DDPWrapper):
    """Uses Nesterov momentum if plain momentum is configured."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for group in self.optimizer.param_groups:
            if group.get("momentum"):
                group["nesterov"] = True


@mutant(
    FaultKind.OPTIMIZER,
    Target("training.trajectory", Part.OPTIMIZER, variant="adamw", parameter="*/exp_avg*"),
    origin=Origin.OPTIMIZERS,
)
class RoundsItsMoments(DDPWrapper):
    """Rounds the optimizer's moments to bf16 after every step."""

    def step(self) -> None:
        self.base.step()
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if key != "step" and isinstance(value, Tensor):
                    value.copy_(value.bfloat16())


@mutant(
    FaultKind.OPTIMIZER,
    Target("training.trajectory", Part.OPTIMIZER, variant="adamw", parameter="*bias*"),
    origin=Origin.OPTIMIZERS,
)
class IgnoresGroups(FSDP2Wrapper):
    """Puts all parameters into one parameter group."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, optimizer=replace(config.optimizer, groups=())))


@mutant(FaultKind.OPTIMIZER, Target("training.trajectory", Part.OPTIMIZER, variant="adamw"), origin=Origin.OPTIMIZERS)
class CorrectsAsInTheFirstStep(DDPWrapper):
    """Applies AdamW's bias correction of the first step in every step."""

    def step(self) -> None:
        self.base.step()
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"].zero_()


@mutant(FaultKind.OPTIMIZER, Target("training.trajectory", Part.OPTIMIZER, variant="sgd"), origin=Origin.OPTIMIZERS)
class StartsWithMomentum(DDPWrapper):
    """Starts with momentum buffers that are filled with 0.25 instead of no momentum buffers."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for parameter in model.parameters():
            self.optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, 0.25)}


@mutant(
    FaultKind.OPTIMIZER,
    Target("training.trajectory", Part.OPTIMIZER, model="transformer", variant="adamw"),
    Target("training.free_running", Part.OPTIMIZER),
    origin=Origin.OPTIMIZERS,
)
class StepsLate(DDPWrapper):
    """Applies the gradients of the previous step, so that the first step changes nothing."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.kept: list[Tensor | None] = [None] * len(list(model.parameters()))

    def step(self) -> None:
        fresh = [None if p.grad is None else p.grad.clone() for p in self.module.parameters()]
        for parameter, late in zip(self.module.parameters(), self.kept, strict=True):
            parameter.grad = late
        self.kept = fresh
        self.base.step()


@mutant(FaultKind.OPTIMIZER, Target("training.sgd_step", Part.OPTIMIZER), origin=Origin.OPTIMIZERS)
class StepsLateAtEveryStage(EngineWrapper):
    """Applies the gradients of the previous step to this rank's shards of the parameters."""

    stages = (2,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.kept: dict[str, Tensor] = {}

    def step(self) -> None:
        for name, grad in seams.reduce_pending(self.base).items():
            late = self.kept.get(name, torch.zeros_like(grad))
            self.kept[name] = grad.clone()
            grad.copy_(late)
        self.base.step()


@mutant(
    FaultKind.OPTIMIZER,
    Target("training.optimizers", Part.OPTIMIZER, variant="nesterov", parameter="*bias/momentum_buffer"),
    origin=Origin.OPTIMIZERS,
)
class IgnoresDampening(DDPWrapper):
    """Adds every gradient to SGD's momentum without dampening."""

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["dampening"] = 0.0
        self.base.step()


@mutant(
    FaultKind.OPTIMIZER,
    Target("training.optimizers", Part.OPTIMIZER, variant="adam", parameter="*/max_exp_avg_sq"),
    origin=Origin.OPTIMIZERS,
)
class ForgetsTheMaximum(DDPWrapper):
    """Divides AMSGrad's step by the newest second moment instead of the largest one, as Adam does."""

    def step(self) -> None:
        for state in self.optimizer.state.values():
            if "max_exp_avg_sq" in state:
                state["max_exp_avg_sq"].zero_()
        self.base.step()


@mutant(
    FaultKind.RANKS,
    Target("training.trajectory", Part.GATHER, variant="sgd", parameter="first.weight"),
    origin=Origin.OPTIMIZERS,
)
class SlipsOnOneRank(DDPWrapper):
    """Changes the first weight element by one ULP on rank 1 after each step, over DDP."""

    def step(self) -> None:
        self.base.step()
        if dist.get_rank() == 1:
            with torch.no_grad():
                parameter = next(iter(self.module.parameters()))
                parameter.view(-1)[0] = torch.nextafter(parameter.view(-1)[0], torch.tensor(1e9))


@mutant(
    FaultKind.RANKS, Target("training.ranks_agree", Part.GATHER, parameter="first.weight"), origin=Origin.OPTIMIZERS
)
class SlipsOnOneRankOfTheReference(EngineWrapper):
    """Multiplies the first weight element by 1 + 2**-22 on rank 1 after each step, over the reference engine."""

    def step(self) -> None:
        self.base.step()
        if dist.get_rank() == 1:
            with torch.no_grad():
                next(iter(self.module.parameters())).view(-1)[:1].mul_(1 + 2**-22)


@mutant(
    FaultKind.OPTIMIZER,
    Target("parameters.stay_put", Part.OPTIMIZER, model="changing", variant="2_by_engine", parameter="*/step"),
    origin=Origin.ORDERS,
)
class CountsStepsOfIdleWeights(CountsMicroBatches):
    """At the end of an engine's window, counts an Adam step also for weights that none of its micro-batches used."""

    def step(self) -> None:
        self.count_step()
        used = set(self.base.full_grads())
        self.base.step()
        for name, leaf in seams.leaves(self.base).items():
            state = self.optimizer.state.get(leaf, {})
            if self.window > 1 and self.micro == 0 and name not in used and "step" in state:
                state["step"] += 1
