"""Define how mutants change private parts of the reference engine that only stage 3 has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from zharness import torch_private
from zharness.engines.reference import ReferenceEngine
from zharness.mutants.seams import comm, replace_attribute
from zharness.reference.collectives import CollectiveKind, ShardCollectives
from zharness.reference.copies.replicas import ReplicatedShards
from zharness.reference.layout import ModelParam
from zharness.reference.prefetch import PrefetchedBucket, Prefetcher
from zharness.reference.saved_tensors import replace_saved_tensors
from zharness.reference.sharded_modules import ModuleForward, ParamUnsharder
from zharness.reference.unshard import UnshardedParam

__all__ = ["ModuleForward", "PrefetchedBucket"]

GradCollective: TypeAlias = Callable[[ModelParam, Tensor], Tensor]
Unshard: TypeAlias = Callable[[Any], Any]
SumOverCopies: TypeAlias = Callable[[Tensor], Tensor]
Fetch: TypeAlias = Callable[[ModelParam, Tensor], None]


# Sharded parameters


def _collectives(engine: ReferenceEngine) -> ShardCollectives:
    return engine.engine._gradients._context.collectives


def replace_reduce_grad(engine: ReferenceEngine, reduce: GradCollective) -> None:
    """Replace the reduce-scatter of gradients of sharded parameters, alone and in buckets."""
    replace_attribute(_collectives(engine), "reduce_grad", reduce)
    replace_attribute(_collectives(engine), "reduce_grads", lambda params, grads: list(map(reduce, params, grads)))


def wrap_reduce_grad(engine: ReferenceEngine, wrap: Callable[[GradCollective], GradCollective]) -> None:
    """Apply the decorator ``wrap`` to the function that reduce-scatters the gradient of one sharded parameter."""
    replace_attribute(_collectives(engine), "reduce_grad", wrap(_collectives(engine).reduce_grad))


def wrap_all_gather_grad(engine: ReferenceEngine, wrap: Callable[[GradCollective], GradCollective]) -> None:
    """Apply the decorator ``wrap`` to the reduce-scatter's adjoint, which all-gathers and divides a gradient."""
    replace_attribute(_collectives(engine), "all_gather_grad", wrap(_collectives(engine).all_gather_grad))


def all_gather_undivided(engine: ReferenceEngine, param: ModelParam, shard: Tensor) -> Tensor:
    """All-gather the shards of a gradient without dividing them. This is a collective."""
    return _collectives(engine)._run(CollectiveKind.ALL_GATHER_GRAD, param, shard)


def shard_divisor(engine: ReferenceEngine, param: ModelParam) -> float:
    """Return the divisor of the sum of a sharded parameter's gradient after its reduce-scatter."""
    return _collectives(engine)._remaining_divisor(param)


def wrap_sum_over_copies(engine: ReferenceEngine, wrap: Callable[[SumOverCopies], SumOverCopies]) -> None:
    """Apply the decorator ``wrap`` to the all-reduce that sums a gradient shard over the copies of the weights."""
    shards = comm(engine)
    assert isinstance(shards, ReplicatedShards)
    replace_attribute(shards._across_copies, "all_reduce", wrap(shards._across_copies.all_reduce))


def _unsharder(engine: ReferenceEngine) -> ParamUnsharder | None:
    return engine.engine._parameters._unsharder


def wrap_unshard(engine: ReferenceEngine, wrap: Callable[[Unshard], Unshard]) -> None:
    """Apply the decorator ``wrap`` to the function that unshards a parameter when a module reads it (only stage 3)."""
    unsharder = _unsharder(engine)
    if unsharder is not None:
        replace_attribute(unsharder, "unshard_if_sharded", wrap(unsharder.unshard_if_sharded))


def unshard_if_sharded(engine: ReferenceEngine, value: Any) -> Any:
    """Return the full tensor of a sharded parameter, and any other value unchanged. This is a collective at stage 3."""
    unsharder = _unsharder(engine)
    return value if unsharder is None else unsharder.unshard_if_sharded(value)


def is_open_for_edit(engine: ReferenceEngine, value: Any) -> bool:
    """Return whether ``value`` is a parameter that is unsharded for an edit."""
    unsharder = _unsharder(engine)
    return unsharder is not None and value in unsharder._editable_params


