"""Who holds what: the row of owners that is a ZeRO stage, and the flat range of elements that is a rank's share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor, nn

from zharness.comm import Comm


class ShardPlacement(Enum):
    """Whether every rank holds all of something, or each rank its own shard of it."""

    REPLICATED = "whole"
    SHARDED = "sharded"


@dataclass(frozen=True)
class StagePlacements:
    """One ZeRO stage. Bytes per rank in fp32 with Adam, psi parameters: 8, 4 and 4 psi, each over N where sharded."""

    optimizer_state: ShardPlacement
    gradients: ShardPlacement
    parameters: ShardPlacement


STAGES: Mapping[int, StagePlacements] = MappingProxyType(
    {
        0: StagePlacements(ShardPlacement.REPLICATED, ShardPlacement.REPLICATED, ShardPlacement.REPLICATED),
        1: StagePlacements(ShardPlacement.SHARDED, ShardPlacement.REPLICATED, ShardPlacement.REPLICATED),
        2: StagePlacements(ShardPlacement.SHARDED, ShardPlacement.SHARDED, ShardPlacement.REPLICATED),
        3: StagePlacements(ShardPlacement.SHARDED, ShardPlacement.SHARDED, ShardPlacement.SHARDED),
    }
)


@dataclass(frozen=True)
class ShardLayout:
    """How ``n`` elements lie over N ranks: rank r owns flat elements r*k to (r+1)*k, with k = ceil(n/N).

    The last shards are shorter, or empty, when N does not divide n. Collectives want equal lengths, so whatever crosses
    the wire is padded to k elements per rank; the padding never reaches an optimizer. ``stride`` is how the original
    lay in memory: kernels sum in an order that depends on it, so a gathered copy lies the same way.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    world_size: int

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def shard_length(self) -> int:
        """Elements of one padded shard: k."""
        return -(-self.numel // self.world_size)

    def shard_bounds(self, rank: int) -> tuple[int, int]:
        """Start and stop of the elements that ``rank`` owns."""
        return min(rank * self.shard_length, self.numel), min((rank + 1) * self.shard_length, self.numel)

    def owned_numel(self, rank: int) -> int:
        """How many elements ``rank`` owns."""
        start, stop = self.shard_bounds(rank)
        return stop - start


@dataclass(frozen=True)
class ParamDtypes:
    """The dtypes of one parameter.

    As the model holds it and its gradient is made (``held``), as that gradient crosses the wire (``wire``), and as the
    optimizer holds its own copy, state and reduced gradient (``master``). ``gathered`` is how stage 3 gathers it inside
    a torch.autocast of that dtype, and None where that is as it is held.
    """

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    master_dtype: torch.dtype
    unshard_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class ModelParam:
    """One parameter of the user's model: its first name, the Parameter itself, its layout and its dtypes."""

    name: str
    parameter: nn.Parameter
    layout: ShardLayout
    dtypes: ParamDtypes

    @property
    def has_master(self) -> bool:
        """Whether the optimizer works on a copy of the parameter, in a dtype of its own."""
        return self.dtypes.master_dtype != self.dtypes.param_dtype

    @property
    def predivide_factor(self) -> int:
        """A power of two, at least the number of ranks where the wire is fp16: divided by it, finite gradients add up.

        So a step overflows where a rank's own gradient does, as in plain PyTorch, and not in the sum alone.
        """
        return 2 ** (self.layout.world_size - 1).bit_length() if self.dtypes.reduce_dtype == torch.float16 else 1

    def cast_for_reduce(self, grad: Tensor) -> Tensor:
        """A gradient as it crosses the wire."""
        return (grad / self.predivide_factor if self.predivide_factor > 1 else grad).to(self.dtypes.reduce_dtype)


def collect_model_params(
    module: nn.Module, world_size: int, dtypes: Mapping[nn.Parameter, ParamDtypes]
) -> dict[str, ModelParam]:
    """Every parameter once, by the name that ``named_parameters()`` gives it first."""
    return {name: ModelParam(name, p, _make_layout(p, world_size), dtypes[p]) for name, p in module.named_parameters()}


def _make_layout(parameter: nn.Parameter, world_size: int) -> ShardLayout:
    dense = torch.empty_like(parameter, device="meta")  # keeps a permuted stride, not one with gaps or overlaps
    return ShardLayout(parameter.shape, dense.stride(), world_size)


def pad_flat(values: Tensor, length: int) -> Tensor:
    """``values`` flat, with zeros behind up to ``length`` elements; a copy only where one is needed."""
    flat = values.reshape(-1)
    return flat if flat.numel() == length else torch.cat([flat, flat.new_zeros(length - flat.numel())])


def all_gather_rows(row: Tensor, comm: Comm) -> Tensor:
    """Every rank's ``row`` (1-D, as long on all of them): shape (N, length of a row). Collective."""
    rows = row.new_empty(comm.world_size, row.numel())
    if row.numel():
        comm.all_gather(rows.view(-1), row)
    return rows


def all_gather_full_tensor(shard: Tensor, layout: ShardLayout, comm: Comm) -> Tensor:
    """The full tensor, from every rank's shard (padded or not). Collective."""
    full = shard.new_empty(layout.shard_length * layout.world_size)
    if layout.numel:
        comm.all_gather(full, pad_flat(shard, layout.shard_length).contiguous())
    return full[: layout.numel].view(layout.shape)
