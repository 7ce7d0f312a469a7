"""Unshard the parameters of a stage 3 model when a module reads them as attributes.

The Parameter object stays in the module, so names, identity, tied weights and ``functional_call`` work as before; only
its data is replaced by the shard. Each module's class is swapped for a subclass with two methods: ``__getattr__``
unshards a sharded Parameter that is read, and ``__call__`` runs ``pre_forward``, the forward and ``post_forward``.
Three more methods keep the model usable: a submodule that is attached later gets a swapped class too, and a deep copy
is a plain, full module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zharness import torch_private as private
from zharness.errors import ConfigError, UsageError
from zharness.reference.inspection.recorded_reads import record_read
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
    """One running forward of one module, with the parameters that were unsharded for it.

    ``first_sequence_number`` is the number of the first autograd node that the forward may make. ``tensors_by_read``
    maps the parameter name, dtype and grad mode of a read to the full tensor.
    """

    first_sequence_number: int
    module: nn.Module | None = None
    unsharded_params: list[UnshardedParam] = field(default_factory=list)
    tensors_by_read: dict[tuple[str, torch.dtype, bool], Tensor] = field(default_factory=dict)


class ParamUnsharder:
    """Unshards the parameters that a module reads, and reshards them after the module's forward."""

    def __init__(self, model_params: Mapping[str, ModelParam], context: ShardingContext) -> None:
        self._sharded_params = {param.parameter: param for param in model_params.values()}
        self._context = context
        self._running_forwards: list[ModuleForward] = []
        self._grad_placeholders: dict[tuple[str, bool], Tensor] = {}  # by parameter name and grad mode
        self._params_by_bucket: dict[int, list[ModelParam]] = {}
        self._editable_params: dict[nn.Parameter, Tensor] = {}
        self._known_versions = {parameter: parameter._version for parameter in self._sharded_params}

    def unshard_if_sharded(self, value: Any) -> Any:
        """Return the full tensor of a sharded parameter (a collective), and any other ``value`` unchanged.

        Raises UsageError if the parameter was edited in place, because the edit would be lost. Inside ``gathered``, a
        forward with gradients raises UsageError too, because the gradient would not reach the parameter.
        """
        param = self._sharded_params.get(value) if isinstance(value, nn.Parameter) else None
        if param is None:
            return value
        if value in self._editable_params:
            if self._running_forwards and torch.is_grad_enabled():
                raise UsageError(
                    "a forward that needs gradients ran inside gathered(); leave that block before the forward"
                )
            return self._editable_params[value]
        self.refuse_lost_edits([value])
        running = self._running_forwards[-1] if self._running_forwards else ModuleForward(0)
        dtype = _choose_unshard_dtype(param, running.module)
        key = (param.name, dtype, torch.is_grad_enabled())
        if key not in running.tensors_by_read:
            unsharded_param = UnshardedParam(param, dtype, self._context)
            full = unshard_param(unsharded_param, self._get_grad_placeholder(unsharded_param))
            if not self._running_forwards:
                self._context.prefetcher.clear()
            running.unsharded_params.append(unsharded_param)
            if private.is_transforming():
                return full  # not cached: a torch.func wrapper dies with its transform, maybe before the forward ends
            full.requires_grad_(value.requires_grad)  # under no_grad too: linear chooses its kernel by it
            record_read(full, value)
            running.tensors_by_read[key] = full
        return running.tensors_by_read[key]

    def unshard_for_edit(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """Unshard ``parameters`` (a collective), and return the tensors, as attribute reads do until ``end_edit``."""
        for parameter in parameters:
            unsharded_param = UnshardedParam(self._sharded_params[parameter], parameter.dtype, self._context)
            self._editable_params[parameter] = unsharded_param.unshard().detach()
            record_read(self._editable_params[parameter], parameter)
        self._context.prefetcher.clear()
        return list(self._editable_params.values())

    def end_edit(self) -> None:
        """End the edit that ``unshard_for_edit`` began, after the caller has written the edits back."""
        for parameter in self._editable_params:
            self.record_version(parameter)
        self._editable_params.clear()

    def unshard_for_deepcopy(self, module: nn.Module, memo: dict[int, Any]) -> None:
        """Unshard ``module``'s own Parameters (a collective) into the ``memo`` of a running deep copy."""
        for parameter in module._parameters.values():
            if parameter in self._sharded_params and id(parameter) not in memo:
                full = UnshardedParam(self._sharded_params[parameter], parameter.dtype, self._context).unshard().clone()
                memo[id(parameter)] = nn.Parameter(full, parameter.requires_grad)
        self._context.prefetcher.clear()

    def record_version(self, parameter: nn.Parameter) -> None:
        """Record that the engine has changed the shard, so that no check reports the change as a user's edit."""
        self._known_versions[parameter] = parameter._version

    def refuse_lost_edits(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        """Raise UsageError if any of ``parameters`` (default: all) was changed by code outside the engine.

        An unsharded tensor shares its shard's version counter, so an in-place edit of the tensor increments the
        counter, but does not change the shard. An edit through ``.data`` bypasses the counter, as it bypasses autograd,
        and is not detected.
        """
        for parameter in parameters or self._sharded_params:
            if parameter in self._editable_params:
                raise UsageError("step() was called inside gathered(); leave that block before step()")
            if parameter._version != self._known_versions[parameter]:
                raise UsageError(
                    f"parameter {self._sharded_params[parameter].name!r} was edited in place, but its weights are "
                    "sharded and an edit of the unsharded tensor would be lost; edit it inside "
                    "`with engine.gathered():`"
                )

    def _get_grad_placeholder(self, unsharded_param: UnshardedParam) -> Tensor:
        """Return the gradient placeholder of the parameter in the outermost running forward.

        All reads of that forward share the placeholder, so their gradients are reduced once. Each forward makes the
        placeholder at its first read, because autograd runs the youngest nodes first: it would keep the full gradient
        of a much older node until the end of the backward.
        """
        key = (unsharded_param.model_param.name, torch.is_grad_enabled())
        if key in self._grad_placeholders:
            return self._grad_placeholders[key]
        if not self._running_forwards or private.is_transforming():
            return make_grad_placeholder(unsharded_param)
        is_bucketed = torch.is_grad_enabled() and self._context.collectives.agreement.is_even
        group = self._params_reduced_with(unsharded_param) if is_bucketed else [unsharded_param]
        for unsharded, placeholder in zip(group, make_grad_placeholders(group), strict=True):
            self._grad_placeholders[unsharded.model_param.name, torch.is_grad_enabled()] = placeholder
        return self._grad_placeholders[key]

    def _params_reduced_with(self, unsharded_param: UnshardedParam) -> list[UnshardedParam]:
        """Return the parameters, including ``unsharded_param``, whose gradients are reduced together with its gradient.

        They are the trained parameters of the same bucket that belong to the outermost running module (which is a small
        part of the model in a recomputation) and have no placeholder yet.
        """
        param = unsharded_param.model_param
        if not param.parameter.requires_grad:
            return [unsharded_param]
        root, buckets = self._running_forwards[0].module, self._context.reduce_buckets
        if not self._params_by_bucket and root is not None:
            for parameter in root.parameters():
                if parameter in self._sharded_params and parameter.requires_grad:
                    trained = self._sharded_params[parameter]
                    self._params_by_bucket.setdefault(id(buckets[trained.name]), []).append(trained)
        members = self._params_by_bucket.get(id(buckets[param.name]), [])
        group = {member.name: member for member in (*members, param)}
        return [
            UnshardedParam(member, unsharded_param.dtype, self._context)
            for member in group.values()
            if (member.name, True) not in self._grad_placeholders
        ]

    def run_forward(self, module: nn.Module, forward: Callable[[], Any]) -> Any:
        """Run ``forward``, the forward of ``module``, reshard its parameters, and return the module's output."""
        running = self.pre_forward(module)
        try:
            output = forward()
        finally:
            self._leave_forward(running)
        self.post_forward(running, output)
        return output

    def pre_forward(self, module: nn.Module) -> ModuleForward:
        """Begin a forward of ``module``, and return the record that collects the parameters that the forward reads."""
        running = ModuleForward(private.next_sequence_number(), module)
        self._running_forwards.append(running)
        return running

    def _leave_forward(self, running: ModuleForward) -> None:
        """End a forward, even if it raised: drop its tensors and, if no outer forward runs, the prefetched bucket."""
        self._running_forwards.pop()
        running.tensors_by_read.clear()
        if not self._running_forwards:
            self._grad_placeholders.clear()
            self._params_by_bucket.clear()
            self._context.prefetcher.clear_after_forward()

    def post_forward(self, running: ModuleForward, output: Any) -> None:
        """Reshard the parameters that were unsharded for a finished forward.

        An unsharded parameter that still exists is part of the output, or was saved on a branch of the graph that does
        not lead to the output. This parameter is added to the caller's forward, whose output may depend on that branch.
        """
        self.reshard(running, output)
        if self._running_forwards:
            alive = [unsharded for unsharded in running.unsharded_params if unsharded.is_alive()]
            self._running_forwards[-1].unsharded_params.extend(alive)

    def reshard(self, running: ModuleForward, output: Any) -> None:
        """Replace unsharded parameters that the graph of ``output`` saved, so that the graph does not retain them."""
        if running.unsharded_params:
            replace_saved_tensors(output, running.unsharded_params, running.first_sequence_number)


def _choose_unshard_dtype(model_param: ModelParam, running_module: nn.Module | None) -> torch.dtype:
    """Return the dtype in which to unshard a parameter: the autocast dtype if autocast applies, else its own dtype.

    The autocast dtype halves the bytes that are sent and that autograd saves. It is used only for reads in the forward
    of the module that owns the parameter, because other modules may inspect the parameter's dtype, as PEFT's adapters
    do.
    """
    parameter, autocast_dtype = model_param.parameter, model_param.dtypes.unshard_dtype
    device = parameter.device.type
    if autocast_dtype is None or running_module is None:
        return parameter.dtype
    is_owner = any(member is parameter for member in running_module._parameters.values())
    is_active = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == autocast_dtype
    return autocast_dtype if is_owner and is_active else parameter.dtype


class ModuleClassSwap:
    """Swaps the classes of one model's modules for subclasses that unshard parameters, and restores them."""

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
        """Swap the classes of ``module`` and of all its submodules, each once.

        Raises ConfigError for a module compiled by torch.jit, whose reads of parameters cannot be intercepted.
        """
        for name, submodule in module.named_modules():
            base = type(submodule)
            if isinstance(submodule, torch.jit.ScriptModule):
                raise ConfigError(
                    f"module {name!r} is compiled by torch.jit, so stage 3 cannot unshard the weights that it reads; "
                    "pass the module uncompiled"
                )
            if base in self._sharded_classes.values():
                continue
            if base not in self._sharded_classes:
                self._sharded_classes[base] = _make_sharded_class(base, self._unsharder, self.swap_classes)
            self._original_classes.append((submodule, base))
            submodule.__class__ = self._sharded_classes[base]

    def restore_classes(self) -> None:
        """Give every module the class that it had before."""
        while self._original_classes:
            module, base = self._original_classes.pop()
            module.__class__ = base


def _make_sharded_class(
    base: type[nn.Module], unsharder: ParamUnsharder, swap_classes: Callable[[nn.Module], None]
) -> type[nn.Module]:
    """Return a subclass of ``base`` whose parameters are unsharded when they are read."""

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
        # RNNs read their parameters from a list: make the list at each read, so that it keeps no tensor alive.
        body["_flat_weights"] = property(
            lambda self: [getattr(self, name, None) for name in self._flat_weights_names], lambda self, weights: None
        )
    return type(base.__name__, (base,), body)


def _deepcopy_with_original_class(module: nn.Module, base: type[nn.Module], memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of ``module`` as an instance of ``base``, its class before the swap."""
    if hasattr(base, "__deepcopy__"):
        copied: nn.Module = base.__deepcopy__(module, memo)
        copied.__class__ = base
        return copied
    copied = memo[id(module)] = base.__new__(base)
    copied.__dict__.update(copy.deepcopy(module.__dict__, memo))
    return copied
