"""Prepare a process for DeepSpeed, and restore the global state that DeepSpeed changes.

DeepSpeed is imported by ``import_deepspeed``, not with this module.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist

from zharness.engines.deepspeed_gathers import await_all_gathers
from zharness.engines.deepspeed_operators import SHM_OPERATOR, SHM_VARIABLE, build_operator
from zharness.errors import EngineContractError, MissingEngine
from zharness.world.current_rank import is_rank

# torch 2.13 deprecates the collectives that DeepSpeed calls, and warns once per call site and rank.
_DEPRECATED_COLLECTIVE = r"`torch\.distributed\.\w+` is deprecated"

_AUTOCAST_FLAGS = ("TORCH_AUTOCAST_INITIALIZED", "TORCH_AUTOCAST_DTYPE")

# Globals of deepspeed.utils.groups: the grid of a pipeline or of tensor parallelism, from which all engines take their
# groups, the group of hpZ, and dictionaries of the groups of experts and of the ranks in these groups.
_GRID = "mpu"
_HPZ_GROUP = "_ZERO_PARAM_INTRA_PARALLEL_GROUP"
_EXPERT_GROUPS = ("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP")
_SEQUENCE_GROUPS = ("_SEQUENCE_PARALLEL_GROUP", "_SEQUENCE_DATA_PARALLEL_GROUP")
_EXPERT_RANKS = ("_EXPERT_PARALLEL_GROUP_RANKS", "_EXPERT_DATA_PARALLEL_GROUP_RANKS")


class DeepSpeedGlobalState:
    """The process-wide state that a DeepSpeed engine changes and ``engine.destroy()`` does not restore.

    The state has four parts:

    - ``torch.nn.functional.linear``, which DeepSpeed replaces at stage 3;
    - the process groups of hpZ, of experts and of sequences, which later engines would use although they did not ask
      for them;
    - the grid of a pipeline (``deepspeed.utils.groups.mpu``), which later engines would use, too;
    - the flags of torch_autocast, which later engines would read.

    The original values are saved before the first engine is built. The last engine to close restores the function and
    destroys the groups. The last engine with ``autocast`` to close restores the flags, and the last engine with a
    ``grid`` restores the grid. So open engines keep the values that they were built with. An engine that is
    garbage-collected without being closed no longer counts as open.
    """

    _open_engines: ClassVar[WeakSet[DeepSpeedGlobalState]] = WeakSet()
    # the original linear, autocast flags and grid
    _originals: ClassVar[tuple[Callable[..., Any], Mapping[str, Any], Any] | None] = None

    def __init__(self, autocast: bool) -> None:
        self.grid: Any = None  # the engine's grid, which the engine sets after it is built
        self._uses_autocast = autocast
        self._autocast_module = import_autocast_module()
        self._groups_module: Any = importlib.import_module("deepspeed.utils.groups")
        if DeepSpeedGlobalState._originals is None:
            # Releases before 0.17.2 have no such module, and releases before 0.18.0 have only the first flag.
            module = self._autocast_module
            flags = {name: getattr(module, name) for name in _AUTOCAST_FLAGS if hasattr(module, name)}
            grid = getattr(self._groups_module, _GRID)
            DeepSpeedGlobalState._originals = (torch.nn.functional.linear, flags, grid)
        DeepSpeedGlobalState._open_engines.add(self)

    def restore(self) -> None:
        """Restore the original values, except those that another open engine needs. A second call does nothing."""
        DeepSpeedGlobalState._open_engines.discard(self)
        if DeepSpeedGlobalState._originals is None:
            return
        linear, flags, grid = DeepSpeedGlobalState._originals
        open_grids = (other.grid for other in DeepSpeedGlobalState._open_engines if other.grid is not None)
        setattr(self._groups_module, _GRID, next(open_grids, grid))
        if not any(other._uses_autocast for other in DeepSpeedGlobalState._open_engines):
            for name, value in flags.items():
                setattr(self._autocast_module, name, value)
        if not DeepSpeedGlobalState._open_engines:
            torch.nn.functional.linear = linear
            DeepSpeedGlobalState._originals = None
            destroy_groups("deepspeed.utils.groups", (_HPZ_GROUP,))
            destroy_expert_groups()
            destroy_groups("deepspeed.runtime.sequence_parallel.parallel_state_sp", _SEQUENCE_GROUPS)


def destroy_pipeline_groups(module: Any) -> None:
    """Destroy the process groups that a PipelineModule made for itself, for its grid and for tied layers."""
    owned = [*vars(module).values(), *vars(module.mpu()).values()]
    owned += [tied["group"] for tied in module.tied_comms.values()]
    for group in owned:
        if isinstance(group, dist.ProcessGroup):
            dist.destroy_process_group(group)


def destroy_expert_groups() -> None:
    """Destroy the process groups of experts, if this process has any, and make DeepSpeed forget them."""
    groups = sys.modules.get("deepspeed.utils.groups")
    for known in (getattr(groups, name, {}) for name in _EXPERT_GROUPS):
        for group in known.values():
            dist.destroy_process_group(group)
        known.clear()
    for name in _EXPERT_RANKS:
        getattr(groups, name, {}).clear()


def destroy_groups(module_name: str, names: tuple[str, ...]) -> None:
    """Destroy the process groups in the globals ``names`` of a module of DeepSpeed, and make DeepSpeed forget them.

    A module that was not imported, and a global that is None, have no group.
    """
    module = sys.modules.get(module_name)
    for name in names:
        group = getattr(module, name, None)
        if group is not None:
            setattr(module, name, None)
            dist.destroy_process_group(group)


def import_autocast_module() -> ModuleType | None:
    """Import the module of DeepSpeed that has the flags of torch_autocast; return None for a release without it."""
    name = "deepspeed.runtime.torch_autocast"
    return importlib.import_module(name) if find_spec(name) is not None else None


def prepare_deepspeed(device_type: str) -> Any:
    """Import DeepSpeed, set the environment variables that it reads, and return the module.

    If the release does not await all all-gathers of ZeRO-3, this function makes it await them. DeepSpeed's own tests
    run without this change.

    Raises EngineContractError if DeepSpeed was imported for another device type.
    """
    deepspeed = import_deepspeed(device_type)
    local = os.environ.get("LOCAL_WORLD_SIZE", str(dist.get_world_size()))
    # DeepSpeed reads these variables instead of the process group: LOCAL_RANK in its argument check, LOCAL_SIZE in its
    # CPU accelerator. Each rank is a process, so the change is not visible elsewhere.
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank() % int(local)))
    os.environ["LOCAL_SIZE"] = local
    name = deepspeed.accelerator.get_accelerator().device_name()
    if name != device_type:
        raise EngineContractError(
            f"DeepSpeed was imported for {name}, but the model is on {device_type}; set DS_ACCELERATOR={device_type}"
        )
    await_all_gathers(deepspeed.__version__)
    return deepspeed


_shm_operators: list[Any] = []  # at most one, inherited by the ranks that a server forks


def get_shm_operator() -> Any:
    """Return DeepSpeed's shared-memory operator on a rank, if it is built; else None.

    A rank server must not initialize the operator, which knows one world size for the lifetime of a process.
    """
    return next(iter(_shm_operators), None) if is_rank() else None


def import_deepspeed(device_type: str) -> Any:
    """Import DeepSpeed and return the module; its shared-memory operator is built if ``ZHARNESS_DEEPSPEED_SHM=1``.

    Raises MissingEngine if DeepSpeed cannot be imported.
    """
    os.environ.setdefault("DS_ACCELERATOR", device_type)  # read at import; prepare_deepspeed checks it
    try:
        import deepspeed

        # Not `deepspeed.comm.torch`: that attribute is the torch package.
        backend: Any = importlib.import_module("deepspeed.comm.torch")
    except ImportError as error:
        raise MissingEngine(
            f"deepspeed does not import ({error}); install it with: pip install 'zharness[deepspeed]'"
        ) from error
    # init_distributed compiles a shared-memory all-reduce on first use. That takes half a minute, in which ranks race
    # for one build folder and time out. Without that all-reduce DeepSpeed uses torch.distributed, as on other devices.
    if backend.build_shm_op is not get_shm_operator:
        if os.environ.get(SHM_VARIABLE) == "1":
            _shm_operators[:] = [build_operator(SHM_OPERATOR, backend.build_shm_op)]
        backend.build_shm_op = get_shm_operator
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, message=_DEPRECATED_COLLECTIVE)
    return deepspeed


def name_last_place(error: BaseException) -> str:
    """Return the last place in DeepSpeed that ``error`` passed, as " at deepspeed/runtime/engine.py:10 in step".

    The text is empty if the error did not pass through DeepSpeed. An assertion of DeepSpeed often has no message.
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_globals.get("__name__", "").partition(".")[0] == "deepspeed":
            _, _, path = frame.f_code.co_filename.rpartition(f"{os.sep}deepspeed{os.sep}")
            return f" at deepspeed/{path}:{line} in {frame.f_code.co_name}"
    return ""
