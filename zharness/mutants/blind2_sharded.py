"""The second blind set, over the reference engine: each factory gives an engine with one bug."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness import torch_private
from zharness.engines import reference
from zharness.engines.protocol import Engine, EngineConfig, Reduction
from zharness.engines.reference import ReferenceEngine
from zharness.engines.torch_engine import LOW_PRECISION_DTYPES
from zharness.reference.buckets import Bucket
from zharness.reference.gradients import GradientClipper, Gradients
from zharness.reference.layout import ModelParam
from zharness.reference.sharded_modules import ParamUnsharder
from zharness.reference.uneven_ranks.negotiation import RequestKind


def _made(model: nn.Module, config: EngineConfig, kind: type[ReferenceEngine] = ReferenceEngine) -> Any:
    return kind(reference.factory(model, config).engine)


def _gradients(engine: ReferenceEngine) -> Gradients:
    return engine.engine._gradients


def _reader(engine: ReferenceEngine) -> ParamUnsharder | None:
    return engine.engine._parameters._unsharder


def flat_bucket_fills_unused(model: nn.Module, config: EngineConfig) -> Engine:
    """Stage 2 reduces a bucket as one flat buffer: a parameter that no rank used gets zeros for a gradient.

    Protocol: "None-gradients are left out". With zeros, weight decay and momentum move weights that nothing used.
    """
    engine = _made(model, config)
    gradients = _gradients(engine)
    agree = gradients._agree_on_used

    def whole_bucket(candidates: Any, more: bool = False) -> tuple[set[str], bool]:
        used, further = agree(candidates, more)
        if used and config.stage == 2:
            used |= {original.name for original in candidates if original.parameter.requires_grad}
        return used, further

    gradients._agree_on_used = whole_bucket  # type: ignore[method-assign, assignment]
    return engine  # type: ignore[no-any-return]


class _SchedulesSkipped(ReferenceEngine):
    def step(self) -> None:
        before = self.engine.skipped_steps
        super().step()
        if self.engine.skipped_steps > before and self.engine.schedule is not None:
            self.engine.schedule.step()


def schedule_moves_on_skipped_step(model: nn.Module, config: EngineConfig) -> Engine:
    """The learning-rate schedule advances also at a boundary whose step an overflow skipped.

    ``schedule[t]`` is for step t; a run that begins with a few overflows loses that many steps of its warm-up.
    """
    return _made(model, config, _SchedulesSkipped)  # type: ignore[no-any-return]


class _MastersFromModel(ReferenceEngine):
    @torch.no_grad()
    def load(self, path: Path) -> None:
        super().load(path)
        parameters = self.engine._parameters
        for name, master in parameters.master_weights.items():
            master.copy_(master.to(parameters._model_params[name].dtypes.param_dtype))


def load_takes_masters_from_model(model: nn.Module, config: EngineConfig) -> Engine:
    """After ``load`` the fp32 masters are casts of the loaded low-precision weights, not what was saved of them.

    Protocol: ``load`` continues from the checkpoint; the fine bits of every master are lost.
    """
    return _made(model, config, _MastersFromModel)  # type: ignore[no-any-return]


class _KeepsCount(ReferenceEngine):
    def zero_grad(self) -> None:
        counted = self.engine._micro_batches
        super().zero_grad()
        self.engine._micro_batches = counted


def zero_grad_keeps_count(model: nn.Module, config: EngineConfig) -> Engine:
    """``zero_grad`` within an accumulation window drops the gradients, but their micro-batches stay counted.

    The next boundary comes too early, with a sum of too few micro-batches over the whole window's divisor.
    """
    return _made(model, config, _KeepsCount)  # type: ignore[no-any-return]


def second_order_undivided(model: nn.Module, config: EngineConfig) -> Engine:
    """Stage 3: the backward of a parameter's reduction gathers the cotangent without the mean's divisor.

    Whoever differentiates parameter gradients again (create_graph) gets the second-order part times the ranks.
    """
    engine = _made(model, config)
    if config.stage == 3:
        channel = _gradients(engine)._context.collectives

        def spread(original: ModelParam, shard: Tensor) -> Tensor:
            return channel._run_or_negotiate(RequestKind.ALL_GATHER_GRAD, original, shard)

        channel.all_gather_grad = spread  # type: ignore[method-assign, assignment]
    return engine  # type: ignore[no-any-return]


def no_grad_read_is_cached(model: nn.Module, config: EngineConfig) -> Engine:
    """Stage 3 caches a gathered weight for the rest of the module's forward, whether or not grad mode was on.

    A forward that looks at its weight under no_grad first (a norm, a statistic) trains that weight no more.
    """
    engine = _made(model, config)
    reader = _reader(engine)
    if reader is not None:
        read = reader.unshard_if_sharded

        def cached(value: Any) -> Any:
            found = read(value)
            plain = found is value or value in reader._editable_params or torch_private.is_transforming()
            if reader._running_forwards and not plain and not torch.is_grad_enabled():
                reader._running_forwards[-1].tensors_by_read.setdefault(
                    (reader._sharded_params[value].name, found.dtype, True), found
                )
            return found

        reader.unshard_if_sharded = cached  # type: ignore[method-assign]
    return engine  # type: ignore[no-any-return]


@torch.no_grad()
def low_precision_rounds_buffers(model: nn.Module, config: EngineConfig) -> Engine:
    """Under bf16 and fp16 the floating-point buffers pass through that dtype at construction, as in model.bfloat16().

    ``dtype`` is that of parameters, gradients and wire; frequencies, masks and means in buffers lose their bits.
    """
    engine = _made(model, config)
    if config.dtype in LOW_PRECISION_DTYPES:
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.copy_(buffer.to(LOW_PRECISION_DTYPES[config.dtype]))
    return engine  # type: ignore[no-any-return]


def evaluation_stays_gathered(model: nn.Module, config: EngineConfig) -> Engine:
    """Stage 3: what a forward under no_grad gathered ahead is freed by the next backward only, which never comes.

    ``gathered_bytes`` stays above 0 after an evaluation: whole weights are held between steps.
    """
    engine = _made(model, config)
    shelf = _gradients(engine)._context.prefetcher
    clear = shelf.clear_after_forward

    def clear_if_trained() -> None:
        if torch.is_grad_enabled():
            clear()

    shelf.clear_after_forward = clear_if_trained  # type: ignore[method-assign]
    return engine  # type: ignore[no-any-return]


class _OwnShardDecides(GradientClipper):
    def rescale(self, reduced: Any) -> bool:
        if super().unscale_and_clip(reduced):
            return True
        if not all(bool(grad.isfinite().all()) for grad in reduced.values()):
            return False
        for grad in reduced.values():
            grad.div_(self._loss_scale.value)
        return True


def overflow_is_decided_by_each_rank(model: nn.Module, config: EngineConfig) -> Engine:
    """Stage 3: whether a step overflowed is asked of this rank's own shards alone.

    Where a gradient overflows in elements of one rank, that one skips and the others step: loss scales and
    skipped steps ("identical on all ranks") part, and the weights are half of one step and half of the next.
    """
    engine = _made(model, config)
    if config.stage == 3:
        inner = engine.engine
        inner._rescaling = _OwnShardDecides(inner.settings, inner._scale, inner._gradients)
    return engine  # type: ignore[no-any-return]


def sum_forgets_accumulation(model: nn.Module, config: EngineConfig) -> Engine:
    """With reduction by sum nothing is divided at all, not even by the engine's own accumulation steps.

    Protocol: divided by the accumulation steps where the engine owns them, whatever the ranks' reduction is.
    """
    engine = _made(model, config)
    if config.reduction is Reduction.SUM:
        wire = _gradients(engine)._context
        object.__setattr__(wire, "divisor", 1)
        wire.collectives._divisor = 1
    return engine  # type: ignore[no-any-return]


class _BackwardInAutocast(ReferenceEngine):
    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        with self.engine.settings.precision.autocast_context(loss.device.type):
            super().backward(loss, retain_graph=retain_graph)


def backward_runs_in_autocast(model: nn.Module, config: EngineConfig) -> Engine:
    """``engine.backward`` runs inside the engine's torch.autocast, so products of float32 regions become low there.

    ``backward`` is to do what ``scale(loss).backward()`` does; a loss, or a block with autocast off, that multiplies
    matrices in float32 gets gradients in bf16.
    """
    return _made(model, config, _BackwardInAutocast)  # type: ignore[no-any-return]


class _StepBehindAutograd(ReferenceEngine):
    def step(self) -> None:
        originals = list(self.engine._model_params.values())
        parameters = tuple(original.parameter for original in originals)
        versions = tuple(parameter._version for parameter in parameters)
        super().step()
        torch._C._autograd._unsafe_set_version_counter(parameters, versions)
        for original in originals:
            self.engine._parameters._record_version(original)


def step_behind_autograds_back(model: nn.Module, config: EngineConfig) -> Engine:
    """A step writes weights as ``param.data`` does, without autograd noticing it.

    The backward of a graph that is older than the step, which torch refuses ("modified by an inplace operation"),
    goes through and mixes old activations with new weights in silence.
    """
    return _made(model, config, _StepBehindAutograd)  # type: ignore[no-any-return]


def tiny_parameters_are_not_averaged(model: nn.Module, config: EngineConfig) -> Engine:
    """Stages 1 and 2: a parameter of fewer elements than ranks is left out of the reduction.

    The owner of each element steps with its own micro-batch's gradient: scalars and the bias of a one-output head
    learn from one rank's data.
    """
    engine = _made(model, config)
    gradients = _gradients(engine)
    reduce, comm = gradients._reduce, engine.engine.comm
    factor = comm.world_size if config.reduction is Reduction.MEAN else 1

    def own(bucket: Bucket) -> list[Tensor]:
        for original in bucket.members:
            grad = original.parameter.grad
            if original.layout.numel < comm.world_size and grad is not None and grad.layout is torch.strided:
                start, stop = original.layout.shard_bounds(comm.rank)
                kept = torch.zeros_like(grad, memory_format=torch.contiguous_format)
                kept.view(-1)[start:stop] = grad.detach().reshape(-1)[start:stop] * factor
                original.parameter.grad = kept
        return reduce(bucket)

    if config.stage in (1, 2):
        gradients._reduce = own  # type: ignore[method-assign]
    return engine  # type: ignore[no-any-return]


def users_alone_are_averaged(model: nn.Module, config: EngineConfig) -> Engine:
    """Stages 0 and 1: the mean of a gradient is taken over the ranks that used the parameter, not over all.

    A branch that half of the ranks took learns twice as fast as in the mean of the ranks' losses.
    """
    engine = _made(model, config)
    gradients = _gradients(engine)
    reduced, comm = gradients.reduce_pending, engine.engine.comm

    def by_users() -> dict[str, Tensor]:
        parameters = [original.parameter for original in gradients._model_params.values()]
        users = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
        dist.all_reduce(users, group=comm.group)
        for parameter, count in zip(parameters, users.tolist(), strict=True):
            if parameter.grad is not None and count < comm.world_size:
                parameter.grad = parameter.grad * (comm.world_size / count)
        return reduced()

    if config.stage < 2 and config.reduction is Reduction.MEAN:
        gradients.reduce_pending = by_users  # type: ignore[method-assign]
    return engine  # type: ignore[no-any-return]


def transforms_read_detached(model: nn.Module, config: EngineConfig) -> Engine:
    """Stage 3: inside a torch.func transform a weight is read as a constant, so that no wrapper outlives it.

    ``torch.func.grad`` of the engine in its input is right, but a penalty on it does not reach the weights: their
    part of the gradient is missing without a word where another loss reaches them.
    """
    engine = _made(model, config)
    reader = _reader(engine)
    if reader is not None:
        read = reader.unshard_if_sharded

        def constant(value: Any) -> Any:
            found = read(value)
            return found.detach() if found is not value and torch_private.is_transforming() else found

        reader.unshard_if_sharded = constant  # type: ignore[method-assign]
    return engine  # type: ignore[no-any-return]


class _ReducedOnce(ReferenceEngine):
    done: set[str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.done.clear()
        return super().__call__(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.done.clear()
        super().backward(loss, retain_graph=retain_graph)

    def scale(self, loss: Tensor) -> Tensor:
        self.done.clear()
        return super().scale(loss)


def second_arrival_is_dropped(model: nn.Module, config: EngineConfig) -> Engine:
    """Stage 2 marks a parameter as reduced until the next forward or ``engine.backward`` and drops what comes later.

    A gradient may come in parts: of a module in a reentrant checkpoint that is used twice, or in the checkpoint and
    outside of it, or of two losses of one forward with a ``backward()`` each. All but the first part is lost.
    """
    engine = _made(model, config, _ReducedOnce)
    engine.done = set()
    gradients = _gradients(engine)
    absorb = gradients._reduce_bucket_if_used

    def once(bucket: Bucket, more: bool) -> bool:
        came = [original for original in bucket.members if original.parameter.grad is not None]
        for original in came:
            if original.name in engine.done:
                original.parameter.grad = None
        outcome = absorb(bucket, more)
        engine.done.update(original.name for original in came)
        return outcome

    if gradients._bucket_reducer is not None:
        gradients._reduce_bucket_if_used = once  # type: ignore[method-assign, assignment]
        gradients._bucket_reducer._reduce = once
    return engine  # type: ignore[no-any-return]
