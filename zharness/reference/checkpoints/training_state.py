"""Collect an engine's training state by parameter name for a checkpoint, and load the state from a checkpoint.

Each tensor is flattened. If the optimizer state is sharded, a rank saves its range of the elements, otherwise all
elements. The tensors are saved as DTensors, so torch.distributed.checkpoint can load the range that another stage or
world size needs. An optimizer state that is one number for a whole parameter, such as the step count, is saved in
CheckpointContents, not as a tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zharness.comm import Comm
from zharness.errors import CheckpointError
from zharness.reference.layout import ModelParam, ShardPlacement, StagePlacements
from zharness.reference.parameters import Parameters

if TYPE_CHECKING:
    from zharness.distributed_tensor import DTensor

# The states that torch.optim keeps as one number per parameter; the last three are NAdam's and ASGD's.
SCALAR_STATE_KEYS = frozenset({"step", "mu_product", "eta", "mu"})
EXTRA_STATE_KEY = "_extra_state"  # torch's key for a module's get_extra_state()


@dataclass(frozen=True)
class CheckpointContents:
    """The description of a checkpoint, which shows whether the checkpoint fits an engine before any tensor is read.

    ``moments`` has the dtypes of each parameter's elementwise optimizer states, and ``counts`` has the other optimizer
    states. ``groups`` has the optimizer's parameter groups, with parameter names under the key ``params``. ``stateful``
    has the class name and the ``state_dict`` of the learning-rate schedule and of the loss scale.
    """

    world_size: int
    steps: int
    skipped_steps: int
    parameters: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[int, ...]]
    optimizer: str
    moments: Mapping[str, Mapping[str, torch.dtype]]
    counts: Mapping[str, Mapping[str, Any]]
    groups: list[dict[str, Any]]
    stateful: Mapping[str, tuple[str, dict[str, Any]]]


def weight_key(name: str) -> str:
    """Return the checkpoint key of the tensor that the optimizer updates for the parameter ``name``.

    That tensor is the parameter's master weight if it has one, otherwise the parameter itself.
    """
    return f"weights/{name}"


def moment_key(name: str, key: str) -> str:
    """Return the checkpoint key of the elementwise optimizer state ``key`` of the parameter ``name``."""
    return f"optimizer/{name}/{key}"


def buffer_key(name: str, rank: int) -> str:
    """Return the checkpoint key of the buffer ``name`` on ``rank``; ranks save their own running statistics."""
    return f"buffers/{rank}/{name}"


class TrainingState:
    """Collects the parameters, buffers and optimizer state of one engine, and loads them into the engine."""

    def __init__(
        self,
        module: nn.Module,
        model_params: Mapping[str, ModelParam],
        placements: StagePlacements,
        parameters: Parameters,
        optimizer: torch.optim.Optimizer,
        stateful: Mapping[str, Any],
        comm: Comm,
    ) -> None:
        self._module = module
        self._model_params = model_params
        self._is_sharded = placements.optimizer_state is ShardPlacement.SHARDED
        self._parameters = parameters
        self._optimizer = optimizer
        self._stateful = stateful
        self._comm = comm
        self._device_meshes: dict[str, DeviceMesh] = {}

    def extra_state(self) -> dict[str, Any]:
        """Return the extra state of this rank's modules (``get_extra_state``) by its key in ``state_dict``."""
        items = self._module.state_dict(keep_vars=True).items()
        return {name: value for name, value in items if name.rpartition(".")[2] == EXTRA_STATE_KEY}

    def load_extra_state(self, extra_state: Mapping[str, Any]) -> None:
        """Pass each module's saved extra state to its ``set_extra_state``."""
        for name, module in self._module.named_modules():
            if (key := f"{name}.{EXTRA_STATE_KEY}".lstrip(".")) in extra_state:
                module.set_extra_state(extra_state[key])

    def collect_contents(self, steps: int, skipped_steps: int, exclude_frozen: bool = False) -> CheckpointContents:
        """Return a description of the checkpoint that this engine would save now, maybe without frozen parameters.

        Raises CheckpointError for an optimizer state that cannot be sharded, and for a schedule without ``state_dict``
        or ``load_state_dict``.
        """
        for key, stateful in self._stateful.items():
            if not all(callable(getattr(stateful, method, None)) for method in ("state_dict", "load_state_dict")):
                raise CheckpointError(
                    f"the {key}, a {type(stateful).__name__}, has no state_dict and load_state_dict, so it cannot be "
                    "saved; define both"
                )
        moments: dict[str, dict[str, torch.dtype]] = {}
        counts: dict[str, dict[str, Any]] = {}
        for name, state in self._optimizer_states().items():
            shape = self._parameters.leaves[name].shape
            moments[name] = {key: value.dtype for key, value in state.items() if _is_elementwise(key, value, shape)}
            counts[name] = {key: value for key, value in state.items() if key not in moments[name]}
            for key, value in counts[name].items():
                if isinstance(value, Tensor) and value.numel() != 1:
                    raise CheckpointError(
                        f"the optimizer state {key!r} of parameter {name!r} has shape {tuple(value.shape)} and cannot "
                        f"be sharded; expected the parameter's shape ({tuple(shape)} on this rank) or a single number"
                    )
        return CheckpointContents(
            self._comm.all_ranks.world_size,
            steps,
            skipped_steps,
            {
                name: tuple(param.layout.shape)
                for name, param in self._model_params.items()
                if not exclude_frozen or self.is_trained(name)
            },
            {name: tuple(buffer.shape) for name, buffer in self._persistent_buffers().items()},
            type(self._optimizer).__name__,
            moments,
            counts,
            self._named_param_groups(),
            {key: (type(stateful).__name__, stateful.state_dict()) for key, stateful in self._stateful.items()},
        )

    def check_compatible(
        self,
        contents: CheckpointContents,
        extra_state: Mapping[str, Any],
        module_only: bool = False,
        ignores_unmatched: bool = False,
    ) -> None:
        """Raise CheckpointError for the first difference between the checkpoint and this model and optimizer.

        If ``module_only`` is True, only parameters, buffers and extra state are compared. If ``ignores_unmatched``
        is True, the checkpoint may lack parameters of the model and have others.
        """
        shapes = {name: tuple(param.layout.shape) for name, param in self._model_params.items()}
        names = shapes.keys() & contents.parameters if ignores_unmatched else shapes.keys() | contents.parameters
        _check_same_shapes("parameter", _pick(contents.parameters, names), _pick(shapes, names))
        _check_same_shapes(
            "buffer", contents.buffers, {name: tuple(b.shape) for name, b in self._persistent_buffers().items()}
        )
        if extra_state.keys() != self.extra_state().keys():
            expected = sorted(self.extra_state())
            raise CheckpointError(
                f"checkpoint of another model: it has the extra state {sorted(extra_state)}, this model has {expected}"
            )
        if module_only:
            return
        if contents.optimizer != type(self._optimizer).__name__:
            raise CheckpointError(
                f"the checkpoint was saved with the optimizer {contents.optimizer}, but this engine has "
                f"{type(self._optimizer).__name__}; pass load_module_only=True to load only the weights"
            )
        expected_groups, saved_groups = (
            [group["params"] for group in groups] for groups in (self._named_param_groups(), contents.groups)
        )
        if expected_groups != saved_groups:
            raise CheckpointError(
                f"the checkpoint's parameter groups are {saved_groups}, but this engine has {expected_groups}; "
                "build the optimizer with the same groups"
            )
        kinds = {key: type(stateful).__name__ for key, stateful in self._stateful.items()}
        saved = {key: kind for key, (kind, _) in contents.stateful.items()}
        if kinds != saved:
            none = "no schedule and no loss scale"
            raise CheckpointError(
                f"the checkpoint contains the state of {', '.join(saved.values()) or none}, but this engine has "
                f"{', '.join(kinds.values()) or none}; build the engine with the same schedule and loss scale"
            )

    def local_tensors(self, contents: CheckpointContents) -> dict[str, Tensor]:
        """Return this rank's part of all tensors that ``contents`` describes, by checkpoint key.

        The returned tensors share memory with the engine.
        """
        states, tensors = self._optimizer_states(), {}
        for name, leaf in self._leaves_in(contents).items():
            tensors[weight_key(name)] = self.make_dtensor(name, leaf)
            for key in contents.moments.get(name, {}):
                tensors[moment_key(name, key)] = self.make_dtensor(name, states[name][key])
        buffers = {
            buffer_key(name, self._comm.all_ranks.rank): buffer for name, buffer in self._persistent_buffers().items()
        }
        return {key: tensor for key, tensor in (tensors | buffers).items() if tensor.numel()}

    def make_empty_tensors(self, contents: CheckpointContents, module_only: bool = False) -> dict[str, Tensor]:
        """Return empty tensors by checkpoint key, into which the checkpoint that ``contents`` describes can be read.

        A rank that the checkpoint does not have gets the keys of rank 0's buffers. If ``module_only`` is True,
        optimizer states are left out.
        """
        tensors: dict[str, Tensor] = {}
        for name, leaf in self._leaves_in(contents).items():
            weight = torch.empty_like(leaf, memory_format=torch.contiguous_format)
            tensors[weight_key(name)] = self.make_dtensor(name, weight)
            moments = {} if module_only else contents.moments.get(name, {})
            for key, dtype in moments.items():
                moment = torch.empty(leaf.shape, dtype=dtype, device=leaf.device)
                tensors[moment_key(name, key)] = self.make_dtensor(name, moment)
        rank = self._comm.all_ranks.rank if self._comm.all_ranks.rank < contents.world_size else 0
        for name, buffer in self._persistent_buffers().items():
            tensors[buffer_key(name, rank)] = torch.empty_like(buffer)
        return {key: tensor for key, tensor in tensors.items() if tensor.numel()}

    def _leaves_in(self, contents: CheckpointContents) -> dict[str, Tensor]:
        """Return the leaves of those parameters that the checkpoint has, by name."""
        return {name: leaf for name, leaf in self._parameters.leaves.items() if name in contents.parameters}

    def is_trained(self, name: str) -> bool:
        """Return whether the parameter ``name`` requires gradients."""
        return self._model_params[name].parameter.requires_grad

    def state_dict_names(self) -> set[str]:
        """Return every name in the module's ``state_dict``, including all names of tied parameters."""
        return set(self._module.state_dict(keep_vars=True))

    def shard_full_tensor(self, name: str, full: Tensor) -> DTensor:
        """Return a copy of this rank's part of ``full``, the full parameter ``name``, as a DTensor."""
        start, stop = self._model_params[name].layout.shard_bounds(self._comm.rank)
        return self.make_dtensor(name, full.reshape(-1)[start:stop].clone() if self._is_sharded else full)

    def make_dtensor(self, name: str, values: Tensor) -> DTensor:
        """Return ``values``, this rank's part of the parameter ``name``, as a DTensor of the flattened parameter.

        ``values`` may have any shape.
        """
        from zharness.distributed_tensor import DTensor, Replicate, Shard

        placement = Shard(0) if self._is_sharded else Replicate()
        flat = torch.Size([self._model_params[name].layout.numel])
        local, mesh = values.detach().reshape(-1), self._get_device_mesh(values.device.type)
        return DTensor.from_local(local, mesh, [placement], run_check=False, shape=flat, stride=(1,))

    def _get_device_mesh(self, device_type: str) -> DeviceMesh:
        """Return the device mesh of the ranks that share one copy of the weights.

        The mesh is made for the first checkpoint, because making it is slow.
        """
        if device_type not in self._device_meshes:
            group = self._comm.group or dist.group.WORLD
            assert group is not None
            self._device_meshes[device_type] = DeviceMesh.from_group(group, device_type)
        return self._device_meshes[device_type]

    @torch.no_grad()
    def load_tensors(
        self, contents: CheckpointContents, local_tensors: Mapping[str, Tensor], module_only: bool = False
    ) -> None:
        """Load ``local_tensors`` and the states in ``contents`` into the engine. This is a collective.

        ``check_compatible`` must have accepted ``contents``. If ``module_only`` is True, only parameters and buffers
        are loaded.
        """
        leaves = self._leaves_in(contents)
        for name, leaf in leaves.items():
            leaf.copy_(_reshape_like_leaf(leaf, local_tensors.get(weight_key(name))))
        self._parameters.publish(leaves)
        for name, buffer in self._persistent_buffers().items():
            keys = (buffer_key(name, self._comm.all_ranks.rank), buffer_key(name, 0))
            buffer.copy_(next((local_tensors[key] for key in keys if key in local_tensors), buffer))
        if module_only:
            return
        states = {
            index: {
                **{
                    key: _reshape_like_leaf(leaves[name], local_tensors.get(moment_key(name, key)))
                    for key in contents.moments[name]
                },
                **contents.counts[name],
            }
            for index, name in enumerate(self._ordered_param_names())
            if name in contents.counts
        }
        numbers = itertools.count()
        groups = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in contents.groups]
        self._optimizer.load_state_dict({"state": states, "param_groups": groups})
        for key, stateful in self._stateful.items():
            stateful.load_state_dict(contents.stateful[key][1])

    def _ordered_param_names(self) -> list[str]:
        """Return the names of the optimizer's parameters, in the order in which torch.optim numbers them."""
        name_of = {id(leaf): name for name, leaf in self._parameters.leaves.items()}
        return [name_of[id(leaf)] for group in self._optimizer.param_groups for leaf in group["params"]]

    def _optimizer_states(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer state by parameter name, without parameters that were never updated."""
        leaves = self._parameters.leaves
        return {
            name: dict(state)
            for name in self._ordered_param_names()
            if (state := self._optimizer.state.get(leaves[name]))
        }

    def _named_param_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups, with names instead of the parameters."""
        names = iter(self._ordered_param_names())
        return [{**group, "params": [next(names) for _ in group["params"]]} for group in self._optimizer.param_groups]

    def _persistent_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that the model's ``state_dict`` contains, each once."""
        names = self._module.state_dict(keep_vars=True).keys()
        return {name: buffer for name, buffer in self._module.named_buffers() if name in names}


def _is_elementwise(key: str, value: Any, shape: torch.Size) -> bool:
    """Return whether an optimizer state has one element for each element of the parameter.

    The shape cannot show this for a parameter with one element, so scalar states are recognised by their keys.
    """
    return key not in SCALAR_STATE_KEYS and isinstance(value, Tensor) and value.shape == shape


def _reshape_like_leaf(leaf: Tensor, local_tensor: Tensor | None) -> Tensor:
    """Return a copy of ``local_tensor``, a loaded tensor, with the shape and strides of ``leaf``.

    ``local_tensor`` is None if ``leaf`` has no elements on this rank.
    """
    from zharness.distributed_tensor import DTensor

    if local_tensor is None:
        return torch.empty_like(leaf)
    values = local_tensor.to_local() if isinstance(local_tensor, DTensor) else local_tensor
    return torch.empty_like(leaf, dtype=values.dtype).copy_(values.view(leaf.shape))


def _pick(shapes: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the entries of ``shapes`` whose names are in ``names``."""
    return {name: shape for name, shape in shapes.items() if name in names}


def _check_same_shapes(kind: str, saved_shapes: Mapping[str, Any], expected_shapes: Mapping[str, Any]) -> None:
    """Raise CheckpointError for the first tensor that is missing on one side or has different shapes on both sides.

    The two sides are the checkpoint and the model. The message calls the tensor ``kind``: "parameter" or "buffer".
    """
    for name in (*expected_shapes, *saved_shapes):
        saved, expected = saved_shapes.get(name), expected_shapes.get(name)
        if saved is None or expected is None or tuple(saved) != tuple(expected):
            in_model = "missing" if expected is None else f"of shape {tuple(expected)}"
            in_checkpoint = "missing" if saved is None else f"of shape {tuple(saved)}"
            raise CheckpointError(
                f"checkpoint of another model: {kind} {name!r} is {in_checkpoint} in the checkpoint, and {in_model} in "
                "this model"
            )
