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

from zharness import torch_private as private
from zharness.errors import ConfigError, UsageError
from zharness.reference.layout import ModelParam
from zharness.reference.saved_tensors import replace_saved_tensors
from zharness.reference.unshard import (
    ShardingContext,
    UnshardedParam,
    make_grad_placeholder,
    make_grad_placeholders,
    unshard_param,
)


@dataclass
class ModuleForward:
    """One running forward of one module: where its graph begins, and the copies that were read during it."""

    first_sequence_number: int
    module: nn.Module | None = None
    unsharded_params: list[UnshardedParam] = field(default_factory=list)
    tensors_by_read: dict[tuple[str, torch.dtype, bool], Tensor] = field(default_factory=dict)


class ParamUnsharder:
    """Reads of sharded parameters, each attributed to the innermost running module."""

    def __init__(self, model_params: Mapping[str, ModelParam], context: ShardingContext) -> None:
        self._sharded_params = {original.parameter: original for original in model_params.values()}
        self._context = context
        self._running_forwards: list[ModuleForward] = []
        self._grad_placeholders: dict[tuple[str, bool], Tensor] = {}
        self._params_by_bucket: dict[int, list[ModelParam]] = {}
        self._editable_params: dict[nn.Parameter, Tensor] = {}
        self._known_versions = {parameter: parameter._version for parameter in self._sharded_params}

    def unshard_if_sharded(self, value: Any) -> Any:
        """``value``, or the full tensor where ``value`` is a sharded parameter. Collective then.

        Raises UsageError where an edit of a gathered copy would be lost, or where a gradient would bypass one.
        """
        original = self._sharded_params.get(value) if isinstance(value, nn.Parameter) else None
        if original is None:
            return value
        if value in self._editable_params:
            if self._running_forwards and torch.is_grad_enabled():
                raise UsageError("a forward that needs gradients ran inside gathered(); leave that block before it")
            return self._editable_params[value]
        self.refuse_lost_edits([value])
        visit = self._running_forwards[-1] if self._running_forwards else ModuleForward(0)
        dtype = _choose_unshard_dtype(original, visit.module)
        key = (original.name, dtype, torch.is_grad_enabled())
        if key not in visit.tensors_by_read:
            copy = UnshardedParam(original, dtype, self._context)
            full = unshard_param(copy, self._get_grad_placeholder(copy))
            if not self._running_forwards:
                self._context.prefetcher.clear()
            visit.unsharded_params.append(copy)
            if private.is_transforming():
                return full  # a wrapper of torch.func dies with its transform, which may end before the visit does
            visit.tensors_by_read[key] = full
        return visit.tensors_by_read[key]

    def unshard_for_edit(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """Full tensors that may be edited; reading by attribute gives these until ``take_back``. Collective."""
        for parameter in parameters:
            copy = UnshardedParam(self._sharded_params[parameter], parameter.dtype, self._context)
            self._editable_params[parameter] = copy.unshard().detach()
        self._context.prefetcher.clear()
        return list(self._editable_params.values())

    def end_edit(self) -> None:
        for parameter in self._editable_params:
            self.record_version(parameter)
        self._editable_params.clear()

    def unshard_for_deepcopy(self, module: nn.Module, memo: dict[int, Any]) -> None:
        """Tell a running deep copy that the copies of ``module``'s own shards are full Parameters. Collective."""
        for parameter in module._parameters.values():
            if parameter in self._sharded_params and id(parameter) not in memo:
                full = UnshardedParam(self._sharded_params[parameter], parameter.dtype, self._context).unshard().clone()
                memo[id(parameter)] = nn.Parameter(full, parameter.requires_grad)
        self._context.prefetcher.clear()

    def record_version(self, parameter: nn.Parameter) -> None:
        """The engine itself has changed the shard of ``parameter``."""
        self._known_versions[parameter] = parameter._version

    def refuse_lost_edits(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        """Raise UsageError for a parameter (any, when none is given) that was changed, but not by the engine.

        A gathered copy shares its shard's version counter, so an edit of it shows there; its values do not. An edit
        through ``.data`` bypasses that counter, as it bypasses autograd, and cannot be seen.
        """
        for parameter in parameters or self._sharded_params:
            if parameter in self._editable_params:
                raise UsageError("the engine was asked to step inside gathered(); leave that block before it")
            if parameter._version != self._known_versions[parameter]:
                raise UsageError(
                    f"parameter {self._sharded_params[parameter].name!r} was edited in place, but its weights are sharded and "
                    "the edit of a gathered copy would be lost; edit it inside `with engine.gathered():`"
                )

    def _get_grad_placeholder(self, unsharded_param: UnshardedParam) -> Tensor:
        """One for each parameter in the outermost running forward, so that its reads there are reduced together.

        Made at the first of them and not once and for all: autograd runs the youngest node first, and would leave an
        old one, with its full gradient, to the end of the backward.
        """
        key = (unsharded_param.model_param.name, torch.is_grad_enabled())
        if key in self._grad_placeholders:
            return self._grad_placeholders[key]
        if not self._running_forwards or private.is_transforming():
            return make_grad_placeholder(unsharded_param)
        copies = (
            self._params_reduced_with(unsharded_param)
            if torch.is_grad_enabled() and self._context.collectives.is_even
            else [unsharded_param]
        )
        for each, stand in zip(copies, make_grad_placeholders(copies), strict=True):
            self._grad_placeholders[each.model_param.name, torch.is_grad_enabled()] = stand
        return self._grad_placeholders[key]

    def _params_reduced_with(self, unsharded_param: UnshardedParam) -> list[UnshardedParam]:
        """The copies whose gradients are reduced with that of ``copy``, without those that have stand-ins already.

        Those of its bucket that belong to the outermost running module: in a recomputation, a small part of it.
        """
        if not unsharded_param.model_param.parameter.requires_grad:
            return [unsharded_param]
        root = self._running_forwards[0].module
        if not self._params_by_bucket and root is not None:
            for parameter in root.parameters():
                if parameter in self._sharded_params and parameter.requires_grad:
                    original = self._sharded_params[parameter]
                    self._params_by_bucket.setdefault(id(self._context.reduce_buckets[original.name]), []).append(
                        original
                    )
        family = self._params_by_bucket.get(id(self._context.reduce_buckets[unsharded_param.model_param.name]), [])
        found = {original.name: original for original in (*family, unsharded_param.model_param)}
        return [
            UnshardedParam(o, unsharded_param.dtype, self._context)
            for o in found.values()
            if (o.name, True) not in self._grad_placeholders
        ]

    def run_forward(self, module: nn.Module, forward: Callable[[], Any]) -> Any:
        """Run the ``forward`` of ``module``; what its graph saved of the copies read meanwhile becomes promises."""
        visit = ModuleForward(private.next_sequence_number(), module)
        self._running_forwards.append(visit)
        try:
            output = forward()
        finally:
            self._running_forwards.pop()
            visit.tensors_by_read.clear()
            if not self._running_forwards:
                self._grad_placeholders.clear()
                self._params_by_bucket.clear()
                self._context.prefetcher.clear_after_forward()
        if visit.unsharded_params:
            replace_saved_tensors(output, visit.unsharded_params, visit.first_sequence_number)
        if self._running_forwards:
            # Alive still: part of the output, or saved on a branch that is not. The caller's graph may lead there.
            self._running_forwards[-1].unsharded_params.extend(
                copy for copy in visit.unsharded_params if copy.is_alive()
            )
        return output


def _choose_unshard_dtype(model_param: ModelParam, running_module: nn.Module | None) -> torch.dtype:
    """Where torch.autocast would cast the parameter anyway, gathering it so halves the wire and what autograd saves.

    For the forward of the module that holds it alone: another one may ask what dtype it has, as PEFT's adapters do.
    """
    parameter, low = model_param.parameter, model_param.dtypes.unshard_dtype
    device = parameter.device.type
    own = running_module is not None and any(each is parameter for each in running_module._parameters.values())
    if own and low is not None and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == low:
        return low
    return parameter.dtype


class ModuleClassSwap:
    """The exchanged classes of one model's modules, and the way back."""

    def __init__(self, module: nn.Module, unsharder: ParamUnsharder) -> None:
        self._unsharder = unsharder
        self._sharded_classes: dict[type[nn.Module], type[nn.Module]] = {}
        self._original_classes: list[tuple[nn.Module, type[nn.Module]]] = []
        try:
            self.swap_classes(module)
        except ConfigError:
            self.restore_classes()
            raise

    def swap_classes(self, module: nn.Module) -> None:
        """Exchange the class of ``module`` and of all modules below it, each once. Raises ConfigError."""
        for name, each in module.named_modules():
            base = type(each)
            if isinstance(each, torch.jit.ScriptModule):
                raise ConfigError(f"module {name!r} is compiled by torch.jit: stage 3 cannot see it read its weights")
            if base in self._sharded_classes.values():
                continue
            if base not in self._sharded_classes:
                self._sharded_classes[base] = _make_sharded_class(base, self._unsharder, self.swap_classes)
            self._original_classes.append((each, base))
            each.__class__ = self._sharded_classes[base]

    def restore_classes(self) -> None:
        while self._original_classes:
            module, base = self._original_classes.pop()
            module.__class__ = base


def _make_sharded_class(
    base: type[nn.Module], unsharder: ParamUnsharder, swap_classes: Callable[[nn.Module], None]
) -> type[nn.Module]:
    def read_attribute(self: nn.Module, name: str) -> Any:
        return unsharder.unshard_if_sharded(base.__getattr__(self, name))

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return unsharder.run_forward(self, lambda: base.__call__(self, *args, **kwargs))

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            swap_classes(value)
        base.__setattr__(self, name, value)

    def add_module(self: nn.Module, name: str, module: nn.Module | None) -> None:
        if module is not None:
            swap_classes(module)
        base.add_module(self, name, module)

    def deep_copy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        unsharder.unshard_for_deepcopy(self, memo)
        return _deepcopy_with_original_class(self, base, memo)

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


def _deepcopy_with_original_class(module: nn.Module, base: type[nn.Module], memo: dict[int, Any]) -> nn.Module:
    """What ``copy.deepcopy`` makes of a module of class ``base``: with that class, which reads nothing."""
    if hasattr(base, "__deepcopy__"):
        made: nn.Module = base.__deepcopy__(module, memo)
        made.__class__ = base
        return made
    made = memo[id(module)] = base.__new__(base)
    made.__dict__.update(copying.deepcopy(module.__dict__, memo))
    return made
