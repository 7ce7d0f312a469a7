"""Reduced gradients on this rank, and the one way that leads from a parameter's ``grad`` to them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zharness.reference.gathered import Wire
from zharness.reference.layout import Original, Owner, Owners, gather, reduce_scatter


class Gradients:
    """The mean gradient of each parameter, whole or this rank's elements of it, in the shape of the optimizer's leaf.

    ``parameter.grad`` holds what is not reduced yet; ``absorb`` moves it here and leaves None behind. A gradient is in
    one of the two places, never in both, so it cannot be reduced twice, whenever and however often backward runs.

    * Whole gradients wait in ``parameter.grad`` until the boundary asks for them.
    * Sharded gradients of whole parameters are absorbed by a hook, one parameter at a time, as backward makes them.
    * Sharded gradients of sharded parameters come reduced out of ``Gather``'s backward and are only moved (at once,
      where the optimizer's dtype is wider).

    A parameter that only some ranks used counts as zero on the others. That is agreed on at the boundary, so it holds
    for whole gradients; in the other two cases every backward must make the same gradients on every rank, in one order.
    """

    def __init__(self, originals: Mapping[str, Original], owners: Owners, wire: Wire) -> None:
        self._originals = originals
        self._owners = owners
        self._wire = wire
        self._reduced: dict[str, Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        if owners.gradients is Owner.SHARDED:
            self._hooks = [self._absorb_as_made(o) for o in originals.values() if self._absorbs(o)]

    def _absorbs(self, original: Original) -> bool:
        """Whether a gradient may not wait in ``parameter.grad``: it is whole, or would add up in too narrow a dtype."""
        narrow = original.formats.master != original.formats.held
        return original.parameter.requires_grad and (self._owners.parameters is Owner.WHOLE or narrow)

    def _absorb_as_made(self, original: Original) -> RemovableHandle:
        def hook(parameter: nn.Parameter) -> None:
            self._absorb(original)

        handle: RemovableHandle = original.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return handle

    def reduced(self) -> dict[str, Tensor]:
        """All that backward left, reduced; parameters without gradient are left out. Collective."""
        for original in self._having_gradients():
            self._absorb(original)
        return dict(self._reduced)

    def held(self) -> list[Tensor]:
        """What is reduced already; the rest is in the parameters."""
        return list(self._reduced.values())

    def full(self) -> dict[str, Tensor]:
        """The reduced gradients in their original shapes, copied to CPU. Collective."""
        return {name: self._whole(name, grad).to("cpu", copy=True) for name, grad in self.reduced().items()}

    def forget(self) -> None:
        """No gradient anywhere: neither reduced nor waiting."""
        self._reduced.clear()
        for original in self._originals.values():
            original.parameter.grad = None

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        self.forget()

    def _having_gradients(self) -> list[Original]:
        """The parameters with a gradient on any rank: a rank that did not use one takes part with zeros."""
        candidates = list(self._originals.values())
        flags = torch.tensor([o.parameter.grad is not None for o in candidates], dtype=torch.uint8)
        if self._owners.parameters is Owner.WHOLE and candidates:
            flags = flags.to(candidates[0].parameter.device)
            self._wire.comm.all_reduce(flags, op=dist.ReduceOp.MAX)
        return [original for original, flag in zip(candidates, flags.tolist(), strict=True) if flag]

    @torch.no_grad()
    def _absorb(self, original: Original) -> None:
        parameter = original.parameter
        local = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
        parameter.grad = None
        share = self._reduce(local, original)
        before = self._reduced.get(original.name)
        self._reduced[original.name] = share if before is None else before.add_(share)

    def _reduce(self, local: Tensor, original: Original) -> Tensor:
        owned = original.layout.owned(self._wire.comm.rank)
        formats = original.formats
        if self._owners.parameters is Owner.SHARDED:
            return local[:owned].to(formats.master)
        sent = local.to(formats.wire)
        if self._owners.optimizer_state is Owner.SHARDED:
            share = reduce_scatter(sent, original.layout, self._wire.comm)[:owned]
        else:
            share = self._wire.comm.all_reduce(sent.contiguous())
        return share.to(formats.master).div_(self._wire.divisor)

    def _whole(self, name: str, grad: Tensor) -> Tensor:
        if self._owners.optimizer_state is Owner.WHOLE:
            return grad
        return gather(grad, self._originals[name].layout, self._wire.comm)

    def norm(self) -> float:
        """The 2-norm of all reduced gradients together, summed in float64. Collective where they are sharded."""
        squares = [torch.linalg.vector_norm(g, dtype=torch.float64).square() for g in self.reduced().values()]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        if self._owners.optimizer_state is Owner.SHARDED:
            self._wire.comm.all_reduce(total)
        return math.sqrt(total.item())

    def clip(self, limit: float) -> float:
        """Scale to a norm of at most ``limit`` as torch.nn.utils.clip_grad_norm_ does; the norm before. Collective."""
        norm = self.norm()
        factor = min(1.0, limit / (norm + 1e-6)) if not math.isnan(norm) else norm
        for grad in self._reduced.values():
            grad.mul_(factor)
        return norm
