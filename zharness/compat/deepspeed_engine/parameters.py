"""Stand in for DeepSpeed's sharded Parameters: the attributes ``ds_*``, ``zero.Init`` and ``GatheredParameters``.

A Parameter belongs to at most one owner, which can all-gather it: an engine at stage 3, or an ``Init`` block whose
model no engine has yet. The owner is stored at the Parameter, as DeepSpeed stores its own attributes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import Enum
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from zharness.comm import Comm
from zharness.compat.deepspeed_engine.communication import init_distributed
from zharness.compat.deepspeed_engine.configuration import half_dtype, read_config
from zharness.reference.engine import Engine
from zharness.reference.inspection.coalesced_collectives import broadcast_tensors
from zharness.reference.inspection.recorded_reads import find_parameter_of_read
from zharness.reference.layout import ModelParam, ShardLayout, all_gather_full_tensor

_OWNER = "ds_owner"
SANITY_CHECKS = "ds_enable_sanity_checks"  # DeepSpeed's own name of the attribute
_ATTRIBUTES = (_OWNER, "ds_id", "ds_shape", "ds_numel", "ds_tensor", "ds_status", "ds_persist", SANITY_CHECKS)
_ids = itertools.count()
# The Parameters of engines, which an ``Init`` block leaves alone although they were made inside it.
ENGINE_PARAMETERS = WeakTensorKeyDictionary()


class ZeroParamStatus(Enum):
    """Whether the full Parameter is in this rank's memory."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Owner(Protocol):
    """The object that shards a Parameter and can all-gather it."""

    def gather(self, parameters: Sequence[nn.Parameter], modifier_rank: int | None) -> AbstractContextManager[None]:
        """Make ``parameters`` full inside the block; at its end keep the edits of ``modifier_rank``, or none.

        Both ends of the block are collectives.
        """


def mark_sharded(parameter: nn.Parameter, owner: Owner, layout: ShardLayout, shard: Tensor) -> None:
    """Give ``parameter`` the attributes of DeepSpeed's sharded Parameters; ``shard`` has this rank's elements."""
    parameter.ds_owner = owner  # type: ignore[attr-defined]
    parameter.ds_id = next(_ids)  # type: ignore[attr-defined]
    parameter.ds_shape = layout.shape  # type: ignore[attr-defined]
    parameter.ds_numel = layout.numel  # type: ignore[attr-defined]
    parameter.ds_tensor = shard  # type: ignore[attr-defined]
    parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]
    parameter.ds_persist = False  # type: ignore[attr-defined]  # no parameter stays full between uses


def unmark(parameter: nn.Parameter) -> None:
    """Remove the attributes that ``mark_sharded`` set."""
    for name in _ATTRIBUTES:
        parameter.__dict__.pop(name, None)


def find_owner(parameter: Any) -> Any:
    """Return the owner of ``parameter``, or None for a tensor that is not sharded."""
    return getattr(parameter, _OWNER, None)


def find_parameter(value: Any) -> Any:
    """Return the Parameter of which ``value`` is a read at stage 3, and any other object unchanged.

    At stage 3 ``model.weight`` is a gathered tensor, not the Parameter. A read of an engine that has ended is returned
    unchanged.
    """
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return value
    parameter = find_parameter_of_read(value)
    return value if find_owner(parameter) is None else parameter


