"""Raise one rank's error on all ranks, so that no rank hangs in a collective that the failed rank never runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from zharness.comm import Comm, all_gather_objects
from zharness.errors import ConfigError

T = TypeVar("T")


def require_same_on_all_ranks(
    comm: Comm, device: torch.device, attempt: Callable[[], T], collect_facts: Callable[[T], Mapping[str, str]]
) -> T:
    """Run ``attempt``, and return its result if it succeeded on every rank with the same facts. This is a collective.

    ``collect_facts`` returns the facts about the result that the ranks compare, in collectives on ``device``. If
    ``attempt`` raised the same error on all ranks, raises that error. If the ranks differ, raises ConfigError on all
    ranks with the first difference.
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
