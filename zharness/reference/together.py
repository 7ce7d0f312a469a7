"""What ranks tell each other beside tensors: a failure of one is a failure of all, so nobody waits for it in vain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from zharness.comm import Comm
from zharness.errors import CheckpointError, ZHarnessError

T = TypeVar("T")


def exchange(value: T, comm: Comm) -> list[T]:
    """Every rank's ``value``, in rank order. Collective."""
    values: list[Any] = [None] * comm.world_size
    dist.all_gather_object(values, value, group=comm.group)
    return values


@contextmanager
def together(comm: Comm) -> Iterator[None]:
    """Where the block fails on any rank, raise CheckpointError on every rank, with the messages of all. Collective.

    The block itself runs no collective: a rank that failed in it would not take part.
    """
    try:
        yield
    except Exception as error:
        _settle(str(error) if isinstance(error, ZHarnessError) else f"{type(error).__name__}: {error}", comm)
        raise
    _settle("", comm)


def _settle(problem: str, comm: Comm) -> None:
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(exchange(problem, comm)):
        if text:
            ranks.setdefault(text, []).append(rank)
    if ranks:
        raise CheckpointError(
            "; ".join(f"{text} (rank {', '.join(map(str, where))})" for text, where in ranks.items())
        ) from None
