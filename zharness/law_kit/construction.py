"""An engine as its factory hands it over: what it has to be, and what it must not have done to the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines.protocol import Capabilities, Engine, EngineConfig, EngineFactory, Piece
from zharness.errors import EngineContractError
from zharness.parity.compare import check_names

Layout = Mapping[str, tuple[Piece, ...]]


def construct_engine(factory: EngineFactory, model: nn.Module, config: EngineConfig) -> tuple[Engine, Layout]:
    """The engine that ``factory`` makes of ``model``, and who owns which elements of its parameters.

    Raises EngineContractError, naming the method, module, parameter or buffer, when it is no Engine or the model was
    changed.
    """
    given = ModelSnapshot.capture(model)
    engine = factory(model, config)
    require_engine(engine)
    layout = require_mapping("layout", engine.layout())
    if not all(isinstance(piece, Piece) for pieces in layout.values() for piece in pieces):
        raise EngineContractError("layout: the engine returned something else than tuples of zharness.engines.Piece")
    owned = {name: tuple(pieces) for name, pieces in layout.items() if name in given.requires_grad}
    given.require_unchanged(model, owned)
    return engine, owned


def require_engine(candidate: object) -> None:
    """Raises EngineContractError that names what an object lacks to be an Engine."""
    verbs = sorted(
        {"__call__", *(name for name in dir(Engine) if not name.startswith("_"))} - {"module", "capabilities"}
    )
    wrong = [name for name in verbs if not callable(getattr(candidate, name, None))]
    for name, kind in (("module", nn.Module), ("capabilities", Capabilities)):
        if not isinstance(getattr(candidate, name, None), kind):
            wrong.append(f"{name} (a {kind.__name__})")
    if wrong:
        raise EngineContractError(
            f"the engine factory returned a {type(candidate).__name__}, which is not an Engine: missing {', '.join(wrong)}"
            "; zharness.engines.Engine documents every method"
        )


@dataclass(frozen=True)
class ModelSnapshot:
    """A model before an engine had it: its modules' training flags, the names of its state, and copies of the state.

    ``trained`` says of each parameter whether it requires a gradient. ``weights`` and ``buffers`` hold a tied tensor
    once, and none of the meta device, which has no values to keep.
    """

    training_flags: Mapping[str, bool]
    requires_grad: Mapping[str, bool]
    state_names: tuple[str, ...]
    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    @classmethod
    def capture(cls, model: nn.Module) -> ModelSnapshot:
        """What ``model`` is now."""
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        return cls(
            get_training_flags(model),
            get_requires_grad(parameters),
            list_state_names(model),
            clone_tensors(parameters),
            clone_tensors(buffers),
        )

    def require_unchanged(self, model: nn.Module, layout: Layout) -> None:
        """Raises EngineContractError where a flag, a name, a buffer or a weight is another now.

        Weights are compared where they are whole on this rank.
        """
        turned = changed_flags(self.training_flags, get_training_flags(model))
        if turned:
            names = ", ".join(name or "the model itself" for name in turned)
            raise EngineContractError(
                f"the engine changed the training flag of {names}; the mode is the caller's to set"
            )
        check_names(
            "the model's state dict, once the engine has it,",
            dict.fromkeys(self.state_names),
            dict.fromkeys(list_state_names(model)),
        )
        weights = dict(model.named_parameters())
        turned = changed_flags(self.requires_grad, get_requires_grad(weights))
        if turned:
            names = ", ".join(map(repr, turned))
            raise EngineContractError(
                f"the engine changed requires_grad of {names}; what trains is the caller's to say"
            )
        for name, before in self.weights.items():
            whole = is_unsharded(weights[name], before, layout.get(name, ()))
            if whole and not has_same_values(before, weights[name]):
                raise EngineContractError(describe_changed_weight(name))
        self._require_unchanged_buffers(
            dict(model.named_buffers()), weights_converted=get_dtypes(weights) != get_dtypes(self.weights)
        )

    def _require_unchanged_buffers(self, buffers: Mapping[str, Tensor], weights_converted: bool) -> None:
        """``require_unchanged`` of buffers. An engine that was asked for another dtype may have ``converted`` weights.

        Whether buffers may go along then is what precision.buffers_keep_dtype says.
        """
        for name, before in self.buffers.items():
            now = buffers[name]
            if now.dtype != before.dtype and not weights_converted:
                raise EngineContractError(
                    f"the engine changed the dtype of the buffer {name!r} from {before.dtype} to {now.dtype}"
                )
            if now.shape != before.shape or not has_same_values(before, now):
                raise EngineContractError(f"the engine changed the buffer {name!r}; expected it as it was given")


def changed_flags(before: Mapping[str, bool], after: Mapping[str, bool]) -> list[str]:
    """The names whose flag is another now."""
    return [name for name, flag in before.items() if after.get(name, flag) != flag]


def get_training_flags(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def get_requires_grad(parameters: Mapping[str, Tensor]) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in parameters.items()}


def clone_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items() if not tensor.is_meta}


def get_dtypes(tensors: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in tensors.items()}


def list_state_names(model: nn.Module) -> tuple[str, ...]:
    """The names of parameters and buffers, tied ones under each."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return tuple(name for name, _ in named)


