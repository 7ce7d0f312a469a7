"""The state of training under original names: what a checkpoint keeps of an engine, and the way back into one.

Each tensor is kept flat. Where the optimizer state is sharded a rank has its own range of the elements, else all of
them; as DTensors they tell torch.distributed.checkpoint so, which then reads whatever range another stage or world size
needs. What is one number for a whole parameter (the count of its steps) is no tensor here but a fact.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
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
    from zharness.reference.checkpoints.dcp import DTensor

# What torch.optim keeps as one number for a whole parameter (the last three are NAdam's and ASGD's).
SCALAR_STATE_KEYS = frozenset({"step", "mu_product", "eta", "mu"})
EXTRA_STATE_KEY = "_extra_state"  # torch's name for what a module's get_extra_state gives


@dataclass(frozen=True)
class CheckpointContents:
    """What a checkpoint holds, enough to know whether it fits an engine before any tensor is read.

    ``moments`` are the elementwise optimizer states of each parameter and their dtypes, ``counts`` the others;
    ``groups`` are the optimizer's groups, with parameter names under ``params``. ``stateful`` are the kind and the
    ``state_dict`` of what else goes on from where it was: the learning-rate schedule, the loss scale.
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
    """Under which a checkpoint holds the optimizer's copy of a parameter."""
    return f"weights/{name}"


def moment_key(name: str, key: str) -> str:
    """Under which a checkpoint holds one elementwise state of a parameter."""
    return f"optimizer/{name}/{key}"


def buffer_key(name: str, rank: int) -> str:
    """Under which a checkpoint holds a buffer. Each rank's own: running statistics differ from rank to rank."""
    return f"buffers/{rank}/{name}"


