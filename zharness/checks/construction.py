"""An engine as its factory hands it over: what it has to be, and what it must not have done to the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines.protocol import Capabilities, Engine, EngineConfig, EngineFactory
from zharness.errors import EngineContractError
from zharness.parity.compare import check_names


def constructed(factory: EngineFactory, model: nn.Module, config: EngineConfig) -> Engine:
    """The engine that ``factory`` makes of ``model``.

    Raises EngineContractError, naming the method, module or parameter, when it is no Engine or the model was changed.
    """
    given = Given.of(model)
    engine = factory(model, config)
    require_engine(engine)
    given.require_unchanged(model)
    return engine


def require_engine(thing: object) -> None:
    """Raises EngineContractError that names what an object lacks to be an Engine."""
    verbs = sorted(
        {"__call__", *(name for name in dir(Engine) if not name.startswith("_"))} - {"module", "capabilities"}
    )
    wrong = [name for name in verbs if not callable(getattr(thing, name, None))]
    for name, kind in (("module", nn.Module), ("capabilities", Capabilities)):
        if not isinstance(getattr(thing, name, None), kind):
            wrong.append(f"{name} (a {kind.__name__})")
    if wrong:
        raise EngineContractError(
            f"the engine factory returned a {type(thing).__name__}, which is not an Engine: missing {', '.join(wrong)}"
            "; zharness.engines.Engine documents every method"
        )


@dataclass(frozen=True)
class Given:
    """A model before an engine had it: its modules' training flags, the names of its state, copies of its weights."""

    training: Mapping[str, bool]
    names: tuple[str, ...]
    weights: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> Given:
        """What ``model`` is now; weights on the meta device have no values to keep."""
        weights = {name: weight.detach().clone() for name, weight in model.named_parameters() if not weight.is_meta}
        return cls(flags(model), names_of(model), weights)

    def require_unchanged(self, model: nn.Module) -> None:
        """Raises EngineContractError where a flag, a name, or a weight that is whole on this rank is another now."""
        now = flags(model)
        turned = [name or "the model itself" for name, flag in self.training.items() if now.get(name, flag) != flag]
        if turned:
            raise EngineContractError(
                f"the engine changed the training flag of {', '.join(turned)}; the mode is the caller's to set"
            )
        check_names(
            "the model's state dict, once the engine has it,", dict.fromkeys(self.names), dict.fromkeys(names_of(model))
        )
        for name, weight in model.named_parameters():
            before = self.weights.get(name)
            if before is not None and is_whole(weight, before) and not torch.equal(weight.detach(), before):
                raise EngineContractError(changed(name))


def flags(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def names_of(model: nn.Module) -> tuple[str, ...]:
    """The names of parameters and buffers, tied ones under each."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return tuple(name for name, _ in named)


def is_whole(weight: Tensor, before: Tensor) -> bool:
    """Whether a parameter can still be compared here: neither a shard, nor of another dtype, nor a DTensor.

    A shard of a single element has the shape of the whole.
    """
    plain = type(weight) is nn.Parameter and weight.dtype == before.dtype and weight.device == before.device
    return plain and weight.shape == before.shape and weight.numel() > 1


def changed(name: str) -> str:
    """That a weight is no longer the initial one."""
    return f"the engine changed the initial weights of {name!r}; training starts from the model as it was given"


def require_initial(params: Any, model: nn.Module) -> None:
    """Raises EngineContractError unless ``full_params`` are the weights of ``model``, by name, shape and value."""
    found, expected = as_dict("full_params", params), dict(model.named_parameters())
    check_names("full_params", expected, found)
    for name, weight in expected.items():
        got = on_cpu("full_params", name, found[name])
        require_shape("full_params", name, got, weight)
        if not torch.equal(got.double(), weight.detach().double()):
            raise EngineContractError(changed(name))


def require_gradients(grads: Any, model: nn.Module) -> None:
    """Raises EngineContractError unless ``full_grads`` have names and shapes of parameters of ``model``.

    Gradients that are not there are not asked for: an engine without them is told by the laws.
    """
    found, expected = as_dict("full_grads", grads), dict(model.named_parameters())
    if not found.keys() <= expected.keys():
        check_names("full_grads", expected, found)
    for name, grad in found.items():
        require_shape("full_grads", name, on_cpu("full_grads", name, grad), expected[name])


def require_shape(what: str, name: str, got: Tensor, expected: Tensor) -> None:
    """Raises EngineContractError for a shape that is not the parameter's."""
    if got.shape != expected.shape:
        raise EngineContractError(
            f"{what}[{name!r}]: the engine returned shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
        )


def as_dict(what: str, value: Any) -> Mapping[str, Any]:
    """``value``, which an engine returned. Raises EngineContractError unless it is a dictionary."""
    if not isinstance(value, Mapping):
        raise EngineContractError(
            f"{what}: the engine returned a {type(value).__name__}, expected a dictionary of tensors by original name"
        )
    return value


def on_cpu(what: str, name: str, value: Any) -> Tensor:
    """A copy of ``value`` on CPU. Raises EngineContractError unless it is a tensor."""
    if not isinstance(value, Tensor):
        raise EngineContractError(f"{what}[{name!r}]: the engine returned a {type(value).__name__}, expected a tensor")
    return value.detach().to("cpu", copy=True)
