"""Define the mesh: the axes of parallelism beside plain data parallelism, and each rank's coordinates on them.

The axes have torchtitan's names. The ranks that the named axes leave over are data parallel (``dp_shard``). Ranks are
in row-major order over the axes, as in ``init_device_mesh``, so neighbouring ranks differ along ``tp``. The axis ``ep``
of experts takes no ranks of its own: it divides the ranks of ``dp_shard`` into groups of neighbours, which split the
experts. ::

    world size 4, mesh tp2            tp 0    tp 1
        dp_shard 0, micro-batch 0     rank 0  rank 1
        dp_shard 1, micro-batch 1     rank 2  rank 3
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from zharness.errors import UsageError

PIPELINE, REPLICATE, DATA_SHARD, CONTEXT, TENSOR = "pp", "dp_replicate", "dp_shard", "cp", "tp"
AXES = (PIPELINE, REPLICATE, DATA_SHARD, CONTEXT, TENSOR)  # outermost first
DATA_AXES = (REPLICATE, DATA_SHARD)  # ranks that differ on them get different micro-batches
EXPERT = "ep"  # not among AXES: it divides the ranks of dp_shard, not the world
SHORT_NAMES = {REPLICATE: "rep", DATA_SHARD: "shard"}
_AXIS = re.compile(r"(?P<name>[a-z_]+?)(?P<size>\d+)")
_NAMES = {**{axis: axis for axis in (*AXES, EXPERT)}, **{short: axis for axis, short in SHORT_NAMES.items()}}
_NOT_NAMED = {DATA_SHARD: "is what the other axes leave over of the world; leave it out"}


@dataclass(frozen=True, order=True)
class Mesh:
    """The named axes of a mesh with their sizes, in the order of AXES; the default has only data parallelism."""

    sizes: tuple[tuple[str, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parse axes such as ``tp2`` or ``rep2,tp2``; '' is the default mesh. Raises UsageError for other text."""
        sizes: dict[str, int] = {}
        for part in filter(None, re.split(r"[,.]", text)):
            match = _AXIS.fullmatch(part)
            if match is None:
                raise UsageError(f"got {part!r} in the mesh {text!r}; expected an axis and its size, as in tp2")
            name = _NAMES.get(match["name"], match["name"])
            if name in _NOT_NAMED:
                raise UsageError(f"got {part!r} in the mesh {text!r}; the axis {name} {_NOT_NAMED[name]}")
            if name not in (*AXES, EXPERT):
                raise UsageError.unknown_name(
                    "axis of the mesh", match["name"], [name for name, axis in _NAMES.items() if axis != DATA_SHARD]
                )
            if name in sizes or int(match["size"]) < 1:
                raise UsageError(f"got the mesh {text!r}; expected each axis once, with a size of 1 or more")
            sizes[name] = int(match["size"])
        return cls(tuple((axis, sizes[axis]) for axis in (*AXES, EXPERT) if axis in sizes))

    @property
    def label(self) -> str:
        """The axes as in a cell's id, ``rep2.tp2``; '' for the default mesh."""
        return ".".join(f"{SHORT_NAMES.get(axis, axis)}{size}" for axis, size in self.sizes)

    @classmethod
    def parse_smallest(cls, text: str) -> Mesh:
        """Parse axes, as in ``rep2.tp``; an axis without a size gets the size 2. Raises UsageError for other text."""
        return cls.parse(re.sub(r"(?<=[a-z_])(?=[,.]|$)", "2", text))

    @classmethod
    def label_axes(cls, text: str) -> str:
        """Return axes, with or without sizes, in a label's names and order. Raises UsageError for other text."""
        sizes = cls.parse_smallest(text).sizes
        parts = {_NAMES[part.rstrip("0123456789")]: part for part in filter(None, re.split(r"[,.]", text))}
        return ".".join(
            f"{SHORT_NAMES.get(axis, axis)}{size if parts[axis][-1].isdigit() else ''}" for axis, size in sizes
        )

    def has_axes(self, text: str) -> bool:
        """Return whether this mesh has the axes and sizes of a label; an axis without a size may have any size."""
        own, wanted = self.label.split("."), text.split(".")
        return len(own) == len(wanted) and all(
            part in (axis, axis.rstrip("0123456789")) for axis, part in zip(own, wanted, strict=True)
        )

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the named axes."""
        return tuple(axis for axis, _ in self.sizes)

    def size(self, axis: str) -> int:
        """Return the size of a named axis, or 1 for an axis that the mesh does not name."""
        return dict(self.sizes).get(axis, 1)

    @property
    def smallest_world(self) -> int:
        """The number of ranks of the smallest world that has this mesh."""
        return self._count_named() * self.size(EXPERT)

    def explain_misfit(self, world_size: int) -> str:
        """Return the reason why ``world_size`` ranks cannot form this mesh, or '' if they can."""
        named = self._count_named()
        if world_size % named == 0:
            return self._explain_misfit_of_experts(world_size // named)
        return f"the mesh {self.label} has {named} ranks or a multiple, which the world size {world_size} is not"

    def _count_named(self) -> int:
        """Return the number of ranks of the named axes that split the world."""
        return math.prod(size for axis, size in self.sizes if axis != EXPERT)

    def _explain_misfit_of_experts(self, data_ranks: int) -> str:
        """Return the reason why the axis ep cannot divide ``data_ranks`` ranks of dp_shard, or '' if it can."""
        if data_ranks % self.size(EXPERT) == 0:
            return ""
        return f"the axis ep of the mesh {self.label} has to divide the {data_ranks} ranks of dp_shard"

    def shape(self, world_size: int) -> Mapping[str, int]:
        """Return the size of every axis, in the order of AXES. Raises UsageError if the mesh does not fit the world."""
        if misfit := self.explain_misfit(world_size):
            raise UsageError(misfit)
        left_over = world_size // self._count_named()
        return {axis: left_over if axis == DATA_SHARD else self.size(axis) for axis in AXES}

    def coordinates(self, rank: int, world_size: int) -> Mapping[str, int]:
        """Return the coordinate of ``rank`` on every axis of AXES, and on ep if the mesh has ep."""
        found = {}
        shape = self.shape(world_size)
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, shape[axis])
        of_experts = {EXPERT: found[DATA_SHARD] % self.size(EXPERT)} if EXPERT in self.axes else {}
        return {axis: found[axis] for axis in AXES} | of_experts

    def data_size(self, world_size: int) -> int:
        """Return the number of different micro-batches of a step, which is the number of terms of a mean gradient."""
        if not self.sizes:  # the mesh of most cells, whose plans ask for this number a million times
            return world_size
        shape = self.shape(world_size)
        return math.prod(shape[axis] for axis in DATA_AXES)

    def world_size(self, data_size: int) -> int:
        """Return the number of ranks of a mesh with ``data_size`` different micro-batches in a step."""
        return data_size * math.prod(size for axis, size in self.sizes if axis not in (*DATA_AXES, EXPERT))

    def data_coordinate(self, rank: int, world_size: int) -> int:
        """Return which of the ``data_size`` micro-batches ``rank`` gets."""
        shape, at = self.shape(world_size), self.coordinates(rank, world_size)
        return at[REPLICATE] * shape[DATA_SHARD] + at[DATA_SHARD]

    def list_ranks(self, data_coordinate: int, world_size: int) -> list[int]:
        """Return the ranks that get the micro-batch of ``data_coordinate``."""
        return [rank for rank in range(world_size) if self.data_coordinate(rank, world_size) == data_coordinate]

    def rank_at_start(self, axis: str, rank: int, world_size: int) -> int:
        """Return the rank at coordinate 0 of ``axis`` whose other coordinates are those of ``rank``."""
        shape = self.shape(world_size)
        place = AXES.index(DATA_SHARD if axis == EXPERT else axis)
        stride = math.prod(shape[inner] for inner in AXES[place + 1 :])
        return rank - self.coordinates(rank, world_size)[axis] * stride

    def describe_rank(self, rank: int, world_size: int) -> str:
        """Return the coordinates of ``rank``, as ``dp_shard 1, tp 0``; '' on the default mesh."""
        if not self.sizes:
            return ""
        shape, at = self.shape(world_size), self.coordinates(rank, world_size)
        return ", ".join(f"{axis} {at[axis]}" for axis in at if shape.get(axis, 1) > 1 or axis in self.axes)


def find_chunk(span: range, parts: int, position: int) -> range:
    """Return the part at ``position`` of a dimension that is split as by torch.chunk: the last parts are shorter."""
    chunk = -(-len(span) // parts)
    return span[position * chunk : (position + 1) * chunk]


DEFAULT_MESH = Mesh()
