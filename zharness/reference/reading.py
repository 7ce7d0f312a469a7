"""Stage 3's modules: their parameters are shards, and reading one by attribute hands out the full tensor.

The Parameter object stays where it was, so names, identity, tied weights and ``functional_call`` are as before; only
its data is the shard. Each module's class is exchanged for a subclass with two methods: ``__getattr__`` turns a sharded
Parameter into a gathered tensor, and ``__call__`` marks the visit, the time during which reads belong to that module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zharness.errors import ConfigError
from zharness.reference import torch_private as private
from zharness.reference.gathered import Copy, Wire, read, stand_in
from zharness.reference.layout import Original
from zharness.reference.promises import promise

# torch.autocast would cast these modules' parameters anyway. Handing them out in its dtype halves the wire and puts the
# low-precision tensor that autograd saves into the ledger; in any other module autocast's own policy decides.
SAFE_UNDER_AUTOCAST: frozenset[type[nn.Module]] = frozenset({nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d})


@dataclass
class Visit:
    """One running forward of one module: where its graph begins, and the copies that were read during it."""

    begin: int
    copies: list[Copy] = field(default_factory=list)
    seen: dict[tuple[nn.Parameter, torch.dtype, bool], Tensor] = field(default_factory=dict)


class Reader:
    """Reads of sharded parameters, each attributed to the innermost running module."""

    def __init__(self, originals: Mapping[str, Original], wire: Wire) -> None:
        self._sharded = {original.parameter: original for original in originals.values()}
        self._wire = wire
        self._running: list[Visit] = []
        self._stands: dict[tuple[nn.Parameter, bool], Tensor] = {}

    def read(self, value: Any, owner: type[nn.Module]) -> Any:
        """``value``, or the full tensor where ``value`` is a sharded parameter. Collective then."""
        if not isinstance(value, nn.Parameter) or value not in self._sharded:
            return value
        dtype = _dtype_of_read(value, owner)
        visit = self._running[-1] if self._running else Visit(0)
        key = (value, dtype, torch.is_grad_enabled())
        if key not in visit.seen:
            copy = Copy(self._sharded[value], dtype, self._wire)
            full = read(copy, self._stand_in(copy))
            visit.copies.append(copy)
            if private.transforming():
                return full  # a wrapper of torch.func dies with its transform, which may end before the visit does
            visit.seen[key] = full
        return visit.seen[key]

    def _stand_in(self, copy: Copy) -> Tensor:
        """One for each parameter in the outermost running forward, so that its reads there are reduced together.

        Made at the first of them and not once and for all: autograd runs the youngest node first, and would leave an
        old one, with its full gradient, to the end of the backward.
        """
        key = (copy.original.parameter, torch.is_grad_enabled())
        if key in self._stands:
            return self._stands[key]
        stand = stand_in(copy)
        if self._running and not private.transforming():
            self._stands[key] = stand
        return stand

    def visit(self, forward: Callable[[], Any]) -> Any:
        """Run ``forward``; what its graph saved of the copies read meanwhile becomes promises to gather them again."""
        visit = Visit(private.sequence_number())
        self._running.append(visit)
        try:
            output = forward()
        finally:
            self._running.pop()
            visit.seen.clear()
            if not self._running:
                self._stands.clear()
        if visit.copies:
            promise(output, visit.copies, visit.begin)
        if self._running:
            # Alive still: part of the output, or saved on a branch that is not. The caller's graph may lead there.
            self._running[-1].copies.extend(copy for copy in visit.copies if copy.alive())
        return output


def _dtype_of_read(parameter: nn.Parameter, owner: type[nn.Module]) -> torch.dtype:
    device = parameter.device.type
    if owner in SAFE_UNDER_AUTOCAST and parameter.dtype == torch.float32 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return parameter.dtype


class Exchange:
    """The exchanged classes of one model's modules, and the way back."""

    def __init__(self, module: nn.Module, reader: Reader) -> None:
        made: dict[type[nn.Module], type[nn.Module]] = {}
        self._before: list[tuple[nn.Module, type[nn.Module]]] = []
        for name, each in module.named_modules():
            base = type(each)
            if isinstance(each, torch.jit.ScriptModule):
                self.undo()
                raise ConfigError(f"module {name!r} is compiled by torch.jit: stage 3 cannot see it read its weights")
            if base not in made:
                made[base] = _reading_class(base, reader)
            self._before.append((each, base))
            each.__class__ = made[base]

    def undo(self) -> None:
        while self._before:
            module, base = self._before.pop()
            module.__class__ = base


def _reading_class(base: type[nn.Module], reader: Reader) -> type[nn.Module]:
    def read_attribute(self: nn.Module, name: str) -> Any:
        return reader.read(base.__getattr__(self, name), base)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return reader.visit(lambda: base.__call__(self, *args, **kwargs))

    body: dict[str, Any] = {"__getattr__": read_attribute, "__call__": call, "__module__": base.__module__}
    if issubclass(base, nn.RNNBase):
        # RNNs keep a list of their parameters as well, and read that: here it is made at each read and never kept.
        body["_flat_weights"] = property(
            lambda self: [getattr(self, name, None) for name in self._flat_weights_names], lambda self, weights: None
        )
    return type(base.__name__, (base,), body)
