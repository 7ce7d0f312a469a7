"""Reduce, accumulate, unscale and clip the gradients of one engine."""

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
from zharness.reference.deepspeed_json.settings import Settings
from zharness.reference.inspection.coalesced_collectives import all_gather_full_tensors
from zharness.reference.layout import ModelParam, ShardPlacement, StagePlacements
from zharness.reference.mixed_precision.loss_scale import LossScale
from zharness.reference.unshard import ShardingContext


class Gradients:
    """The mean gradient of each parameter of one engine, in the shape of the tensor that the optimizer updates.

    That shape is full, or that of this rank's shard. ``parameter.grad`` has the gradient that is not reduced yet.
    Reducing moves the gradient into this object and sets ``parameter.grad`` to None, so a gradient is in one of the two
    places and cannot be reduced twice, no matter when and how often backward runs.

    * Replicated gradients (stages 0 and 1) stay in ``parameter.grad`` until the accumulation boundary.
    * Sharded gradients of replicated parameters (stage 2) are reduced bucket by bucket during backward: see
      ``BucketReducer``.
    * Gradients of sharded parameters (stage 3) leave the backward of ``ReduceGrad`` already reduced and are moved into
      this object at the boundary, or at once if the optimizer's dtype is wider.

    A parameter that only some ranks used counts as zero on the others; a parameter that no rank used has no gradient.
    Before each reduction of replicated parameters, the ranks exchange which parameters they used. At stage 3 every
    backward has to compute the same gradients on every rank, in the same order, or run inside ``uneven``.
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
        self._device = next((p.parameter.device for p in model_params.values()), torch.device("cpu"))
        self._bucket_reducer: BucketReducer | None = None
        self._hooks: list[RemovableHandle] = []
        context.collectives.agreement.remote_grad_callbacks.append(self._add_remote_grad)
        self._register_hooks()

    def _register_hooks(self) -> None:
        """Register the hooks that reduce gradients during backward.

        Stage 2 needs a hook on every trained parameter. Stage 3 needs one on each parameter with a master weight, whose
        gradients would otherwise accumulate in a dtype narrower than the optimizer's.
        """
        if self._placements.gradients is ShardPlacement.REPLICATED:
            return
        trained = [param for param in self._model_params.values() if param.parameter.requires_grad]
        if self._placements.parameters is ShardPlacement.REPLICATED:
            names = {param.name for param in trained}
            self._bucket_reducer = BucketReducer(
                [b for b in (b.select(names) for b in self._buckets) if b.members], self._reduce_bucket_if_used
            )
            self._hooks = [_register_grad_hook(param, self._bucket_reducer.on_grad_ready) for param in trained]
        else:
            narrow = [param for param in trained if param.has_master]
            self._hooks = [_register_grad_hook(param, self._make_reduce_hook(Bucket((param,)))) for param in narrow]

    def _make_reduce_hook(self, bucket: Bucket) -> Callable[[nn.Parameter], None]:
        """Return a hook that reduces the gradient of the bucket's only parameter."""
        # torch also calls a hook without a gradient, if one node makes the gradients of several parameters.
        return lambda parameter: self._reduce_and_add(bucket) if parameter.grad is not None else None

    @contextmanager
    def allow_uneven_ranks(self) -> Iterator[None]:
        """Let ranks run different backwards inside the block, where stage 2 reduces no gradient before the boundary."""
        if self._bucket_reducer is not None:
            self._remove_hooks()
        try:
            yield
        finally:
            if not self._hooks:
                self._register_hooks()

    def reduce_pending(self) -> dict[str, Tensor]:
        """Reduce the gradients that backward left in ``parameter.grad``, and return all reduced gradients.

        This is a collective. The returned dictionary has the same order on all ranks and leaves out parameters that no
        rank used. Raises UsageError on every rank if the ranks used sharded parameters differently outside ``uneven``.
        """
        if self._placements.parameters is ShardPlacement.SHARDED:
            self._context.collectives.agreement.check_same_collectives()
        used, _ = self._agree_on_used(list(self._model_params.values()))
        for bucket in self._buckets:
            self._reduce_and_add(bucket.select(used))
        if self._bucket_reducer is not None:
            self._bucket_reducer.reset()
        # The order in which gradients were made differs if ranks used different parameters; the model's does not.
        return {name: self._reduced_grads[name] for name in self._model_params if name in self._reduced_grads}

    def reduced_tensors(self) -> list[Tensor]:
        """Return the gradients that are reduced already; the others are in ``parameter.grad``."""
        return list(self._reduced_grads.values())

    def full_grads(self) -> dict[str, Tensor]:
        """Reduce all gradients, and return full copies on the CPU in the parameters' shapes. This is a collective."""
        reduced = self.reduce_pending()
        if self._placements.optimizer_state is ShardPlacement.REPLICATED:
            return {name: grad.to("cpu", copy=True) for name, grad in reduced.items()}
        shards = {name: (grad, self._model_params[name].layout) for name, grad in reduced.items()}
        return all_gather_full_tensors(shards, self._context.comm)

    def clear(self) -> None:
        """Drop all gradients, reduced or not, and the prefetched bucket that a failed backward may have left."""
        self._reduced_grads.clear()
        self._context.prefetcher.clear()
        for param in self._model_params.values():
            param.parameter.grad = None
        if self._bucket_reducer is not None:
            self._bucket_reducer.reset()

    def close(self) -> None:
        """Remove the hooks and drop all gradients."""
        self._remove_hooks()
        self.clear()

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _agree_on_used(self, candidates: Sequence[ModelParam], has_more: bool = False) -> tuple[set[str], bool]:
        """Exchange which ``candidates`` have a gradient: a collective of one byte each if parameters are replicated.

        Returns the names of the candidates with a gradient on any rank, and whether ``has_more`` is true on any rank.
        """
        flags = torch.tensor([*(c.parameter.grad is not None for c in candidates), has_more], dtype=torch.uint8)
        if self._placements.parameters is ShardPlacement.REPLICATED and candidates:
            flags = flags.to(candidates[0].parameter.device)
            self._context.comm.all_ranks.all_reduce(flags, op=dist.ReduceOp.MAX)
        *used, any_has_more = flags.tolist()
        return {param.name for param, flag in zip(candidates, used, strict=True) if flag}, bool(any_has_more)

    def _reduce_bucket_if_used(self, bucket: Bucket, has_more: bool) -> bool:
        """Reduce the members of ``bucket`` that have a gradient on any rank. This is a collective.

        Returns True if there are such members, or if ``has_more`` is true on any rank.
        """
        used, any_has_more = self._agree_on_used(bucket.members, has_more)
        self._reduce_and_add(bucket.select(used))
        return bool(used) or any_has_more

    @torch.no_grad()
    def _reduce_and_add(self, bucket: Bucket) -> None:
        """Reduce the bucket's gradients (a collective) and add them to the reduced gradients of earlier backwards."""
        if not bucket.members:
            return
        for param, grad_shard in zip(bucket.members, self._reduce(bucket), strict=True):
            self._add(param, grad_shard)

    def _add_remote_grad(self, param: ModelParam, mean: Tensor) -> None:
        """Add this rank's share of a mean gradient to which only other ranks contributed, in the optimizer's dtype."""
        self._add(param, self._to_master_dtype(mean, param))

    @torch.no_grad()
    def _add(self, param: ModelParam, grad_shard: Tensor) -> None:
        """Add a reduced gradient to the reduced gradient of earlier backwards."""
        before = self._reduced_grads.get(param.name)
        self._reduced_grads[param.name] = grad_shard if before is None else before.add_(grad_shard)

    def _reduce(self, bucket: Bucket) -> list[Tensor]:
        """Reduce the bucket's gradients and set ``parameter.grad`` to None; an unused parameter contributes zeros.

        Returns one tensor for each member, in the shape of its leaf and the optimizer's dtype.
        """
        comm, master_dtype = self._context.comm, bucket.members[0].dtypes.master_dtype
        local_grads = [_take_local_grad(param) for param in bucket.members]
        if self._placements.parameters is ShardPlacement.SHARDED:
            return [self._to_master_dtype(grad, param) for grad, param in zip(local_grads, bucket.members, strict=True)]
        outgoing = [param.cast_for_reduce(grad) for param, grad in zip(bucket.members, local_grads, strict=True)]
        divisor = self._remaining_divisor(bucket.members[0])
        if self._placements.optimizer_state is ShardPlacement.REPLICATED:
            return bucket.split_full_tensors(bucket.all_reduce(outgoing, comm).to(master_dtype).div_(divisor))
        return bucket.split_shards(bucket.reduce_scatter(outgoing, comm).to(master_dtype).div_(divisor), comm.rank)

    def _to_master_dtype(self, shard: Tensor, param: ModelParam) -> Tensor:
        """Return a reduced gradient without padding, cast to the optimizer's dtype.

        The gradient of a parameter with a master weight is still a sum (see ``ShardCollectives._remaining_divisor``),
        and is divided here.
        """
        owned = shard[: param.layout.owned_numel(self._context.comm.rank)].to(param.dtypes.master_dtype)
        return owned.div_(self._remaining_divisor(param)) if param.has_master else owned

    def _remaining_divisor(self, param: ModelParam) -> float:
        """Return the divisor that turns a reduced sum into the mean, after ``predivide_factor`` was applied."""
        return self._context.divisor / param.predivide_factor

    def is_finite(self) -> bool:
        """Return whether all reduced gradients are finite on every rank. This is a collective of one byte."""
        extremes = [end for grad in self._reduced_grads.values() if grad.numel() for end in torch.aminmax(grad)]
        values = torch.stack([*extremes, torch.zeros((), dtype=torch.float64, device=self._device)])
        bad, ranks = (~values.isfinite().all()).to(torch.uint8), self._context.comm.all_ranks
        return not ranks.all_reduce(bad, op=dist.ReduceOp.MAX)

    def norm(self) -> float:
        """Compute the 2-norm of all reduced gradients in float64. This is a collective if they are sharded."""
        squares = [torch.linalg.vector_norm(g, dtype=torch.float64).square() for g in self._reduced_grads.values()]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=self._device)
        if self._placements.optimizer_state is ShardPlacement.SHARDED:
            self._context.comm.all_reduce(total)
        return math.sqrt(total.item())


