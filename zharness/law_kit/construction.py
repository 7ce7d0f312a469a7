"""Build an engine, and check that it implements the protocol and that its factory did not change the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines.protocol import Capabilities, Engine, EngineConfig, EngineFactory, Piece
from zharness.errors import EngineContractError
from zharness.parity.compare import check_names

Layout = Mapping[str, tuple[Piece, ...]]


class InitialValues(Enum):
    """The changes that an engine may make to the weights and buffers of the model that it gets."""

    KEPT = "they stay as they are, as all ranks have the same"
    FROM_RANK_0 = "a rank whose model has others takes those of rank 0"


def construct_engine(
    factory: EngineFactory, model: nn.Module, config: EngineConfig, values: InitialValues = InitialValues.KEPT
) -> tuple[Engine, Layout]:
    """Build an engine around ``model``, and return the engine with the layout of its parameters.

    Raise EngineContractError if the factory did not return an Engine, or if it changed more of the model than
    ``values`` allows. The message names the method, module, parameter or buffer.
    """
    snapshot = ModelSnapshot.capture(model)
    if values is InitialValues.FROM_RANK_0:
        snapshot = replace(snapshot, weights={}, buffers={})
    engine = factory(model, config)
    require_engine(engine)
    layout = require_mapping("layout", engine.layout())
    if not all(isinstance(piece, Piece) for pieces in layout.values() for piece in pieces):
        raise EngineContractError("layout: expected a tuple of zharness.engines.Piece for each parameter")
    owned = {name: tuple(pieces) for name, pieces in layout.items() if name in snapshot.requires_grad}
    require_pieces_inside(owned, snapshot.sizes)
    snapshot.require_unchanged(model, owned)
    return engine, owned


def require_pieces_inside(layout: Layout, sizes: Mapping[str, int]) -> None:
    """Raise EngineContractError if a piece in ``layout`` has elements that its parameter does not have.

    ``sizes`` has the number of elements of each parameter.
    """
    for name, pieces in layout.items():
        for piece in pieces:
            if not 0 <= piece.start <= piece.stop <= sizes[name]:
                raise EngineContractError(
                    f"layout: rank {piece.rank} owns the elements {piece.start} to {piece.stop} of {name!r}; expected "
                    f"a range inside 0 to {sizes[name]}, without the padding of shards"
                )


def require_engine(candidate: object) -> None:
    """Raise EngineContractError, which lists what ``candidate`` lacks, unless ``candidate`` implements Engine."""
    verbs = sorted(
        {"__call__", *(name for name in dir(Engine) if not name.startswith("_"))} - {"module", "capabilities"}
    )
    missing = [name for name in verbs if not callable(getattr(candidate, name, None))]
    for name, kind in (("module", nn.Module), ("capabilities", Capabilities)):
        if not isinstance(getattr(candidate, name, None), kind):
            missing.append(f"{name} (a {kind.__name__})")
    if missing:
        raise EngineContractError(
            f"the engine factory returned a {type(candidate).__name__}, which is not an Engine: missing "
            f"{', '.join(missing)}; zharness.engines.Engine documents every method"
        )


@dataclass(frozen=True)
class ModelSnapshot:
    """A copy of a model's training flags, names, weights and buffers, made before an engine wraps the model.

    ``sizes`` has the number of elements of each parameter. ``weights`` and ``buffers`` contain a tied tensor only once.
    They contain no tensors on the meta device, which have no values.
    """

    training_flags: Mapping[str, bool]
    requires_grad: Mapping[str, bool]
    sizes: Mapping[str, int]
    state_names: tuple[str, ...]
    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    @classmethod
    def capture(cls, model: nn.Module) -> ModelSnapshot:
        """Return a snapshot of the flags, names, weights and buffers of ``model``."""
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        return cls(
            get_training_flags(model),
            get_requires_grad(parameters),
            {name: parameter.numel() for name, parameter in parameters.items()},
            list_state_names(model),
            clone_tensors(parameters),
            clone_tensors(buffers),
        )

    def require_unchanged(self, model: nn.Module, layout: Layout) -> None:
        """Raise EngineContractError if a flag, a name, a buffer or a weight of ``model`` has changed.

        Flags are each module's training flag and each parameter's ``requires_grad``. Only the weights that are
        unsharded on this rank are compared.
        """
        changed = changed_flags(self.training_flags, get_training_flags(model))
        if changed:
            names = ", ".join(name or "the model itself" for name in changed)
            raise EngineContractError(
                f"the engine changed the training flag of {names}; only the caller may set the mode"
            )
        check_names(
            "the model's state dict, after the engine was built,",
            dict.fromkeys(self.state_names),
            dict.fromkeys(list_state_names(model)),
        )
        weights = dict(model.named_parameters())
        changed = changed_flags(self.requires_grad, get_requires_grad(weights))
        if changed:
            names = ", ".join(map(repr, changed))
            raise EngineContractError(
                f"the engine changed requires_grad of {names}; only the caller may choose which parameters train"
            )
        for name, before in self.weights.items():
            whole = is_unsharded(weights[name], before, layout.get(name, ()))
            if whole and not has_same_values(before, weights[name]):
                raise EngineContractError(describe_changed_weight(name))
        self._require_unchanged_buffers(
            dict(model.named_buffers()), weights_converted=get_dtypes(weights) != get_dtypes(self.weights)
        )

    def _require_unchanged_buffers(self, buffers: Mapping[str, Tensor], weights_converted: bool) -> None:
        """Raise EngineContractError if a buffer has changed.

        If ``weights_converted`` is true, the dtypes of buffers may change, because the law precision.buffers_keep_dtype
        judges whether an engine may convert buffers together with the weights.
        """
        for name, before in self.buffers.items():
            now = buffers[name]
            if now.dtype != before.dtype and not weights_converted:
                raise EngineContractError(
                    f"the engine changed the dtype of the buffer {name!r} from {before.dtype} to {now.dtype}"
                )
            if now.shape != before.shape or not has_same_values(before, now):
                raise EngineContractError(f"the engine changed the buffer {name!r}; expected it unchanged")


def changed_flags(before: Mapping[str, bool], after: Mapping[str, bool]) -> list[str]:
    """Return the names of the flags that differ between ``before`` and ``after``."""
    return [name for name, flag in before.items() if after.get(name, flag) != flag]


def get_training_flags(model: nn.Module) -> dict[str, bool]:
    """Return a dictionary from the name of each module to its training flag."""
    return {name: module.training for name, module in model.named_modules()}


def get_requires_grad(parameters: Mapping[str, Tensor]) -> dict[str, bool]:
    """Return a dictionary from the name of each parameter to its ``requires_grad``."""
    return {name: parameter.requires_grad for name, parameter in parameters.items()}


def clone_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a dictionary with a copy of every tensor that is not on the meta device."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items() if not tensor.is_meta}


def get_dtypes(tensors: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    """Return a dictionary from the name of each tensor to its dtype."""
    return {name: tensor.dtype for name, tensor in tensors.items()}


def list_state_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of all parameters and buffers of ``model``, including every name of a tied tensor."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return tuple(name for name, _ in named)


def is_unsharded(weight: Tensor, before: Tensor, pieces: tuple[Piece, ...]) -> bool:
    """Return whether this rank holds the full ``weight``. If it does not, the weight is a DTensor or a shard.

    If a parameter has one element, its shard has the shape of the full parameter, even on the ranks where the shard is
    padding. The layout, ``pieces``, then says whether this rank has the element.
    """
    if type(weight) is not nn.Parameter or weight.shape != before.shape:
        return False
    here = (piece.start < piece.stop for piece in pieces if piece.rank == dist.get_rank())
    return weight.numel() != 1 or not pieces or any(here)


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor. The DTensor class is not imported, because the import takes a second."""
    return hasattr(tensor, "to_local")


