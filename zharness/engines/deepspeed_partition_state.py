"""Choose the states of DeepSpeed's optimizer that can be read, from the partitions and states of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from zharness.errors import EngineContractError

T = TypeVar("T")


@dataclass(frozen=True)
class PartitionState:
    """The number of elements of a rank's partition, and of each state (by key) that the rank's optimizer has for it.

    ``is_padding`` says that no parameter has an element in the partition.
    """

    rank: int
    elements: int
    is_padding: bool
    states: Mapping[str, int]


def choose_readable_keys(partitions: Sequence[PartitionState]) -> set[str]:
    """Return the keys of states that have as many elements as the partition on every rank.

    Muon's momentum has the elements of all matrices that overlap a partition. On some ranks their number may equal, by
    chance, the number of elements of the partition, although the elements are different ones. So the numbers have to be
    equal on every rank. Raises EngineContractError if a rank with elements of parameters lacks a state that another
    rank has.
    """
    keys = set[str]().union(*(partition.states for partition in partitions))
    for key in sorted(keys):
        lacking = [each.rank for each in partitions if not each.is_padding and key not in each.states]
        if lacking:
            having = [each.rank for each in partitions if key in each.states]
            raise EngineContractError(
                f"DeepSpeed's optimizer has the state {key} on ranks {having}, and none on ranks {lacking}, whose "
                "partitions have elements of parameters, too"
            )
    return {key for key in keys if all(each.states.get(key) == each.elements for each in partitions)}


def gather_objects(own: T, group: Any) -> list[T]:
    """Return the objects ``own`` of all ranks of ``group``. This is a collective."""
    views: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(views, own, group=group)
    return views
