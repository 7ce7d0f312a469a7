"""The client's data set as micro-batches of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from zharness.comm import Comm
from zharness.errors import ConfigError


class MicroBatchLoader(DataLoader[Any]):
    """A torch DataLoader over this rank's share of ``dataset``; each iteration is a new epoch in a new order.

    The epochs count from 0, or from what ``set_epoch`` says.

    The shares are those of torch's DistributedSampler with seed 0, one micro-batch per item. Where the ranks do not
    divide the data set, the sampler repeats its first samples, or drops its last ones with ``drop_last``.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        micro_batch_size: int,
        comm: Comm,
        collate_fn: Callable[..., Any] | None,
        drop_last: bool,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ConfigError(
                f"training_data is a {type(dataset).__name__} without length, which cannot be dealt out to the ranks; "
                "let each rank build a torch DataLoader over its own part"
            )
        self._rank_sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, comm.world_size, comm.rank, drop_last=drop_last
        )
        self._epoch = 0
        super().__init__(
            dataset, micro_batch_size, sampler=self._rank_sampler, collate_fn=collate_fn, drop_last=drop_last
        )

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next iteration is, as of torch's sampler: to go on after ``load_checkpoint``."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._rank_sampler.set_epoch(self._epoch)
        self._epoch += 1
        return super().__iter__()
