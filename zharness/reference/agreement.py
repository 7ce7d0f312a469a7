"""What every rank has to bring along alike, compared before anything is done with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from zharness.comm import Comm
from zharness.errors import ConfigError

T = TypeVar("T")
Facts = Mapping[str, str]


def together(comm: Comm, device: torch.device, attempt: Callable[[], T], facts: Callable[[T], Facts]) -> T:
    """What ``attempt`` returns, where it returned on every rank with the same ``facts``. Collective.

    Where it raised on all ranks alike, its error; else one ConfigError on all ranks, which names the first difference.
    So a rank that is refused never leaves the others waiting in the next collective.
    """
    failed: Exception | None = None
    try:
        value = attempt()
        told: Facts = facts(value)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks have to hear of it
        told, failed = {"outcome": f"{type(error).__name__}: {error}"}, error
    everyone = _exchange(comm, device, told)
    if any(other != everyone[0] for other in everyone):
        raise ConfigError(_difference(everyone)) from failed
    if failed is not None:
        raise failed
    return value


def _exchange(comm: Comm, device: torch.device, told: Facts) -> list[Facts]:
    """Every rank's facts, as JSON: bytes of a peer are data, and nothing of them is executed."""
    text = json.dumps(told, sort_keys=True).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    head = _gathered(comm, torch.tensor([digest, len(text)], device=device)).view(-1, 2).tolist()
    if all(other == head[0] for other in head):
        return [told]
    padded = text.ljust(max(length for _, length in head))
    tail = _gathered(comm, torch.tensor(list(padded), dtype=torch.uint8, device=device)).view(len(head), -1)
    return [json.loads(bytes(row)) for row in tail.tolist()]


def _gathered(comm: Comm, mine: Tensor) -> Tensor:
    return comm.all_gather(mine.new_empty(comm.world_size * mine.numel()), mine)


def _difference(everyone: list[Facts]) -> str:
    keys = sorted({key for facts in everyone for key in facts}, key=lambda key: (key != "outcome", key))
    key = next(key for key in keys if len({facts.get(key) for facts in everyone}) > 1)
    said: dict[str, list[int]] = {}
    for rank, facts in enumerate(everyone):
        said.setdefault(facts.get(key, "accepted" if key == "outcome" else "nothing of that name"), []).append(rank)
    parts = (f"{text} on rank {', '.join(map(str, ranks))}" for text, ranks in said.items())
    return f"the ranks differ in {key}: {'; '.join(parts)}; give every rank the same model, configuration and optimizer"
