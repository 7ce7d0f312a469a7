"""The fixtures of a test in ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zharness.pytest_ranks.rank_protocol import TEST_DIR
from zharness.world.current_rank import current_rank, format_call_site, is_rank

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from zharness.comm import Collective, Comm


def announce_collective(kind: Collective, tensor: Tensor) -> None:
    """Tell the server which collective comes next and where the test calls it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(os.sep.join(("zharness", "comm.py"))):
        frame = frame.f_back
    words = f"{kind.value} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    current_rank().channel.announce(words, format_call_site(frame))


def make_comm() -> Comm:
    """The collectives of the default group, counted, and each announced before it runs."""
    from zharness.comm import Comm

    current_rank()  # the clear error in a process that is no rank
    return Comm(observer=announce_collective)


def make_device() -> torch.device:
    """The device of this rank."""
    from zharness.world.rank import rank_device

    return rank_device(current_rank().rank, current_rank().world_size) if is_rank() else rank_device(0, 1)


def make_shared_tmp_path(request: pytest.FixtureRequest) -> Path:
    """The directory that all ranks of one test share."""
    room = request.node.stash.get(TEST_DIR, None)
    shared = room / "shared" if room is not None else Path(request.getfixturevalue("tmp_path"))
    shared.mkdir(mode=0o700, parents=True, exist_ok=True)
    return shared