def is_unsharded(weight: Tensor, before: Tensor, pieces: tuple[Piece, ...]) -> bool:
    """Whether a parameter can still be compared here: neither a DTensor nor a shard.

    A shard of a single element, or its padding, has the shape of the whole; who owns the element is left to be asked.
    """
    if type(weight) is not nn.Parameter or weight.shape != before.shape:
        return False
    here = (piece.start < piece.stop for piece in pieces if piece.rank == dist.get_rank())
    return weight.numel() != 1 or not pieces or any(here)


def is_dtensor(tensor: Tensor) -> bool:
    """Told by its verb: to import the class takes a second, which no engine without DTensors should cost."""
    return hasattr(tensor, "to_local")


def has_same_values(before: Tensor, after: Tensor) -> bool:
    """Whether ``now`` holds the values of ``before``, rounded where it is of a narrower dtype."""
    return torch.equal(before.to(after.device, after.dtype), after.detach())


def describe_changed_weight(name: str) -> str:
    """That a weight is no longer the initial one."""
    return f"the engine changed the initial weights of {name!r}; training starts from the model as it was given"


def require_initial_weights(params: Any, model: nn.Module) -> None:
    """Raises EngineContractError unless ``full_params`` are the weights of ``model``, by name, shape and value."""
    found, expected = require_mapping("full_params", params), dict(model.named_parameters())
    check_names("full_params", expected, found)
    for name, weight in expected.items():
        got = require_cpu_tensor("full_params", name, found[name])
        require_shape("full_params", name, got, weight)
        if not torch.equal(got.double(), weight.detach().double()):
            raise EngineContractError(describe_changed_weight(name))


def require_gradients(grads: Any, model: nn.Module) -> None:
    """Raises EngineContractError unless ``full_grads`` have names and shapes of parameters of ``model``.

    Gradients that are not there are not asked for: an engine without them is told by the laws.
    """
    found, expected = require_mapping("full_grads", grads), dict(model.named_parameters())
    if not found.keys() <= expected.keys():
        check_names("full_grads", expected, found)
    for name, grad in found.items():
        require_shape("full_grads", name, require_cpu_tensor("full_grads", name, grad), expected[name])


def require_shape(source: str, name: str, actual: Tensor, expected: Tensor) -> None:
    """Raises EngineContractError for a shape that is not the parameter's."""
    if actual.shape != expected.shape:
        raise EngineContractError(
            f"{source}[{name!r}]: the engine returned shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        )


def require_mapping(source: str, value: Any) -> Mapping[str, Any]:
    """``value``, which an engine returned. Raises EngineContractError unless it is a dictionary."""
    if not isinstance(value, Mapping):
        raise EngineContractError(
            f"{source}: the engine returned a {type(value).__name__}, expected a dictionary of tensors by original name"
        )
    return value


def require_cpu_tensor(source: str, name: str, value: Any) -> Tensor:
    """``value`` on CPU. Raises EngineContractError unless it is a tensor."""
    if not isinstance(value, Tensor):
        raise EngineContractError(
            f"{source}[{name!r}]: the engine returned a {type(value).__name__}, expected a tensor"
        )
    return value.detach().cpu()
