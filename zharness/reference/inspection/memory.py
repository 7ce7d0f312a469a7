"""Count the bytes of tensors on a rank, and the current and peak bytes of unsharded parameters at stage 3."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from zharness import torch_private as private


def storage_bytes(values: Iterable[Any]) -> int:
    """Return the storage bytes of the tensors among ``values``, counting a storage that several tensors share once."""
    storages = (value.untyped_storage() for value in values if isinstance(value, Tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def storage_bytes_by_dtype(values: Iterable[Any]) -> dict[str, int]:
    """Return the storage bytes of the tensors among ``values`` for each name of a dtype: ``{"bfloat16": 1024}``."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    names = sorted({str(tensor.dtype) for tensor in tensors})
    return {n.removeprefix("torch."): storage_bytes(t for t in tensors if str(t.dtype) == n) for n in names}


class UnshardedMemoryTracker:
    """Counts the bytes of all unsharded storages that exist on this rank, and records their peak.

    The tracker has only weak references, so tracking a tensor does not keep its memory allocated.
    """

    def __init__(self) -> None:
        self._live_storages: dict[int, private.WeakStorage] = {}  # by address
        self._upper_bound_bytes = 0  # the bytes of _live_storages; some of them may have been freed since
        self._prefetched_bytes = 0
        self.peak = 0

    def add(self, tensor: Tensor) -> private.WeakStorage:
        """Track the storage of ``tensor`` until it is freed, and return a weak reference to that storage."""
        storage = private.WeakStorage(tensor)
        if storage.address() not in self._live_storages:
            self._live_storages[storage.address()] = storage
            self._upper_bound_bytes += storage.nbytes
        self._update_peak()
        return storage

    def set_prefetched_bytes(self, nbytes: int) -> None:
        """Set the number of bytes that the prefetched bucket takes now."""
        self._prefetched_bytes = nbytes
        self._update_peak()

    def _update_peak(self) -> None:
        """Update the peak; the storages are examined only if their upper bound exceeds the recorded peak."""
        if self._prefetched_bytes + self._upper_bound_bytes > self.peak:
            self.peak = max(self.peak, self.live_bytes())

    def live_bytes(self) -> int:
        """Return the bytes of the tracked storages that exist now, including those of the prefetched bucket."""
        expired = private.are_storages_expired(self._live_storages)
        if any(expired):
            known = zip(self._live_storages.items(), expired, strict=True)
            self._live_storages = {address: storage for (address, storage), is_expired in known if not is_expired}
            self._upper_bound_bytes = sum(storage.nbytes for storage in self._live_storages.values())
        return self._prefetched_bytes + self._upper_bound_bytes
