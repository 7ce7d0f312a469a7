"""Anyone's model: a factory by its path, which returns a model, or a model, its batches and its loss."""

from __future__ import annotations

import copy
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from zharness.errors import UsageError
from zharness.workload.models import SAMPLES, Batch, ModelSpec, collect_tensors
from zharness.workload.shrink_model import shrink_factory_result
from zharness.workload.transformers_batches import find_draw

_FACTORY_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*(?:\([\w.=,]+\))?")
EXPECTED_RETURN = (
    "a model; or (model, batch), or (model, batch, loss), where batch(generator) draws a tensor, a tuple or a dict of "
    "tensors, the arguments of the model, and loss(output, batch) is a scalar tensor"
)
IN_PROCESS_PACKAGE = "given"  # where a path has its package: what was handed over in this process and is nowhere else
Factory = Callable[[], Any]
DrawInputs = Callable[[torch.Generator], Any]

_registered_factories: dict[str, Factory] = {}  # by hand_over alone, before any rank is forked


@dataclass(frozen=True)
class UserModelParts:
    """What a factory made: a model, how a micro-batch is drawn, and how the model's output is scored."""

    model: nn.Module
    draw: DrawInputs
    score: Callable[[Any, Any], Tensor]


def is_user_model(name: str) -> bool:
    """Whether ``name`` is the path of a factory, ``package.module:factory``, changes to its model behind it or not."""
    return _FACTORY_PATH.fullmatch(name) is not None


def register_factory(name: str, factory: Factory) -> None:
    """Have ``factory``, which may be a closure, found under ``name`` here and in every process forked from here on."""
    _registered_factories[name] = factory
    user_model_spec.cache_clear()  # what it keeps under that name may be another one's


def is_registered_factory(name: str) -> bool:
    """Whether something is found under ``name`` in this process alone."""
    return name in _registered_factories


def unregister_factory(name: str) -> None:
    """Forget what was handed over under ``name``, and the model that was made of it."""
    _registered_factories.pop(name, None)
    user_model_spec.cache_clear()


@lru_cache(maxsize=8)
def user_model_spec(name: str) -> ModelSpec:
    """The model of the factory ``name``. Raises UsageError where there is none to import; it is not called yet."""
    shop = UserModel(name, resolve_factory(name))
    return ModelSpec(name, f"the model of {name}", shop.build, shop.batch, shop.loss)


def build_fresh_model(name: str, seed: int) -> nn.Module:
    """The model of ``name`` from one more call of its factory."""
    return UserModel(name, resolve_factory(name)).get_parts(seed).model


def resolve_factory(name: str) -> Factory:
    """The factory that was handed over under ``name``, or lies at that path. Raises UsageError.

    Behind a path may stand what makes the model smaller: ``package.module:factory(num_hidden_layers=1)`` changes its
    configuration, ``package.module:factory(2=out)`` leaves a module of a sequence out.
    """
    path, changes = parse_user_model_name(name)
    factory = _registered_factories.get(path) or import_factory(path)
    return (lambda: shrink_factory_result(factory(), changes)) if changes else factory


def parse_user_model_name(name: str) -> tuple[str, dict[str, str]]:
    """The path of a factory, and the changes to its model."""
    path, _, changes = name.removesuffix(")").partition("(")
    return path, dict(change.split("=", 1) for change in changes.split(",") if "=" in change)


def format_user_model_name(path: str, changes: Mapping[str, str]) -> str:
    """The name of a factory's model with ``changes``."""
    return f"{path}({','.join(f'{key}={value}' for key, value in changes.items())})" if changes else path


