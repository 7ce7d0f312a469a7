"""Models of the meta device under FSDP2, which shards them as they are: what a caller does to give them values."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.errors import ConfigError
from zharness.reference.client.meta_init import find_deferred_modules


def initial_state_on_rank0(model: nn.Module, device: torch.device) -> Mapping[str, Tensor] | None:
    """The state that the constructor of ``model`` would have given it, on rank 0, and nothing on the others.

    None where no part of it is on the meta device. Raises ConfigError for a module that cannot give its tensors values,
    a model of which a part alone is on the meta device, and buffers that no state dict holds.
    """
    meta = find_deferred_modules(model)
    if not meta:
        return None
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    real = [name for name, tensor in tensors.items() if not tensor.is_meta]
    unsaved = sorted(tensors.keys() - model.state_dict().keys())
    for names, reason in ((real, "is not on the meta device, as the rest is"), (unsaved, "is in no state dict")):
        if names:
            raise ConfigError(f"{names[0]!r} {reason}; build the whole model on one device, with persistent buffers")
    if dist.get_rank() != 0:
        return {}
    whole = copy.deepcopy(model)
    for module in find_deferred_modules(whole):
        module.materialise(device)
    return whole.state_dict()


def materialize_and_load(model: nn.Module, device: torch.device, values: Mapping[str, Tensor]) -> None:
    """Memory for the shards of ``model``, and rank 0's ``values`` in them. Collective.

    As https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html loads a full state dict.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model.to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(values), options=options)
