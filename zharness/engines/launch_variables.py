"""Set the environment variables by which torchrun tells a rank who it is, for packages that read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

from zharness.device import local_device_index
from zharness.environment import set_variables


@contextmanager
def launch_variables() -> Iterator[None]:
    """Set the variables inside the block; without them accelerate trains each rank separately.

    Without OMP_NUM_THREADS accelerate would also change the number of threads of this process.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    values: Mapping[str, int] = {
        "RANK": rank,
        "LOCAL_RANK": local_device_index(rank),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), size),
        "OMP_NUM_THREADS": torch.get_num_threads(),
    }
    with set_variables({name: str(value) for name, value in values.items()}):
        yield
