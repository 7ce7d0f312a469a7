"""Define how mutants change private parts of the reference engine, except those that only stage 3 has.

If the reference engine is rewritten, this file has to change, but no mutant has to. A function that is called
``wrap_x(engine, wrap)`` replaces the engine's ``x`` by ``wrap(x)``. ``seams_stage3`` holds the private parts that only
stage 3 has, and ``seams_engines`` holds the private parts of torch's engines and DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import Tensor, nn

from zharness.comm import Comm
from zharness.engines import EngineConfig
from zharness.engines.reference import ReferenceEngine
from zharness.engines.reference import factory as build_reference
from zharness.reference.buckets import Bucket, copy_shards_to_full
from zharness.reference.deepspeed_json.settings import Settings
from zharness.reference.gradients import Gradients, _take_local_grad
from zharness.reference.inspection.coalesced_collectives import broadcast_tensors
from zharness.reference.layout import ModelParam, ShardPlacement
from zharness.reference.mixed_precision.loss_scale import LossScale
from zharness.reference.parameters import Parameters
from zharness.reference.torch_func.torch_fallback import EndOfBackward

__all__ = ["Bucket", "ModelParam", "broadcast_tensors", "copy_shards_to_full"]

ReduceBucket: TypeAlias = Callable[[Bucket], list[Tensor]]
ReducePending: TypeAlias = Callable[[], dict[str, Tensor]]
AgreeOnUsed: TypeAlias = Callable[..., tuple[set[str], bool]]
AddGrad: TypeAlias = Callable[[ModelParam, Tensor], None]
UnscaleAndClip: TypeAlias = Callable[[Mapping[str, Tensor]], bool]
Update: TypeAlias = Callable[[Mapping[str, Tensor]], None]
BroadcastEdit: TypeAlias = Callable[[ModelParam, Tensor, int], None]


def build(model: nn.Module, config: EngineConfig, adapter: type[ReferenceEngine] = ReferenceEngine) -> ReferenceEngine:
    """Build the correct reference engine behind an ``adapter``, which may be a mutant's own class."""
    return adapter(build_reference(model, config).engine)


def replace_attribute(owner: object, name: str, value: object) -> None:
    """Replace an attribute of an object, even of a frozen dataclass. Raises AttributeError if the object lacks it."""
    getattr(owner, name)  # raises after a rename; without this line, the mutant would silently be a correct engine
    object.__setattr__(owner, name, value)


# The engine


def model_params(engine: ReferenceEngine) -> Mapping[str, ModelParam]:
    """Return the parameters of the engine's model, by name."""
    return engine.engine.model_params


def comm(engine: ReferenceEngine) -> Comm:
    """Return the communicator of the engine's collectives."""
    return engine.engine.comm


def settings(engine: ReferenceEngine) -> Settings:
    """Return the settings that the engine was built with."""
    return engine.engine.settings


def step_counts(engine: ReferenceEngine) -> tuple[int, int]:
    """Return how many steps were made, and how many were skipped for an overflow."""
    return engine.engine.steps, engine.engine.skipped_steps


def set_step_counts(engine: ReferenceEngine, steps: int, skipped_steps: int) -> None:
    """Set how many steps were made, and how many were skipped for an overflow."""
    engine.engine.steps, engine.engine.skipped_steps = steps, skipped_steps


def micro_batches(engine: ReferenceEngine) -> int:
    """Return how many micro-batches of the accumulation window were counted."""
    return engine.engine._micro_batches


def set_micro_batches(engine: ReferenceEngine, count: int) -> None:
    """Set how many micro-batches of the accumulation window were counted."""
    engine.engine._micro_batches = count


def wrap_update(engine: ReferenceEngine, wrap: Callable[[Update], Update]) -> None:
    """Apply the decorator ``wrap`` to the function that updates the leaves from the reduced gradients by name."""
    replace_attribute(engine.engine, "_update", wrap(engine.engine._update))


def replace_resume(engine: ReferenceEngine, resume: Callable[..., None]) -> None:
    """Replace the function that loads the contents and tensors that were read from a checkpoint."""
    replace_attribute(engine.engine, "_resume_from", resume)


def load_tensors(
    engine: ReferenceEngine, contents: Any, local_tensors: Mapping[str, Tensor], module_only: bool
) -> None:
    """Copy loaded tensors and state into the model and the optimizer."""
    engine.engine._training_state.load_tensors(contents, local_tensors, module_only)


