"""Bugs over the reference engine: each factory makes a sound one and breaks one thing inside the objects it made."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness import torch_private as private
from zharness.engines.protocol import Engine, EngineConfig
from zharness.engines.reference import ReferenceEngine, factory
from zharness.reference.buckets import Bucket
from zharness.reference.gradients import _take_local_grad
from zharness.reference.layout import ModelParam, ShardPlacement
from zharness.reference.prefetch import PrefetchedBucket, Prefetcher
from zharness.reference.saved_tensors import replace_saved_tensors
from zharness.reference.sharded_modules import ModuleForward


class _KeepsCount(ReferenceEngine):
    def zero_grad(self) -> None:
        counted = self.engine._micro_batches
        super().zero_grad()
        self.engine._micro_batches = counted


def window_survives_zero_grad(model: nn.Module, config: EngineConfig) -> Engine:
    """``zero_grad`` drops the gradients of an open window but goes on counting its micro-batches.

    The next step is then made of too few micro-batches, and divided by as many as ever.
    """
    made = factory(model, config)
    made.__class__ = _KeepsCount
    return made


class _KeptAfterEvaluation(Prefetcher):
    kept = False

    def clear(self) -> None:
        if not self.kept:
            super().clear()

    def clear_after_forward(self) -> None:
        self.kept = not torch.is_grad_enabled()
        super().clear_after_forward()


class _Unversioned(PrefetchedBucket):
    def has(self, original: ModelParam, dtype: torch.dtype) -> bool:
        return dtype == self.dtype and original.name in self.shards


def evaluation_leaves_prefetch(model: nn.Module, config: EngineConfig) -> Engine:
    """Stage 3: what a forward without gradients prefetched stays until a training forward ends, whatever changes.

    An evaluation between backward and step makes the next forward read the weights of before that step; and after any
    evaluation gathered bytes are held between steps.
    """
    made = factory(model, config)
    if config.stage == 3:
        shelf = made.engine._parameters._unsharder._context.prefetcher  # type: ignore[union-attr]
        shelf.__class__ = _KeptAfterEvaluation
        gather = shelf._all_gather_bucket

        def gather_unversioned(bucket: Bucket, dtype: torch.dtype) -> PrefetchedBucket:
            lot = gather(bucket, dtype)
            object.__setattr__(lot, "__class__", _Unversioned)
            return lot

        shelf._all_gather_bucket = gather_unversioned  # type: ignore[method-assign]
    return made


class _LoadsModelFirst(ReferenceEngine):
    @torch.no_grad()
    def load(self, path: Path) -> None:
        super().load(path)
        parameters = self.engine._parameters
        for name, master in parameters.master_weights.items():
            master.copy_(parameters._make_leaf(self.engine._model_params[name]))


def masters_from_model_at_load(model: nn.Module, config: EngineConfig) -> Engine:
    """``load`` makes the fp32 masters anew from the low-precision weights instead of reading the saved ones.

    A resumed training goes on from rounded masters, elsewhere than the one that was not interrupted.
    """
    made = factory(model, config)
    made.__class__ = _LoadsModelFirst
    return made


def empty_shard_ends_update(model: nn.Module, config: EngineConfig) -> Engine:
    """Stages 1 to 3: the loop that hands a rank its shards of gradients breaks at one without elements, not skips it.

    A rank that owns nothing of a small parameter updates its part of every later parameter with zeros.
    """
    made = factory(model, config)
    leaves = made.engine._parameters.leaves

    def stop_at_empty(*_: Any) -> None:
        stopped = False
        for leaf in leaves.values():
            stopped = stopped or (leaf.grad is not None and not leaf.grad.numel())
            if stopped and leaf.grad is not None:
                leaf.grad = torch.zeros_like(leaf.grad)

    if config.stage:
        made.engine.optimizer.register_step_pre_hook(stop_at_empty)
    return made


def double_backward_undivided(model: nn.Module, config: EngineConfig) -> Engine:
    """Stage 3: the backward of the reduction gathers gradients and forgets the divisor of the mean that it undoes.

    What a loss of the parameters' own gradients (``create_graph=True``) adds to the gradients is N times too large.
    """
    made = factory(model, config)
    channel = made.engine._parameters._collectives
    spread = channel.all_gather_grad

    def undivided(original: ModelParam, shard: Tensor) -> Tensor:
        return spread(original, shard) * channel._remaining_divisor(original)

    channel.all_gather_grad = undivided  # type: ignore[method-assign, assignment]
    return made


def stale_graph_accepted(model: nn.Module, config: EngineConfig) -> Engine:
    """Stage 3: a backward through a graph that is older than the last step gathers the new weights in silence.

    Plain PyTorch refuses it ("modified by an inplace operation"); here activations of old weights meet new weights, and
    the gradients are of no function at all.
    """
    made = factory(model, config)
    reader = made.engine._parameters._unsharder
    if reader is not None:
        read = reader.unshard_if_sharded

        def read_unguarded(value: Any) -> Any:
            full = read(value)
            for visit in reader._running_forwards[-1:]:
                for copy in visit.unsharded_params:
                    copy._raise_if_stale = lambda: None  # type: ignore[method-assign]
            return full

        reader.unshard_if_sharded = read_unguarded  # type: ignore[method-assign]
    return made


def replaced_buffer_not_saved(model: nn.Module, config: EngineConfig) -> Engine:
    """The engine lists the buffers once, at construction, and saves and loads those tensors.

    A module that assigns a buffer anew in its forward (``self.average = 0.9 * self.average + ...``) is saved with the
    values of before training, and not restored.
    """
    made = factory(model, config)
    listed = made.engine._training_state._persistent_buffers()
    made.engine._training_state._persistent_buffers = lambda: listed  # type: ignore[method-assign]
    return made


def unfrozen_unreduced(model: nn.Module, config: EngineConfig) -> Engine:
    """Stages 0 to 2: a parameter that was frozen at construction and is trained later is never reduced.

    Each rank updates what it owns with its own gradient in place of the mean; at stage 0 the ranks drift apart.
    """
    made = factory(model, config)
    gradients, steps = made.engine._gradients, made.engine.settings.accumulation_steps
    registered = {name for name, o in made.engine._model_params.items() if o.parameter.requires_grad}
    reduce = gradients._reduce

    def local(original: ModelParam) -> Tensor:
        grad = _take_local_grad(original).to(original.dtypes.master_dtype) / steps
        if gradients._placements.optimizer_state is ShardPlacement.REPLICATED:
            return grad
        start, stop = original.layout.shard_bounds(gradients._context.comm.rank)
        return grad.reshape(-1)[start:stop].clone()

    def reduce_registered(bucket: Bucket) -> list[Tensor]:
        known = bucket.select(registered)
        shares = dict(zip((o.name for o in known.members), reduce(known) if known.members else (), strict=True))
        return [shares[o.name] if o.name in shares else local(o) for o in bucket.members]

    if config.stage < 3:
        gradients._reduce = reduce_registered  # type: ignore[method-assign]
    return made


def failed_forward_stays_open(model: nn.Module, config: EngineConfig) -> Engine:
    """Stage 3: the end of a module's forward is not in a ``finally``, so one that raises is never taken as over.

    After an exception that the caller caught, gathered weights are held for good, and weights that are read outside a
    forward stay what they were then, whatever steps follow.
    """
    made = factory(model, config)
    reader = made.engine._parameters._unsharder
    if reader is not None:

        def visit(module: nn.Module, forward: Callable[[], Any]) -> Any:
            mine = ModuleForward(private.next_sequence_number(), module)
            reader._running_forwards.append(mine)
            output = forward()
            reader._running_forwards.pop()
            mine.tensors_by_read.clear()
            if not reader._running_forwards:
                reader._grad_placeholders.clear()
                reader._params_by_bucket.clear()
                reader._context.prefetcher.clear_after_forward()
            if mine.unsharded_params:
                replace_saved_tensors(output, mine.unsharded_params, mine.first_sequence_number)
            if reader._running_forwards:
                reader._running_forwards[-1].unsharded_params.extend(
                    copy for copy in mine.unsharded_params if copy.is_alive()
                )
            return output

        reader.run_forward = visit  # type: ignore[method-assign]
    return made


def tied_twice_in_norm(model: nn.Module, config: EngineConfig) -> Engine:
    """A tied weight counts in the global norm once for each of its names.

    ``grad_norm`` is too large, and clipping shrinks the gradients too far.
    """
    made = factory(model, config)
    gradients = made.engine._gradients
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    more = {n: uses[id(o.parameter)] - 1 for n, o in made.engine._model_params.items() if uses[id(o.parameter)] > 1}
    norm = gradients.norm

    def norm_by_name() -> float:
        again = torch.zeros((), dtype=torch.float64)
        for name in more.keys() & gradients._reduced_grads.keys():
            again += more[name] * torch.linalg.vector_norm(gradients._reduced_grads[name], dtype=torch.float64).square()
        if gradients._placements.optimizer_state is ShardPlacement.SHARDED:
            dist.all_reduce(again)
        return math.sqrt(norm() ** 2 + again.item())

    if more:
        gradients.norm = norm_by_name  # type: ignore[method-assign]
    return made


class _UnscalesInPlace(ReferenceEngine):
    def full_grads(self) -> dict[str, Tensor]:
        found = super().full_grads()
        for grad in self.engine._gradients._reduced_grads.values():
            grad.div_(self.engine.loss_scale)
        return found


def looking_unscales(model: nn.Module, config: EngineConfig) -> Engine:
    """``full_grads`` divides the engine's own gradients by the loss scale, and the step does so again.

    Who looks at the gradients before a step trains with gradients that are smaller by the loss scale.
    """
    made = factory(model, config)
    made.__class__ = _UnscalesInPlace
    return made


def second_backward_dropped(model: nn.Module, config: EngineConfig) -> Engine:
    """Stage 2: a parameter is reduced once in a micro-batch, and what comes for it after that is dropped.

    Of two losses that are backwarded one after the other before ``step``, or of the uses of a module inside and outside
    of a reentrant checkpoint, only the first counts.
    """
    made = factory(model, config)
    gradients, done = made.engine._gradients, dict[str, int]()
    add, forget = gradients._add, gradients.clear

    def add_once(original: ModelParam, share: Tensor) -> None:
        if done.get(original.name) != made.engine._micro_batches:
            done[original.name] = made.engine._micro_batches
            add(original, share)

    def forget_all() -> None:
        done.clear()
        forget()

    if config.stage == 2:
        gradients._add, gradients.clear = add_once, forget_all  # type: ignore[method-assign, assignment]
    return made


def autograd_grad_counts(model: nn.Module, config: EngineConfig) -> Engine:
    """Stages 0 and 1: gradients are caught by hooks on the parameters as tensors, which every use of autograd runs.

    What ``torch.autograd.grad`` computes for the parameters, which leaves ``.grad`` alone in plain PyTorch, is trained
    on as well.
    """
    made = factory(model, config)
    gradients, caught = made.engine._gradients, dict[str, list[Tensor | None]]()
    reduced, forget = gradients.reduce_pending, gradients.clear

    def catch(name: str, grad: Tensor | None) -> None:
        plain = grad is not None and not private.is_legacy_batched(grad) and not private.is_transforming()
        caught.setdefault(name, []).append(grad.detach() if grad is not None and plain else None)

    def arrived(name: str, _parameter: nn.Parameter) -> None:
        if caught.get(name):
            caught[name].pop()  # it is in .grad as well

    def reduced_with_caught() -> dict[str, Tensor]:
        for name, grads in caught.items():
            parameter = made.engine._model_params[name].parameter
            for grad in (each for each in grads if each is not None):
                parameter.grad = grad.clone() if parameter.grad is None else parameter.grad + grad
        caught.clear()
        return reduced()

    def forget_all() -> None:
        caught.clear()
        forget()

    if config.stage < 2:
        gradients.reduce_pending, gradients.clear = reduced_with_caught, forget_all  # type: ignore[method-assign]
        for name, parameter in ((n, o.parameter) for n, o in made.engine._model_params.items()):
            if parameter.requires_grad:
                hooks = gradients._hooks  # removed at close
                hooks.append(parameter.register_hook(partial(catch, name)))  # type: ignore[no-untyped-call]
                hooks.append(parameter.register_post_accumulate_grad_hook(partial(arrived, name)))  # type: ignore
    return made


def substituted_weights_ignored(model: nn.Module, config: EngineConfig) -> Engine:
    """Stage 3: a module's read of a weight is looked up by module and name, among the weights of construction.

    ``torch.func.functional_call`` with other values for the parameters computes with the engine's own, and what is
    differentiated by those values gets no gradient.
    """
    made = factory(model, config)
    reader, exchange = made.engine._parameters._unsharder, made.engine._parameters._class_swap
    if reader is not None and exchange is not None:
        owned = {(id(m), name): p for m in model.modules() for name, p in m._parameters.items() if p is not None}

        def reading(base: type[nn.Module]) -> Callable[[nn.Module, str], Any]:
            def read_attribute(self: nn.Module, name: str) -> Any:
                held = owned.get((id(self), name))
                return reader.unshard_if_sharded(base.__getattr__(self, name) if held is None else held)

            return read_attribute

        for base, made_class in exchange._sharded_classes.items():
            made_class.__getattr__ = reading(base)  # type: ignore[method-assign]
    return made
