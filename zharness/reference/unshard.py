"""Unshard a parameter as a differentiable operation: the forward is an all-gather, the backward a reduce-scatter.

If autograd saved unsharded tensors for backward, the whole model would stay in memory until then. So after a module's
forward, ``saved_tensors.replace_saved_tensors`` replaces each saved reference to an unsharded tensor by a pack hook,
which keeps only the shape, and an unpack hook, which all-gathers again in backward (``UnshardedParam.pack_hook`` and
``unpack_hook``, through torch's ``SavedTensor.register_hooks``).

No code frees a storage explicitly: a storage is freed when its last reference is dropped, also for a second backward on
a retained graph, ``create_graph``, recomputation and torch.func transforms. A saved tensor that cannot be replaced
stays alive, and is counted by the memory tracker, until its graph is freed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from zharness import torch_private as private
from zharness.comm import Comm
from zharness.errors import StaleGraphError
from zharness.reference.buckets import Bucket
from zharness.reference.collectives import ShardCollectives
from zharness.reference.inspection.memory import UnshardedMemoryTracker
from zharness.reference.layout import ModelParam
from zharness.reference.prefetch import Prefetcher
from zharness.reference.torch_func import torch_fallback


@dataclass(frozen=True)
class ShardingContext:
    """The objects of one engine with which parameters are unsharded and gradients are reduced.

    ``divisor`` turns a sum over ranks and micro-batches into the mean. ``reduce_buckets`` maps each parameter's name to
    the bucket in which the parameter's gradient is reduced.
    """

    comm: Comm
    memory_tracker: UnshardedMemoryTracker
    divisor: int
    collectives: ShardCollectives
    prefetcher: Prefetcher
    reduce_buckets: Mapping[str, Bucket]


@dataclass(frozen=True)
class SavedView:
    """The size, stride and offset of a saved tensor, which autograd keeps instead of the tensor until backward."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class BackwardGather:
    """A parameter unsharded for one backward (autograd graph task), and the number of nodes that have yet to use it."""

    graph_task_id: int
    unsharded: Tensor
    remaining_uses: int