def wrap_unscale_and_clip(engine: ReferenceEngine, wrap: Callable[[UnscaleAndClip], UnscaleAndClip]) -> None:
    """Apply the decorator ``wrap`` to ``unscale_and_clip``, which returns False for an overflow on any rank."""
    clipper = engine.engine._clipper
    replace_attribute(clipper, "unscale_and_clip", wrap(clipper.unscale_and_clip))


def set_grad_norm(engine: ReferenceEngine, norm: float | None) -> None:
    """Set the gradient norm that the engine reports."""
    engine.engine._clipper.norm = norm


def skips_on_overflow(engine: ReferenceEngine) -> bool:
    """Return whether an overflow makes the engine skip the step; otherwise the step raises an error."""
    return engine.engine.settings.precision.skips_on_overflow


def loss_scaler(engine: ReferenceEngine) -> LossScale:
    """Return the object that stores and updates the loss scale."""
    return engine.engine.loss_scaler


def count_unsharded(engine: ReferenceEngine, tensor: Tensor) -> None:
    """Count ``tensor`` among the unsharded parameters that are alive."""
    engine.engine._memory_tracker.add(tensor)


def wrap_count_unsharded(
    engine: ReferenceEngine, wrap: Callable[[Callable[[Tensor], Any]], Callable[[Tensor], Any]]
) -> None:
    """Apply the decorator ``wrap`` to the function that counts the bytes of every newly unsharded parameter."""
    tracker = engine.engine._memory_tracker
    replace_attribute(tracker, "add", wrap(tracker.add))


def persistent_buffers(engine: ReferenceEngine) -> Mapping[str, Tensor]:
    """Return the buffers that a checkpoint contains, by name."""
    return engine.engine._training_state._persistent_buffers()


def replace_persistent_buffers(engine: ReferenceEngine, buffers: Callable[[], Any]) -> None:
    """Replace the function that lists the buffers of a checkpoint."""
    replace_attribute(engine.engine._training_state, "_persistent_buffers", buffers)


def wrap_make_empty_tensors(
    engine: ReferenceEngine, wrap: Callable[[Callable[..., Mapping[str, Tensor]]], Callable[..., Any]]
) -> None:
    """Apply the decorator ``wrap`` to the function that allocates, by checkpoint key, the tensors that a load fills."""
    state = engine.engine._training_state
    replace_attribute(state, "make_empty_tensors", wrap(state.make_empty_tensors))


# Gradients and their reduction


def _gradients(engine: ReferenceEngine) -> Gradients:
    return engine.engine._gradients


def reduce_pending(engine: ReferenceEngine) -> dict[str, Tensor]:
    """Reduce all pending gradients, and return every reduced gradient. This is a collective."""
    return _gradients(engine).reduce_pending()


def reduced_grads(engine: ReferenceEngine) -> MutableMapping[str, Tensor]:
    """Return the engine's own table of reduced gradients, by name."""
    return _gradients(engine)._reduced_grads


@contextmanager
def with_reduced_grads(engine: ReferenceEngine, grads: dict[str, Tensor]) -> Iterator[None]:
    """Use ``grads`` as the engine's table of reduced gradients within the block."""
    before, _gradients(engine)._reduced_grads = _gradients(engine)._reduced_grads, grads
    try:
        yield
    finally:
        _gradients(engine)._reduced_grads = before


def wrap_reduce_pending(engine: ReferenceEngine, wrap: Callable[[ReducePending], ReducePending]) -> None:
    """Apply the decorator ``wrap`` to the reduction of pending gradients, which ``step`` and ``full_grads`` call."""
    replace_attribute(_gradients(engine), "reduce_pending", wrap(_gradients(engine).reduce_pending))


def wrap_reduce_bucket(engine: ReferenceEngine, wrap: Callable[[ReduceBucket], ReduceBucket]) -> None:
    """Apply the decorator ``wrap`` to the function that reduces a bucket and sets its parameters' ``grad`` to None."""
    replace_attribute(_gradients(engine), "_reduce", wrap(_gradients(engine)._reduce))


def change_local_grads(engine: ReferenceEngine, change: Callable[[Tensor], Tensor]) -> None:
    """Apply ``change`` to every full local gradient just before it is reduced (stages 0 to 2)."""

    def wrap(reduce: ReduceBucket) -> ReduceBucket:
        def reduce_changed(bucket: Bucket) -> list[Tensor]:
            for param in bucket.members:
                parameter = param.parameter
                if parameter.grad is not None and engine.engine.settings.stage < 3:
                    parameter.grad = change(parameter.grad)
            return reduce(bucket)

        return reduce_changed

    wrap_reduce_bucket(engine, wrap)