class EngineOwner:
    """Gathers the Parameters of one engine at stage 3."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def mark(self, params: Iterable[ModelParam]) -> None:
        """Mark the Parameters of the engine."""
        for param in params:
            shard = param.parameter.detach()[: param.layout.owned_numel(self._engine.comm.rank)]
            mark_sharded(param.parameter, self, param.layout, shard)

    @contextmanager
    def gather(self, parameters: Sequence[nn.Parameter], modifier_rank: int | None) -> Iterator[None]:
        """Make ``parameters`` full inside the block, with ``Engine.gathered``."""
        with self._engine.gathered(parameters, modifier_rank or 0) as full:
            shards = [parameter.data for parameter in parameters]
            values = list(full.values())
            for parameter, value in zip(parameters, values, strict=True):
                parameter.data = value.clone() if modifier_rank is None else value
            try:
                with set_status(parameters, ZeroParamStatus.AVAILABLE):
                    yield
            finally:
                for parameter, shard, value in zip(parameters, shards, values, strict=True):
                    edited, parameter.data = parameter.data, shard
                    if modifier_rank is not None and edited.data_ptr() != value.data_ptr():
                        value.copy_(edited)


class InitOwner:
    """Shards the Parameters of a model that no engine has yet."""

    def __init__(self) -> None:
        init_distributed()
        self._comm = Comm()

    @torch.no_grad()
    def shard(self, parameter: nn.Parameter) -> None:
        """Broadcast rank 0's values of a full Parameter and keep this rank's elements. This is a collective."""
        broadcast_tensors([parameter.detach()], self._comm)
        layout = ShardLayout(parameter.shape, parameter.stride(), self._comm.world_size)
        start, stop = layout.shard_bounds(self._comm.rank)
        mark_sharded(parameter, self, layout, parameter.detach().reshape(-1)[start:stop].clone())
        parameter.data = parameter.detach().new_empty(0)

    @torch.no_grad()
    def unshard(self, parameter: nn.Parameter) -> None:
        """Make ``parameter`` full. This is a collective."""
        layout = ShardLayout(parameter.ds_shape, (), self._comm.world_size)  # type: ignore[attr-defined]
        parameter.data = all_gather_full_tensor(parameter.ds_tensor, layout, self._comm)  # type: ignore[attr-defined]

    @contextmanager
    def gather(self, parameters: Sequence[nn.Parameter], modifier_rank: int | None) -> Iterator[None]:
        """Make ``parameters`` full inside the block."""
        for parameter in parameters:
            self.unshard(parameter)
        try:
            with set_status(parameters, ZeroParamStatus.AVAILABLE):
                yield
        finally:
            for parameter in parameters:
                self._end_gather(parameter, modifier_rank)

    @torch.no_grad()
    def _end_gather(self, parameter: nn.Parameter, modifier_rank: int | None) -> None:
        """Keep the edits of ``modifier_rank`` (a collective), and this rank's elements only."""
        if modifier_rank is not None:
            broadcast_tensors([parameter.detach()], self._comm, modifier_rank)
            shard: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
            start = self._comm.rank * -(-parameter.numel() // self._comm.world_size)
            shard.copy_(parameter.detach().reshape(-1)[start : start + shard.numel()])
        parameter.data = parameter.detach().new_empty(0)


@contextmanager
def set_status(parameters: Sequence[nn.Parameter], status: ZeroParamStatus) -> Iterator[None]:
    """Set ``ds_status`` of ``parameters`` inside the block."""
    before = [parameter.ds_status for parameter in parameters]  # type: ignore[attr-defined]
    for parameter in parameters:
        parameter.ds_status = status  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for parameter, old in zip(parameters, before, strict=True):
            parameter.ds_status = old  # type: ignore[attr-defined]


class GatheredParameters:
    """Context manager that makes sharded Parameters full, and keeps the edits of rank ``modifier_rank``, or none.

    ``params`` is a Parameter or an iterable of Parameters. As in DeepSpeed, whatever is not sharded is ignored: a
    Parameter at stages 0 to 2, a buffer, any other object. Entering raises RuntimeError inside another block that
    gathers one of the Parameters. Leaving raises RuntimeError if ``enable_sanity_checks`` of the ``Init`` block's JSON
    is set, ``modifier_rank`` is None and a Parameter was edited in place, because the edit is lost.
    """

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
    ) -> None:
        supplied: list[Any] = [params] if isinstance(params, Tensor) else list(params)
        candidates = [find_parameter(value) for value in supplied] if enabled else []
        self._parameters: list[Any] = list(dict.fromkeys(p for p in candidates if find_owner(p) is not None))
        self._modifier_rank = modifier_rank
        self._versions: list[int] = []
        self._stack = ExitStack()

    def __enter__(self) -> None:
        overlapping = [p.ds_id for p in self._parameters if p.ds_status is ZeroParamStatus.AVAILABLE]
        if overlapping:
            raise RuntimeError(
                "Nested GatheredParameters contexts cannot overlap parameters; parameter ds_ids already gathered by an "
                f"outer context: {overlapping}"
            )
        for owner in dict.fromkeys(find_owner(p) for p in self._parameters):
            owned = [p for p in self._parameters if find_owner(p) is owner]
            self._stack.enter_context(owner.gather(owned, self._modifier_rank))
        self._versions = [p._version for p in self._parameters]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        edited = [p.ds_id for p, version in zip(self._parameters, self._versions, strict=True) if p._version != version]
        are_checked = any(getattr(p, SANITY_CHECKS, False) for p in self._parameters)
        self._stack.__exit__(kind, error, trace)
        if edited and are_checked and self._modifier_rank is None and kind is None:
            raise RuntimeError(
                f"detected an in-place modification of the parameters with ds_ids {edited} in GatheredParameters with "
                "modifier_rank=None, which keeps no edit; pass modifier_rank"
            )


class Init:
    """Context manager that shards the Parameters of the modules that are built inside the block.

    Unlike DeepSpeed's, which shards a Parameter once its module is built, this class shards all of them at the end of
    the block, and of two nested blocks at the end of the inner one. ``dtype``, or the dtype of the configuration, is
    the dtype to which they are cast. ``module`` is a model that is sharded at once.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *_: Any,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        **__: Any,
    ) -> None:
        given = config if config is not None else config_dict_or_path
        json_config = read_config(given) if given is not None else {}
        self._dtype = dtype or half_dtype(json_config)
        self._checks_edits = bool(json_config.get("zero_optimization", {}).get("enable_sanity_checks", False))
        self._enabled = enabled
        self._created: list[tuple[nn.Module, str]] = []
        self._handle: Any = None
        if module is not None and enabled:
            self._shard(list(module.parameters()))

    def __enter__(self) -> Init:
        if self._enabled:
            init_distributed()
            self._handle = nn.modules.module.register_module_parameter_registration_hook(
                lambda module, name, parameter: self._created.append((module, name))
            )
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if not self._enabled:
            return
        self._handle.remove()
        if kind is None:
            created = (module._parameters.get(name) for module, name in self._created)
            self._shard([parameter for parameter in created if parameter is not None])

    def _shard(self, parameters: Iterable[nn.Parameter]) -> None:
        """Cast and shard ``parameters``. This is a collective."""
        owner = InitOwner()
        for parameter in dict.fromkeys(parameters):
            if find_owner(parameter) is None and parameter not in ENGINE_PARAMETERS:
                if self._dtype is not None and parameter.is_floating_point():
                    parameter.data = parameter.detach().to(self._dtype)
                owner.shard(parameter)
                setattr(parameter, SANITY_CHECKS, self._checks_edits)


def unshard_model(model: nn.Module) -> None:
    """Make those Parameters of ``model`` full that an ``Init`` block has sharded. This is a collective.

    ``Init`` blocks that are still open leave all Parameters of ``model`` alone from now on.
    """
    for parameter in model.parameters():
        ENGINE_PARAMETERS[parameter] = True
        owner = find_owner(parameter)
        if isinstance(owner, InitOwner):
            owner.unshard(parameter)
            unmark(parameter)
