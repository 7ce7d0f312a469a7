"""Count the bytes of tensors on a rank, and at stage 3 those of unsharded parameters, with their peak."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from zharness import torch_private as private


def storage_bytes(values: Iterable[Any]) -> int:
    """Sum the storage bytes of the tensors among ``values``; a storage that several tensors share counts once."""
    storages = (value.untyped_storage() for value in values if isinstance(value, Tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def storage_bytes_by_dtype(values: Iterable[Any]) -> dict[str, int]:
    """Sum the storage bytes of the tensors among ``values`` for each dtype, by name: ``{"bfloat16": 1024}``."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    names = sorted({str(tensor.dtype) for tensor in tensors})
    return {n.removeprefix("torch."): storage_bytes(t for t in tensors if str(t.dtype) == n) for n in names}


class UnshardedMemoryTracker:
    """Count the bytes of all unsharded storages that are alive, and record their peak.

    It keeps weak references only, so tracking a tensor does not keep it alive.
    """

    def __init__(self) -> None:
        self._live_storages: dict[int, private.WeakStorage] = {}  # by address
        self._upper_bound_bytes = 0  # the bytes of _live_storages; some of them may have been freed since
        self._prefetched_bytes = 0
        self.peak = 0

    def add(self, tensor: Tensor) -> private.WeakStorage:
        """Track the storage of ``tensor`` until it is freed. Returns a weak reference to it."""
        storage = private.WeakStorage(tensor)
        if storage.address() not in self._live_storages:
            self._live_storages[storage.address()] = storage
            self._upper_bound_bytes += storage.nbytes
        self._update_peak()
        return storage

    def set_prefetched_bytes(self, nbytes: int) -> None:
        """Set the number of bytes that the prefetcher holds now."""
        self._prefetched_bytes = nbytes
        self._update_peak()

    def _update_peak(self) -> None:
        """Raise the peak if needed; the storages are only examined when their upper bound exceeds it."""
        if self._prefetched_bytes + self._upper_bound_bytes > self.peak:
            self.peak = max(self.peak, self.live_bytes())

    def live_bytes(self) -> int:
        """Count the bytes of the storages that are alive, prefetched ones included."""
        expired = private.are_storages_expired(self._live_storages)
        if any(expired):
            known = zip(self._live_storages.items(), expired, strict=True)
            self._live_storages = {address: storage for (address, storage), is_expired in known if not is_expired}
            self._upper_bound_bytes = sum(storage.nbytes for storage in self._live_storages.values())
        return self._prefetched_bytes + self._upper_bound_bytes