def wrap_reduce_bucket_if_used(
    engine: ReferenceEngine, wrap: Callable[[Callable[[Bucket, bool], bool]], Callable[[Bucket, bool], bool]]
) -> None:
    """At stage 2, apply the decorator ``wrap`` to the reduction of a bucket during backward; else do nothing."""
    gradients = _gradients(engine)
    reducer = gradients._bucket_reducer
    if reducer is not None:
        reduce = wrap(gradients._reduce_bucket_if_used)
        replace_attribute(gradients, "_reduce_bucket_if_used", reduce)
        replace_attribute(reducer, "_reduce", reduce)


def wrap_agree_on_used(engine: ReferenceEngine, wrap: Callable[[AgreeOnUsed], AgreeOnUsed]) -> None:
    """Apply the decorator ``wrap`` to the collective that finds out which parameters have a gradient on any rank."""
    replace_attribute(_gradients(engine), "_agree_on_used", wrap(_gradients(engine)._agree_on_used))


def wrap_add_reduced(engine: ReferenceEngine, wrap: Callable[[AddGrad], AddGrad]) -> None:
    """Apply the decorator ``wrap`` to the function that adds a reduced gradient to the table of reduced gradients."""
    replace_attribute(_gradients(engine), "_add", wrap(_gradients(engine)._add))


