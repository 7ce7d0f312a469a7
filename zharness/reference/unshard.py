"""Gathered parameters as differentiable values: reading one is an all-gather, its backward a reduce-scatter.

A gathered copy that autograd saved for backward would live until then, and the whole model with it. So when a module's
forward is over, each saved reference to a copy is replaced by a promise to gather it again (``Copy.pack`` and
``Copy.unpack``, through torch's own ``SavedTensor.register_hooks``, one saved tensor at a time). Nothing ever frees
bytes that somebody may still read: a copy's storage goes when its last reference goes, in a second backward on a
retained graph, under ``create_graph``, in a recomputation or inside a transform of torch.func alike. What cannot be
replaced is held, and counted, until its graph is dropped.
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
from zharness.reference import torch_fallback
from zharness.reference.buckets import Bucket
from zharness.reference.collectives import ShardCollectives
from zharness.reference.layout import ModelParam
from zharness.reference.prefetch import Prefetcher


class UnshardedMemoryTracker:
    """Bytes of every gathered storage that is alive, and the most there ever were."""

    def __init__(self) -> None:
        self._live_storages: dict[int, private.WeakStorage] = {}  # by address
        self._upper_bound_bytes = 0  # of these; some may be dead
        self._prefetched_bytes = 0
        self.peak = 0

    def add(self, tensor: Tensor) -> private.WeakStorage:
        storage = private.WeakStorage(tensor)
        if storage.address() not in self._live_storages:
            self._live_storages[storage.address()] = storage
            self._upper_bound_bytes += storage.nbytes
        self._update_peak()
        return storage

    def set_prefetched_bytes(self, nbytes: int) -> None:
        """So many bytes are on the shelf now."""
        self._prefetched_bytes = nbytes
        self._update_peak()

    def _update_peak(self) -> None:
        """Who is alive matters only where there may be more than ever: not at every read of every step."""
        if self._prefetched_bytes + self._upper_bound_bytes > self.peak:
            self.peak = max(self.peak, self.live_bytes())

    def live_bytes(self) -> int:
        gone = private.are_storages_expired(self._live_storages)
        if any(gone):
            kept = zip(self._live_storages.items(), gone, strict=True)
            self._live_storages = {address: storage for (address, storage), dead in kept if not dead}
            self._upper_bound_bytes = sum(storage.nbytes for storage in self._live_storages.values())
        return self._prefetched_bytes + self._upper_bound_bytes


@dataclass(frozen=True)
class ShardingContext:
    """What a gather and its backward need beside the parameter: group, ledger, divisor, collectives and buckets."""

    comm: Comm
    memory_tracker: UnshardedMemoryTracker
    divisor: int
    collectives: ShardCollectives
    prefetcher: Prefetcher
    reduce_buckets: Mapping[str, Bucket]


@dataclass(frozen=True)
class SavedView:
    """Where in a copy's storage a saved tensor lies."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class BackwardGather:
    """A copy gathered again for one backward, which will ask for it ``due`` more times."""

    graph_task_id: int
    unsharded: Tensor
    remaining_uses: int


