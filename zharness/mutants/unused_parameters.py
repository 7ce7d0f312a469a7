"""Mutants that are wrong for parameters that no rank, or only some ranks, used in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import (
    EngineConfig,
    Reduction,
    ddp,
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
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part


@mutant(
    FaultKind.PARAMETERS,
    Target("parameters.branch", None, model="changing", cause="'unused.bias', 'unused.weight']"),
    Target("backward.engine_backward", None, model="blocks", cause="unknown ['head.bias', 'head.weight']"),
    origin=Origin.GRAPHS,
)
class ZerosForTheUnused(EngineWrapper):
    """Gives every parameter that the loss did not use a gradient of zeros, so that the optimizer decays it."""

    def fill(self) -> None:
        """Set the gradient of every parameter without a gradient to zeros."""
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def full_grads(self) -> dict[str, Tensor]:
        self.fill()
        grads: dict[str, Tensor] = self.base.full_grads()
        return grads

    def step(self) -> None:
        self.fill()
        self.base.step()


@mutant(FaultKind.PARAMETERS, Target("parameters.stay_put", Part.OPTIMIZER, model="changing"), origin=Origin.GRAPHS)
class DecaysTheUnused(EngineWrapper):
    """Applies weight decay to parameters that have no gradient."""

    def step(self) -> None:
        used = self.base.full_grads()
        self.base.step()
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                if name not in used:
                    parameter.mul_(0.999)


@mutant(FaultKind.OPTIMIZER, Target("training.any_order", Part.OPTIMIZER, variant="sums"), origin=Origin.ORDERS)
class DecaysWhatHasNoGradient(EngineWrapper):
    """Applies weight decay to all parameters in a step in which no parameter has a gradient."""

    wraps = "ddp"

    def step(self) -> None:
        if not any(True for _ in self.parameters_with_grad()):
            with torch.no_grad():
                for parameter in self.module.parameters():
                    parameter.mul_(1 - 1e-3)
        self.base.step()


@mutant_factory(
    FaultKind.PARAMETERS,
    Target("parameters.stay_put", Part.OPTIMIZER, model="changing", parameter="branch.*"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_1,
)
def idle_parameter_gets_zeros(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Steps with a gradient of zeros for a parameter that has no gradient now, but had one in an earlier step.

    ``torch.optim`` does not change such a parameter; in the mutant, momentum, Adam's moments and weight decay still
    change a branch that is switched off, or a layer that was frozen meanwhile.
    """
    engine, once_used = seams.build(model, config), set[str]()

    def wrap(update: Callable[[Mapping[str, Tensor]], None]) -> Callable[[Mapping[str, Tensor]], None]:
        def update_all(reduced: Mapping[str, Tensor]) -> None:
            once_used.update(reduced)
            leaves = seams.leaves(engine)
            update(
                {name: reduced.get(name, torch.zeros_like(leaf)) for name, leaf in leaves.items() if name in once_used}
            )

        return update_all

    seams.wrap_update(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.PARAMETERS,
    Target("parameters.stay_put", Part.OPTIMIZER, model="changing", parameter="unused.*"),
    wraps="reference",
    stages=(2,),
    origin=Origin.BLIND_2,
)
def flat_bucket_fills_unused(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 2, reduces a bucket as one flat buffer, so that a parameter that no rank used gets a gradient of zeros.

    Because the gradient is zero instead of None, weight decay and momentum change weights that no rank used.
    """
    engine = seams.build(model, config)

    def wrap(agree: seams.AgreeOnUsed) -> seams.AgreeOnUsed:
        def agree_on_buckets(candidates: Sequence[seams.ModelParam], has_more: bool = False) -> tuple[set[str], bool]:
            used, more = agree(candidates, has_more)
            if used and config.stage == 2:
                used |= {param.name for param in candidates if param.parameter.requires_grad}
            return used, more

        return agree_on_buckets

    seams.wrap_agree_on_used(engine, wrap)
    return engine


class _Zeroes(TorchEngine):
    def zero_grad(self) -> None:
        seams_engines.reset_window(self)
        seams_engines.optimizer(self).zero_grad(set_to_none=False)
        seams_engines.drop_gradients(self)


@mutant_factory(
    FaultKind.PARAMETERS,
    Target("parameters.stay_put", Part.OPTIMIZER, model="changing", parameter="branch.*"),
    wraps="ddp",
    stages=(0,),
    origin=Origin.BLIND_3,
)
def zero_grad_leaves_zeros(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Fills DDP's gradients with zeros in ``zero_grad`` instead of setting them to None.

    A parameter that was used once and is not used later has a gradient of zeros, so that momentum, Adam's moments and
    weight decay still change it.
    """
    # Without this option DDP raises if a loss does not use all parameters.
    engine = ddp.factory(model, replace(config, options={**config.options, "find_unused_parameters": True}))
    engine.__class__ = _Zeroes
    return engine


@mutant_factory(
    FaultKind.PARAMETERS,
    Target("parameters.stay_put", Part.OPTIMIZER, model="changing", parameter="branch.*"),
    wraps="ddp",
    stages=(0,),
    origin=Origin.BLIND_5,
)
def zeros_for_none(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Fills DDP's gradients with zeros in ``zero_grad`` instead of dropping them.

    Momentum and weight decay still change a parameter that an earlier step used and this step does not, and
    ``full_grads`` reports a gradient for the parameter.
    """
    # Without this option DDP raises if a loss does not use all parameters.
    engine = ddp.factory(model, replace(config, options={**config.options, "find_unused_parameters": True}))
    engine.__class__ = _Zeroes
    return engine


@mutant_factory(
    FaultKind.PARAMETERS,
    Target("parameters.stay_put", Part.OPTIMIZER, model="changing", parameter="branch.*"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_6,
)
def once_used_gets_zeros(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Uses zeros, not None, as the gradient of a parameter that had a gradient in an earlier step but not in this.

    Momentum, Adam's moments and weight decay still change the parameter; plain PyTorch does not change it.
    """
    engine, once_used = seams.build(model, config), set[str]()

    def wrap(reduce_pending: seams.ReducePending) -> seams.ReducePending:
        def reduce_and_fill() -> dict[str, Tensor]:
            found, table = reduce_pending(), seams.reduced_grads(engine)
            for name in once_used - found.keys():
                table[name] = torch.zeros_like(seams.leaves(engine)[name])
            once_used.update(found)
            return {name: table[name] for name in seams.model_params(engine) if name in once_used}

        return reduce_and_fill

    seams.wrap_reduce_pending(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.OPTIMIZER,
    Target("parameters.stay_put", Part.OPTIMIZER, model="changing", parameter="branch.*"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_4,
)
def one_step_count_for_all(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Uses the engine's step count as Adam's ``step`` for every parameter, as a fused optimizer would.

    If a step did not use a parameter, the parameter's bias correction counts a step that did not update it.
    """
    engine = seams.build(model, config)

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        steps = seams.step_counts(engine)[0]
        for state in optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].fill_(steps)

    seams_engines.optimizer(engine).register_step_pre_hook(count)
    return engine


@mutant_factory(
    FaultKind.PARAMETERS,
    Target("parameters.used_on_some_ranks", None, model="changing", variant="others", cause="missing ['branch.bias'"),
    wraps="reference",
    stages=(0, 1, 2),
    origin=Origin.BLIND_4,
)
def first_rank_decides(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stages 0 to 2, lets rank 0 alone decide which parameters were used in a step.

    Parameters that only other ranks used (an expert, a branch that depends on data) lose their gradients and are not
    updated.
    """
    engine = seams.build(model, config)

    def agree(candidates: Sequence[seams.ModelParam], has_more: bool = False) -> tuple[set[str], bool]:
        flags = torch.tensor([*(o.parameter.grad is not None for o in candidates), has_more], dtype=torch.uint8)
        if candidates:
            seams.comm(engine).broadcast(flags, 0)
        *used, more = flags.tolist()
        return {param.name for param, flag in zip(candidates, used, strict=True) if flag}, bool(more)

    if config.stage < 3:
        seams.wrap_agree_on_used(engine, lambda _: agree)
    return engine


@mutant_factory(
    FaultKind.SCALE,
    Target("parameters.used_on_some_ranks", model="changing", parameter="branch.*"),
    wraps="reference",
    stages=(0, 1, 2),
    origin=Origin.BLIND_1,
)
def mean_over_users(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stages 0 to 2, averages a parameter's gradient over the ranks that used the parameter, not over all ranks.

    A rank that did not use the parameter should count as zero in the mean, so an expert that only one rank used learns
    too fast by a factor of the world size.
    """
    engine = seams.build(model, config)

    def wrap(reduce: seams.ReduceBucket) -> seams.ReduceBucket:
        def reduce_by_users(bucket: seams.Bucket) -> list[Tensor]:
            device = bucket.members[0].parameter.device
            users = torch.tensor([float(o.parameter.grad is not None) for o in bucket.members], device=device)
            dist.all_reduce(users)
            shares = reduce(bucket)
            for share, count in zip(shares, users.tolist(), strict=True):
                if 0 < count < dist.get_world_size():
                    share.mul_(dist.get_world_size() / count)
            return shares

        return reduce_by_users

    if config.stage < 3 and config.reduction is Reduction.MEAN:
        seams.wrap_reduce_bucket(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.SCALE,
    Target("parameters.used_on_some_ranks", model="changing", parameter="branch.*"),
    wraps="reference",
    stages=(0, 1),
    origin=Origin.BLIND_2,
)
def users_alone_are_averaged(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stages 0 and 1, averages a gradient over the ranks that used the parameter, not over all ranks.

    A branch that half of the ranks used learns twice as fast as it should.
    """
    engine = seams.build(model, config)
    comm = seams.comm(engine)

    def wrap(reduce_pending: seams.ReducePending) -> seams.ReducePending:
        def reduce_by_users() -> dict[str, Tensor]:
            parameters = [param.parameter for param in seams.model_params(engine).values()]
            users = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
            dist.all_reduce(users, group=comm.group)
            for parameter, count in zip(parameters, users.tolist(), strict=True):
                if parameter.grad is not None and count < comm.world_size:
                    parameter.grad = parameter.grad * (comm.world_size / count)
            return reduce_pending()

        return reduce_by_users

    if config.stage < 2 and config.reduction is Reduction.MEAN:
        seams.wrap_reduce_pending(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.SCALE,
    Target("parameters.used_on_some_ranks", model="changing", parameter="branch.*"),
    wraps="reference",
    stages=(0, 1, 2),
    origin=Origin.BLIND_6,
)
def mean_over_users_only(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Averages a gradient over the ranks that used the parameter, not over all ranks.

    A rank that did not use the parameter should count as zero in the mean, so the gradient of an expert that one rank
    used is too large by a factor of the world size.
    """
    engine, world_size = seams.build(model, config), dist.get_world_size()
    if config.stage == 3 or config.reduction is Reduction.SUM:
        return engine
    users: dict[str, int] = {}

    def agree(candidates: Sequence[seams.ModelParam], has_more: bool = False) -> tuple[set[str], bool]:
        flags = torch.tensor([*(o.parameter.grad is not None for o in candidates), has_more], dtype=torch.uint8)
        seams.comm(engine).all_reduce(flags, op=dist.ReduceOp.SUM)
        *used, more = flags.tolist()
        users.update({param.name: flag for param, flag in zip(candidates, used, strict=True)})
        return {param.name for param, flag in zip(candidates, used, strict=True) if flag}, bool(more)

    def wrap(reduce: seams.ReduceBucket) -> seams.ReduceBucket:
        def reduce_by_users(bucket: seams.Bucket) -> list[Tensor]:
            return [
                share.mul_(world_size / users[param.name]) if 0 < users[param.name] < world_size else share
                for share, param in zip(reduce(bucket), bucket.members, strict=True)
            ]

        return reduce_by_users

    seams.wrap_agree_on_used(engine, lambda _: agree)
    seams.wrap_reduce_bucket(engine, wrap)
    return engine
