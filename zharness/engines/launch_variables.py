"""Set the environment variables by which torchrun tells a rank who it is, for packages that read them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def launch_variables() -> Iterator[None]:
    """Set the variables inside the block; without them accelerate trains each rank alone.

    Without OMP_NUM_THREADS accelerate would also change the number of threads of this process.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    values: Mapping[str, int] = {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), rank),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), size),
        "OMP_NUM_THREADS": torch.get_num_threads(),
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