class UnshardedParam:
    """One read of a sharded parameter: how to gather it, and whether the gathered storage is still alive."""

    def __init__(self, model_param: ModelParam, dtype: torch.dtype, context: ShardingContext) -> None:
        self.model_param = model_param
        self.dtype = dtype
        self.context = context
        self._param_version = model_param.parameter._version
        self._storage: private.WeakStorage | None = None
        self._packed_count = 0
        self._backward_gather: BackwardGather | None = None

    def unshard(self) -> Tensor:
        """The full parameter in the copy's dtype. Collective.

        The result shares its version counter with the shard (``detach`` does, ``data`` exchanges what lies behind it).
        So an optimizer step, which edits the shard, makes autograd refuse every graph that saved the old weights, by
        the very check that refuses them in plain PyTorch.
        """
        layout, shard = self.model_param.layout, self.model_param.parameter
        with torch.no_grad(), private.suspend_transforms():
            # A copy, since a backend may hold the buffer of a finished collective a moment longer than its caller does.
            values = torch.empty_strided(layout.shape, layout.stride, dtype=self.dtype, device=shard.device)
            if self.context.collectives.is_even:
                self.context.prefetcher.fetch_into(self.model_param, values)
            else:
                values.copy_(self.context.collectives.all_gather_param(self.model_param, self.dtype))
            full = shard.detach()
            full.data = values
        self._storage = self.context.memory_tracker.add(full)
        return full

    def with_dtype(self, dtype: torch.dtype) -> UnshardedParam:
        """The same parameter in another dtype, to be gathered only when backward asks for it."""
        return UnshardedParam(self.model_param, dtype, self.context)

    def is_alive(self) -> bool:
        return self._storage is not None and self._storage.is_alive()

    def storage_address(self) -> int | None:
        """The address of the gathered storage."""
        return None if self._storage is None else self._storage.address()

    def pack_hook(self, tensor: Tensor) -> SavedView:
        """The promise that takes the place of a saved tensor."""
        self._packed_count += 1
        return SavedView(tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack_hook(self, view: SavedView) -> Tensor:
        """The saved tensor again, for the node that needs it now. Collective."""
        self._raise_if_stale()
        with torch.no_grad(), private.suspend_transforms():
            return self._unshard_for_backward().as_strided(view.size, view.stride, view.offset)

    def _unshard_for_backward(self) -> Tensor:
        """One gather per backward, however many nodes saved this copy: it is kept until the last of them has asked."""
        task = private.current_graph_task_id()
        lasting = (
            task != -1 and private.can_queue_callback()
        )  # else nobody says which backward asks, or when it is over
        loan = self._backward_gather
        if loan is None or loan.graph_task_id != task:
            loan = BackwardGather(task, self.unshard(), self._packed_count)
            if lasting:
                # A backward that needs only some of the nodes never asks for the rest.
                private.queue_backward_callback(self._end_backward)
            else:
                self.context.prefetcher.clear()
        last = loan.remaining_uses == 1 or not lasting
        self._backward_gather = None if last else BackwardGather(task, loan.unsharded, loan.remaining_uses - 1)
        return loan.unsharded

    def _end_backward(self) -> None:
        self._backward_gather = None
        self.context.prefetcher.clear()

    def _raise_if_stale(self) -> None:
        now = self.model_param.parameter._version
        if now != self._param_version:
            raise StaleGraphError(
                f"backward needs parameter {self.model_param.name!r} as its forward read it, but it was changed since "
                f"(rank {self.context.comm.rank}: version {now}, expected {self._param_version}); "
                "run the forward again after step(), or call every backward before it"
            )


def make_grad_placeholder(unsharded_param: UnshardedParam) -> Tensor:
    """Where the gradients of all reads of one parameter meet: its full shape, without storage for it."""
    return _apply_to_param(ReduceGrad, unsharded_param.model_param.parameter, unsharded_param)


def make_grad_placeholders(unsharded_params: Sequence[UnshardedParam]) -> tuple[Tensor, ...]:
    """``stand_in`` of several, whose gradients are reduced together, in one collective."""
    result: tuple[Tensor, ...] = torch_fallback.apply_function(
        ReduceGradBucket, unsharded_params, *(c.model_param.parameter for c in unsharded_params)
    )
    return result


def unshard_param(unsharded_param: UnshardedParam, grad_placeholder: Tensor) -> Tensor:
    """The full parameter, differentiable with respect to ``stand``. Collective."""
    return _apply_to_param(AllGatherParam, grad_placeholder, unsharded_param)


def _apply_to_param(function: type[torch.autograd.Function], tensor: Tensor, unsharded_param: UnshardedParam) -> Tensor:
    result: Tensor = torch_fallback.apply_function(function, tensor, unsharded_param)
    return result


class ReduceGrad(torch.autograd.Function):
    """Shard to a stand-in of the full shape; backward sums over ranks and divides, so that no loss is ever scaled.

    Autograd adds up the gradients of a tensor's uses before it calls what made the tensor. So however often a forward
    reads a parameter (tied weights, a module called twice), its gradient is whole on this rank before it is reduced,
    once, and rounded as in plain PyTorch.
    """

    @staticmethod
    def forward(shard: Tensor, unsharded_param: UnshardedParam) -> Tensor:
        return shard.new_zeros(()).expand(unsharded_param.model_param.layout.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, UnshardedParam], output: Tensor) -> None:
        ctx.unsharded_param = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _run_grad_collective(grad, ctx.unsharded_param), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, shard: Tensor, unsharded_param: UnshardedParam) -> Any:
        raise RuntimeError(
            f"parameter {unsharded_param.model_param.name!r} is sharded and cannot be batched by vmap; "
            "pass full_params() through torch.func.functional_call instead"
        )


