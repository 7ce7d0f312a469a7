"""Load this rank's micro-batches from the data set that is passed to ``initialize``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from zharness.comm import Comm
from zharness.errors import ConfigError


class MicroBatchLoader(DataLoader[Any]):
    """A torch DataLoader over this rank's samples of ``dataset``, in a new order at each iteration (epoch).

    Epochs count from 0, or from the number that was passed to ``set_epoch``. The samples are those of torch's
    DistributedSampler with seed 0, and each item is one micro-batch. If the world size does not divide the length of
    the data set, the sampler repeats its first samples, or drops the last ones if ``drop_last`` is True.
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
                f"training_data is a {type(dataset).__name__} without length, which cannot be divided among the ranks; "
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
        """Set the number of the next epoch, for example when training continues after ``load_checkpoint``."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._rank_sampler.set_epoch(self._epoch)
        self._epoch += 1
        return super().__iter__()
