"""From a plain model and DeepSpeed's JSON to an engine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from zharness.comm import Comm
from zharness.errors import ConfigError
from zharness.reference import config as configuration
from zharness.reference.engine import Engine
from zharness.reference.gathered import Ledger, Wire
from zharness.reference.gradients import Gradients
from zharness.reference.layout import STAGES, originals
from zharness.reference.optimizer import Builder, ParameterGroups, build
from zharness.reference.parameters import Parameters, share


def initialize(
    *,
    model: nn.Module,
    config: Mapping[str, Any],
    model_parameters: ParameterGroups | None = None,
    optimizer: torch.optim.Optimizer | Builder | None = None,
    average_over_ranks: bool = True,
) -> tuple[Engine, torch.optim.Optimizer, None, None]:
    """Shard ``model`` as ``config`` says; engine, optimizer, and DeepSpeed's two places for what this engine lacks.

    Collective over the default process group: rank 0's parameters and buffers become everyone's. What is on the meta
    device gets memory and values from its module's ``reset_parameters``, sharded as it comes. ``optimizer`` is a
    torch optimizer over the model's parameters that has not stepped, or a builder that is called with a mapping from
    name to leaf; without it, ``config["optimizer"]`` decides, over ``model_parameters`` or all of them.
    ``average_over_ranks=False`` sums the ranks' gradients; the mean over micro-batches is taken either way.

    Raises ConfigError for a key, a dtype or an optimizer that the engine does not honour.
    """
    comm = Comm()
    settings = configuration.read(config, comm.world_size)
    _only_fp32(model)
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            share(tensor, comm)
    owners = STAGES[settings.stage]
    divisor = settings.accumulation_steps * (comm.world_size if average_over_ranks else 1)
    wire = Wire(comm, Ledger(), divisor)
    found = originals(model, comm.world_size)
    with ExitStack() as undo:  # an optimizer that is refused leaves the model as it was
        undo.callback(_give_back, [(p, p.data) for p in model.parameters() if not p.is_meta])
        parameters = Parameters(model, found, owners, wire)
        undo.callback(parameters.close)
        chosen = build(optimizer, settings.optimizer, model_parameters, found, parameters.leaves)
        undo.pop_all()
    gradients = Gradients(found, owners, wire)
    engine = Engine(model, settings, owners, comm, found, parameters, gradients, chosen, wire.ledger)
    return engine, chosen, None, None


def _give_back(before: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
    for parameter, data in before:
        parameter.data = data


def _only_fp32(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ConfigError(f"parameter {name!r} is {parameter.dtype}; the engine computes in torch.float32")
