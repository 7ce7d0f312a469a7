"""Implement the fixtures of tests on ranks: ``comm``, ``device``, ``shared_tmp_path``."""

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
    """Announce the collective that this rank enters next, with its dtype, its shape and the test's calling line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(os.sep.join(("zharness", "comm.py"))):
        frame = frame.f_back
    operation = f"{kind.value} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    current_rank().channel.announce(operation, format_call_site(frame))


def make_comm() -> Comm:
    """Return an object with the collectives of the default process group, for the fixture ``comm``.

    Each collective is counted, and announced through this rank's channel before it runs. Raises WorldError in a
    process that is not a rank.
    """
    from zharness.comm import Comm

    current_rank()  # raises here, with a clear message, rather than in the first collective
    return Comm(observer=announce_collective)


def make_device() -> torch.device:
    """Return the device of this rank; in pytest's own process, the device that a single rank would have."""
    from zharness.device import rank_device

    return rank_device(current_rank().rank if is_rank() else 0)


def make_shared_tmp_path(request: pytest.FixtureRequest) -> Path:
    """Return the directory that all ranks of one test share; in pytest's own process, the test's ``tmp_path``."""
    test_dir = request.node.stash.get(TEST_DIR, None)
    shared = test_dir / "shared" if test_dir is not None else Path(request.getfixturevalue("tmp_path"))
    shared.mkdir(mode=0o700, parents=True, exist_ok=True)
    return shared