class ReduceGradBucket(torch.autograd.Function):
    """``Meet`` for several parameters: its backward runs once all of their gradients are whole on this rank.

    Those that nothing used have none. A backward that is differentiated again, or batched, reduces them one by one.
    """

    @staticmethod
    def forward(unsharded_params: Sequence[UnshardedParam], *shards: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            s.new_zeros(()).expand(c.model_param.layout.shape) for c, s in zip(unsharded_params, shards, strict=True)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.unsharded_params = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        made = [(copy, grad) for copy, grad in zip(ctx.unsharded_params, grads, strict=True) if grad is not None]
        if (
            torch.is_grad_enabled()
            or private.is_transforming()
            or any(private.is_legacy_batched(grad) for _, grad in made)
        ):
            return None, *(
                None if g is None else _run_grad_collective(g, c)
                for c, g in zip(ctx.unsharded_params, grads, strict=True)
            )
        means = iter(
            ctx.unsharded_params[0].context.collectives.reduce_grads(
                [copy.model_param for copy, _ in made], [grad for _, grad in made]
            )
        )
        return None, *(None if grad is None else next(means) for grad in grads)


class AllGatherParam(torch.autograd.Function):
    """A parameter's stand-in to the parameter itself: the all-gather of its shards.

    Written as forward without ctx plus setup_context, the form that torch.func can transform. The gradient is cast to
    the shard's dtype before it is reduced, where torch.autocast casts it too.
    """

    @staticmethod
    def forward(grad_placeholder: Tensor, unsharded_param: UnshardedParam) -> Tensor:
        return unsharded_param.unshard()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, UnshardedParam], output: Tensor) -> None:
        ctx.unsharded_param = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        dense = grad if grad.layout is torch.strided else grad.to_dense()  # an embedding's, with sparse=True
        return dense.to(ctx.unsharded_param.model_param.parameter.dtype), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, grad_placeholder: Tensor, unsharded_param: UnshardedParam) -> Any:
        raise RuntimeError(f"parameter {unsharded_param.model_param.name!r} is sharded and cannot be batched by vmap")


class GradCollective(Enum):
    """Between the whole of a parameter's gradient, on every rank, and the shard of their mean."""

    REDUCE_SCATTER = "every rank's whole to the shard of the mean"
    ALL_GATHER = "every rank's shard to the whole, divided"

    @property
    def adjoint(self) -> GradCollective:
        """The way of the gradient: each is the other's adjoint."""
        return GradCollective.ALL_GATHER if self is GradCollective.REDUCE_SCATTER else GradCollective.REDUCE_SCATTER


class GradCollectiveFunction(torch.autograd.Function):
    """One of the two ways: the backward of Meet, and then each the backward of the other, for create_graph."""

    @staticmethod
    def forward(tensor: Tensor, unsharded_param: UnshardedParam, collective: GradCollective) -> Tensor:
        channel = unsharded_param.context.collectives
        run = channel.reduce_grad if collective is GradCollective.REDUCE_SCATTER else channel.all_gather_grad
        with private.suspend_transforms():
            return private.map_batch_rows(lambda row: run(unsharded_param.model_param, row), tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, UnshardedParam, GradCollective], output: Tensor) -> None:
        _, ctx.unsharded_param, ctx.collective = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _run_grad_collective(grad, ctx.unsharded_param, ctx.collective.adjoint), None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, None, None],
        tensor: Tensor,
        unsharded_param: UnshardedParam,
        collective: GradCollective,
    ) -> Any:
        rows = tensor.movedim(in_dims[0] or 0, 0)
        return torch.stack([_run_grad_collective(row, unsharded_param, collective) for row in rows]), 0


def _run_grad_collective(
    tensor: Tensor, unsharded_param: UnshardedParam, collective: GradCollective = GradCollective.REDUCE_SCATTER
) -> Tensor:
    result: Tensor = torch_fallback.apply_function(GradCollectiveFunction, tensor, unsharded_param, collective)
    return result
