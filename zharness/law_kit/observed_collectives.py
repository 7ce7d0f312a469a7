"""Record the collectives that torch's dispatcher sees: what a rank sends, in which dtype, and along which axis."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zharness.errors import HarnessFault
from zharness.law_kit.rank_context import RankContext
from zharness.mesh import find_chunk
from zharness.torch_private import resolve_process_group

REDUCE, GATHER, BROADCAST, SEND = "reduce", "gather", "broadcast", "send"
GRADIENTS, WEIGHTS, BROADCASTS, ACTIVATIONS = "gradients", "weights", "broadcasts", "activations"
CONTENTS: Mapping[str, str] = {REDUCE: GRADIENTS, GATHER: WEIGHTS, BROADCAST: BROADCASTS, SEND: ACTIVATIONS}
# By the name of an operator: what the operator does, and the position of the argument with the tensors that a rank
# sends.
OPERATORS: Mapping[str, tuple[str, int]] = {
    "c10d::allreduce_": (REDUCE, 0),
    "c10d::allreduce_coalesced_": (REDUCE, 0),
    "c10d::reduce_": (REDUCE, 0),
    "c10d::reduce_scatter_": (REDUCE, 1),
    "c10d::_reduce_scatter_base_": (REDUCE, 1),
    "c10d::reduce_scatter_tensor_coalesced_": (REDUCE, 1),
    "c10d::alltoall_": (REDUCE, 1),
    "c10d::alltoall_base_": (REDUCE, 1),  # the reference engine adds up the tensors that it receives
    "c10d::allgather_": (GATHER, 1),
    "c10d::_allgather_base_": (GATHER, 1),
    "c10d::allgather_coalesced_": (GATHER, 1),
    "c10d::allgather_into_tensor_coalesced_": (GATHER, 1),
    "c10d::broadcast_": (BROADCAST, 0),
    "c10d::gather_": (GATHER, 1),
    "c10d::scatter_": (GATHER, 1),
    "c10d::send": (SEND, 0),
    "_c10d_functional::all_reduce": (REDUCE, 0),
    "_c10d_functional::all_reduce_": (REDUCE, 0),
    "_c10d_functional::all_reduce_coalesced": (REDUCE, 0),
    "_c10d_functional::all_reduce_coalesced_": (REDUCE, 0),
    "_c10d_functional::reduce_scatter_tensor": (REDUCE, 0),
    "_c10d_functional::reduce_scatter_tensor_out": (REDUCE, 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": (REDUCE, 0),
    "_c10d_functional::all_gather_into_tensor": (GATHER, 0),
    "_c10d_functional::all_gather_into_tensor_out": (GATHER, 0),
    "_c10d_functional::all_gather_into_tensor_coalesced": (GATHER, 0),
    "_c10d_functional::all_to_all_single": (GATHER, 0),
    "_c10d_functional::broadcast": (BROADCAST, 0),
    "_c10d_functional::broadcast_": (BROADCAST, 0),
    "_c10d_functional::isend": (SEND, 0),
    "_dtensor::shard_dim_alltoall": (GATHER, 0),
}
# For operators that send to one rank: the position of the argument with the receiver's number in the group.
DESTINATIONS: Mapping[str, int] = {"c10d::send": 2, "_c10d_functional::isend": 1}
# For broadcasts: the position of the argument with the sender's number in the group.
ROOTS: Mapping[str, int] = {"c10d::broadcast_": 2, "_c10d_functional::broadcast": 1, "_c10d_functional::broadcast_": 1}
# Operators that send no elements.
SILENT = frozenset(
    {
        "c10d::barrier",
        "c10d::monitored_barrier_",
        "c10d::check_for_nan",
        "c10d::recv_",
        "c10d::recv_any_source_",
        "_c10d_functional::irecv",
        "_c10d_functional::wait_tensor",
        "_c10d_functional::_wrap_tensor_autograd",
    }
)
NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")


@dataclass(frozen=True, order=True)
class Sent:
    """A kind of message: what is sent, by which operator of torch, along which axes, and in which dtype.

    ``receiver`` has the receiver's coordinates on these axes if one rank receives the message; otherwise it is empty.
    """

    content: str
    operator: str
    axes: str
    dtype: str
    receiver: str = ""

    @property
    def name(self) -> str:
        """The name under which a rank records the number of elements that it sends in such messages."""
        return "/".join((self.content, self.operator, self.axes, self.dtype, self.receiver))

    @classmethod
    def parse(cls, name: str) -> Sent:
        """Return the message whose name is ``name``."""
        return cls(*name.split("/"))


class CollectiveObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class has no types
    """Counts the elements of floating-point tensors that this rank sends inside the ``with`` block, by ``Sent``.

    A tensor of one element is a flag, a loss or a norm, and is not counted. In a broadcast only the root sends. A
    tensor is an activation if ``is_activation`` is true for it, or if it is sent to one rank. Any other tensor is a
    gradient if it is reduced, or a weight if it is gathered; a broadcast tensor is neither. On a CPU autograd runs a
    backward in the calling thread, so this mode also sees the collectives of a backward and of DDP's hooks in the
    backward.
    """

    def __init__(self, ctx: RankContext, is_activation: Callable[[Tensor], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements: Counter[Sent] = Counter()
        self._ctx = ctx
        self._is_activation = is_activation

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs first, and its collectives come here; so does torch's CommDebugMode
        name = func.name().partition(".")[0]
        if find_operator(name) is not None:
            self._count(name, args, (kwargs or {}).values())
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Sequence[Any], named: Iterable[Any]) -> None:
        """Count the tensors of one call of the operator ``name``."""
        action, position = OPERATORS[name]
        group = next(filter(None, map(resolve_process_group, (*args, *named))), None)
        ranks = [] if group is None else dist.get_process_group_ranks(group)
        if ranks and name in ROOTS and ranks[args[ROOTS[name]]] != self._ctx.rank:
            return
        if ranks and action == SEND:
            ranks = [self._ctx.rank, ranks[args[DESTINATIONS[name]]]]
        axes = find_axes(self._ctx, ranks)
        receiver = find_coordinates(self._ctx, ranks[1], axes) if axes and action == SEND else ""
        for tensor in flatten(args[position]) if axes else ():
            if tensor.is_floating_point() and tensor.numel() > 1:
                content = ACTIVATIONS if self._is_activation(tensor) else CONTENTS[action]
                sent = Sent(content, name, axes, str(tensor.dtype).removeprefix("torch."), receiver)
                self.elements[sent] += tensor.numel()


def find_operator(name: str) -> tuple[str, int] | None:
    """Return the entry of OPERATORS for an operator, or None if the operator sends nothing.

    Raises HarnessFault for a collective that this module does not know, because its elements would not be counted.
    """
    if name.partition("::")[0] in NAMESPACES and name not in OPERATORS and name not in SILENT:
        raise HarnessFault(f"the observer of collectives does not know the operator {name}; add it to OPERATORS")
    return OPERATORS.get(name)


def flatten(value: Any) -> list[Tensor]:
    """Return the tensors of nested lists."""
    return [value] if isinstance(value, Tensor) else [tensor for part in value for tensor in flatten(part)]


def find_axes(ctx: RankContext, ranks: Sequence[int]) -> str:
    """Return the axes of the mesh along which ``ranks`` differ, joined by commas; '' for fewer than two ranks."""
    places = [ctx.config.mesh.coordinates(rank, ctx.world_size) for rank in ranks]
    return ",".join(axis for axis in (places[0] if places else ()) if len({place[axis] for place in places}) > 1)


def find_coordinates(ctx: RankContext, rank: int, axes: str) -> str:
    """Return the coordinates of ``rank`` on ``axes``, both joined by commas."""
    place = ctx.config.mesh.coordinates(rank, ctx.world_size)
    return ",".join(str(place[axis]) for axis in axes.split(","))


@dataclass(frozen=True)
class AxisSizes:
    """The elements of a model's parameters on one rank of tp, and what padding may add.

    ``local`` counts the elements of each parameter that tp leaves on a rank. ``padding`` is the largest number of
    elements that the padding of all shards adds. ``partial`` counts the elements whose gradients each rank of tp has
    only in part, because it sees a part of the sequence.
    """

    local: int
    padding: int
    partial: int


def split_shapes(
    shapes: Mapping[str, Sequence[int]], plan: Mapping[str, str], tensor_size: int, coordinate: int = 0
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parts of the parameters ``shapes`` that the rank at ``coordinate`` of tp has.

    A column-wise layer splits the first dimension of its weight and bias. A row-wise layer splits the last dimension of
    its weight. As in torch.chunk, the last ranks have the smaller parts.
    """
    parts = {name: list(shape) for name, shape in shapes.items()}
    for name, part in parts.items() if tensor_size > 1 else ():
        module, _, kind = name.rpartition(".")
        word = plan.get(module, "")
        if "colwise" in word or (word.startswith("rowwise") and kind == "weight"):
            dim = 0 if "colwise" in word else -1
            part[dim] = len(find_chunk(range(part[dim]), tensor_size, coordinate))
    return {name: tuple(part) for name, part in parts.items()}


def measure_parameters(
    shapes: Mapping[str, Sequence[int]], plan: Mapping[str, str], tensor_size: int, shards: int
) -> AxisSizes:
    """Return the sizes of parameters that ``plan`` splits over ``tensor_size`` ranks, and that are then sharded."""
    local = padding = partial = 0
    for name, shape in split_shapes(shapes, plan, tensor_size).items():
        numel = math.prod(shape)
        local += numel
        padding += (shards - 1) * max(1, numel // shape[0])
        word = plan.get(name.rpartition(".")[0], "") if tensor_size > 1 else ""
        partial += numel if word == "sequence_parallel" else 0
    return AxisSizes(local, padding, partial)
