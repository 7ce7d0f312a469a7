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
_DEPRECATED_COLLECTIVE = r"`torch\.distributed\.\w+` is deprecated"


class DeepSpeedGlobalState:
    """What DeepSpeed sets for the whole process and ``engine.destroy()`` leaves: its own torch.nn.functional.linear at
    stage 3, and that torch_autocast is on, after which every later engine scales and communicates as if it were.

    What was there before the first engine is put back, the function by the engine that is closed last and autocast by
    the last of those that ask for it (``autocast``), whichever was built first: one that lives on computes and
    communicates as it asked to. An engine that is forgotten and never closed counts no more, but what was there before
    it is not forgotten.
    """

    _open_engines: ClassVar[WeakSet[DeepSpeedGlobalState]] = WeakSet()
    _originals: ClassVar[tuple[Callable[..., Any], Any, Any] | None] = None  # linear, and the two flags of autocast

    def __init__(self, autocast: bool) -> None:
        self._uses_autocast = autocast
        self._autocast_module: Any = importlib.import_module("deepspeed.runtime.torch_autocast")
        if DeepSpeedGlobalState._originals is None:
            flags = (self._autocast_module.TORCH_AUTOCAST_INITIALIZED, self._autocast_module.TORCH_AUTOCAST_DTYPE)
            DeepSpeedGlobalState._originals = (torch.nn.functional.linear, *flags)
        DeepSpeedGlobalState._open_engines.add(self)

    def restore(self) -> None:
        """Put back what was there before, unless another engine that is open needs it; a second call does nothing."""
        DeepSpeedGlobalState._open_engines.discard(self)
        if DeepSpeedGlobalState._originals is None:
            return
        linear, *flags = DeepSpeedGlobalState._originals
        if not any(other._uses_autocast for other in DeepSpeedGlobalState._open_engines):
            self._autocast_module.TORCH_AUTOCAST_INITIALIZED, self._autocast_module.TORCH_AUTOCAST_DTYPE = flags
        if not DeepSpeedGlobalState._open_engines:
            torch.nn.functional.linear = linear
            DeepSpeedGlobalState._originals = None


def prepare_deepspeed(device_type: str) -> Any:
    """The deepspeed module, with the process made ready for deepspeed.initialize on ``device_type``."""
    deepspeed = import_deepspeed(device_type)
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


def import_deepspeed(device_type: str) -> Any:
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
    warnings.filterwarnings("ignore", category=FutureWarning, message=_DEPRECATED_COLLECTIVE)
    return deepspeed
