"""Stage 3's modules: their parameters are shards, and reading one by attribute hands out the full tensor.

The Parameter object stays where it was, so names, identity, tied weights and ``functional_call`` are as before; only
its data is the shard. Each module's class is exchanged for a subclass with two methods: ``__getattr__`` turns a sharded
Parameter into a gathered tensor, and ``__call__`` marks the visit, the time during which reads belong to that module.
Three more keep the model a model: a submodule that is attached later is exchanged too, and a deep copy is a plain one.
"""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zharness.errors import ConfigError, UsageError
from zharness.reference import torch_private as private
from zharness.reference.gathered import Copy, Wire, read, stand_in, stand_ins
from zharness.reference.layout import Original
from zharness.reference.promises import promise


@dataclass
class Visit:
    """One running forward of one module: where its graph begins, and the copies that were read during it."""

    begin: int
    module: nn.Module | None = None
    copies: list[Copy] = field(default_factory=list)
    seen: dict[tuple[str, torch.dtype, bool], Tensor] = field(default_factory=dict)


class Reader:
    """Reads of sharded parameters, each attributed to the innermost running module."""

    def __init__(self, originals: Mapping[str, Original], wire: Wire) -> None:
        self._sharded = {original.parameter: original for original in originals.values()}
        self._wire = wire
        self._running: list[Visit] = []
        self._stands: dict[tuple[str, bool], Tensor] = {}
        self._families: dict[int, list[Original]] = {}
        self._lent: dict[nn.Parameter, Tensor] = {}
        self._versions = {parameter: parameter._version for parameter in self._sharded}

    def read(self, value: Any) -> Any:
        """``value``, or the full tensor where ``value`` is a sharded parameter. Collective then.

        Raises UsageError where an edit of a gathered copy would be lost, or where a gradient would bypass one.
        """
        original = self._sharded.get(value) if isinstance(value, nn.Parameter) else None
        if original is None:
            return value
        if value in self._lent:
            if self._running and torch.is_grad_enabled():
                raise UsageError("a forward that needs gradients ran inside gathered(); leave that block before it")
            return self._lent[value]
        self.refuse_lost_edits([value])
        visit = self._running[-1] if self._running else Visit(0)
        dtype = _dtype_of_read(original, visit.module)
        key = (original.name, dtype, torch.is_grad_enabled())
        if key not in visit.seen:
            copy = Copy(original, dtype, self._wire)
            full = read(copy, self._stand_in(copy))
            if not self._running:
                self._wire.shelf.clear()
            visit.copies.append(copy)
            if private.transforming():
                return full  # a wrapper of torch.func dies with its transform, which may end before the visit does
            visit.seen[key] = full
        return visit.seen[key]

    def lend(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """Full tensors that may be edited; reading by attribute gives these until ``take_back``. Collective."""
        for parameter in parameters:
            copy = Copy(self._sharded[parameter], parameter.dtype, self._wire)
            self._lent[parameter] = copy.fill().detach()
        self._wire.shelf.clear()
        return list(self._lent.values())

    def take_back(self) -> None:
        for parameter in self._lent:
            self.know(parameter)
        self._lent.clear()

    def unshard(self, module: nn.Module, memo: dict[int, Any]) -> None:
        """Tell a running deep copy that the copies of ``module``'s own shards are full Parameters. Collective."""
        for parameter in module._parameters.values():
            if parameter in self._sharded and id(parameter) not in memo:
                full = Copy(self._sharded[parameter], parameter.dtype, self._wire).fill().clone()
                memo[id(parameter)] = nn.Parameter(full, parameter.requires_grad)
        self._wire.shelf.clear()

    def know(self, parameter: nn.Parameter) -> None:
        """The engine itself has changed the shard of ``parameter``."""
        self._versions[parameter] = parameter._version

    def refuse_lost_edits(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        """Raise UsageError for a parameter (any, when none is given) that was changed, but not by the engine.

        A gathered copy shares its shard's version counter, so an edit of it shows there; its values do not. An edit
        through ``.data`` bypasses that counter, as it bypasses autograd, and cannot be seen.
        """
        for parameter in parameters or self._sharded:
            if parameter in self._lent:
                raise UsageError("the engine was asked to step inside gathered(); leave that block before it")
            if parameter._version != self._versions[parameter]:
                raise UsageError(
                    f"parameter {self._sharded[parameter].name!r} was edited in place, but its weights are sharded and "
                    "the edit of a gathered copy would be lost; edit it inside `with engine.gathered():`"
                )

    def _stand_in(self, copy: Copy) -> Tensor:
        """One for each parameter in the outermost running forward, so that its reads there are reduced together.

        Made at the first of them and not once and for all: autograd runs the youngest node first, and would leave an
        old one, with its full gradient, to the end of the backward.
        """
        key = (copy.original.name, torch.is_grad_enabled())
        if key in self._stands:
            return self._stands[key]
        if not self._running or private.transforming():
            return stand_in(copy)
        copies = self._neighbours(copy) if torch.is_grad_enabled() and self._wire.channel.even else [copy]
        for each, stand in zip(copies, stand_ins(copies), strict=True):
            self._stands[each.original.name, torch.is_grad_enabled()] = stand
        return self._stands[key]

    def _neighbours(self, copy: Copy) -> list[Copy]:
        """The copies whose gradients are reduced with that of ``copy``, without those that have stand-ins already.

        Those of its bucket that belong to the outermost running module: in a recomputation, a small part of it.
        """
        if not copy.original.parameter.requires_grad:
            return [copy]
        root = self._running[0].module
        if not self._families and root is not None:
            for parameter in root.parameters():
                if parameter in self._sharded and parameter.requires_grad:
                    original = self._sharded[parameter]
                    self._families.setdefault(id(self._wire.neighbours[original.name]), []).append(original)
        family = self._families.get(id(self._wire.neighbours[copy.original.name]), [])
        found = {original.name: original for original in (*family, copy.original)}
        return [Copy(o, copy.dtype, self._wire) for o in found.values() if (o.name, True) not in self._stands]

    def visit(self, module: nn.Module, forward: Callable[[], Any]) -> Any:
        """Run the ``forward`` of ``module``; what its graph saved of the copies read meanwhile becomes promises."""
        visit = Visit(private.sequence_number(), module)
        self._running.append(visit)
        try:
            output = forward()
        finally:
            self._running.pop()
            visit.seen.clear()
            if not self._running:
                self._stands.clear()
                self._families.clear()
                self._wire.shelf.clear_after_forward()
        if visit.copies:
            promise(output, visit.copies, visit.begin)
        if self._running:
            # Alive still: part of the output, or saved on a branch that is not. The caller's graph may lead there.
            self._running[-1].copies.extend(copy for copy in visit.copies if copy.alive())
        return output


def _dtype_of_read(original: Original, running: nn.Module | None) -> torch.dtype:
    """Where torch.autocast would cast the parameter anyway, gathering it so halves the wire and what autograd saves.

    For the forward of the module that holds it alone: another one may ask what dtype it has, as PEFT's adapters do.
    """
    parameter, low = original.parameter, original.formats.gathered
    device = parameter.device.type
    own = running is not None and any(each is parameter for each in running._parameters.values())
    if own and low is not None and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == low:
        return low
    return parameter.dtype


class Exchange:
    """The exchanged classes of one model's modules, and the way back."""

    def __init__(self, module: nn.Module, reader: Reader) -> None:
        self._reader = reader
        self._made: dict[type[nn.Module], type[nn.Module]] = {}
        self._before: list[tuple[nn.Module, type[nn.Module]]] = []
        try:
            self.adopt(module)
        except ConfigError:
            self.undo()
            raise

    def adopt(self, module: nn.Module) -> None:
        """Exchange the class of ``module`` and of all modules below it, each once. Raises ConfigError."""
        for name, each in module.named_modules():
            base = type(each)
            if isinstance(each, torch.jit.ScriptModule):
                raise ConfigError(f"module {name!r} is compiled by torch.jit: stage 3 cannot see it read its weights")
            if base in self._made.values():
                continue
            if base not in self._made:
                self._made[base] = _reading_class(base, self._reader, self.adopt)
            self._before.append((each, base))
            each.__class__ = self._made[base]

    def undo(self) -> None:
        while self._before:
            module, base = self._before.pop()
            module.__class__ = base


def _reading_class(base: type[nn.Module], reader: Reader, adopt: Callable[[nn.Module], None]) -> type[nn.Module]:
    def read_attribute(self: nn.Module, name: str) -> Any:
        return reader.read(base.__getattr__(self, name))

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return reader.visit(self, lambda: base.__call__(self, *args, **kwargs))

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            adopt(value)
        base.__setattr__(self, name, value)

    def add_module(self: nn.Module, name: str, module: nn.Module | None) -> None:
        if module is not None:
            adopt(module)
        base.add_module(self, name, module)

    def deep_copy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        reader.unshard(self, memo)
        return _plain_copy(self, base, memo)

    body: dict[str, Any] = {
        "__getattr__": read_attribute,
        "__call__": call,
        "__setattr__": set_attribute,
        "add_module": add_module,
        "__deepcopy__": deep_copy,
        "__module__": base.__module__,
    }
    if issubclass(base, nn.RNNBase):
        # RNNs keep a list of their parameters as well, and read that: here it is made at each read and never kept.
        body["_flat_weights"] = property(
            lambda self: [getattr(self, name, None) for name in self._flat_weights_names], lambda self, weights: None
        )
    return type(base.__name__, (base,), body)


def _plain_copy(module: nn.Module, base: type[nn.Module], memo: dict[int, Any]) -> nn.Module:
    """What ``copy.deepcopy`` makes of a module of class ``base``: with that class, which reads nothing."""
    if hasattr(base, "__deepcopy__"):
        made: nn.Module = base.__deepcopy__(module, memo)
        made.__class__ = base
        return made
    made = memo[id(module)] = base.__new__(base)
    made.__dict__.update(copying.deepcopy(module.__dict__, memo))
    return made