class UnshardedParam:
    """One read of a sharded parameter, which unshards the parameter for the forward and again for backward."""

    def __init__(self, model_param: ModelParam, dtype: torch.dtype, context: ShardingContext) -> None:
        self.model_param = model_param
        self.dtype = dtype
        self.context = context
        self._param_version = model_param.parameter._version
        self._storage: private.WeakStorage | None = None
        self._packed_count = 0
        self._backward_gather: BackwardGather | None = None

    def unshard(self) -> Tensor:
        """All-gather and return the full parameter in ``self.dtype``. This is a collective.

        The result shares its version counter with the shard: ``detach`` keeps the counter, and assigning ``data``
        replaces the values behind it. An optimizer step edits the shard, so autograd then refuses every graph that
        saved the old weights, with the same check as in plain PyTorch.
        """
        layout, shard = self.model_param.layout, self.model_param.parameter
        with torch.no_grad(), private.suspend_transforms():
            # Copy: a backend may keep the buffer of a collective alive for a moment after the collective has returned.
            values = torch.empty_strided(layout.shape, layout.stride, dtype=self.dtype, device=shard.device)
            if self.context.collectives.agreement.is_even:
                self.context.prefetcher.fetch_into(self.model_param, values)
            else:
                values.copy_(self.context.collectives.all_gather_param(self.model_param, self.dtype))
            full = shard.detach()
            full.data = values
        self._storage = self.context.memory_tracker.add(full)
        return full

    def with_dtype(self, dtype: torch.dtype) -> UnshardedParam:
        """Return a read of the same parameter in ``dtype``, which is all-gathered only if backward needs it."""
        return UnshardedParam(self.model_param, dtype, self.context)

    def is_alive(self) -> bool:
        """Return whether the unsharded parameter's storage still exists."""
        return self._storage is not None and self._storage.is_alive()

    def storage_address(self) -> int | None:
        """Return the address of the unsharded parameter's storage, or None if ``unshard`` was not called."""
        return None if self._storage is None else self._storage.address()

    def pack_hook(self, tensor: Tensor) -> SavedView:
        """Return the size, stride and offset of a saved tensor in the unsharded storage, as autograd's pack hook."""
        self._packed_count += 1
        return SavedView(tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack_hook(self, view: SavedView) -> Tensor:
        """Restore a saved tensor for the autograd node that runs now (autograd's unpack hook). This is a collective.

        Raises StaleGraphError if the parameter was changed since its forward.
        """
        self._raise_if_stale()
        with torch.no_grad(), private.suspend_transforms():
            return self._unshard_for_backward().as_strided(view.size, view.stride, view.offset)

    def _unshard_for_backward(self) -> Tensor:
        """Return the full parameter, unsharded once per backward and kept until the last node that saved it has run."""
        task = private.current_graph_task_id()
        gather = self._backward_gather
        if gather is None or gather.graph_task_id != task:
            gather = BackwardGather(task, self.unshard(), self._packed_count)
            # A backward that needs only some of the nodes never unpacks the rest, so its end has to reshard too.
            if task == -1 or not torch_fallback.call_after_backward(self.post_backward):
                self._backward_gather = None
                self.context.prefetcher.clear()
                return gather.unsharded
        remaining = gather.remaining_uses - 1
        self._backward_gather = BackwardGather(task, gather.unsharded, remaining) if remaining else None
        return gather.unsharded

    def post_backward(self) -> None:
        """Reshard at the end of a backward by freeing the unsharded parameter and the prefetched bucket."""
        self._backward_gather = None
        self.context.prefetcher.clear()

    def _raise_if_stale(self) -> None:
        """Raise StaleGraphError if the parameter was changed since its forward."""
        version = self.model_param.parameter._version
        if version != self._param_version:
            raise StaleGraphError(
                f"backward needs parameter {self.model_param.name!r} with the values that its forward read, but it was "
                f"changed since (rank {self.context.comm.rank}: version {version}, expected {self._param_version}); "
                "run the forward again after step(), or call every backward before it"
            )


def make_grad_placeholder(unsharded_param: UnshardedParam) -> Tensor:
    """Return the tensor in which autograd adds up the gradients of all reads of one parameter.

    The tensor has the full shape but no storage of that size, and its backward is ``ReduceGrad.backward``.
    """
    return _apply_to_param(ReduceGrad, unsharded_param.model_param.parameter, unsharded_param)


def make_grad_placeholders(unsharded_params: Sequence[UnshardedParam]) -> tuple[Tensor, ...]:
    """Return the gradient placeholders of several parameters, whose gradients are reduced in one collective."""
    result: tuple[Tensor, ...] = torch_fallback.apply_function(
        ReduceGradBucket, unsharded_params, *(unsharded.model_param.parameter for unsharded in unsharded_params)
    )
    return result


def unshard_param(unsharded_param: UnshardedParam, grad_placeholder: Tensor) -> Tensor:
    """Return the full parameter, whose gradient autograd adds to ``grad_placeholder``. This is a collective."""
    return _apply_to_param(AllGatherParam, grad_placeholder, unsharded_param)


def _apply_to_param(function: type[torch.autograd.Function], tensor: Tensor, unsharded_param: UnshardedParam) -> Tensor:
    """Apply ``function``, an autograd Function, to ``tensor`` and ``unsharded_param``, and return its output."""
    result: Tensor = torch_fallback.apply_function(function, tensor, unsharded_param)
    return result


class ReduceGrad(torch.autograd.Function):
    """Maps a shard to a gradient placeholder of the full shape; backward reduce-scatters the gradient to the shard.

    Autograd adds up the gradients of all uses of the placeholder before it runs this backward. So however often a
    forward reads a parameter (tied weights, a module called twice), its gradient is complete on this rank before the
    only reduction, and is rounded as in plain PyTorch. This backward divides by the number of ranks and micro-batches,
    so the loss need not be scaled for the mean.
    """

    @staticmethod
    def forward(shard: Tensor, unsharded_param: UnshardedParam) -> Tensor:
        """Return a scalar zero expanded to the parameter's full shape, a placeholder that takes no memory."""
        return shard.new_zeros(()).expand(unsharded_param.model_param.layout.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, UnshardedParam], output: Tensor) -> None:
        """Save the parameter in ``ctx`` for backward."""
        ctx.unsharded_param = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return this rank's shard of the mean of all ranks' full gradients. This is a collective."""
        return _run_grad_collective(grad, ctx.unsharded_param), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, shard: Tensor, unsharded_param: UnshardedParam) -> Any:
        """Raise RuntimeError, because a shard has no dimension that vmap could batch."""
        raise RuntimeError(
            f"parameter {unsharded_param.model_param.name!r} is sharded and cannot be batched by vmap; "
            "pass full_params() through torch.func.functional_call instead"
        )


class ReduceGradBucket(torch.autograd.Function):
    """Reduces the gradients of several parameters like ``ReduceGrad``, once all gradients are complete on this rank.

    An unused parameter gets no gradient. A backward that is differentiated again (``create_graph``) or batched by vmap
    reduces the gradients one by one, since only ``GradCollectiveFunction`` supports that.
    """

    @staticmethod
    def forward(unsharded_params: Sequence[UnshardedParam], *shards: Tensor) -> tuple[Tensor, ...]:
        """Return, for each parameter, a scalar zero expanded to the full shape: a placeholder that takes no memory."""
        return tuple(
            shard.new_zeros(()).expand(unsharded.model_param.layout.shape)
            for unsharded, shard in zip(unsharded_params, shards, strict=True)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save the parameters in ``ctx`` for backward, where the gradient of an unused parameter stays None."""
        ctx.unsharded_params = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return this rank's shards of the means of all ranks' full gradients. This is a collective."""
        params_and_grads = zip(ctx.unsharded_params, grads, strict=True)
        pairs = [(unsharded, grad) for unsharded, grad in params_and_grads if grad is not None]
        if (
            torch.is_grad_enabled()
            or private.is_transforming()
            or any(private.is_legacy_batched(grad) for _, grad in pairs)
        ):
            one_by_one = zip(grads, ctx.unsharded_params, strict=True)
            return None, *(None if grad is None else _run_grad_collective(grad, param) for grad, param in one_by_one)
        collectives = ctx.unsharded_params[0].context.collectives
        used_params = [unsharded.model_param for unsharded, _ in pairs]
        means = iter(collectives.reduce_grads(used_params, [grad for _, grad in pairs]))
        return None, *(None if grad is None else next(means) for grad in grads)


class AllGatherParam(torch.autograd.Function):
    """Maps a gradient placeholder to the full parameter, which is all-gathered from its shards.

    Backward returns the full gradient for the placeholder, cast to the shard's dtype before it is reduced, as
    torch.autocast casts it. The Function has a forward without ctx and a setup_context, so torch.func can transform it.
    """

    @staticmethod
    def forward(grad_placeholder: Tensor, unsharded_param: UnshardedParam) -> Tensor:
        """All-gather and return the full parameter. This is a collective."""
        return unsharded_param.unshard()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, UnshardedParam], output: Tensor) -> None:
        """Save the parameter in ``ctx`` for backward."""
        ctx.unsharded_param = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the full gradient in the shard's dtype, and as a dense tensor if nn.Embedding made it sparse."""
        dense = grad if grad.layout is torch.strided else grad.to_dense()
        return dense.to(ctx.unsharded_param.model_param.parameter.dtype), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, grad_placeholder: Tensor, unsharded_param: UnshardedParam) -> Any:
        """Raise RuntimeError, because a shard has no dimension that vmap could batch."""
        raise RuntimeError(f"parameter {unsharded_param.model_param.name!r} is sharded and cannot be batched by vmap")


