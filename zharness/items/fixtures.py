"""The fixtures of a test in ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zharness.items.inside import ROOM
from zharness.world.here import here, is_rank, site_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from zharness.comm import Collective, Comm


def announce(kind: Collective, full: Tensor) -> None:
    """Tell the server which collective comes next and where the test calls it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(os.sep.join(("zharness", "comm.py"))):
        frame = frame.f_back
    words = f"{kind.value} {str(full.dtype).removeprefix('torch.')}{list(full.shape)}"
    here().channel.announce(words, site_of(frame))


def make_comm() -> Comm:
    """The collectives of the default group, counted, and each announced before it runs."""
    from zharness.comm import Comm

    here()  # the clear error in a process that is no rank
    return Comm(observer=announce)


def make_device() -> torch.device:
    """The device of this rank."""
    from zharness.world.rank import rank_device

    return rank_device(here().rank, here().world_size) if is_rank() else rank_device(0, 1)


def make_shared(request: pytest.FixtureRequest) -> Path:
    """The directory that all ranks of one test share."""
    room = request.node.stash.get(ROOM, None)
    shared = room / "shared" if room is not None else Path(request.getfixturevalue("tmp_path"))
    shared.mkdir(mode=0o700, parents=True, exist_ok=True)
    return shared
