"""Raise an error of one rank on all ranks during a save or load, so that no rank hangs in the next collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zharness.comm import Comm, all_gather_objects, is_true_on_any_rank
from zharness.errors import CheckpointError, ZHarnessError


@contextmanager
def raise_on_all_ranks(comm: Comm) -> Iterator[None]:
    """Raise CheckpointError on every rank, with the messages of all failed ranks, if the block fails on any rank.

    This is a collective. The block itself must not run a collective, because a rank that has failed would not take part
    in that collective.
    """
    try:
        yield
    except Exception as error:
        has_message = isinstance(error, ZHarnessError)
        _raise_if_any_failed(str(error) if has_message else f"{type(error).__name__}: {error}", comm)
        raise
    _raise_if_any_failed("", comm)


def _raise_if_any_failed(message: str, comm: Comm) -> None:
    """Raise CheckpointError if any rank passes a ``message`` that is not empty. This is a collective.

    The ranks exchange one byte, and the messages only if a rank has one.
    """
    if not is_true_on_any_rank(bool(message), comm):
        return
    ranks_by_message: dict[str, list[int]] = {}
    for rank, text in enumerate(all_gather_objects(message, comm)):
        if text:
            ranks_by_message.setdefault(text, []).append(rank)
    raise CheckpointError(
        "; ".join(f"{text} (rank {', '.join(map(str, ranks))})" for text, ranks in ranks_by_message.items())
    ) from None
