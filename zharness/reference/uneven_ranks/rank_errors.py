"""Raise one rank's error on all ranks, so that no rank hangs in a collective that the failed rank never runs."""

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
    """Return a list with every rank's ``value``, in rank order. This is a collective."""
    values: list[Any] = [None] * comm.world_size
    dist.all_gather_object(values, value, group=comm.group)
    return values


@contextmanager
def raise_on_all_ranks(comm: Comm) -> Iterator[None]:
    """Raise CheckpointError on every rank, with the messages of all ranks, if the block fails on any.

    This is a collective. The block itself must not run a collective, because a rank that has failed would not take part
    in it.
    """
    try:
        yield
    except Exception as error:
        has_message = isinstance(error, ZHarnessError)
        _raise_if_any_failed(str(error) if has_message else f"{type(error).__name__}: {error}", comm)
        raise
    _raise_if_any_failed("", comm)


def _raise_if_any_failed(message: str, comm: Comm) -> None:
    """Raise CheckpointError if any rank passes a ``message`` that is not empty. This is a collective."""
    ranks_by_message: dict[str, list[int]] = {}
    for rank, text in enumerate(all_gather_objects(message, comm)):
        if text:
            ranks_by_message.setdefault(text, []).append(rank)
    if ranks_by_message:
        raise CheckpointError(
            "; ".join(f"{text} (rank {', '.join(map(str, ranks))})" for text, ranks in ranks_by_message.items())
        ) from None


def require_same_on_all_ranks(
    comm: Comm, device: torch.device, attempt: Callable[[], T], collect_facts: Callable[[T], Mapping[str, str]]
) -> T:
    """Run ``attempt``, and return its result if it succeeded on every rank with the same facts. This is a collective.

    ``collect_facts`` returns facts about the result, which the ranks exchange from ``device``. If ``attempt`` raised
    the same error on all ranks, raises that error; otherwise raises ConfigError on all ranks, which names the first
    difference.
    """
    raised: Exception | None = None
    try:
        value = attempt()
        facts = collect_facts(value)
    except Exception as error:  # noqa: BLE001 - the other ranks must learn of any error, or they would hang
        facts, raised = {"outcome": f"{type(error).__name__}: {error}"}, error
    if not _is_same_on_all_ranks(facts, comm, device):
        raise ConfigError(_describe_difference(all_gather_objects(dict(facts), comm))) from raised
    if raised is not None:
        raise raised
    return value


def _is_same_on_all_ranks(facts: Mapping[str, str], comm: Comm, device: torch.device) -> bool:
    """Return whether all ranks have the same ``facts``. This is a collective.

    The ranks compare digests in one collective, because gathering the facts as objects would take several.
    """
    digest = hashlib.sha256(repr(sorted(facts.items())).encode()).digest()
    local = torch.tensor([*digest], dtype=torch.uint8, device=device)
    rows = comm.all_gather(local.new_empty(comm.world_size * len(digest)), local).view(comm.world_size, -1)
    return bool((rows == local).all())


def _describe_difference(facts_by_rank: list[dict[str, str]]) -> str:
    """Return a message about the first fact in which ranks differ, with its value on each rank.

    An error of ``attempt`` is reported before any other fact.
    """
    keys = sorted({key for facts in facts_by_rank for key in facts}, key=lambda key: (key != "outcome", key))
    key = next(key for key in keys if len({facts.get(key) for facts in facts_by_rank}) > 1)
    ranks_by_text: dict[str, list[int]] = {}
    for rank, facts in enumerate(facts_by_rank):
        text = facts.get(key, "accepted" if key == "outcome" else "nothing of that name")
        ranks_by_text.setdefault(text, []).append(rank)
    parts = (f"{text} on rank {', '.join(map(str, ranks))}" for text, ranks in ranks_by_text.items())
    return f"the ranks differ in {key}: {'; '.join(parts)}; give every rank the same model, configuration and optimizer"
