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

from zharness.comm import Comm
from zharness.errors import StaleGraphError
from zharness.reference import fallback
from zharness.reference import torch_private as private
from zharness.reference.buckets import Bucket
from zharness.reference.layout import Original
from zharness.reference.shelf import Shelf
from zharness.reference.uneven import Channel


class Ledger:
    """Bytes of every gathered storage that is alive, and the most there ever were."""

    def __init__(self) -> None:
        self._live: dict[int, private.WeakStorage] = {}  # by address
        self._at_most = 0  # of these; some may be dead
        self._shelved = 0
        self.peak = 0

    def add(self, tensor: Tensor) -> private.WeakStorage:
        storage = private.WeakStorage(tensor)
        if storage.holds() not in self._live:
            self._live[storage.holds()] = storage
            self._at_most += storage.nbytes
        self._look()
        return storage

    def shelve(self, nbytes: int) -> None:
        """So many bytes are on the shelf now."""
        self._shelved = nbytes
        self._look()

    def _look(self) -> None:
        """Who is alive matters only where there may be more than ever: not at every read of every step."""
        if self._shelved + self._at_most > self.peak:
            self.peak = max(self.peak, self.bytes())

    def bytes(self) -> int:
        gone = private.expired(self._live)
        if any(gone):
            kept = zip(self._live.items(), gone, strict=True)
            self._live = {address: storage for (address, storage), dead in kept if not dead}
            self._at_most = sum(storage.nbytes for storage in self._live.values())
        return self._shelved + self._at_most


@dataclass(frozen=True)
class Wire:
    """What a gather and its backward need beside the parameter: group, ledger, divisor, collectives and buckets."""

    comm: Comm
    ledger: Ledger
    divisor: int
    channel: Channel
    shelf: Shelf
    neighbours: Mapping[str, Bucket]


