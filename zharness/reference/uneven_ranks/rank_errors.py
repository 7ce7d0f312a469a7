"""What ranks tell each other beside tensors: a failure of one is a failure of all, so nobody waits for it in vain."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zharness.comm import Comm
from zharness.errors import CheckpointError, ConfigError, ZHarnessError

T = TypeVar("T")


def all_gather_objects(value: T, comm: Comm) -> list[T]:
    """Every rank's ``value``, in rank order. Collective."""
    values: list[Any] = [None] * comm.world_size
    dist.all_gather_object(values, value, group=comm.group)
    return values


@contextmanager
def raise_on_all_ranks(comm: Comm) -> Iterator[None]:
    """Where the block fails on any rank, raise CheckpointError on every rank, with the messages of all. Collective.

    The block itself runs no collective: a rank that failed in it would not take part.
    """
    try:
        yield
    except Exception as error:
        _raise_if_any_failed(
            str(error) if isinstance(error, ZHarnessError) else f"{type(error).__name__}: {error}", comm
        )
        raise
    _raise_if_any_failed("", comm)


def _raise_if_any_failed(message: str, comm: Comm) -> None:
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(all_gather_objects(message, comm)):
        if text:
            ranks.setdefault(text, []).append(rank)
    if ranks:
        raise CheckpointError(
            "; ".join(f"{text} (rank {', '.join(map(str, where))})" for text, where in ranks.items())
        ) from None


def require_same_on_all_ranks(
    comm: Comm, device: torch.device, attempt: Callable[[], T], collect_facts: Callable[[T], Mapping[str, str]]
) -> T:
    """What ``attempt`` returns, where it returned on every rank with the same ``facts``. Collective, from ``device``.

    Where it raised on all ranks alike, its error; else one ConfigError on all ranks, which names the first difference.
    """
    failed: Exception | None = None
    try:
        value = attempt()
        told = collect_facts(value)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks have to hear of it
        told, failed = {"outcome": f"{type(error).__name__}: {error}"}, error
    if not _is_same_on_all_ranks(told, comm, device):
        raise ConfigError(_describe_difference(all_gather_objects(dict(told), comm))) from failed
    if failed is not None:
        raise failed
    return value


def _is_same_on_all_ranks(facts: Mapping[str, str], comm: Comm, device: torch.device) -> bool:
    """Whether all ranks were ``told`` the same: by a digest, since to send objects takes several collectives."""
    digest = hashlib.sha256(repr(sorted(facts.items())).encode()).digest()
    mine = torch.tensor([*digest], dtype=torch.uint8, device=device)
    rows = comm.all_gather(mine.new_empty(comm.world_size * len(digest)), mine).view(comm.world_size, -1)
    return bool((rows == mine).all())


def _describe_difference(facts_by_rank: list[dict[str, str]]) -> str:
    keys = sorted({key for facts in facts_by_rank for key in facts}, key=lambda key: (key != "outcome", key))
    key = next(key for key in keys if len({facts.get(key) for facts in facts_by_rank}) > 1)
    said: dict[str, list[int]] = {}
    for rank, facts in enumerate(facts_by_rank):
        said.setdefault(facts.get(key, "accepted" if key == "outcome" else "nothing of that name"), []).append(rank)
    parts = (f"{text} on rank {', '.join(map(str, ranks))}" for text, ranks in said.items())
    return f"the ranks differ in {key}: {'; '.join(parts)}; give every rank the same model, configuration and optimizer"