class GradCollective(Enum):
    """The two collectives on gradients, reduce-scatter and all-gather, each of which is the adjoint of the other."""

    REDUCE_SCATTER = "reduce-scatter every rank's full gradient to this rank's shard of the mean"
    ALL_GATHER = "all-gather every rank's shard to the full tensor, and divide it"

    @property
    def adjoint(self) -> GradCollective:
        """The collective that computes the gradient of this collective."""
        return GradCollective.ALL_GATHER if self is GradCollective.REDUCE_SCATTER else GradCollective.REDUCE_SCATTER


class GradCollectiveFunction(torch.autograd.Function):
    """A gradient collective as a differentiable function, whose backward is the adjoint collective.

    The backward of ``ReduceGrad`` calls this Function, so that ``create_graph`` can differentiate that backward.
    """

    @staticmethod
    def forward(tensor: Tensor, unsharded_param: UnshardedParam, collective: GradCollective) -> Tensor:
        """Run the collective on ``tensor``. This is a collective."""
        collectives = unsharded_param.context.collectives
        is_reduce = collective is GradCollective.REDUCE_SCATTER
        run = collectives.reduce_grad if is_reduce else collectives.all_gather_grad
        with private.suspend_transforms():
            return run(unsharded_param.model_param, tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, UnshardedParam, GradCollective], output: Tensor) -> None:
        """Save the parameter and the collective in ``ctx`` for backward."""
        _, ctx.unsharded_param, ctx.collective = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient, computed by the adjoint collective. This is a collective."""
        return _run_grad_collective(grad, ctx.unsharded_param, ctx.collective.adjoint), None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, None, None],
        tensor: Tensor,
        unsharded_param: UnshardedParam,
        collective: GradCollective,
    ) -> Any:
        """Run the collective on each row of a batch by torch.func.vmap. This is a collective."""
        rows = tensor.movedim(in_dims[0] or 0, 0)
        return torch.stack([_run_grad_collective(row, unsharded_param, collective) for row in rows]), 0


def _run_grad_collective(
    tensor: Tensor, unsharded_param: UnshardedParam, collective: GradCollective = GradCollective.REDUCE_SCATTER
) -> Tensor:
    """Run ``collective`` on a gradient or its shard, row by row in a batch: autograd records no Function of a batch."""
    return private.map_batch_rows(
        lambda row: torch_fallback.apply_function(GradCollectiveFunction, row, unsharded_param, collective), tensor
    )
