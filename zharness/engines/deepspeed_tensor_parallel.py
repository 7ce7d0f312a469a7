"""Split models over the axis tp with DeepSpeed's AutoTP, and read the split tensors whole."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines.deepspeed_partition_state import PartitionState, gather_objects
from zharness.engines.deepspeed_round_robin import RoundRobinLinks
from zharness.engines.deepspeed_tensors import DeepSpeedTensorReader
from zharness.engines.protocol import EngineConfig, Feature, Piece
from zharness.errors import ConfigError, EngineContractError
from zharness.mesh import TENSOR, Mesh

_DOCUMENTATION = "https://www.deepspeed.ai/tutorials/autotp-training/"
# AutoTP's settings for each word of a plan; see PLAN_WORDS. AutoTP has no row-wise layer that takes a whole input, so
# such a layer is not split. A layer that is not split gives the same numbers.
LAYER_SPECS: Mapping[str, Mapping[str, Any]] = {
    "colwise": {"partition_type": "column"},
    "colwise_gather_output": {"partition_type": "column", "gather_output": True},
    "rowwise": {"partition_type": "row"},
    "rowwise_split_input": {"partition_type": "skip"},
}
_PARTS = "its functions for partitioned states return the part of a split parameter that this rank of tp has"
REFUSES_ON_TP: Mapping[Feature, str] = {
    Feature.READ_OUT: _PARTS,
    Feature.WRITE_IN: _PARTS,
    Feature.SHARD_ACCESS: _PARTS,
    Feature.INITIAL_WEIGHTS: "ranks of data parallelism broadcast to each other, and those of tp do not",
    Feature.EDITS: f"it documents no way to edit a parameter that AutoTP has split ({_DOCUMENTATION})",
}


def tensor_parallel_section(mesh: Mesh, plan: Mapping[str, str]) -> dict[str, Any]:
    """Return DeepSpeed's section ``tensor_parallel`` for the mesh; empty without the axis tp.

    Raises ConfigError for a model without a plan, and for a word of a plan for which AutoTP has no layer.
    """
    if TENSOR not in mesh.axes:
        return {}
    if not plan:
        raise ConfigError("the config has the axis tp, but no tp_plan that says how it splits the model")
    for word in plan.values():
        if word not in LAYER_SPECS:
            raise ConfigError.unknown_name("word of a tp_plan on the deepspeed engine", word, sorted(LAYER_SPECS))
    specs = [{"patterns": [rf"^{re.escape(name)}\.weight$"], **LAYER_SPECS[word]} for name, word in plan.items()]
    partition = {"use_default_specs": False, "layer_specs": specs}
    return {"tensor_parallel": {"autotp_size": mesh.size(TENSOR), "partition_config": partition}}


def build_reader(
    engine: Any,
    params: Mapping[str, nn.Parameter],
    shapes: Mapping[str, torch.Size],
    links: RoundRobinLinks,
    config: EngineConfig,
) -> DeepSpeedTensorReader:
    """Return the reader of an engine: one that gathers over tp, if the mesh of ``config`` has this axis.

    ``shapes`` are the shapes of the parameters before ``engine`` was built.
    """
    if TENSOR not in config.mesh.axes:
        return DeepSpeedTensorReader(engine, params, config.stage, links, data_group=None)
    from deepspeed.utils import groups

    reader = SplitTensorReader(
        engine,
        params,
        config.stage,
        links,
        groups.get_data_parallel_group(),
        shapes,
        groups.get_tensor_model_parallel_group(),
    )
    reader.require_split_weights(config.tp_plan, config.mesh.size(TENSOR))
    return reader


@dataclass(frozen=True)
class SplitTensorReader(DeepSpeedTensorReader):
    """Reads full tensors of a model that AutoTP has split.

    ``shapes`` are the shapes of the parameters before they were split, and ``tensor_group`` has the ranks that split
    them. Every method is a collective.
    """

    shapes: Mapping[str, torch.Size]
    tensor_group: Any

    def require_split_weights(self, plan: Mapping[str, str], size: int) -> None:
        """Raise EngineContractError unless AutoTP split the weight of each module of ``plan`` whose word says so.

        A layer that is not split gives the same numbers, so a comparison with plain PyTorch would not find it. A weight
        with fewer rows or columns than the ``size`` of tp is whole on one rank.
        """
        for module, word in plan.items():
            dim = {"column": 0, "row": 1}.get(LAYER_SPECS[word]["partition_type"])
            name = f"{module}.weight"
            if dim is None or (name in self.shapes and self.shapes[name][dim] < size):
                continue
            if name not in self.shapes or self._split_dim(name) != dim:
                raise EngineContractError(f"AutoTP did not split {name!r} in dimension {dim}; the plan says {word}")

    def grads(self) -> dict[str, Tensor]:
        """Return the full gradients by name."""
        return self._gather(super().grads())

    def weights(self) -> dict[str, Tensor]:
        """Return the full weights by name."""
        return self._gather(super().weights())

    def masters(self) -> dict[str, Tensor]:
        """Return the full fp32 master weights by name."""
        return self._gather(super().masters())

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the full optimizer state by parameter name and key."""
        return {
            name: {key: self._gather_one(name, value) if value.dim() else value for key, value in state.items()}
            for name, state in super().optimizer_state().items()
        }

    def _gather_partitions(self, group: int) -> list[PartitionState]:
        views = gather_objects(super()._gather_partitions(group), self.tensor_group)
        return [partition for view in views for partition in view]

    def state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the full ``module.state_dict()``; the names of a tied weight share one tensor."""
        names = {id(param): name for name, param in self.params.items()}
        full = self.weights()
        tied = {name: names.get(id(value)) for name, value in module.state_dict(keep_vars=True).items()}
        return {
            name: value if (first := tied[name]) is None else full[first]
            for name, value in super().state_dict(module).items()
        }

    def layout(self) -> dict[str, tuple[Piece, ...]]:
        """Return which pieces of each trained parameter each rank owns; data-parallel replicas own the same pieces."""
        owned = {
            name: self._own_runs(name, pieces)
            for name, pieces in self._pieces_of_parts().items()
            if pieces or self._split_dim(name) is not None
        }
        views: list[Mapping[str, list[Piece]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(views, owned)
        return {name: tuple(piece for view in views for piece in view.get(name, ())) for name in owned}

    def _pieces_of_parts(self) -> dict[str, tuple[Piece, ...]]:
        """Return the pieces of this rank's parts of the trained parameters, by name; there are none at stage 0."""
        of_zero = super().layout()
        trained = [name for name, param in self.params.items() if param.requires_grad]
        return {name: of_zero.get(name, ()) for name in trained}

    def _own_runs(self, name: str, pieces: tuple[Piece, ...]) -> list[Piece]:
        """Return this rank's runs of the flat full parameter, for the pieces of its part, or for all of its part."""
        rank = dist.get_rank()
        places = self._own_places(name)
        spans = [(piece.start, piece.stop) for piece in pieces if piece.rank == rank]
        if not pieces:
            spans = [(0, places.numel())]
        return [run for start, stop in spans for run in list_runs(rank, places[start:stop])]

    def _own_places(self, name: str) -> Tensor:
        """Return, for each element of this rank's part, its index in the flat full parameter."""
        shape, dim = self.shapes[name], self._split_dim(name)
        places = torch.arange(shape.numel()).view(shape)
        if dim is None:
            return places.flatten()
        sizes: list[Any] = [None] * dist.get_world_size(self.tensor_group)
        dist.all_gather_object(sizes, self._part_shape(name)[dim], group=self.tensor_group)
        return torch.split(places, sizes, dim)[dist.get_rank(self.tensor_group)].flatten()

    def _part_shape(self, name: str) -> torch.Size:
        """Return the shape of this rank's part of a parameter, which stage 3 may have sharded."""
        param: Any = self.params[name]
        return torch.Size(getattr(param, "ds_shape", param.shape))

    def _split_dim(self, name: str) -> int | None:
        """Return the dimension in which tp splits a parameter, or None if each rank of tp has all of it."""
        full, part = self.shapes[name], self._part_shape(name)
        return next((dim for dim, size in enumerate(full) if part[dim] != size), None)

    def _gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._gather_one(name, tensor) for name, tensor in tensors.items()}

    def _gather_one(self, name: str, part: Tensor) -> Tensor:
        """Return the full tensor of ``part``, along the dimension in which the parameter is split."""
        dim = self._split_dim(name)
        if dim is None:
            return part
        parts: list[Any] = [None] * dist.get_world_size(self.tensor_group)
        # not all_gather: AutoTP's parts may differ in size
        dist.all_gather_object(parts, part, group=self.tensor_group)
        return torch.cat(parts, dim=dim)


def list_runs(rank: int, places: Tensor) -> list[Piece]:
    """Return a piece for each run of consecutive numbers in the ascending ``places``, which ``rank`` owns."""
    if places.numel() == 0:
        return []
    breaks = (places.diff() != 1).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), places.numel()]
    return [Piece(rank, int(places[start]), int(places[stop - 1]) + 1) for start, stop in pairwise(edges)]