def sharded_name(engine: ReferenceEngine, parameter: nn.Parameter) -> str:
    """Return the name of a sharded parameter. Raises KeyError for any other tensor."""
    unsharder = _unsharder(engine)
    if unsharder is None:
        raise KeyError(parameter)
    return unsharder._sharded_params[parameter].name


def running_forward(engine: ReferenceEngine) -> ModuleForward | None:
    """Return the innermost running forward of a module, or None."""
    unsharder = _unsharder(engine)
    return unsharder._running_forwards[-1] if unsharder is not None and unsharder._running_forwards else None


def replace_grad_placeholders(engine: ReferenceEngine, table: dict[Any, Any]) -> None:
    """Replace the table of gradient placeholders of the running forward (stage 3)."""
    unsharder = _unsharder(engine)
    if unsharder is not None:
        unsharder._grad_placeholders = table


def skip_stale_check(unsharded: UnshardedParam) -> None:
    """Let backward unshard a parameter again even though a step has changed it since its forward."""
    replace_attribute(unsharded, "_raise_if_stale", lambda: None)


def leave_failed_forwards_open(engine: ReferenceEngine) -> None:
    """Run module forwards without the ``finally`` that ends them after an exception (stage 3)."""
    unsharder = _unsharder(engine)
    if unsharder is None:
        return

    def run_forward(module: nn.Module, forward: Callable[[], Any]) -> Any:
        running = ModuleForward(torch_private.next_sequence_number(), module)
        unsharder._running_forwards.append(running)
        output = forward()
        unsharder._running_forwards.pop()
        running.tensors_by_read.clear()
        if not unsharder._running_forwards:
            unsharder._grad_placeholders.clear()
            unsharder._params_by_bucket.clear()
            unsharder._context.prefetcher.clear_after_forward()
        if running.unsharded_params:
            replace_saved_tensors(output, running.unsharded_params, running.first_sequence_number)
        if unsharder._running_forwards:
            alive = [unsharded for unsharded in running.unsharded_params if unsharded.is_alive()]
            unsharder._running_forwards[-1].unsharded_params.extend(alive)
        return output

    replace_attribute(unsharder, "run_forward", run_forward)


def sharded_classes(engine: ReferenceEngine) -> Mapping[type[nn.Module], type[nn.Module]]:
    """Return, by module class, the subclass that replaces the class at stage 3."""
    swap = engine.engine._parameters._class_swap
    return {} if swap is None else swap._sharded_classes


# Prefetching


def _prefetcher(engine: ReferenceEngine) -> Prefetcher:
    return engine.engine._gradients._context.prefetcher


def wrap_fetch(engine: ReferenceEngine, wrap: Callable[[Fetch], Fetch]) -> None:
    """Apply the decorator ``wrap`` to the function that copies a parameter, prefetched or not, into a full tensor."""
    replace_attribute(_prefetcher(engine), "fetch_into", wrap(_prefetcher(engine).fetch_into))


def wrap_all_gather_bucket(
    engine: ReferenceEngine, wrap: Callable[[Callable[..., PrefetchedBucket]], Callable[..., PrefetchedBucket]]
) -> None:
    """Apply the decorator ``wrap`` to the function that all-gathers a bucket of parameters."""
    replace_attribute(_prefetcher(engine), "_all_gather_bucket", wrap(_prefetcher(engine)._all_gather_bucket))


def wrap_clear_prefetched(engine: ReferenceEngine, wrap: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
    """Apply the decorator ``wrap`` to the function that drops the prefetched bucket."""
    replace_attribute(_prefetcher(engine), "clear", wrap(_prefetcher(engine).clear))


def wrap_clear_after_forward(engine: ReferenceEngine, wrap: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
    """Apply the decorator ``wrap`` to the function that drops the prefetched bucket at the end of a model's forward."""
    replace_attribute(_prefetcher(engine), "clear_after_forward", wrap(_prefetcher(engine).clear_after_forward))


def prefetched_shards(engine: ReferenceEngine) -> Mapping[str, Tensor]:
    """Return the shards of the prefetched bucket, by parameter name; empty if there is none."""
    bucket = _prefetcher(engine)._current_bucket
    return {} if bucket is None else bucket.shards


def replace_contains(bucket: PrefetchedBucket, contains: Callable[[ModelParam, torch.dtype], bool]) -> None:
    """Replace the method that tests whether a prefetched bucket has a parameter's current values."""
    replace_attribute(bucket, "contains", contains)
