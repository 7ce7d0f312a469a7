"""Define which tensors each ZeRO stage shards, and which range of a parameter's elements each rank owns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor, nn

from zharness.comm import Comm, join


class ShardPlacement(Enum):
    """The placement of a tensor: a full copy on every rank, or one shard on each rank."""

    REPLICATED = "whole"
    SHARDED = "sharded"


@dataclass(frozen=True)
class StagePlacements:
    """The placements of optimizer state, gradients and parameters at one ZeRO stage.

    With Adam in fp32, a model of psi parameters needs 8 psi bytes of optimizer state, 4 psi of gradients and 4 psi of
    parameters on each rank, divided by the world size N where they are sharded.
    """

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
    """The shards of a parameter with n elements on N ranks: rank r owns flat elements r*k to (r+1)*k - 1.

    Here k = ceil(n/N), so the last shards are shorter, or empty, if N does not divide n. Collectives need equal
    lengths, so shards are padded to k elements before they are sent; the padding is never passed to an optimizer.
    ``stride`` has the strides of the original parameter. Unsharded tensors get the same strides, because kernels sum in
    an order that depends on them.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    world_size: int

    @cached_property
    def numel(self) -> int:
        """The number of elements of the full parameter, n."""
        return math.prod(self.shape)

    @cached_property
    def shard_length(self) -> int:
        """The number of elements of one padded shard, k."""
        return -(-self.numel // self.world_size)

    def shard_bounds(self, rank: int) -> tuple[int, int]:
        """Return the start and the stop of the range of flat elements that ``rank`` owns."""
        return min(rank * self.shard_length, self.numel), min((rank + 1) * self.shard_length, self.numel)

    def owned_numel(self, rank: int) -> int:
        """Return the number of elements that ``rank`` owns, without padding."""
        start, stop = self.shard_bounds(rank)
        return stop - start


@dataclass(frozen=True)
class ParamDtypes:
    """The dtypes in which one parameter, its gradient and its optimizer state are kept and sent.

    ``param_dtype`` is that of the parameter in the model and of its local gradient. The gradient is reduced in
    ``reduce_dtype``. ``master_dtype`` is that of the master weight, the optimizer state and the reduced gradient. Stage
    3 all-gathers the parameter in ``unshard_dtype``, the dtype of torch.autocast; None means ``param_dtype``.
    """

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    master_dtype: torch.dtype
    unshard_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class ModelParam:
    """One parameter of the user's model: its first name, layout, dtypes, and how many ranks' gradients are summed."""

    name: str
    parameter: nn.Parameter
    layout: ShardLayout
    dtypes: ParamDtypes
    addends: int

    @property
    def has_master(self) -> bool:
        """True if the optimizer updates a master weight, a copy of the parameter in another dtype."""
        return self.dtypes.master_dtype != self.dtypes.param_dtype

    @property
    def predivide_factor(self) -> int:
        """The divisor of a gradient before it is reduced: a power of two >= ``addends`` for fp16, otherwise 1.

        The division keeps the sum of finite gradients finite, so a step overflows only where plain PyTorch's step does.
        """
        return 2 ** (self.addends - 1).bit_length() if self.dtypes.reduce_dtype == torch.float16 else 1

    def cast_for_reduce(self, grad: Tensor) -> Tensor:
        """Return a gradient divided by ``predivide_factor`` and cast to the reduce dtype."""
        return (grad / self.predivide_factor if self.predivide_factor > 1 else grad).to(self.dtypes.reduce_dtype)


def collect_model_params(
    module: nn.Module, shards: Comm, dtypes: Mapping[nn.Parameter, ParamDtypes]
) -> dict[str, ModelParam]:
    """Return every parameter of ``module`` once, by the first name that ``named_parameters()`` gives it."""
    size, addends, params = shards.world_size, shards.all_ranks.world_size, module.named_parameters()
    return {name: ModelParam(name, p, _make_layout(p, size), dtypes[p], addends) for name, p in params}


def _make_layout(parameter: nn.Parameter, world_size: int) -> ShardLayout:
    """Return the layout of ``parameter`` over ``world_size`` ranks."""
    dense = torch.empty_like(parameter, device="meta")  # keeps permuted strides, but no gaps or overlaps
    return ShardLayout(parameter.shape, dense.stride(), world_size)


def pad_flat(values: Tensor, length: int) -> Tensor:
    """Return ``values`` flattened and padded with zeros to ``length`` elements, without a copy if possible."""
    flat = values.reshape(-1)
    return flat if flat.numel() == length else join([flat, flat.new_zeros(length - flat.numel())])


def all_gather_rows(row: Tensor, comm: Comm) -> Tensor:
    """All-gather every rank's 1-D ``row`` of one common length to shape (N, length). This is a collective."""
    rows = row.new_empty(comm.world_size, row.numel())
    if row.numel():
        comm.all_gather(rows.view(-1), row)
    return rows


def all_gather_full_tensor(shard: Tensor, layout: ShardLayout, comm: Comm) -> Tensor:
    """All-gather and return the full tensor from every rank's ``shard``, padded or not. This is a collective."""
    full = shard.new_empty(layout.shard_length * layout.world_size)
    if layout.numel:
        comm.all_gather(full, pad_flat(shard, layout.shard_length).contiguous())
    return full[: layout.numel].view(layout.shape)
