"""Define how mutants replace an engine's collectives, and how they delay a stream of a GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from zharness.comm import Comm
from zharness.device import Poison
from zharness.engines.reference import ReferenceEngine
from zharness.world.staged_group import BACKEND, register_staged_backend

SLEEP_CYCLES = 20_000_000  # about 10 ms of a GPU


def replace_comm(engine: ReferenceEngine, broken: type[Comm]) -> None:
    """Make ``broken`` run the engine's collectives, in a group of the backend ``staged``. This is a collective."""
    register_staged_backend(Poison.ON)
    comm = engine.engine.comm
    comm.__class__ = broken
    comm.group = dist.new_group(backend=BACKEND)
    comm._backend, comm._gloo = dist.Backend(BACKEND), False


def delay_current_stream() -> None:
    """Make the current stream idle for ``SLEEP_CYCLES`` before its next work."""
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]


def warm_stream(like: Tensor) -> torch.cuda.Stream:
    """Return a new stream whose memory pool has room for copies of ``like``, and wait for all earlier work.

    Allocating new memory from the driver waits for every stream, which would hide the wait that the mutant leaves out.
    """
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for each in (torch.cuda.current_stream(), stream):
        with torch.cuda.stream(each):
            room = [torch.empty_like(like) for _ in range(8)]
            del room
    torch.cuda.synchronize()
    return stream