@dataclass(frozen=True)
class View:
    """Where in a copy's storage a saved tensor lies."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Loan:
    """A copy gathered again for one backward, which will ask for it ``due`` more times."""

    backward: int
    full: Tensor
    due: int


class Copy:
    """One read of a sharded parameter: how to gather it, and whether the gathered storage is still alive."""

    def __init__(self, original: Original, dtype: torch.dtype, wire: Wire) -> None:
        self.original = original
        self.dtype = dtype
        self.wire = wire
        self._version = original.parameter._version
        self._storage: private.WeakStorage | None = None
        self._promises = 0
        self._loan: Loan | None = None

    def fill(self) -> Tensor:
        """The full parameter in the copy's dtype. Collective.

        The result shares its version counter with the shard (``detach`` does, ``data`` exchanges what lies behind it).
        So an optimizer step, which edits the shard, makes autograd refuse every graph that saved the old weights, by
        the very check that refuses them in plain PyTorch.
        """
        layout, shard = self.original.layout, self.original.parameter
        with torch.no_grad(), private.outside_transforms():
            # A copy, since a backend may hold the buffer of a finished collective a moment longer than its caller does.
            values = torch.empty_strided(layout.shape, layout.stride, dtype=self.dtype, device=shard.device)
            if self.wire.channel.even:
                self.wire.shelf.fetch(self.original, values)
            else:
                values.copy_(self.wire.channel.full(self.original, self.dtype))
            full = shard.detach()
            full.data = values
        self._storage = self.wire.ledger.add(full)
        return full

    def cast(self, dtype: torch.dtype) -> Copy:
        """The same parameter in another dtype, to be gathered only when backward asks for it."""
        return Copy(self.original, dtype, self.wire)

    def alive(self) -> bool:
        return self._storage is not None and self._storage.alive()

    def holds(self) -> int | None:
        """The address of the gathered storage."""
        return None if self._storage is None else self._storage.holds()

    def pack(self, saved: Tensor) -> View:
        """The promise that takes the place of a saved tensor."""
        self._promises += 1
        return View(saved.size(), saved.stride(), int(saved.storage_offset()))

    def unpack(self, view: View) -> Tensor:
        """The saved tensor again, for the node that needs it now. Collective."""
        self._refuse_if_stale()
        with torch.no_grad(), private.outside_transforms():
            return self._borrow().as_strided(view.size, view.stride, view.offset)

    def _borrow(self) -> Tensor:
        """One gather per backward, however many nodes saved this copy: it is kept until the last of them has asked."""
        task = private.graph_task()
        lasting = task != -1 and private.can_queue()  # else nobody says which backward asks, or when it is over
        loan = self._loan
        if loan is None or loan.backward != task:
            loan = Loan(task, self.fill(), self._promises)
            if lasting:
                # A backward that needs only some of the nodes never asks for the rest.
                private.at_end_of_backward(self._settle)
            else:
                self.wire.shelf.clear()
        last = loan.due == 1 or not lasting
        self._loan = None if last else Loan(task, loan.full, loan.due - 1)
        return loan.full

    def _settle(self) -> None:
        self._loan = None
        self.wire.shelf.clear()

    def _refuse_if_stale(self) -> None:
        now = self.original.parameter._version
        if now != self._version:
            raise StaleGraphError(
                f"backward needs parameter {self.original.name!r} as its forward read it, but it was changed since "
                f"(rank {self.wire.comm.rank}: version {now}, expected {self._version}); "
                "run the forward again after step(), or call every backward before it"
            )


def stand_in(copy: Copy) -> Tensor:
    """Where the gradients of all reads of one parameter meet: its full shape, without storage for it."""
    return _apply(Meet, copy.original.parameter, copy)


def stand_ins(copies: Sequence[Copy]) -> tuple[Tensor, ...]:
    """``stand_in`` of several, whose gradients are reduced together, in one collective."""
    result: tuple[Tensor, ...] = fallback.apply(MeetTogether, copies, *(c.original.parameter for c in copies))
    return result


def read(copy: Copy, stand: Tensor) -> Tensor:
    """The full parameter, differentiable with respect to ``stand``. Collective."""
    return _apply(Gather, stand, copy)


def _apply(function: type[torch.autograd.Function], tensor: Tensor, copy: Copy) -> Tensor:
    result: Tensor = fallback.apply(function, tensor, copy)
    return result


class Meet(torch.autograd.Function):
    """Shard to a stand-in of the full shape; backward sums over ranks and divides, so that no loss is ever scaled.

    Autograd adds up the gradients of a tensor's uses before it calls what made the tensor. So however often a forward
    reads a parameter (tied weights, a module called twice), its gradient is whole on this rank before it is reduced,
    once, and rounded as in plain PyTorch.
    """

    @staticmethod
    def forward(shard: Tensor, copy: Copy) -> Tensor:
        return shard.new_zeros(()).expand(copy.original.layout.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Copy], output: Tensor) -> None:
        ctx.copy = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _move(grad, ctx.copy), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, shard: Tensor, copy: Copy) -> Any:
        raise RuntimeError(
            f"parameter {copy.original.name!r} is sharded and cannot be batched by vmap; "
            "pass full_params() through torch.func.functional_call instead"
        )


class MeetTogether(torch.autograd.Function):
    """``Meet`` for several parameters: its backward runs once all of their gradients are whole on this rank.

    Those that nothing used have none. A backward that is differentiated again, or batched, reduces them one by one.
    """

    @staticmethod
    def forward(copies: Sequence[Copy], *shards: Tensor) -> tuple[Tensor, ...]:
        return tuple(s.new_zeros(()).expand(c.original.layout.shape) for c, s in zip(copies, shards, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.copies = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        made = [(copy, grad) for copy, grad in zip(ctx.copies, grads, strict=True) if grad is not None]
        if torch.is_grad_enabled() or private.transforming() or any(private.batched(grad) for _, grad in made):
            return None, *(None if g is None else _move(g, c) for c, g in zip(ctx.copies, grads, strict=True))
        means = iter(ctx.copies[0].wire.channel.means([copy.original for copy, _ in made], [grad for _, grad in made]))
        return None, *(None if grad is None else next(means) for grad in grads)


class Gather(torch.autograd.Function):
    """A parameter's stand-in to the parameter itself: the all-gather of its shards.

    Written as forward without ctx plus setup_context, the form that torch.func can transform. The gradient is cast to
    the shard's dtype before it is reduced, where torch.autocast casts it too.
    """

    @staticmethod
    def forward(stand: Tensor, copy: Copy) -> Tensor:
        return copy.fill()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Copy], output: Tensor) -> None:
        ctx.copy = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        dense = grad if grad.layout is torch.strided else grad.to_dense()  # an embedding's, with sparse=True
        return dense.to(ctx.copy.original.parameter.dtype), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, stand: Tensor, copy: Copy) -> Any:
        raise RuntimeError(f"parameter {copy.original.name!r} is sharded and cannot be batched by vmap")


class Way(Enum):
    """Between the whole of a parameter's gradient, on every rank, and the shard of their mean."""

    REDUCE = "every rank's whole to the shard of the mean"
    SPREAD = "every rank's shard to the whole, divided"

    @property
    def back(self) -> Way:
        """The way of the gradient: each is the other's adjoint."""
        return Way.SPREAD if self is Way.REDUCE else Way.REDUCE


class Move(torch.autograd.Function):
    """One of the two ways: the backward of Meet, and then each the backward of the other, for create_graph."""

    @staticmethod
    def forward(given: Tensor, copy: Copy, way: Way) -> Tensor:
        channel = copy.wire.channel
        run = channel.mean if way is Way.REDUCE else channel.spread
        with private.outside_transforms():
            return private.by_row(lambda row: run(copy.original, row), given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Copy, Way], output: Tensor) -> None:
        _, ctx.copy, ctx.way = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _move(grad, ctx.copy, ctx.way.back), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None, None], given: Tensor, copy: Copy, way: Way) -> Any:
        rows = given.movedim(in_dims[0] or 0, 0)
        return torch.stack([_move(row, copy, way) for row in rows]), 0


def _move(tensor: Tensor, copy: Copy, way: Way = Way.REDUCE) -> Tensor:
    result: Tensor = fallback.apply(Move, tensor, copy, way)
    return result
