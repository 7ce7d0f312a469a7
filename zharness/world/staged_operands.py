"""Prepare host tensors for gloo, and post-process the tensors that gloo has reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zharness.torch_private import read_premultiplied_factor
from zharness.world.staged_work import Exchange, flatten_to_bytes

Op = dist.ReduceOp
# gloo cannot reduce booleans.
REDUCED_AS = {torch.bool: torch.uint8}


def make_options(options_type: type, **values: Any) -> Any:
    """Return options of a collective with these values."""
    options = options_type()
    for name, value in values.items():
        setattr(options, name, value)
    return options


def start_all_reduces(gloo: Any, host: Sequence[Tensor], dtypes: Sequence[torch.dtype], op: Any, size: int) -> Exchange:
    """All-reduce the bytes of host tensors of ``dtypes`` over the ``size`` ranks of ``gloo``."""
    typed = [prepare_operand(flat, dtype, op, size) for flat, dtype in zip(host, dtypes, strict=True)]
    works = [
        gloo.allreduce([tensor], make_options(dist.AllreduceOptions, reduceOp=exchange_op(op, dtype)))
        for tensor, dtype in zip(typed, dtypes, strict=True)
        if tensor.numel()  # gloo divides by the number of elements
    ]
    return Exchange(works, lambda: [finish_reduction(tensor, op, size) for tensor in typed])


def read_op(opts: Any) -> Any:
    """Return the reduction in ``opts``; the default is SUM."""
    return Op(Op.SUM) if opts is None else opts.reduceOp


def pad(flat: Tensor, size: int) -> Tensor:
    """Return ``flat``, padded with zeros at its end to ``size`` elements."""
    return flat if flat.numel() == size else torch.cat([flat, flat.new_zeros(size - flat.numel())])


def exchange_op(op: Any, dtype: torch.dtype) -> Any:
    """Return the reduction that gloo runs for ``op``: SUM for the mean and for sums of scaled operands.

    A sum of booleans is their maximum, as in torch's NCCL backend.
    """
    if dtype is torch.bool and op == Op.SUM:
        return Op.MAX
    return Op.SUM if op == Op.AVG or op == Op.PREMUL_SUM else op


def prepare_operand(flat: Tensor, dtype: torch.dtype, op: Any, size: int) -> Tensor:
    """Return a host tensor of bytes as the operand of gloo; floats are scaled before the sum, as NCCL does."""
    if flat.is_sparse:
        return flat
    tensor = flat.view(REDUCED_AS.get(dtype, dtype))
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if op == Op.PREMUL_SUM:
        return tensor * read_premultiplied_factor(op)
    return tensor / size if op == Op.AVG and tensor.is_floating_point() else tensor


def finish_reduction(tensor: Tensor, op: Any, size: int) -> Tensor:
    """Return the bytes of a reduced host tensor; the mean of integers is rounded towards zero."""
    if op == Op.AVG and not tensor.is_floating_point():
        tensor = torch.div(tensor, size, rounding_mode="trunc")
    return flatten_to_bytes(tensor)


def count_bytes(tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return the bytes of each rank's part of ``tensor``; ``splits`` are rows, or equal parts if empty."""
    if not splits:
        return [tensor.nbytes // size] * size
    row = tensor.nbytes // len(tensor) if len(tensor) else 0
    return [row * split for split in splits]