def has_same_values(before: Tensor, after: Tensor) -> bool:
    """Return whether ``after`` equals ``before``, rounded to the dtype of ``after``."""
    return torch.equal(before.to(after.device, after.dtype), after.detach())


def describe_changed_weight(name: str) -> str:
    """Return the error message for an engine that changed the initial values of the parameter ``name``."""
    return f"the engine changed the initial weights of {name!r}; training starts from the weights of the model"


def require_initial_weights(params: Any, model: nn.Module) -> None:
    """Raise EngineContractError if ``params`` differ in name, shape or value from the parameters of ``model``."""
    found, expected = require_mapping("full_params", params), dict(model.named_parameters())
    check_names("full_params", expected, found)
    for name, weight in expected.items():
        got = require_cpu_tensor("full_params", name, found[name])
        require_shape("full_params", name, got, weight)
        if not torch.equal(got.double(), weight.detach().double()):
            raise EngineContractError(describe_changed_weight(name))


def require_gradients(grads: Any, model: nn.Module) -> None:
    """Raise EngineContractError if a gradient's name or shape is not that of a parameter of ``model``.

    A gradient may be missing here, because the laws check which parameters have gradients.
    """
    found, expected = require_mapping("full_grads", grads), dict(model.named_parameters())
    if not found.keys() <= expected.keys():
        check_names("full_grads", expected, found)
    for name, grad in found.items():
        require_shape("full_grads", name, require_cpu_tensor("full_grads", name, grad), expected[name])


def require_shape(source: str, name: str, actual: Tensor, expected: Tensor) -> None:
    """Raise EngineContractError if ``actual`` does not have the shape of ``expected``.

    ``source`` is the name of the engine's method that returned ``actual``.
    """
    if actual.shape != expected.shape:
        raise EngineContractError(
            f"{source}[{name!r}]: the engine returned the shape {tuple(actual.shape)}; expected {tuple(expected.shape)}"
        )


def require_mapping(source: str, value: Any) -> Mapping[str, Any]:
    """Return ``value``. Raise EngineContractError, with the name of the method ``source``, if it is not a mapping."""
    if not isinstance(value, Mapping):
        raise EngineContractError(
            f"{source}: the engine returned a {type(value).__name__}; expected a dictionary of tensors by parameter"
        )
    return value


def require_cpu_tensor(source: str, name: str, value: Any) -> Tensor:
    """Return ``value``, detached and on the CPU. Raise EngineContractError if ``value`` is not a tensor."""
    if not isinstance(value, Tensor):
        raise EngineContractError(
            f"{source}[{name!r}]: the engine returned a {type(value).__name__}; expected a tensor"
        )
    return value.detach().cpu()
