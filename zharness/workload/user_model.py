"""Load models of users. Each is built by a factory that the user names by its path ``package.module:factory``.

The factory returns a model, or a tuple of a model, a function that draws its micro-batches, and its loss function.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from zharness.errors import UsageError
from zharness.raising_frame import describe_exception
from zharness.workload.models import SAMPLES, Batch, ModelSpec
from zharness.workload.nested_tensors import collect_tensors
from zharness.workload.shrink_model import shrink_factory_result
from zharness.workload.synchronized_norm import replace_synchronized_norms
from zharness.workload.transformers_batches import find_draw

_FACTORY_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*(?:\([\w.=,]+\))?")
EXPECTED_RETURN = (
    "a model; or (model, batch), or (model, batch, loss), where batch(generator) draws a tensor, a tuple or a dict of "
    "tensors, the arguments of the model, and loss(output, batch) is a scalar tensor"
)
IN_PROCESS_PACKAGE = "given"  # the package in the paths of factories that exist only in this process
Factory = Callable[[], Any]
DrawInputs = Callable[[torch.Generator], Any]

_registered_factories: dict[str, Factory] = {}  # filled before any rank is forked


@dataclass(frozen=True)
class UserModelParts:
    """The result of a user's factory.

    ``model`` is the model. ``draw(generator)`` draws a micro-batch. ``score(output, batch)`` computes the loss.
    """

    model: nn.Module
    draw: DrawInputs
    score: Callable[[Any, Any], Tensor]


def is_user_model(name: str) -> bool:
    """Return whether ``name`` is the path of a model factory, ``package.module:factory`` or
    ``package.module:factory(argument=value)``."""
    return _FACTORY_PATH.fullmatch(name) is not None


def register_factory(name: str, factory: Factory) -> None:
    """Register ``factory`` under ``name`` in this process and in processes that this process forks later.

    The factory may be a closure.
    """
    _registered_factories[name] = factory
    user_model_spec.cache_clear()  # the cache may contain another factory with this name


def is_registered_factory(name: str) -> bool:
    """Return whether a factory was registered under ``name`` in this process."""
    return name in _registered_factories


def unregister_factory(name: str) -> None:
    """Remove the factory that is registered under ``name``, and clear the cache of user models."""
    _registered_factories.pop(name, None)
    user_model_spec.cache_clear()


@lru_cache(maxsize=8)
def user_model_spec(name: str) -> ModelSpec:
    """Return the ModelSpec of the factory ``name``, which is imported now and called when the model is built.

    Raises UsageError if the factory cannot be imported.
    """
    user_model = UserModel(name, resolve_factory(name))
    return ModelSpec(name, f"the model of {name}", user_model.build, user_model.batch, user_model.loss)


def get_user_model(name: str) -> UserModel:
    """Return the cached UserModel of the factory ``name``, which the laws copy."""
    return user_model_spec(name).build.__self__  # type: ignore[attr-defined,no-any-return] # a method of UserModel


def resolve_factory(name: str) -> Factory:
    """Return the factory that is registered under ``name``, or import it. Raises UsageError if the import fails.

    Changes in parentheses after the path make the model smaller: ``package.module:factory(num_hidden_layers=1)`` sets a
    key of the model's configuration, and ``package.module:factory(2=out)`` omits a module of a sequence.
    """
    path, changes = parse_user_model_name(name)
    factory = _registered_factories.get(path) or import_factory(path)
    return (lambda: shrink_factory_result(factory(), changes)) if changes else factory


def parse_user_model_name(name: str) -> tuple[str, dict[str, str]]:
    """Split ``name`` into the path of the factory and the changes to its model."""
    path, _, changes = name.removesuffix(")").partition("(")
    return path, dict(change.split("=", 1) for change in changes.split(",") if "=" in change)


def format_user_model_name(path: str, changes: Mapping[str, str]) -> str:
    """Return the name of a user's model: the factory's ``path`` and the ``changes`` to its model."""
    return f"{path}({','.join(f'{key}={value}' for key, value in changes.items())})" if changes else path


def list_factories(pattern: str) -> list[str]:
    """Return the paths of the factories that ``package.module:pattern`` matches, in the order of the module.

    A path without ``*``, ``?`` and ``[`` is returned as it is. Otherwise a factory is a function that the module itself
    defines, whose name does not begin with an underscore and which needs no argument. Raises UsageError if the module
    cannot be imported or has no such function.
    """
    module_name, _, attribute = pattern.partition(":")
    if not attribute or not set("*?[") & set(attribute):
        return [pattern]
    module = import_user_module(module_name, pattern)
    functions = {name: value for name, value in vars(module).items() if inspect.isfunction(value) and name[0] != "_"}
    own = [
        name
        for name, value in functions.items()
        if value.__module__ == module_name
        and all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in list_parameters(value))
    ]
    chosen = [f"{module_name}:{name}" for name in own if fnmatchcase(name, attribute)]
    if not chosen:
        remedy = f"a factory is a function of {module_name} that needs no argument"
        raise UsageError.unknown_name(f"factory of {module_name}", attribute, own, remedy)
    return chosen


def list_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of ``function``."""
    return list(inspect.signature(function).parameters.values())


class UserModel:
    """The model of a user's factory.

    The factory's last result is cached, and copies of its model are returned, because a law needs many copies.
    ``generator_state`` is the state in which the factory's last call left torch's generator.
    """

    def __init__(self, name: str, factory: Factory) -> None:
        self.name = name
        self._factory = factory
        self._cached_parts: tuple[int, UserModelParts] | None = None
        self.generator_state = torch.empty(0)

    def get_parts(self, seed: int | None = None) -> UserModelParts:
        """Call the factory with torch's generator seeded with ``seed``, or return the cached result for this seed.

        If ``seed`` is None, the cached result is returned, for any seed.
        """
        if self._cached_parts is None or seed not in (None, self._cached_parts[0]):
            self._cached_parts = None  # free the model before the next one is built
            seed = 0 if seed is None else seed
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                self._cached_parts = seed, call_factory(self.name, self._factory)
                self.generator_state = torch.default_generator.get_state()
        return self._cached_parts[1]

    def build(self) -> nn.Module:
        """Return a copy of the model, with its weights initialized from the current seed of torch's generator."""
        model = self.get_parts(torch.initial_seed()).model
        try:
            return copy.deepcopy(model, copy_computed_attributes(model))
        except Exception as error:  # deepcopy of a user's module may raise anything
            raise UsageError(
                f"{self.name}: the model cannot be copied by copy.deepcopy ({describe_exception(error)}); laws "
                "need several copies, so its attributes must be parameters, buffers, modules and plain values"
            ) from error

    def batch(self, generator: torch.Generator) -> Batch:
        """Draw a micro-batch from ``generator``, whose seed also becomes the seed for the forward.

        Raises UsageError if the batch function raises, or returns no rows.
        """
        draw = self.get_parts().draw
        try:
            drawn = draw(generator)
        except Exception as error:  # a user's batch function may raise anything
            raise UsageError(
                f"{self.name}: batch(generator) raised {describe_exception(error)}; expected a function that draws a "
                "micro-batch with the generator"
            ) from error
        rows = {len(tensor) if tensor.dim() else 0 for tensor in collect_tensors(drawn)}
        if len(rows) != 1 or rows == {0}:
            raise UsageError(
                f"{self.name}: batch(generator) returned {describe_value(drawn)}; expected a tensor, a tuple or a dict "
                "of tensors that all have one row for each sample"
            )
        return Batch(drawn, drawn, generator.initial_seed())

    def loss(self, output: Any, batch: Any) -> Tensor:
        """Return the loss of ``output``. Raises UsageError if the loss is not a scalar that requires a gradient."""
        parts = self.get_parts()
        loss = parts.score(output, batch)
        if not isinstance(loss, Tensor) or loss.dim() or (not loss.requires_grad and torch.is_grad_enabled()):
            hint = "; give a loss function, because the model returns no loss" if parts.score is default_loss else ""
            raise UsageError(
                f"the loss is {describe_value(loss)}; expected a scalar tensor that requires a gradient{hint}"
            )
        return loss


def copy_computed_attributes(model: nn.Module) -> dict[int, Tensor]:
    """Return detached copies of the computed tensors among the modules' attributes, by id, as deepcopy's memo.

    copy.deepcopy refuses a tensor with a history. An example is the weight that torch.nn.utils.weight_norm computes
    from two parameters before each forward.
    """
    values = (value for module in model.modules() for value in vars(module).values())
    return {id(value): value.detach().clone() for value in values if isinstance(value, Tensor) and not value.is_leaf}


def import_factory(name: str) -> Factory:
    """Import the factory at the path ``name``. Raises UsageError if the import fails.

    The current directory is put on the import path.
    """
    module, _, attribute = name.partition(":")
    if module == IN_PROCESS_PACKAGE:
        raise UsageError(
            f"{name} was passed to zharness.verify in a process that has ended; call zharness.verify again"
        )
    factory = getattr(import_user_module(module, name), attribute, None)
    if not callable(factory):
        raise UsageError(
            f"{name!r}: module {module!r} has no callable {attribute!r}; expected a factory of {EXPECTED_RETURN}"
        )
    return factory  # type: ignore[no-any-return]


def import_user_module(module: str, name: str) -> ModuleType:
    """Import ``module`` for the model ``name``, also from the current directory. Raises UsageError if that fails."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # importing a user's module may raise anything, or call sys.exit
        raise UsageError(
            f"cannot import {module!r} for the model {name!r}: {describe_exception(error)}; "
            "expected package.module:factory, importable from the current directory"
        ) from error


def call_factory(name: str, factory: Factory) -> UserModelParts:
    """Call ``factory``, and add the default draw and loss functions if the factory returns no such functions.

    Raises UsageError if the factory raises, or returns anything other than what EXPECTED_RETURN describes.
    """
    try:
        result = factory()
    except SystemExit as error:
        raise UsageError(
            f"the factory {name} called sys.exit({error.code!r}); expected {EXPECTED_RETURN}: remove the exit, or "
            "parse command-line arguments elsewhere"
        ) from error
    except Exception as error:  # a user's factory may raise anything
        raise UsageError(f"the factory {name} raised {describe_exception(error)}") from error
    model, draw, score = (
        (*result, None, None)[:3] if isinstance(result, tuple) and 1 <= len(result) <= 3 else (result, None, None)
    )
    if not isinstance(model, nn.Module) or not all(part is None or callable(part) for part in (draw, score)):
        raise UsageError(f"the factory {name} returned {describe_value(result)}; expected {EXPECTED_RETURN}")
    unshaped = [key for key, parameter in model.named_parameters() if is_lazy(parameter)]
    if unshaped:
        raise UsageError(
            f"the parameter {unshaped[0]!r} of the model of {name} has no shape before the first forward; run a "
            "forward on a batch of zeros in the factory, so that engines can shard it"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"the model of {name} has no parameter that requires a gradient; expected at least one")
    return UserModelParts(replace_synchronized_norms(model), draw or default_draw(name, model), score or default_loss)


def default_draw(name: str, model: nn.Module) -> DrawInputs:
    """Return a function that draws micro-batches for a model of the transformers package.

    Raises UsageError for any other model. ``name`` is the factory's name for the error message.
    """
    draw = find_draw(model, SAMPLES)
    if draw is None:
        raise UsageError(
            f"the factory {name} returned a {type(model).__name__} without a batch function, which only models of the "
            f"transformers package that compute a loss do not need; return {EXPECTED_RETURN}, as in: "
            "return model, lambda generator: torch.randn(4, 16, generator=generator), "
            "lambda output, batch: output.square().mean()"
        )
    return draw


def default_loss(output: Any, _batch: Any) -> Tensor:
    """Return the loss that the model computes itself: the output of the model, or the entry ``loss`` of the output."""
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    return loss  # type: ignore[return-value] # UserModel.loss raises if it is None


def describe_value(obj: Any) -> str:
    """Describe the type of ``obj``, and the shapes of the tensors in it, for an error message."""
    if isinstance(obj, Tensor):
        return f"a tensor of shape {tuple(obj.shape)}{'' if obj.requires_grad else ' that requires no gradient'}"
    if isinstance(obj, (tuple, list)):
        return f"a {type(obj).__name__} of ({', '.join(map(describe_value, obj))})"
    if isinstance(obj, dict):
        return f"a dict of {', '.join(f'{key}: {describe_value(value)}' for key, value in obj.items())}"
    if isinstance(obj, type):
        return f"the class {obj.__name__}"
    name = type(obj).__name__
    return "None" if obj is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
