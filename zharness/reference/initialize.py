"""From a plain model and DeepSpeed's JSON to an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from zharness.comm import Comm
from zharness.errors import ConfigError
from zharness.reference.buckets import assign_buckets
from zharness.reference.coalesced_collectives import broadcast_tensors
from zharness.reference.collectives import ShardCollectives
from zharness.reference.dataloader import MicroBatchLoader
from zharness.reference.deepspeed_json import settings as configuration
from zharness.reference.deepspeed_json.settings import Settings
from zharness.reference.engine import Engine
from zharness.reference.gradients import Gradients
from zharness.reference.layout import STAGES, collect_model_params
from zharness.reference.loss_scale import LossScale
from zharness.reference.meta_init import infer_device
from zharness.reference.optimizer import (
    OptimizerBuilder,
    ParameterGroups,
    build_optimizer,
    build_schedule,
    describe_param_groups,
)
from zharness.reference.parameters import Parameters, refuse_owned_modules
from zharness.reference.prefetch import Prefetcher
from zharness.reference.rank_errors import require_same_on_all_ranks
from zharness.reference.unshard import ShardingContext, UnshardedMemoryTracker


def initialize(
    *,
    model: nn.Module,
    config: Mapping[str, Any] | str | Path,
    model_parameters: ParameterGroups | None = None,
    optimizer: torch.optim.Optimizer | OptimizerBuilder | None = None,
    lr_scheduler: Any = None,
    training_data: Dataset[Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> tuple[Engine, torch.optim.Optimizer, MicroBatchLoader | None, Any]:
    """Shard ``model`` as ``config`` says; returns engine, optimizer, dataloader and scheduler, as DeepSpeed does.

    Collective over the default process group: rank 0's parameters and buffers become everyone's. What is on the meta
    device gets memory and values from its module's ``reset_parameters``, sharded as it comes. ``config`` is
    DeepSpeed's JSON, as a dict or a file's path (``reference.sections`` lists its keys). ``optimizer`` is a torch
    optimizer over the model's parameters that has not stepped, or a builder that is called with a mapping from name to
    leaf (a class of another's than torch.optim's needs ``zero_allow_untested_optimizer``); without it,
    ``config["optimizer"]`` decides, over ``model_parameters`` or all of them. ``lr_scheduler`` is a scheduler over that
    optimizer, or a callable that makes one of it; without it, ``config["scheduler"]`` decides. It
    is stepped after each optimizer step that was made. ``training_data`` comes back as a loader of micro-batches.

    Raises ConfigError for a key, a dtype or an optimizer that the engine does not honour, and for anything in which the
    ranks differ, and for a model that another engine has: on every rank, with the model as it was.
    """
    comm = Comm()
    device = infer_device(model, comm)

    def read_settings() -> Settings:
        refuse_owned_modules(model)
        return configuration.parse_config(configuration.load_config(config), comm.world_size, device.type)

    settings = require_same_on_all_ranks(
        comm, device, read_settings, lambda found: _collect_rank_facts(found, model, training_data)
    )
    loader = None
    if training_data is not None:
        loader = MicroBatchLoader(training_data, settings.micro_batch_size, comm, collate_fn, settings.drop_last)
    owners = STAGES[settings.stage]
    divisor = settings.accumulation_steps * (comm.world_size if settings.average_over_ranks else 1)
    found = collect_model_params(model, comm.world_size, settings.precision.assign_dtypes(model))
    all_of_them = list(found.values())
    travelling, fetched = (assign_buckets(all_of_them, size) for size in (settings.bucket_size, settings.prefetch_size))
    ledger = UnshardedMemoryTracker()
    channel = ShardCollectives(all_of_them, comm, divisor)
    shelf = Prefetcher(fetched, settings.prefetch_size, channel, ledger.set_prefetched_bytes)
    neighbours = {original.name: bucket for bucket in travelling for original in bucket.members}
    wire = ShardingContext(comm, ledger, divisor, channel, shelf, neighbours)
    with ExitStack() as undo:  # an optimizer that is refused leaves the model as it was
        given = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
        undo.callback(_restore_tensors, [(each, each.data, each.detach().clone()) for each in given])
        broadcast_tensors(given, comm)
        parameters = Parameters(model, found, owners, wire, travelling)
        undo.callback(parameters.close)
        if isinstance(optimizer, torch.optim.Optimizer):
            undo.callback(
                _restore_param_groups,
                optimizer,
                [group["params"] for group in optimizer.param_groups],
                dict(optimizer.state),
            )

        def build_optimizer_and_schedule() -> tuple[torch.optim.Optimizer, Any]:
            chosen = build_optimizer(optimizer, settings, model_parameters, found, parameters.leaves)
            return chosen, build_schedule(lr_scheduler, settings.scheduler, chosen)

        chosen, schedule = require_same_on_all_ranks(
            comm, device, build_optimizer_and_schedule, lambda both: describe_param_groups(both[0], parameters.leaves)
        )
        undo.pop_all()
    parameters.mark_modules_owned()
    scale = LossScale(settings.precision.loss_scaling, model.parameters())
    gradients = Gradients(found, owners, wire, travelling)
    engine = Engine(
        model, settings, owners, comm, found, parameters, gradients, chosen, schedule, scale, wire.memory_tracker
    )
    return engine, chosen, loader, schedule


def _collect_rank_facts(settings: Settings, model: nn.Module, training_data: Dataset[Any] | None) -> dict[str, str]:
    """What has to be alike on all ranks, before anything is done to the model."""
    told = {f"configuration: {each.name}": repr(getattr(settings, each.name)) for each in fields(settings)}
    formats = settings.precision.assign_dtypes(model)
    for name, p in model.named_parameters():
        if not p.is_floating_point() and p.requires_grad:
            raise ConfigError(f"parameter {name!r} is {p.dtype}; only real floating-point parameters are trained")
        done = formats[p].param_dtype if settings.stage < 2 else formats[p].master_dtype
        if p.requires_grad and settings.grad_accum_dtype not in (None, done):
            raise ConfigError(
                f"data_types.grad_accum_dtype is {settings.grad_accum_dtype} and parameter {name!r} {p.dtype}: its "
                f"micro-batches add up in {done}; leave the key out, or enable bf16 or fp16 at stage 2 or 3"
            )
        told[f"parameter {name!r}"] = f"{p.dtype} {tuple(p.shape)}, {'trained' if p.requires_grad else 'frozen'}"
    told |= {f"buffer {name!r}": f"{each.dtype} {tuple(each.shape)}" for name, each in model.named_buffers()}
    return told | {
        "training_data": "none"
        if training_data is None
        else f"{len(training_data)} samples"
        if hasattr(training_data, "__len__")
        else "?"
    }


@torch.no_grad()
def _restore_tensors(saved: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
    for tensor, data, values in saved:
        tensor.data = data
        tensor.copy_(values)


def _restore_param_groups(
    optimizer: torch.optim.Optimizer, saved_params: list[Any], saved_state: dict[Any, Any]
) -> None:
    for group, params in zip(optimizer.param_groups, saved_params, strict=True):
        group["params"] = params
    optimizer.state.clear()
    optimizer.state.update(saved_state)
