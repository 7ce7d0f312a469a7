"""Reduced gradients on this rank, and the one way that leads from a parameter's ``grad`` to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zharness.reference.bucket_reducer import BucketReducer
from zharness.reference.buckets import Bucket
from zharness.reference.coalesced_collectives import all_gather_full_tensors
from zharness.reference.layout import ModelParam, ShardPlacement, StagePlacements
from zharness.reference.unshard import ShardingContext


class Gradients:
    """The mean gradient of each parameter, whole or this rank's elements of it, in the shape of the optimizer's leaf.

    ``parameter.grad`` holds what is not reduced yet; ``absorb`` moves it here and leaves None behind. A gradient is in
    one of the two places, never in both, so it cannot be reduced twice, whenever and however often backward runs.

    * Whole gradients wait in ``parameter.grad`` until the boundary asks for them.
    * Sharded gradients of whole parameters are absorbed bucket by bucket as backward makes them: see ``Rounds``.
    * Sharded gradients of sharded parameters come reduced out of ``Gather``'s backward and are only moved (at once,
      where the optimizer's dtype is wider).

    A parameter that only some ranks used counts as zero on the others; one that none used has no gradient. The ranks
    agree on that before each reduction. It holds for whole parameters; where they are sharded, every backward must make
    the same gradients on every rank, in one order.
    """

    def __init__(
        self,
        model_params: Mapping[str, ModelParam],
        placements: StagePlacements,
        context: ShardingContext,
        buckets: Sequence[Bucket],
    ) -> None:
        self._model_params = model_params
        self._placements = placements
        self._context = context
        self._buckets = buckets
        self._reduced_grads: dict[str, Tensor] = {}
        self._device = next((o.parameter.device for o in model_params.values()), torch.device("cpu"))
        self._bucket_reducer: BucketReducer | None = None
        self._hooks: list[RemovableHandle] = []
        context.collectives.remote_grad_callbacks.append(self._add_remote_grad)
        self._register_hooks()

    def _register_hooks(self) -> None:
        """Absorb gradients as they come: those that are whole, and those that would add up in too narrow a dtype."""
        if self._placements.gradients is ShardPlacement.REPLICATED:
            return
        trained = [original for original in self._model_params.values() if original.parameter.requires_grad]
        if self._placements.parameters is ShardPlacement.REPLICATED:
            names = {original.name for original in trained}
            self._bucket_reducer = BucketReducer(
                [b for b in (b.select(names) for b in self._buckets) if b.members], self._reduce_bucket_if_used
            )
            self._hooks = [_register_grad_hook(original, self._bucket_reducer.on_grad_ready) for original in trained]
        else:
            narrow = [o for o in trained if o.has_master]
            self._hooks = [
                _register_grad_hook(original, self._make_reduce_hook(Bucket((original,)))) for original in narrow
            ]

    def _make_reduce_hook(self, bucket: Bucket) -> Callable[[nn.Parameter], None]:
        # torch calls it for a parameter that got no gradient too, where one node makes those of several.
        return lambda parameter: self._reduce_and_add(bucket) if parameter.grad is not None else None

    @contextmanager
    def allow_uneven_ranks(self) -> Iterator[None]:
        """Inside, gradients of whole parameters wait for the boundary: ranks may run different backwards."""
        if self._bucket_reducer is not None:
            self._remove_hooks()
        try:
            yield
        finally:
            if not self._hooks:
                self._register_hooks()

    def reduce_pending(self) -> dict[str, Tensor]:
        """All that backward left, reduced; parameters without gradient are left out. Collective.

        Raises UsageError on every rank where sharded parameters were used unlike, outside ``uneven``.
        """
        if self._placements.parameters is ShardPlacement.SHARDED:
            self._context.collectives.check_same_collectives()
        used, _ = self._agree_on_used(list(self._model_params.values()))
        for bucket in self._buckets:
            self._reduce_and_add(bucket.select(used))
        if self._bucket_reducer is not None:
            self._bucket_reducer.reset()
        # In one order on all ranks: which came first differs, where ranks used different parameters.
        return {name: self._reduced_grads[name] for name in self._model_params if name in self._reduced_grads}

    def reduced_tensors(self) -> list[Tensor]:
        """What is reduced already; the rest is in the parameters."""
        return list(self._reduced_grads.values())

    def full_grads(self) -> dict[str, Tensor]:
        """The reduced gradients in their original shapes, copied to CPU. Collective."""
        reduced = self.reduce_pending()
        if self._placements.optimizer_state is ShardPlacement.REPLICATED:
            return {name: grad.to("cpu", copy=True) for name, grad in reduced.items()}
        shards = {name: (grad, self._model_params[name].layout) for name, grad in reduced.items()}
        return all_gather_full_tensors(shards, self._context.comm)

    def clear(self) -> None:
        """No gradient anywhere: neither reduced nor waiting; and nothing that a failed backward left gathered."""
        self._reduced_grads.clear()
        self._context.prefetcher.clear()
        for original in self._model_params.values():
            original.parameter.grad = None
        if self._bucket_reducer is not None:
            self._bucket_reducer.reset()

    def close(self) -> None:
        self._remove_hooks()
        self.clear()

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _agree_on_used(self, candidates: Sequence[ModelParam], has_more: bool = False) -> tuple[set[str], bool]:
        """The names of those with a gradient on any rank, and whether any rank has ``more``. Collective: bytes."""
        flags = torch.tensor([*(o.parameter.grad is not None for o in candidates), has_more], dtype=torch.uint8)
        if self._placements.parameters is ShardPlacement.REPLICATED and candidates:
            flags = flags.to(candidates[0].parameter.device)
            self._context.comm.all_reduce(flags, op=dist.ReduceOp.MAX)
        *used, further = flags.tolist()
        return {original.name for original, flag in zip(candidates, used, strict=True) if flag}, bool(further)

    def _reduce_bucket_if_used(self, bucket: Bucket, has_more: bool) -> bool:
        """Absorb what any rank has of ``bucket``; whether that is anything, or some rank has ``more``. Collective."""
        used, further = self._agree_on_used(bucket.members, has_more)
        self._reduce_and_add(bucket.select(used))
        return bool(used) or further

    @torch.no_grad()
    def _reduce_and_add(self, bucket: Bucket) -> None:
        if not bucket.members:
            return
        for original, share in zip(bucket.members, self._reduce(bucket), strict=True):
            self._add(original, share)

    def _add_remote_grad(self, param: ModelParam, mean: Tensor) -> None:
        """Add what came of a gradient that only other ranks made, in the dtype in which gradients add up."""
        self._add(param, self._to_master_dtype(mean, param))

    @torch.no_grad()
    def _add(self, param: ModelParam, grad_shard: Tensor) -> None:
        before = self._reduced_grads.get(param.name)
        self._reduced_grads[param.name] = grad_shard if before is None else before.add_(grad_shard)

    def _reduce(self, bucket: Bucket) -> list[Tensor]:
        """The bucket's gradients, taken from the parameters: a rank that did not use one takes part with zeros."""
        rank, formats, comm = self._context.comm.rank, bucket.members[0].dtypes, self._context.comm
        taken = [_take_local_grad(original) for original in bucket.members]
        if self._placements.parameters is ShardPlacement.SHARDED:
            return [self._to_master_dtype(grad, original) for grad, original in zip(taken, bucket.members, strict=True)]
        outgoing = [original.cast_for_reduce(grad) for original, grad in zip(bucket.members, taken, strict=True)]
        divisor = self._remaining_divisor(bucket.members[0])
        if self._placements.optimizer_state is ShardPlacement.REPLICATED:
            return bucket.split_full_tensors(bucket.all_reduce(outgoing, comm).to(formats.master_dtype).div_(divisor))
        return bucket.split_shards(bucket.reduce_scatter(outgoing, comm).to(formats.master_dtype).div_(divisor), rank)

    def _to_master_dtype(self, shard: Tensor, param: ModelParam) -> Tensor:
        """A gradient that came reduced; undivided, where the optimizer's dtype is wider than the one it came in."""
        mine = shard[: param.layout.owned_numel(self._context.comm.rank)].to(param.dtypes.master_dtype)
        return mine.div_(self._remaining_divisor(param)) if param.has_master else mine

    def _remaining_divisor(self, param: ModelParam) -> float:
        """What is left to divide a sum by, after its way over the wire."""
        return self._context.divisor / param.predivide_factor

    def is_finite(self) -> bool:
        """Whether every element of what ``reduced`` gave last is finite, on every rank. Collective: one byte."""
        ends = [end for grad in self._reduced_grads.values() if grad.numel() for end in torch.aminmax(grad)]
        seen = torch.stack([*ends, torch.zeros((), dtype=torch.float64, device=self._device)])
        return not self._context.comm.all_reduce((~seen.isfinite().all()).to(torch.uint8), op=dist.ReduceOp.MAX)

    def norm(self) -> float:
        """The 2-norm of what ``reduced`` gave last, all together, summed in float64. Collective where it is sharded."""
        squares = [torch.linalg.vector_norm(g, dtype=torch.float64).square() for g in self._reduced_grads.values()]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        if self._placements.optimizer_state is ShardPlacement.SHARDED:
            self._context.comm.all_reduce(total)
        return math.sqrt(total.item())


def _register_grad_hook(param: ModelParam, function: Callable[[nn.Parameter], None]) -> RemovableHandle:
    handle: RemovableHandle = param.parameter.register_post_accumulate_grad_hook(function)  # type: ignore[no-untyped-call]
    return handle


def _take_local_grad(param: ModelParam) -> Tensor:
    parameter = param.parameter
    local = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
    parameter.grad = None
    return local if local.layout is torch.strided else local.to_dense()
