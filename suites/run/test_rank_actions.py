"""Test the actions that several laws perform on a rank."""

import pytest
import torch.distributed as dist

from zharness.law_kit.rank_actions import shared_folder
from zharness.world import current_rank, exchange


@pytest.mark.world_size(2)
def test_the_folder_stays_for_the_other_ranks_if_a_rank_raises() -> None:
    mine = current_rank()
    try:
        with shared_folder() as folder:
            assert mine.rank == 1 or folder.is_relative_to(mine.scratch_dir)
            if mine.rank == 0:
                raise InterruptedError
            exchange(None)
            assert folder.is_dir()
    except InterruptedError:
        exchange(None)
        dist.barrier()  # rank 1 enters it at the end of its block
