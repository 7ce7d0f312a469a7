"""Reduced gradients on this rank, and the one way that leads from a parameter's ``grad`` to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zharness.reference.buckets import Bucket
from zharness.reference.gathered import Wire
from zharness.reference.layout import Original, Owner, Owners
from zharness.reference.packed import gather_all
from zharness.reference.rounds import Rounds


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
        self, originals: Mapping[str, Original], owners: Owners, wire: Wire, travelling: Sequence[Bucket]
    ) -> None:
        self._originals = originals
        self._owners = owners
        self._wire = wire
        self._buckets = travelling
        self._reduced: dict[str, Tensor] = {}
        self._device = next((o.parameter.device for o in originals.values()), torch.device("cpu"))
        self._rounds: Rounds | None = None
        self._hooks: list[RemovableHandle] = []
        wire.channel.credits.append(self._credit)
        self._watch()

    def _watch(self) -> None:
        """Absorb gradients as they come: those that are whole, and those that would add up in too narrow a dtype."""
        if self._owners.gradients is Owner.WHOLE:
            return
        trained = [original for original in self._originals.values() if original.parameter.requires_grad]
        if self._owners.parameters is Owner.WHOLE:
            names = {original.name for original in trained}
            self._rounds = Rounds([b for b in (b.only(names) for b in self._buckets) if b.members], self._absorb_some)
            self._hooks = [_hook(original, self._rounds.arrived) for original in trained]
        else:
            narrow = [o for o in trained if o.has_master]
            self._hooks = [_hook(original, self._absorber(Bucket((original,)))) for original in narrow]

    def _absorber(self, bucket: Bucket) -> Callable[[nn.Parameter], None]:
        # torch calls it for a parameter that got no gradient too, where one node makes those of several.
        return lambda parameter: self._absorb(bucket) if parameter.grad is not None else None

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Inside, gradients of whole parameters wait for the boundary: ranks may run different backwards."""
        if self._rounds is not None:
            self._unwatch()
        try:
            yield
        finally:
            if not self._hooks:
                self._watch()

    def reduced(self) -> dict[str, Tensor]:
        """All that backward left, reduced; parameters without gradient are left out. Collective.

        Raises UsageError on every rank where sharded parameters were used unlike, outside ``uneven``.
        """
        if self._owners.parameters is Owner.SHARDED:
            self._wire.channel.settle()
        used, _ = self._agree(list(self._originals.values()))
        for bucket in self._buckets:
            self._absorb(bucket.only(used))
        if self._rounds is not None:
            self._rounds.forget()
        # In one order on all ranks: which came first differs, where ranks used different parameters.
        return {name: self._reduced[name] for name in self._originals if name in self._reduced}

    def held(self) -> list[Tensor]:
        """What is reduced already; the rest is in the parameters."""
        return list(self._reduced.values())

    def full(self) -> dict[str, Tensor]:
        """The reduced gradients in their original shapes, copied to CPU. Collective."""
        reduced = self.reduced()
        if self._owners.optimizer_state is Owner.WHOLE:
            return {name: grad.to("cpu", copy=True) for name, grad in reduced.items()}
        shards = {name: (grad, self._originals[name].layout) for name, grad in reduced.items()}
        return gather_all(shards, self._wire.comm)

    def forget(self) -> None:
        """No gradient anywhere: neither reduced nor waiting; and nothing that a failed backward left gathered."""
        self._reduced.clear()
        self._wire.shelf.clear()
        for original in self._originals.values():
            original.parameter.grad = None
        if self._rounds is not None:
            self._rounds.forget()

    def close(self) -> None:
        self._unwatch()
        self.forget()

    def _unwatch(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _agree(self, candidates: Sequence[Original], more: bool = False) -> tuple[set[str], bool]:
        """The names of those with a gradient on any rank, and whether any rank has ``more``. Collective: bytes."""
        flags = torch.tensor([*(o.parameter.grad is not None for o in candidates), more], dtype=torch.uint8)
        if self._owners.parameters is Owner.WHOLE and candidates:
            flags = flags.to(candidates[0].parameter.device)
            self._wire.comm.all_reduce(flags, op=dist.ReduceOp.MAX)
        *used, further = flags.tolist()
        return {original.name for original, flag in zip(candidates, used, strict=True) if flag}, bool(further)

    def _absorb_some(self, bucket: Bucket, more: bool) -> bool:
        """Absorb what any rank has of ``bucket``; whether that is anything, or some rank has ``more``. Collective."""
        used, further = self._agree(bucket.members, more)
        self._absorb(bucket.only(used))
        return bool(used) or further

    @torch.no_grad()
    def _absorb(self, bucket: Bucket) -> None:
        if not bucket.members:
            return
        for original, share in zip(bucket.members, self._reduce(bucket), strict=True):
            self._add(original, share)

    def _credit(self, original: Original, mean: Tensor) -> None:
        """Add what came of a gradient that only other ranks made, in the dtype in which gradients add up."""
        self._add(original, self._moved(mean, original))

    @torch.no_grad()
    def _add(self, original: Original, share: Tensor) -> None:
        before = self._reduced.get(original.name)
        self._reduced[original.name] = share if before is None else before.add_(share)

    def _reduce(self, bucket: Bucket) -> list[Tensor]:
        """The bucket's gradients, taken from the parameters: a rank that did not use one takes part with zeros."""
        rank, formats, comm = self._wire.comm.rank, bucket.members[0].formats, self._wire.comm
        taken = [_take(original) for original in bucket.members]
        if self._owners.parameters is Owner.SHARDED:
            return [self._moved(grad, original) for grad, original in zip(taken, bucket.members, strict=True)]
        outgoing = [original.outgoing(grad) for original, grad in zip(bucket.members, taken, strict=True)]
        divisor = self._divisor_of(bucket.members[0])
        if self._owners.optimizer_state is Owner.WHOLE:
            return bucket.wholes(bucket.all_reduce(outgoing, comm).to(formats.master).div_(divisor))
        return bucket.shards(bucket.reduce_scatter(outgoing, comm).to(formats.master).div_(divisor), rank)

    def _moved(self, shard: Tensor, original: Original) -> Tensor:
        """A gradient that came reduced; undivided, where the optimizer's dtype is wider than the one it came in."""
        mine = shard[: original.layout.owned(self._wire.comm.rank)].to(original.formats.master)
        return mine.div_(self._divisor_of(original)) if original.has_master else mine

    def _divisor_of(self, original: Original) -> float:
        """What is left to divide a sum by, after its way over the wire."""
        return self._wire.divisor / original.headroom

    def finite(self) -> bool:
        """Whether every element of what ``reduced`` gave last is finite, on every rank. Collective: one byte."""
        ends = [end for grad in self._reduced.values() if grad.numel() for end in torch.aminmax(grad)]
        seen = torch.stack([*ends, torch.zeros((), dtype=torch.float64, device=self._device)])
        return not self._wire.comm.all_reduce((~seen.isfinite().all()).to(torch.uint8), op=dist.ReduceOp.MAX)

    def norm(self) -> float:
        """The 2-norm of what ``reduced`` gave last, all together, summed in float64. Collective where it is sharded."""
        squares = [torch.linalg.vector_norm(g, dtype=torch.float64).square() for g in self._reduced.values()]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        if self._owners.optimizer_state is Owner.SHARDED:
            self._wire.comm.all_reduce(total)
        return math.sqrt(total.item())


def _hook(original: Original, function: Callable[[nn.Parameter], None]) -> RemovableHandle:
    handle: RemovableHandle = original.parameter.register_post_accumulate_grad_hook(function)  # type: ignore[no-untyped-call]
    return handle


def _take(original: Original) -> Tensor:
    parameter = original.parameter
    local = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
    parameter.grad = None
    return local if local.layout is torch.strided else local.to_dense()