def wrap_clear_grads(engine: ReferenceEngine, wrap: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
    """Apply the decorator ``wrap`` to the function that drops all gradients."""
    replace_attribute(_gradients(engine), "clear", wrap(_gradients(engine).clear))


def keep_hooks_at_close(engine: ReferenceEngine) -> None:
    """Make ``close`` keep the hooks on the parameters; it still drops the gradients."""
    replace_attribute(_gradients(engine), "close", _gradients(engine).clear)


def grad_hooks(engine: ReferenceEngine) -> list[Any]:
    """Return the handles of the hooks on parameters, which ``close`` removes."""
    return _gradients(engine)._hooks


def wrap_reduced_tensors(
    engine: ReferenceEngine, wrap: Callable[[Callable[[], list[Tensor]]], Callable[[], list[Tensor]]]
) -> None:
    """Apply the decorator ``wrap`` to the function that lists the reduced gradients whose bytes are counted."""
    replace_attribute(_gradients(engine), "reduced_tensors", wrap(_gradients(engine).reduced_tensors))


def grad_norm(engine: ReferenceEngine) -> float:
    """Return the global norm of the reduced gradients, still scaled. This is a collective."""
    return _gradients(engine).norm()


def grads_are_finite(engine: ReferenceEngine) -> bool:
    """Return whether the reduced gradients are finite on every rank. This is a collective."""
    return _gradients(engine).is_finite()


def wrap_grad_norm(engine: ReferenceEngine, wrap: Callable[[Callable[[], float]], Callable[[], float]]) -> None:
    """Apply the decorator ``wrap`` to the function that computes the global gradient norm."""
    replace_attribute(_gradients(engine), "norm", wrap(_gradients(engine).norm))


def wrap_grad_divisor(
    engine: ReferenceEngine, wrap: Callable[[Callable[[ModelParam], float]], Callable[[ModelParam], float]]
) -> None:
    """Apply the decorator ``wrap`` to the function that returns the divisor of a gradient summed over ranks."""
    replace_attribute(_gradients(engine), "_remaining_divisor", wrap(_gradients(engine)._remaining_divisor))


def wrap_cast_for_reduce(
    engine: ReferenceEngine,
    wrap: Callable[[ModelParam, Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]],
) -> None:
    """Replace the function that casts each parameter's local gradient for reduction by ``wrap(param, function)``."""
    for param in model_params(engine).values():
        replace_attribute(param, "cast_for_reduce", wrap(param, param.cast_for_reduce))


def take_local_grad(param: ModelParam) -> Tensor:
    """Return a parameter's local gradient, or zeros if it has none, and set its ``grad`` to None."""
    return _take_local_grad(param)


def divisor(engine: ReferenceEngine) -> int:
    """Return the divisor of a sum over ranks and micro-batches."""
    return _gradients(engine)._context.divisor


def set_divisor(engine: ReferenceEngine, value: int) -> None:
    """Set the divisor of a sum over ranks and micro-batches."""
    replace_attribute(_gradients(engine)._context, "divisor", value)
    replace_attribute(_gradients(engine)._context.collectives, "_divisor", value)


def grads_are_sharded(engine: ReferenceEngine) -> bool:
    """Return whether a rank keeps only its shard of reduced gradients (stages 2 and 3)."""
    return engine.engine._placements.gradients is ShardPlacement.SHARDED


def optimizer_is_sharded(engine: ReferenceEngine) -> bool:
    """Return whether a rank keeps only its shard of the optimizer state (stages 1 to 3)."""
    return engine.engine._placements.optimizer_state is ShardPlacement.SHARDED


# The end of a backward, stage 2


def _end_of_backward(engine: ReferenceEngine) -> EndOfBackward | None:
    reducer = _gradients(engine)._bucket_reducer
    return None if reducer is None else reducer._end_of_backward


def wrap_grad_ready(
    engine: ReferenceEngine, wrap: Callable[[Callable[[nn.Parameter], None]], Callable[[nn.Parameter], None]]
) -> None:
    """Apply the decorator ``wrap`` to the function that is called for each gradient that a backward makes (stage 2)."""
    end = _end_of_backward(engine)
    if end is not None:
        replace_attribute(end, "on_grad_ready", wrap(end.on_grad_ready))


def wrap_backward_end(engine: ReferenceEngine, wrap: Callable[[Callable[[int], None]], Callable[[int], None]]) -> None:
    """Apply the decorator ``wrap`` to the function that is called with a graph task's id when it ends (stage 2)."""
    end = _end_of_backward(engine)
    if end is not None:
        replace_attribute(end, "_end", wrap(end._end))


def running_graph_tasks(engine: ReferenceEngine) -> Iterable[int]:
    """Return the ids of the graph tasks that have made gradients and have not ended (stage 2)."""
    end = _end_of_backward(engine)
    return () if end is None else end._phases


def pending_params(engine: ReferenceEngine) -> Iterable[nn.Parameter]:
    """Return the parameters whose gradients wait in a bucket that is not full (stage 2)."""
    reducer = _gradients(engine)._bucket_reducer
    return () if reducer is None else reducer._pending_params


# Parameters


def _parameters(engine: ReferenceEngine) -> Parameters:
    return engine.engine._parameters


def leaves(engine: ReferenceEngine) -> Mapping[str, Tensor]:
    """Return the tensors that the optimizer updates, by name."""
    return _parameters(engine).leaves


def master_weights(engine: ReferenceEngine) -> Mapping[str, Tensor]:
    """Return the optimizer's fp32 copies of low-precision parameters, by name."""
    return _parameters(engine).master_weights


def local_elements(engine: ReferenceEngine, param: ModelParam) -> Tensor:
    """Return this rank's elements of a parameter of the model, as a view in the shape of the leaf."""
    return _parameters(engine)._make_leaf(param)


def publish(engine: ReferenceEngine, names: Iterable[str]) -> None:
    """Copy updated leaves into the model's parameters. This is a collective."""
    _parameters(engine).publish(names)


def replace_publish(engine: ReferenceEngine, function: Callable[[Iterable[str]], None]) -> None:
    """Replace the function that copies updated leaves into the model's parameters."""
    replace_attribute(_parameters(engine), "publish", function)


def wrap_all_gather_shards(engine: ReferenceEngine, wrap: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Apply the decorator ``wrap`` to the function that all-gathers updated shards into parameters (stages 1, 2)."""
    replace_attribute(_parameters(engine), "_all_gather_shards", wrap(_parameters(engine)._all_gather_shards))


def replace_publish_buckets(engine: ReferenceEngine, make: Callable[[Bucket], Bucket]) -> None:
    """Replace each bucket in which updated shards are all-gathered by ``make(bucket)``."""
    replace_attribute(_parameters(engine), "_buckets", tuple(map(make, _parameters(engine)._buckets)))


def wrap_broadcast_edit(engine: ReferenceEngine, wrap: Callable[[BroadcastEdit], BroadcastEdit]) -> None:
    """Apply the decorator ``wrap`` to the function that gives every rank the parameter that rank 0 has edited."""
    replace_attribute(_parameters(engine), "_broadcast_edit", wrap(_parameters(engine)._broadcast_edit))


def record_version(engine: ReferenceEngine, param: ModelParam) -> None:
    """Record that the engine itself has changed the parameter."""
    _parameters(engine)._record_version(param)