class UserModel:
    """What a factory makes. What it made last is kept, and copied: a law asks for a model many times over."""

    def __init__(self, name: str, factory: Factory) -> None:
        self.name = name
        self._factory = factory
        self._cached_parts: tuple[int, UserModelParts] | None = None

    def get_parts(self, seed: int | None = None) -> UserModelParts:
        """What the factory makes with torch's generator at ``seed``; None: whatever the seed was."""
        if self._cached_parts is None or seed not in (None, self._cached_parts[0]):
            self._cached_parts = None  # freed before the next one is made
            seed = 0 if seed is None else seed
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                self._cached_parts = seed, call_factory(self.name, self._factory)
        return self._cached_parts[1]

    def build(self) -> nn.Module:
        """A copy of the model in the initial weights of the seed that torch's generator is at."""
        model = self.get_parts(torch.initial_seed()).model
        try:
            return copy.deepcopy(model)
        except Exception as error:  # whatever a foreign module raises
            raise UsageError(
                f"{self.name}: the model cannot be copied by copy.deepcopy ({type(error).__name__}: {error}), of which "
                "every law takes several; have it keep nothing but parameters, buffers and plain values"
            ) from error

    def batch(self, generator: torch.Generator) -> Batch:
        """A micro-batch; what its forward draws follows from the same seed."""
        drawn = self.get_parts().draw(generator)
        rows = {len(tensor) if tensor.dim() else 0 for tensor in collect_tensors(drawn)}
        if len(rows) != 1 or rows == {0}:
            raise UsageError(
                f"{self.name}: batch(generator) returned {describe_value(drawn)}; expected a tensor, a tuple or a dict of "
                "tensors that all have one row for each sample"
            )
        return Batch(drawn, drawn, generator.initial_seed())

    def loss(self, output: Any, batch: Any) -> Tensor:
        """The loss of an output."""
        found = self.get_parts().score(output, batch)
        if not isinstance(found, Tensor) or found.dim() or (not found.requires_grad and torch.is_grad_enabled()):
            raise UsageError(
                f"{self.name}: the loss is {describe_value(found)}; expected a scalar tensor that a backward can start from"
            )
        return found


def import_factory(name: str) -> Factory:
    """The factory at the path ``name``, looked for in the current directory too. Raises UsageError."""
    module, _, attribute = name.partition(":")
    if module == IN_PROCESS_PACKAGE:
        raise UsageError(f"{name} was handed to zharness.verify by a process that is gone; call it there once more")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:  # whatever a foreign module raises while it is imported, the sentence is the same
        raise UsageError(
            f"cannot import {module!r} for the model {name!r}: {type(error).__name__}: {error}; "
            "expected package.module:factory, importable from the current directory"
        ) from error
    if not callable(factory):
        raise UsageError(
            f"{name!r}: module {module!r} has no callable {attribute!r}; expected a factory of {EXPECTED_RETURN}"
        )
    return factory  # type: ignore[no-any-return]


def call_factory(name: str, factory: Factory) -> UserModelParts:
    """What ``factory`` returns, complete. Raises UsageError where it fails, or returns something else."""
    try:
        made = factory()
    except Exception as error:  # whatever a foreign factory raises, the user has to hear of it in one sentence
        raise UsageError(f"the factory {name} raised {type(error).__name__}: {error}") from error
    model, draw, score = (
        (*made, None, None)[:3] if isinstance(made, tuple) and 1 <= len(made) <= 3 else (made, None, None)
    )
    if not isinstance(model, nn.Module) or not all(part is None or callable(part) for part in (draw, score)):
        raise UsageError(f"the factory {name} returned {describe_value(made)}; expected {EXPECTED_RETURN}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"the model of {name} has no parameter that requires a gradient; expected one that trains")
    return UserModelParts(model, draw or default_draw(name, model), score or default_loss)


def default_draw(name: str, model: nn.Module) -> DrawInputs:
    """How a micro-batch is drawn for a model of the transformers package. Raises UsageError for any other."""
    draw = find_draw(model, SAMPLES)
    if draw is None:
        raise UsageError(
            f"the factory {name} returned a {type(model).__name__} and no batch function, which only models of the "
            f"transformers package with a loss of their own do without; return {EXPECTED_RETURN}, as in: "
            "return model, lambda generator: torch.randn(4, 16, generator=generator), "
            "lambda output, batch: output.square().mean()"
        )
    return draw


def default_loss(output: Any, _batch: Any) -> Tensor:
    """The loss that a model returns by itself: its output, or what that has under ``loss``."""
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    return loss  # type: ignore[return-value] # Workshop.loss says so where it is none


def describe_value(obj: Any) -> str:
    """What something is, in few words."""
    if isinstance(obj, Tensor):
        return f"a tensor of shape {tuple(obj.shape)}{'' if obj.requires_grad else ' without gradient'}"
    if isinstance(obj, (tuple, list)):
        return f"a {type(obj).__name__} of ({', '.join(map(describe_value, obj))})"
    if isinstance(obj, dict):
        return f"a dict of {', '.join(f'{key}: {describe_value(value)}' for key, value in obj.items())}"
    return "None" if obj is None else f"a {type(obj).__name__}"
