"""Split a model's modules over the axis tp with torch's ``parallelize_module``, and find out which rank owns what."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines.device_meshes import get_device_mesh
from zharness.engines.protocol import EngineConfig, Piece
from zharness.engines.torch_gathers import gather_full_tensors
from zharness.errors import ConfigError, EngineContractError
from zharness.mesh import DATA_AXES, TENSOR, Mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The meaning of transformers' words for plans. Modules outside a plan have whole inputs and outputs on every rank of
# tp.
PLAN_WORDS = {
    "colwise": "rows of the weight are split, and so is the last dimension of the output",
    "colwise_gather_output": "rows of the weight are split, and the output is gathered",
    "colwise_split_logits": "as colwise, but the output is a DTensor, for loss_parallel",
    "rowwise": "columns of the weight are split, as the input is; the outputs are summed",
    "rowwise_split_input": "columns of the weight are split, and so is the input, which was whole; outputs are summed",
    "rowwise_to_sequence": "as rowwise, but the summed output is split along the sequence",
    "rowwise_split_input_to_sequence": "as rowwise_split_input, but the summed output is split along the sequence",
    "sequence_to_colwise": "as colwise, but the input, split along the sequence, is gathered first",
    "sequence_to_colwise_gather_output": "as sequence_to_colwise, but the output is gathered",
    "sequence_to_colwise_split_logits": "as sequence_to_colwise, but the output is a DTensor, for loss_parallel",
    "sequence_parallel": "the weight is whole, and the input and the output are split along the sequence",
    "sequence_parallel_to_tensor": "as sequence_parallel, but the output is a tensor, and no DTensor",
}


_LAZY_MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict",
)


def warm_up() -> None:
    """Import in the rank server modules that each rank would import: 0.6 s of CPU time on each, 38 s on 64 ranks."""
    for name in _LAZY_MODULES:
        importlib.import_module(name)


def build_device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """Return the DeviceMesh of all ranks, with a dimension for ``dp_shard`` and for each axis that ``mesh`` names."""
    shape = mesh.shape(dist.get_world_size())
    axes = tuple(axis for axis in shape if axis in (*mesh.axes, DATA_AXES[-1]))
    return get_device_mesh(device.type, tuple(shape[axis] for axis in axes), axes)


def split_modules(model: nn.Module, config: EngineConfig, devices: DeviceMesh) -> None:
    """Split the modules of the config's plan over the axis tp of ``devices`` in place. This is a collective.

    Raises ConfigError for an unknown word in the plan, and for a model without a plan.
    """
    if TENSOR in config.mesh.axes:
        apply_plan(model, config, devices[TENSOR])


def apply_plan(model: nn.Module, config: EngineConfig, tensor_ranks: DeviceMesh) -> None:
    """Split the modules of the config's plan over ``tensor_ranks`` in place, as ``split_modules`` does."""
    from torch.distributed.tensor.parallel import parallelize_module

    if not config.tp_plan:
        raise ConfigError("the config has the axis tp, but no tp_plan that says how it splits the model")
    styles = {name: make_style(word) for name, word in config.tp_plan.items()}
    parallelize_module(model, tensor_ranks, styles)
    require_split_weights(model, config.tp_plan)


def require_split_weights(model: nn.Module, plan: Mapping[str, str]) -> None:
    """Raise EngineContractError unless tp splits the weight of each module that ``plan`` splits by its word.

    ``parallelize_module`` only warns of a name that the model does not have. A layer that is not split gives the same
    numbers, so a comparison with plain PyTorch would not find it.
    """
    modules = dict(model.named_modules())
    for name, word in plan.items():
        placements = getattr(getattr(modules.get(name), "weight", None), "placements", ())
        if not word.startswith("sequence_parallel") and not any(placement.is_shard() for placement in placements):
            raise EngineContractError(
                f"parallelize_module split no weight of {name!r}; the plan says {word}: {PLAN_WORDS[word]}"
            )


def make_style(word: str) -> Any:
    """Return torch's ParallelStyle for a word of a plan. Raises ConfigError for an unknown word."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    match word:
        case "colwise":
            return ColwiseParallel()
        case "colwise_gather_output":
            return ColwiseParallel(output_layouts=Replicate())
        case "colwise_split_logits":
            return ColwiseParallel(use_local_output=False)
        case "rowwise":
            return RowwiseParallel()
        case "rowwise_split_input":
            return RowwiseParallel(input_layouts=Replicate())
        case "rowwise_to_sequence":
            return RowwiseParallel(output_layouts=Shard(1))
        case "rowwise_split_input_to_sequence":
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        case "sequence_to_colwise":
            return ColwiseParallel(input_layouts=Shard(1))
        case "sequence_to_colwise_gather_output":
            return ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        case "sequence_to_colwise_split_logits":
            return ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
        case "sequence_parallel":
            return SequenceParallel(sequence_dim=1)
        case "sequence_parallel_to_tensor":
            return SequenceParallel(sequence_dim=1, use_local_output=True)
        case _:
            raise ConfigError.unknown_name("word of a tp_plan", word, sorted(PLAN_WORDS))


def find_owners(params: Mapping[str, Tensor]) -> dict[str, tuple[Piece, ...]]:
    """Return the flat elements of each DTensor of ``params`` that each rank owns; replicas own the same elements.

    Each rank fills a tensor with its number, and the tensors are gathered like the weights. This is a collective.
    """
    from torch.distributed.tensor import DTensor

    sharded = {name: param for name, param in params.items() if isinstance(param.data, DTensor)}
    seen = dict(zip(sharded, map(list_runs, gather_rank_numbers(list(sharded.values()))), strict=True))
    views: list[Mapping[str, list[Piece]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(views, seen)
    return {name: tuple(dict.fromkeys(piece for view in views for piece in view[name])) for name in seen}


def gather_rank_numbers(params: Sequence[Any]) -> list[Tensor]:
    """Return for each DTensor a flat tensor that holds, for each element, the rank from which it was gathered."""
    from torch.distributed.tensor import DTensor

    placed = [
        DTensor.from_local(
            torch.full_like(param.to_local(), dist.get_rank(), dtype=torch.int64),
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
        for param in params
    ]
    return [full.flatten() for full in gather_full_tensors(placed)]


def list_runs(ranks: Tensor) -> list[Piece]:
    """Return a piece for each run of equal numbers in ``ranks``."""
    pieces, start = [], 0
    for rank, run in groupby(ranks.tolist()):
        stop = start + len(list(run))
        pieces.append(Piece(rank, start, stop))
        start = stop
    return pieces
