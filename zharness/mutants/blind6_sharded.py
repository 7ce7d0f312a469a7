"""Sixteen bugs over the reference engine, each in a few lines on the engine's own objects."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness import torch_private as private
from zharness.engines import reference as adapter
from zharness.engines.protocol import EngineConfig, Reduction
from zharness.engines.reference import ReferenceEngine


def inside(engine: ReferenceEngine) -> Any:
    """The engine's parts, which no type tells."""
    return engine.engine


def before_reduction(engine: ReferenceEngine, change: Callable[[Tensor], Tensor]) -> None:
    """Let ``change`` have every whole local gradient just before it is reduced (stages 0 to 2)."""
    gradients = inside(engine)._gradients
    reduce = gradients._reduce

    def changed(bucket: Any) -> Any:
        for original in bucket.members:
            parameter = original.parameter
            if parameter.grad is not None and engine.engine.settings.stage < 3:
                parameter.grad = change(parameter.grad)
        return reduce(bucket)

    gradients._reduce = changed


def mean_over_users_only(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """The mean of a gradient is taken over the ranks that used the parameter, not over all ranks.

    The mean over ranks counts a rank without use as zero: a rarely used expert gets N times too large a gradient.
    """
    engine = adapter.factory(model, config)
    gradients, world = inside(engine)._gradients, dist.get_world_size()
    if config.stage == 3 or config.reduction is Reduction.SUM:
        return engine
    users: dict[str, int] = {}
    reduce = gradients._reduce

    def agree(candidates: Any, more: bool = False) -> tuple[set[str], bool]:
        flags = torch.tensor([*(o.parameter.grad is not None for o in candidates), more], dtype=torch.uint8)
        gradients._wire.comm.all_reduce(flags, op=dist.ReduceOp.SUM)
        *used, further = flags.tolist()
        users.update({o.name: flag for o, flag in zip(candidates, used, strict=True)})
        return {o.name for o, flag in zip(candidates, used, strict=True) if flag}, bool(further)

    def reduced(bucket: Any) -> list[Tensor]:
        shares: list[Tensor] = reduce(bucket)
        return [
            share.mul_(world / users[o.name]) if 0 < users[o.name] < world else share
            for share, o in zip(shares, bucket.members, strict=True)
        ]

    gradients._agree, gradients._reduce = agree, reduced
    return engine


def sparse_rows_overwrite(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """A sparse gradient is made dense by writing its rows, not by adding them.

    A token that occurs twice in a micro-batch loses all but its last contribution.
    """
    engine = adapter.factory(model, config)

    def dense(gradient: Tensor) -> Tensor:
        if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
            return gradient
        made = torch.zeros(gradient.shape, dtype=gradient.dtype)
        for row, value in zip(gradient._indices()[0].tolist(), gradient._values(), strict=True):
            made[row] = value
        return made

    before_reduction(engine, dense)
    return engine


def gradients_flat_as_they_lie(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Gradients are flattened in the order in which they lie in memory, weights in that of their indices.

    A transposed or channels_last parameter is so updated with other elements' gradients.
    """
    engine = adapter.factory(model, config)

    def flat(gradient: Tensor) -> Tensor:
        if gradient.layout is not torch.strided or gradient.is_contiguous():
            return gradient
        dense = 1
        for stride, size in sorted(zip(gradient.stride(), gradient.shape, strict=True)):
            if size != 1 and stride != dense:
                return gradient
            dense *= size
        return gradient.as_strided((gradient.numel(),), (1,)).view(gradient.shape)

    before_reduction(engine, flat)
    return engine


def one_gradient_per_forward(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Stage 2 marks a parameter as reduced until the next forward, and drops what arrives of it after that.

    So a weight shared by two segments under reentrant checkpointing, or a second backward of a retained graph, loses
    contributions that plain PyTorch adds.
    """
    engine = adapter.factory(model, config)
    if config.stage != 2:
        return engine
    core = inside(engine)
    add, forget, done = core._gradients._add, core._gradients.forget, set[str]()

    def once(original: Any, share: Tensor) -> None:
        if original.name not in done:
            done.add(original.name)
            add(original, share)

    def forgotten() -> None:
        done.clear()
        forget()

    class Marking(ReferenceEngine):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if private.current_graph_task_id() == -1:
                done.clear()
            return super().__call__(*args, **kwargs)

    core._gradients._add, core._gradients.forget = once, forgotten
    engine.__class__ = Marking
    return engine


def tied_counted_twice_in_the_norm(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """The global norm runs over every name of a parameter, so a tied one's gradient is counted once per name.

    ``grad_norm`` is too large, and clipping shrinks the gradients too much.
    """
    engine = adapter.factory(model, config)
    gradients = inside(engine)._gradients
    names = {original.parameter: name for name, original in gradients._originals.items()}
    times = dict.fromkeys(names.values(), 0)
    for _, parameter in model.named_parameters(remove_duplicate=False):
        times[names[parameter]] += 1
    norm = gradients.norm

    def counted() -> float:
        once = gradients._reduced
        gradients._reduced = {n: g * math.sqrt(times[n]) if times[n] > 1 else g for n, g in once.items()}
        try:
            return float(norm())
        finally:
            gradients._reduced = once

    gradients.norm = counted
    return engine


def growth_window_survives_an_overflow(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """An overflow does not begin the count of good steps anew, so the dynamic loss scale grows too early.

    The scale is to grow after a window of steps without overflow, as GradScaler's does. Needs fp16's dynamic scale.
    """
    engine = adapter.factory(model, config)
    scale = inside(engine)._scale
    update = scale.update

    def updated(overflow: bool) -> None:
        good = scale._good
        update(overflow)
        if overflow:
            scale._good = good

    scale.update = updated
    return engine


def weights_are_constants_in_transforms(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3 a weight that is read while a torch.func transform runs is a constant for the outer backward.

    A model that takes torch.func.grad of a part of itself (forces from an energy) trains without those gradients.
    """
    engine = adapter.factory(model, config)
    reader = inside(engine)._parameters._reader
    if reader is not None:
        read = reader.read

        def detached(value: Any) -> Any:
            full = read(value)
            return full.detach() if full is not value and private.is_transforming() else full

        reader.read = detached
    return engine


def old_graph_reads_new_weights(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3 a backward gathers the weights as they are now, also where a step has changed them since the forward.

    Plain PyTorch refuses such a backward ("modified by an inplace operation"); this one gives wrong gradients in
    silence.
    """
    engine = adapter.factory(model, config)
    reader = inside(engine)._parameters._reader
    if reader is not None:
        read = reader.read

        def unchecked(value: Any) -> Any:
            full = read(value)
            for copy in reader._running[-1].copies if reader._running else ():
                copy._refuse_if_stale = lambda: None
            return full

        reader.read = unchecked
    return engine


def second_derivative_undivided(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3 the backward of the gradient's reduce-scatter gathers, and forgets to divide as the mean did.

    A penalty on the weights' gradients (autograd.grad with create_graph) gets N times its gradient.
    """
    engine = adapter.factory(model, config)
    channel = inside(engine)._gradients._wire.channel
    spread = channel.spread
    channel.spread = lambda original, shard: spread(original, shard) * channel._divisor
    return engine


def micro_batches_add_up_low(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Reduced gradients of several micro-batches are added in the model's bf16 or fp16, not in the masters' fp32.

    What the engine accumulates loses its low bits with each micro-batch: the reason why masters and their gradients
    are fp32.
    """
    engine = adapter.factory(model, config)
    gradients = inside(engine)._gradients

    @torch.no_grad()
    def add(original: Any, share: Tensor) -> None:
        before, held = gradients._reduced.get(original.name), original.formats.held
        total = share if before is None else (before.to(held) + share.to(held)).to(share.dtype)
        gradients._reduced[original.name] = total

    gradients._add = add
    return engine


def load_merges_the_optimizer_state(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """``load`` keeps the running optimizer's state of every parameter for which the checkpoint has none.

    Going back to a checkpoint from before a parameter's first gradient goes on with moments of the abandoned run.
    """

    class Merging(ReferenceEngine):
        def load(self, path: Path) -> None:
            state = self.engine.optimizer.state
            before = {leaf: dict(held) for leaf, held in state.items() if held}
            super().load(path)
            state = self.engine.optimizer.state
            for leaf, held in before.items():
                if not state.get(leaf):
                    state[leaf] = held

    engine = adapter.factory(model, config)
    engine.__class__ = Merging
    return engine


def load_gives_rank_0s_buffers(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """``load`` gives every rank the buffers that rank 0 saved.

    Running statistics are each rank's own and were saved so; after a load training goes on with others.
    """
    engine = adapter.factory(model, config)
    state, rank = inside(engine)._state, dist.get_rank()
    blank = state.blank

    def of_rank_0(*args: Any, **kwargs: Any) -> Mapping[str, Tensor]:
        found = blank(*args, **kwargs)
        mine = f"buffers/{rank}/"
        return {f"buffers/0/{key.removeprefix(mine)}" if key.startswith(mine) else key: v for key, v in found.items()}

    state.blank = of_rank_0
    return engine


def edits_miss_the_master(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """An edit inside ``gathered`` reaches the model's low-precision weight and not the optimizer's fp32 master.

    The next step casts the master back over it: the edit is undone. Needs bf16 or fp16.
    """
    engine = adapter.factory(model, config)
    parameters = inside(engine)._parameters
    replace = parameters._replace

    def edited(original: Any, value: Tensor, source: int) -> None:
        master = parameters.masters.get(original.name)
        before = None if master is None else master.clone()
        replace(original, value, source)
        if master is not None and before is not None:
            with torch.no_grad():
                master.copy_(before)

    parameters._replace = edited
    return engine


def forwards_are_counted(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Where the engine owns accumulation, forwards with gradients are counted as micro-batches, not calls of ``step``.

    A loss of two forwards (a pair of views, a discriminator on real and fake) ends the window after half of it.
    """
    seen = SimpleNamespace(forwards=0)

    class Counting(ReferenceEngine):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            seen.forwards += torch.is_grad_enabled() and private.current_graph_task_id() == -1
            return super().__call__(*args, **kwargs)

        def step(self) -> None:
            inside(self)._micro_batches += max(0, seen.forwards - 1)
            seen.forwards = 0
            super().step()

        def zero_grad(self) -> None:
            seen.forwards = 0
            super().zero_grad()

    engine = adapter.factory(model, config)
    engine.__class__ = Counting
    return engine


def close_leaves_hooks(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """``close`` forgets the gradients of stage 2 but leaves the hooks that reduce them on the parameters.

    Whoever trains the module plainly afterwards finds no ``grad``: the closed engine takes them. Needs all ranks.
    """
    engine = adapter.factory(model, config)
    gradients = inside(engine)._gradients
    gradients.close = gradients.forget
    return engine


def once_used_gets_zeros(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """A parameter that had a gradient in an earlier step gets zeros, not None, in a step in which no rank uses it.

    Momentum, Adam's moments and weight decay go on moving it, where plain PyTorch leaves it alone.
    """
    engine = adapter.factory(model, config)
    core = inside(engine)
    reduced, seen = core._gradients.reduced, set[str]()

    def filled() -> dict[str, Tensor]:
        found = reduced()
        for name in seen - found.keys():
            core._gradients._reduced[name] = torch.zeros_like(core._parameters.leaves[name])
        seen.update(found)
        return {name: core._gradients._reduced[name] for name in core._originals if name in seen}

    core._gradients.reduced = filled
    return engine
