"""Stand in for ``deepspeed.comm``: pass every call on to ``torch.distributed``."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from zharness.compat.deepspeed_engine.accelerator import get_accelerator


def init_distributed(dist_backend: str | None = None, *_: Any, **__: Any) -> None:
    """Initialize the default process group from the launcher's environment variables, unless it exists."""
    if not dist.is_initialized():
        dist.init_process_group(dist_backend or get_accelerator().communication_backend_name())


def is_initialized() -> bool:
    """Return whether the default process group exists."""
    return bool(dist.is_available() and dist.is_initialized())


def get_local_rank() -> int:
    """Return the number of this rank among the ranks of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    """Return the default process group."""
    return dist.group.WORLD


def inference_all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Any:
    """Sum ``tensor`` over the ranks, in place."""
    return dist.all_reduce(tensor, op=op, group=group)


def build_shm_op() -> None:
    """Build nothing: the reference engine has no shared-memory operator."""