class GradientClipper:
    """Multiplies the gradients of a step by one factor that both unscales and clips them.

    ``norm`` is the norm of the last step's gradients, unscaled and before clipping. It is None if the step needed no
    norm, that is, without clipping, without a loss scale, and in a precision that does not skip steps on overflow.
    """

    def __init__(self, settings: Settings, loss_scale: LossScale, gradients: Gradients) -> None:
        self.norm: float | None = None
        self._max_norm = settings.max_grad_norm
        self._skips_on_overflow = settings.precision.skips_on_overflow
        self._loss_scale = loss_scale
        self._gradients = gradients

    def unscale_and_clip(self, reduced_grads: Mapping[str, Tensor]) -> bool:
        """Unscale ``reduced_grads`` in place, and clip them to the configured ``gradient_clipping``.

        This is a collective. Returns False, with the gradients unchanged, if a gradient is not finite on some rank.
        Clips in the same way as torch.nn.utils.clip_grad_norm_.
        """
        self.norm, factor = None, 1.0 / self._loss_scale.value
        if self._max_norm is not None or self._skips_on_overflow or self._loss_scale.is_needed():
            self.norm = self._gradients.norm() / self._loss_scale.value
        is_finite = self._gradients.is_finite() if self.norm is None else math.isfinite(self.norm)
        if self._max_norm is not None and self.norm is not None:
            factor *= min(1.0, self._max_norm / (self.norm + 1e-6))
        if is_finite and factor != 1.0:
            for grad in reduced_grads.values():
                grad.mul_(factor)
        return is_finite


def _register_grad_hook(param: ModelParam, function: Callable[[nn.Parameter], None]) -> RemovableHandle:
    """Register ``function`` as a hook that autograd calls whenever it has accumulated the parameter's gradient."""
    handle: RemovableHandle = param.parameter.register_post_accumulate_grad_hook(function)  # type: ignore[no-untyped-call]
    return handle


def _take_local_grad(param: ModelParam) -> Tensor:
    """Set ``parameter.grad`` to None and return the gradient as a dense tensor, or zeros if there was none."""
    parameter = param.parameter
    local = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
    parameter.grad = None
    return local if local.layout is torch.strided else local.to_dense()
