"""Initialize models that were built on the meta device, whose tensors FSDP2 shards but does not initialize."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.errors import ConfigError
from zharness.reference.client.meta_init import find_deferred_modules


def initial_state_on_rank0(model: nn.Module, device: torch.device) -> Mapping[str, Tensor] | None:
    """Return the initialized state of a model on the meta device on rank 0, and an empty state on other ranks.

    Returns None if no tensor is on the meta device. Raises ConfigError for a module that cannot initialize its tensors,
    for a model that is only partly on the meta device, and for buffers that are not in the state dict.
    """
    if not find_deferred_modules(model):
        return None
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    real = [name for name, tensor in tensors.items() if not tensor.is_meta]
    unsaved = sorted(tensors.keys() - model.state_dict().keys())
    for names, problem in (
        (real, "is not on the meta device, but other tensors are"),
        (unsaved, "is not in the state dict"),
    ):
        if names:
            raise ConfigError(f"{names[0]!r} {problem}; build the whole model on one device, with persistent buffers")
    if dist.get_rank() != 0:
        return {}
    initialized = copy.deepcopy(model)
    for module in find_deferred_modules(initialized):
        module.materialise(device)
    return initialized.state_dict()


def materialize_and_load(model: nn.Module, device: torch.device, values: Mapping[str, Tensor]) -> None:
    """Allocate the shards of ``model`` and load rank 0's ``values`` into them. This is a collective.

    The state dict is loaded as in https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model.to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(values), options=options)
