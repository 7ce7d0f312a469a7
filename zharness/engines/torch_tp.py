"""Adapt ``parallelize_module`` to the Engine protocol: only the axis tp, over all ranks, without data parallelism.

The caller trains the module that ``parallelize_module`` returns, as in torch's tutorial on tensor parallelism: no
wrapper reduces gradients, because every rank of tp gets the same micro-batch.
"""

from __future__ import annotations

from contextlib import nullcontext

from torch import nn

from zharness.comm import Comm
from zharness.engines.protocol import Capabilities, EngineConfig, Feature
from zharness.engines.tensor_parallel import build_device_mesh, find_owners, split_modules
from zharness.engines.torch_checkpoint import SHARDED_FORMAT
from zharness.engines.torch_engine import (
    AUTOCAST_OPTION,
    TORCH_REFUSES,
    EngineAdapter,
    TorchEngine,
    do_nothing,
    leaf_parameters,
    validate_config,
)
from zharness.engines.torch_gathers import gather_full_tensors
from zharness.mesh import TENSOR
from zharness.reference.client.meta_init import infer_device

DOCUMENTATION = "https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html"
NO_DATA_PARALLELISM = "parallelize_module splits modules over tp alone, and reduces nothing over data parallelism"
REFUSES = {
    **TORCH_REFUSES,
    Feature.ENGINE_ACCUMULATION: "gradients accumulate in .grad, and only the caller's optimizer ends a window",
    Feature.NO_SYNC: f"{NO_DATA_PARALLELISM}, so that there is no reduction to leave out",
    Feature.RANK_BUFFERS: "torch.distributed.checkpoint saves a tensor that is not a DTensor once for all ranks",
    Feature.UNEVEN_RANKS: f"every rank of tp runs every module that is split ({DOCUMENTATION})",
    Feature.EDITS: f"all ranks have to edit a split weight, which is a DTensor, together ({DOCUMENTATION})",
    Feature.DEFERRED: "parallelize_module splits the values that a model has, and a model on the meta device has none",
    **dict.fromkeys(
        (Feature.INITIAL_WEIGHTS, Feature.INITIAL_BUFFERS),
        "a split weight is that of the first rank of tp (src_data_rank), and the others stay as each rank has them",
    ),
    Feature.RESOURCES: "it does not count the bytes that it allocates",
    Feature.STEADINESS: "the process groups of its DeviceMesh, and their threads, live until destroy_process_group",
    Feature.OWN_WEIGHT_GRADIENTS: (
        "autograd.grad returns DTensors for split weights, which do not mix with the tensors of whole weights "
        f"({DOCUMENTATION})"
    ),
}
CAPABILITIES = Capabilities(
    stages=frozenset({0}),
    refuses=REFUSES,
    mesh_axes=frozenset({TENSOR}),
    whole_mesh=NO_DATA_PARALLELISM,
)


def factory(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Split ``model`` in place over the default process group by the plan of the config. This is a collective.

    Raises ConfigError for an unsupported configuration.
    """
    validate_config(config, CAPABILITIES, AUTOCAST_OPTION)
    split_modules(model, config, build_device_mesh(config.mesh, infer_device(model, Comm())))
    params = leaf_parameters(model)
    adapter = EngineAdapter(
        forward=model.__call__,
        no_sync=nullcontext,
        params=params,
        full_tensors=gather_full_tensors,
        layout=find_owners(params),
        drop_gradients=do_nothing,
        release=do_nothing,
        checkpoint_format=SHARDED_FORMAT,
    )
    return TorchEngine(model, CAPABILITIES, config, adapter)