class TrainingState:
    """Parameters, buffers and optimizer of one engine, as a checkpoint sees them."""

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
        """What modules' ``get_extra_state`` give, by its name in ``state_dict``. This rank's."""
        kept = self._module.state_dict(keep_vars=True).items()
        return {name: value for name, value in kept if name.rpartition(".")[2] == EXTRA_STATE_KEY}

    def load_extra_state(self, extra_state: Mapping[str, Any]) -> None:
        """Give each module the extra state that was saved of it."""
        for name, module in self._module.named_modules():
            if (key := f"{name}.{EXTRA_STATE_KEY}".lstrip(".")) in extra_state:
                module.set_extra_state(extra_state[key])

    def collect_contents(self, steps: int, skipped_steps: int) -> CheckpointContents:
        """What this engine would save now, after so many steps.

        Raises CheckpointError for state that cannot be cut, and for a schedule that does not tell its state.
        """

        for key, each in self._stateful.items():
            if not all(callable(getattr(each, verb, None)) for verb in ("state_dict", "load_state_dict")):
                raise CheckpointError(
                    f"the {key}, a {type(each).__name__}, has no state_dict and load_state_dict, so no checkpoint "
                    "could tell where it was; give it both"
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
                        f"the optimizer's {key!r} of parameter {name!r} has shape {tuple(value.shape)}, neither the "
                        f"parameter's ({tuple(shape)} on this rank) nor a single number: no other stage could read it"
                    )
        return CheckpointContents(
            self._comm.world_size,
            steps,
            skipped_steps,
            {name: tuple(original.layout.shape) for name, original in self._model_params.items()},
            {name: tuple(buffer.shape) for name, buffer in self._persistent_buffers().items()},
            type(self._optimizer).__name__,
            moments,
            counts,
            self._named_param_groups(),
            {key: (type(each).__name__, each.state_dict()) for key, each in self._stateful.items()},
        )

    def check_compatible(
        self, contents: CheckpointContents, extra_state: Mapping[str, Any], module_only: bool = False
    ) -> None:
        """Raise CheckpointError, with the first difference, unless all that was saved is of this very model."""
        own = {name: tuple(original.layout.shape) for name, original in self._model_params.items()}
        _check_same_shapes("parameter", contents.parameters, own)
        _check_same_shapes(
            "buffer", contents.buffers, {name: tuple(b.shape) for name, b in self._persistent_buffers().items()}
        )
        if extra_state.keys() != self.extra_state().keys():
            here = sorted(self.extra_state())
            raise CheckpointError(
                f"checkpoint of another model: it has the extra state {sorted(extra_state)}, here is {here}"
            )
        if module_only:
            return
        if contents.optimizer != type(self._optimizer).__name__:
            raise CheckpointError(
                f"the checkpoint is of the optimizer {contents.optimizer}, this engine has "
                f"{type(self._optimizer).__name__}; load_module_only=True takes the weights alone"
            )
        mine, theirs = (
            [group["params"] for group in groups] for groups in (self._named_param_groups(), contents.groups)
        )
        if mine != theirs:
            raise CheckpointError(f"the checkpoint's parameter groups are {theirs}, this engine's {mine}")
        kinds = {key: type(each).__name__ for key, each in self._stateful.items()}
        saved = {key: kind for key, (kind, _) in contents.stateful.items()}
        if kinds != saved:
            raise CheckpointError(
                f"the checkpoint has the state of {saved or 'nothing'}, this engine {kinds or 'none'}"
            )

    def local_tensors(self, contents: CheckpointContents) -> dict[str, Tensor]:
        """This rank's part of everything in ``contents``, sharing memory with the engine."""
        states, found = self._optimizer_states(), {}
        for name, leaf in self._parameters.leaves.items():
            found[weight_key(name)] = self.make_dtensor(name, leaf)
            for key in contents.moments.get(name, {}):
                found[moment_key(name, key)] = self.make_dtensor(name, states[name][key])
        own = {buffer_key(name, self._comm.rank): buffer for name, buffer in self._persistent_buffers().items()}
        return {key: tensor for key, tensor in (found | own).items() if tensor.numel()}

    def make_empty_tensors(self, contents: CheckpointContents, module_only: bool = False) -> dict[str, Tensor]:
        """Fresh memory for all of ``contents``. A rank that the checkpoint does not know reads rank 0's buffers."""
        found: dict[str, Tensor] = {}
        for name, leaf in self._parameters.leaves.items():
            found[weight_key(name)] = self.make_dtensor(
                name, torch.empty_like(leaf, memory_format=torch.contiguous_format)
            )
            moments = {} if module_only else contents.moments.get(name, {})
            for key, dtype in moments.items():
                found[moment_key(name, key)] = self.make_dtensor(
                    name, torch.empty(leaf.shape, dtype=dtype, device=leaf.device)
                )
        rank = self._comm.rank if self._comm.rank < contents.world_size else 0
        own = {buffer_key(name, rank): torch.empty_like(buffer) for name, buffer in self._persistent_buffers().items()}
        return {key: tensor for key, tensor in (found | own).items() if tensor.numel()}

    def is_trained(self, name: str) -> bool:
        """Whether the parameter wants gradients."""
        return self._model_params[name].parameter.requires_grad

    def state_dict_names(self) -> set[str]:
        """Every name in the module's ``state_dict``, those of tied weights included."""
        return set(self._module.state_dict(keep_vars=True))

    def shard_full_tensor(self, name: str, full: Tensor) -> DTensor:
        """This rank's part of a whole parameter, in memory of its own."""
        start, stop = self._model_params[name].layout.shard_bounds(self._comm.rank)
        return self.make_dtensor(name, full.reshape(-1)[start:stop].clone() if self._is_sharded else full)

    def make_dtensor(self, name: str, values: Tensor) -> DTensor:
        """``values`` of this rank's leaf (any shape) as its part of the flat parameter ``name``."""
        from zharness.reference.checkpoints.dcp import DTensor, Replicate, Shard

        placement = Shard(0) if self._is_sharded else Replicate()
        flat = torch.Size([self._model_params[name].layout.numel])
        local, mesh = values.detach().reshape(-1), self._get_device_mesh(values.device.type)
        return DTensor.from_local(local, mesh, [placement], run_check=False, shape=flat, stride=(1,))

    def _get_device_mesh(self, device_type: str) -> DeviceMesh:
        """The ranks, in DTensor's words. Made at the first checkpoint: making one takes longer than a small tensor."""
        if device_type not in self._device_meshes:
            group = self._comm.group or dist.group.WORLD
            assert group is not None
            self._device_meshes[device_type] = DeviceMesh.from_group(group, device_type)
        return self._device_meshes[device_type]

    @torch.no_grad()
    def load_tensors(
        self, contents: CheckpointContents, local_tensors: Mapping[str, Tensor], module_only: bool = False
    ) -> None:
        """Train on from ``pieces``, of contents that were checked. Collective."""
        leaves = self._parameters.leaves
        for name, leaf in leaves.items():
            leaf.copy_(_reshape_like_leaf(leaf, local_tensors.get(weight_key(name))))
        self._parameters.publish(leaves)
        for name, buffer in self._persistent_buffers().items():
            held = next(
                (local_tensors[key] for r in (self._comm.rank, 0) if (key := buffer_key(name, r)) in local_tensors),
                buffer,
            )
            buffer.copy_(held)
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
        for key, each in self._stateful.items():
            each.load_state_dict(contents.stateful[key][1])

    def _ordered_param_names(self) -> list[str]:
        """The optimizer's parameters in the order in which torch.optim numbers them."""
        name_of = {id(leaf): name for name, leaf in self._parameters.leaves.items()}
        return [name_of[id(leaf)] for group in self._optimizer.param_groups for leaf in group["params"]]

    def _optimizer_states(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state by parameter; one without, because it was never updated, is left out."""
        leaves = self._parameters.leaves
        return {
            name: dict(state)
            for name in self._ordered_param_names()
            if (state := self._optimizer.state.get(leaves[name]))
        }

    def _named_param_groups(self) -> list[dict[str, Any]]:
        names = iter(self._ordered_param_names())
        return [{**group, "params": [next(names) for _ in group["params"]]} for group in self._optimizer.param_groups]

    def _persistent_buffers(self) -> dict[str, Tensor]:
        """The buffers that ``state_dict`` keeps, each once."""
        kept = self._module.state_dict(keep_vars=True).keys()
        return {name: buffer for name, buffer in self._module.named_buffers() if name in kept}


def _is_elementwise(key: str, value: Any, shape: torch.Size) -> bool:
    """Whether each element belongs to one of the parameter, which the shape of a parameter of one number cannot say."""
    return key not in SCALAR_STATE_KEYS and isinstance(value, Tensor) and value.shape == shape


def _reshape_like_leaf(leaf: Tensor, local_tensor: Tensor | None) -> Tensor:
    """A piece in the shape and strides of ``leaf``; of an empty parameter there is none."""
    from zharness.reference.checkpoints.dcp import DTensor

    if local_tensor is None:
        return torch.empty_like(leaf)
    values = local_tensor.to_local() if isinstance(local_tensor, DTensor) else local_tensor
    return torch.empty_like(leaf, dtype=values.dtype).copy_(values.view(leaf.shape))


def _check_same_shapes(kind: str, saved_shapes: Mapping[str, Any], expected_shapes: Mapping[str, Any]) -> None:
    for name in (*expected_shapes, *saved_shapes):
        got, expected = saved_shapes.get(name), expected_shapes.get(name)
        if got is None or expected is None or tuple(got) != tuple(expected):
            here = "no such" if expected is None else f"one of shape {tuple(expected)}"
            there = "none" if got is None else f"shape {tuple(got)}"
            raise CheckpointError(f"checkpoint of another model: {kind} {name!r} has {there} there, and here is {here}")
