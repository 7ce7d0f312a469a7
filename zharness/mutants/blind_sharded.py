"""Broken on purpose, over the reference engine: each factory gives an engine with one bug, right where that sleeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness import torch_private as private
from zharness.engines import reference as sound
from zharness.engines.protocol import EngineConfig, Reduction
from zharness.engines.reference import ReferenceEngine
from zharness.reference.inspection.coalesced_collectives import broadcast_tensors
from zharness.reference.layout import ModelParam


def patch(target: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put ``make(what it was)`` in the place of one attribute of one object."""
    object.__setattr__(target, name, make(getattr(target, name)))


def remade(kind: type[ReferenceEngine], model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """The sound engine, with ``kind`` for its adapter."""
    return kind(sound.factory(model, config).engine)


def idle_parameter_gets_zeros(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """A parameter that had a gradient in an earlier step gets zeros in a step in which nobody used it.

    Wrong, since torch.optim leaves a parameter without gradient alone: here momentum, Adam's moments and weight decay
    go on moving a branch that is switched off, or a layer that was frozen meanwhile.
    """
    built, met = sound.factory(model, config), set[str]()

    def make(update: Callable[[Mapping[str, Tensor]], None]) -> Callable[[Mapping[str, Tensor]], None]:
        def updated(reduced: Mapping[str, Tensor]) -> None:
            met.update(reduced)
            leaves = built.engine._parameters.leaves
            update({name: reduced.get(name, torch.zeros_like(leaf)) for name, leaf in leaves.items() if name in met})

        return updated

    patch(built.engine, "_update", make)
    return built


def unfrozen_stays_put(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """The list of trained parameters is made once: one that was frozen then and is unfrozen later is never updated.

    Wrong, since its gradient is there (``full_grads`` shows it) and the user who unfreezes a backbone trains a head.
    """
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    built = sound.factory(model, config)

    def make(update: Callable[[Mapping[str, Tensor]], None]) -> Callable[[Mapping[str, Tensor]], None]:
        return lambda reduced: update({name: grad for name, grad in reduced.items() if name not in frozen})

    patch(built.engine, "_update", make)
    return built


def mean_over_users(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """The mean of a parameter's gradient is over the ranks that used it, not over all. Stages 0 to 2.

    Wrong, since a rank that did not use it contributes zero to the loss of the whole batch: an expert that one rank of
    N used learns N times too fast.
    """
    built = sound.factory(model, config)

    def make(reduce: Callable[[Any], list[Tensor]]) -> Callable[[Any], list[Tensor]]:
        def reduced(bucket: Any) -> list[Tensor]:
            device = bucket.members[0].parameter.device
            users = torch.tensor([float(o.parameter.grad is not None) for o in bucket.members], device=device)
            dist.all_reduce(users)
            shares = reduce(bucket)
            for share_of_it, count in zip(shares, users.tolist(), strict=True):
                if 0 < count < dist.get_world_size():
                    share_of_it.mul_(dist.get_world_size() / count)
            return shares

        return reduced

    if config.stage < 3 and config.reduction is Reduction.MEAN:
        patch(built.engine._gradients, "_reduce", make)
    return built


class _SumOfScalars(ModelParam):
    def outgoing(self, grad: Tensor) -> Tensor:
        return super().cast_for_reduce(grad if self.layout.shape else grad * self.layout.world_size)


def scalar_is_summed(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """The gradient of a parameter without dimensions (a temperature, a gate) is the sum over ranks, not the mean.

    Wrong wherever the reduction is the mean: it learns N times too fast, beside weights that are right.
    """
    built = sound.factory(model, config)
    if config.reduction is Reduction.MEAN:
        _reclass(built, _SumOfScalars)
    return built


class _InMemoryOrder(ModelParam):
    def outgoing(self, grad: Tensor) -> Tensor:
        stride = self.layout.stride
        order = sorted(range(len(stride)), key=lambda d: -stride[d])
        if order != list(range(len(stride))):
            grad = grad.permute(order).reshape(self.layout.shape)
        return super().cast_for_reduce(grad)


def strided_in_memory_order(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """From stage 1 on a gradient is flattened as it lies in memory, while shards are cut in the logical order.

    Wrong for a parameter that is not contiguous (channels_last, a transposed weight): its gradient is permuted.
    """
    built = sound.factory(model, config)
    if config.stage > 0:
        _reclass(built, _InMemoryOrder)
    return built


def _reclass(built: ReferenceEngine, kind: type[ModelParam]) -> None:
    for original in built.engine._model_params.values():
        object.__setattr__(original, "__class__", kind)


def norm_misses_the_tail(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """The last rank leaves its shard of parameters that the ranks do not divide out of the global norm.

    Wrong: ``grad_norm`` is too small, the clipped step too long, and an infinity there passes for finite under fp16.
    """
    built = sound.factory(model, config)
    gradients, last = built.engine._gradients, dist.get_rank() == dist.get_world_size() - 1

    def make(norm: Callable[[], float]) -> Callable[[], float]:
        def of_even_shards() -> float:
            whole, layouts = gradients._reduced_grads, {n: o.layout for n, o in built.engine._model_params.items()}
            gradients._reduced_grads = {
                n: g for n, g in whole.items() if not (last and layouts[n].numel % layouts[n].world_size)
            }
            try:
                return norm()
            finally:
                gradients._reduced_grads = whole

        return of_even_shards

    if config.stage > 0:
        patch(gradients, "norm", make)
    return built


class _SecondBlockAnew(ReferenceEngine):
    _blocks = 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self.engine.no_sync():
            if self._blocks:
                for original in self.engine._model_params.values():
                    original.parameter.grad = None
            self._blocks += 1
            yield

    def step(self) -> None:
        super().step()
        self._blocks *= bool(self.engine._micro_batches)

    def zero_grad(self) -> None:
        super().zero_grad()
        self._blocks = 0


def second_no_sync_begins_anew(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """A second ``no_sync`` block before the same step begins by clearing the local gradients. Stages 0 and 1.

    Wrong, since backwards inside accumulate: what the first block (and backwards between) left is lost.
    """
    return remade(_SecondBlockAnew, model, config)


class _CountsBackwards(ReferenceEngine):
    _scaled = 0

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self._scaled += 1
        super().backward(loss, retain_graph=retain_graph)

    def scale(self, loss: Tensor) -> Tensor:
        self._scaled += 1
        return super().scale(loss)

    def step(self) -> None:
        self.engine._micro_batches = max(self.engine._micro_batches, self._scaled - 1)
        super().step()
        self._scaled *= bool(self.engine._micro_batches)

    def zero_grad(self) -> None:
        super().zero_grad()
        self._scaled = 0

    def load(self, path: Path) -> None:
        super().load(path)
        self._scaled = 0


def boundary_counts_backwards(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Under accumulation by the engine, backwards count as micro-batches where there are more of them than steps.

    Wrong, since ``step`` counts: with two losses, and so two backwards, a micro-batch, the optimizer steps too early.
    """
    return remade(_CountsBackwards, model, config)


class _SkipAges(ReferenceEngine):
    def step(self) -> None:
        before = self.engine.skipped_steps
        super().step()
        if self.engine.skipped_steps > before:
            for state in self.engine.optimizer.state.values():
                if "step" in state:
                    state["step"] += 1


def skipped_step_ages_adam(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """A step that is skipped for its overflow still counts in Adam's ``step``, and so in its bias correction.

    Wrong, since a skipped step changes nothing: the state is off by one, and every later update by a little.
    """
    return remade(_SkipAges, model, config)


class _KeepsEvaluation(ReferenceEngine):
    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._evaluating, self._kept = False, list[Tensor]()

        def make(add: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
            def added(full: Tensor) -> Any:
                if self._evaluating:
                    self._kept.append(full.detach())
                return add(full)

            return added

        patch(engine._ledger, "add", make)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._evaluating = not torch.is_grad_enabled()
        if self._evaluating:
            self._kept.clear()
        try:
            return super().__call__(*args, **kwargs)
        finally:
            self._evaluating = False

    def step(self) -> None:
        super().step()
        self._kept.clear()


def evaluation_keeps_weights(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3 the weights that a forward under ``no_grad`` gathered stay until the next step or such forward.

    Wrong, since nothing reads them any more: after a validation every rank holds the whole model
    (``gathered_bytes`` is not 0), and the next training forward peaks that much higher.
    """
    return remade(_KeepsEvaluation, model, config)


class _LoadRounds(ReferenceEngine):
    def load(self, path: Path) -> None:
        super().load(path)
        for name, master in self.engine._parameters.master_weights.items():
            master.copy_(master.to(self.engine._model_params[name].dtypes.param_dtype))


def load_rounds_masters(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Under bf16 and fp16 ``load`` makes the masters from the model's weights, so they lose what those cannot hold.

    Wrong, since training does not continue: weights are equal at once, and differ some steps later.
    """
    return remade(_LoadRounds, model, config)


class _LoadLagsSchedule(ReferenceEngine):
    def load(self, path: Path) -> None:
        super().load(path)
        if self.engine.schedule is not None:
            self.engine.schedule.last_epoch = max(0, self.engine.schedule.last_epoch - 1)


def load_lags_the_schedule(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """``load`` restores the learning rates, but the schedule's own count is one behind.

    Wrong: the first step after a load is right, and from the second on every factor comes a step too late.
    """
    return remade(_LoadLagsSchedule, model, config)


class _LoadShares(ReferenceEngine):
    def load(self, path: Path) -> None:
        super().load(path)
        for buffer in self.module.buffers():
            broadcast_tensors([buffer], self.engine.comm)


def load_shares_buffers(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """After ``load`` every rank has rank 0's buffers, not those that it saved.

    Wrong, since running statistics are each rank's own: the other ranks do not continue where they were.
    """
    return remade(_LoadShares, model, config)


class _SaveDraws(ReferenceEngine):
    def save(self, path: Path) -> None:
        torch.randint(1 << 30, ())  # for a temporary name
        super().save(path)


def save_draws_random_numbers(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """``save`` takes a number from torch's generator.

    Wrong, since writing a checkpoint must not change the training: dropout masks after it are others than without it.
    """
    return remade(_SaveDraws, model, config)


def reentrant_end_drops_outer(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 2 the end of a reentrant checkpoint's backward is taken for the end of all, and clears what waits.

    Wrong: gradients that the outer backward made before it, of a bucket that is not full yet, are lost.
    """
    built = sound.factory(model, config)
    rounds = built.engine._gradients._bucket_reducer
    if rounds is None:
        return built
    end, task_of = rounds._end_of_backward, dict[nn.Parameter, int]()

    def arrive(arrived: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
        def noted(parameter: nn.Parameter) -> None:
            task_of[parameter] = private.current_graph_task_id()
            arrived(parameter)

        return noted

    def finish(ended: Callable[[int], None]) -> Callable[[int], None]:
        def cleared(task: int) -> None:
            if any(other < task for other in end._phases):
                for parameter in rounds._pending_params:
                    if task_of[parameter] != task:
                        parameter.grad = None
            ended(task)

        return cleared

    patch(end, "arrived", arrive)
    patch(end, "_end", finish)
    return built


def reduced_once_a_backward(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3 a parameter's gradient is reduced once in a backward; who asks again gets the first answer.

    Wrong where one backward reduces several: ``is_grads_batched`` (all rows become the first), torch.func over a
    module that is called twice, ``create_graph`` over two forwards (the second's contribution is the first's).
    """
    built = sound.factory(model, config)
    done: dict[str, Tensor] = {}
    task_of_them = -1

    def make(mean: Callable[[ModelParam, Tensor], Tensor]) -> Callable[[ModelParam, Tensor], Tensor]:
        def once(original: ModelParam, full: Tensor) -> Tensor:
            nonlocal task_of_them
            task = private.current_graph_task_id()
            if task == -1:
                return mean(original, full)
            if task != task_of_them:
                done.clear()
                task_of_them = task
            if original.name not in done:
                done[original.name] = mean(original, full)
            return done[original.name].clone()

        return once

    patch(built.engine._gradients._context.collectives, "mean", make)
    return built
