"""What DeepSpeed needs of a process, and leaves in it. Nothing of it is imported before ``imported`` is called."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist

from zharness.errors import EngineContractError, MissingEngine

# torch 2.13 renames the collectives that DeepSpeed calls, and says so once per call site and rank.
_RENAMED = r"`torch\.distributed\.\w+` is deprecated"


class Leftovers:
    """What DeepSpeed sets for the whole process and ``engine.destroy()`` leaves: its own torch.nn.functional.linear at
    stage 3, and that torch_autocast is on, after which every later engine scales and communicates as if it were.

    The function is put back by the engine that is closed last, whichever was built first: one that lives on computes
    with the kernels that it has had from the start. An engine that is forgotten and never closed counts no more.
    """

    _open: ClassVar[WeakSet[Leftovers]] = WeakSet()

    def __init__(self) -> None:
        self._linear: Callable[..., Any] = next(
            (other._linear for other in Leftovers._open), torch.nn.functional.linear
        )
        Leftovers._open.add(self)
        self._autocast: Any = importlib.import_module("deepspeed.runtime.torch_autocast")
        self._was = (self._autocast.TORCH_AUTOCAST_INITIALIZED, self._autocast.TORCH_AUTOCAST_DTYPE)

    def undo(self) -> None:
        """Put back what was there before."""
        Leftovers._open.discard(self)
        if not Leftovers._open and self._linear.__module__.partition(".")[0] != "deepspeed":
            torch.nn.functional.linear = self._linear
        self._autocast.TORCH_AUTOCAST_INITIALIZED, self._autocast.TORCH_AUTOCAST_DTYPE = self._was


def prepare(device_type: str) -> Any:
    """The deepspeed module, with the process made ready for deepspeed.initialize on ``device_type``."""
    deepspeed = imported(device_type)
    local = os.environ.get("LOCAL_WORLD_SIZE", str(dist.get_world_size()))
    # Read by DeepSpeed instead of the process group: the local rank by its argument check, the number of ranks on this
    # machine by its CPU accelerator. A rank is a process of its own, so nobody else sees them.
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank() % int(local)))
    os.environ["LOCAL_SIZE"] = local
    name = deepspeed.accelerator.get_accelerator().device_name()
    if name != device_type:
        raise EngineContractError(
            f"DeepSpeed was imported for {name}, the model lives on {device_type}; set DS_ACCELERATOR={device_type}"
        )
    return deepspeed


def imported(device_type: str) -> Any:
    """The deepspeed module, without the build that ranks would race for. Raises MissingEngine."""
    os.environ.setdefault("DS_ACCELERATOR", device_type)  # read at import; prepare names a decision for another device
    try:
        import deepspeed

        # By name: the attribute deepspeed.comm.torch is torch itself.
        backend: Any = importlib.import_module("deepspeed.comm.torch")
    except ImportError as missing:
        raise MissingEngine(
            f"deepspeed does not import ({missing}); install it with: pip install 'zharness[deepspeed]'"
        ) from missing
    # init_distributed compiles a shared-memory all-reduce on first use: half a minute in which ranks race for one build
    # folder and a deadline takes it for a hang. Without it DeepSpeed uses torch.distributed, as on every other device.
    backend.build_shm_op = lambda: None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, message=_RENAMED)
    return deepspeed
