"""Build an engine from a plain model and DeepSpeed's JSON, with the function ``initialize``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from zharness.comm import Comm
from zharness.reference.buckets import Bucket, assign_buckets
from zharness.reference.client.dataloader import MicroBatchLoader
from zharness.reference.client.meta_init import infer_device
from zharness.reference.client.optimizer import (
    OptimizerBuilder,
    ParameterGroups,
    build_optimizer,
    build_schedule,
    describe_param_groups,
)
from zharness.reference.collectives import ShardCollectives
from zharness.reference.copies.replicas import group_shards
from zharness.reference.deepspeed_json import settings as configuration
from zharness.reference.deepspeed_json.settings import Settings
from zharness.reference.engine import Engine
from zharness.reference.gradients import Gradients
from zharness.reference.inspection.coalesced_collectives import broadcast_tensors
from zharness.reference.inspection.memory import UnshardedMemoryTracker
from zharness.reference.layout import STAGES, ModelParam, collect_model_params
from zharness.reference.mixed_precision.loss_scale import LossScale
from zharness.reference.parameters import Parameters, refuse_owned_modules
from zharness.reference.prefetch import Prefetcher
from zharness.reference.uneven_ranks.negotiated_agreement import NegotiatedAgreement
from zharness.reference.uneven_ranks.rank_errors import require_same_on_all_ranks
from zharness.reference.uneven_ranks.rank_facts import collect_rank_facts
from zharness.reference.unshard import ShardingContext


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
    """Shard ``model`` as ``config`` says. Returns engine, optimizer, data loader and scheduler, as DeepSpeed does.

    This function is a collective over the default process group: rank 0's parameters and buffers are broadcast to all
    ranks. Modules on the meta device are initialized by their ``reset_parameters``, and sharded one by one.

    ``config`` is DeepSpeed's JSON, as a dict or a file's path; ``deepspeed_json/sections.py`` lists its keys.
    ``optimizer`` is a torch optimizer over the model's parameters that has not stepped, or a function that builds an
    optimizer. The function gets a mapping from each parameter's name to the tensor that the optimizer has to update. A
    class outside torch.optim needs ``zero_allow_untested_optimizer``. Without ``optimizer``, ``config["optimizer"]`` is
    built over ``model_parameters``, or over all parameters. ``lr_scheduler`` is a scheduler over that optimizer or a
    function that builds a scheduler; without it, ``config["scheduler"]`` is built. The scheduler steps after each
    optimizer step that was not skipped. ``training_data`` is returned as a loader of micro-batches with ``collate_fn``.

    Raises ConfigError on every rank, and leaves the model unchanged, if the engine does not support a key, a dtype or
    the optimizer, if ``config`` or ``model`` differs between ranks, or if ``model`` belongs to another engine.
    """
    comm = Comm()
    device = infer_device(model, comm)

    def read_settings() -> Settings:
        refuse_owned_modules(model)
        return configuration.parse_config(configuration.load_config(config), comm.world_size, device.type)

    settings = require_same_on_all_ranks(
        comm, device, read_settings, lambda parsed: collect_rank_facts(parsed, model, training_data)
    )
    options = (settings.micro_batch_size, comm, collate_fn, settings.drop_last)
    loader = None if training_data is None else MicroBatchLoader(training_data, *options)
    placements = STAGES[settings.stage]
    divisor = settings.accumulation_steps * (comm.world_size if settings.average_over_ranks else 1)
    shards = group_shards(comm, settings.shard_size, device)
    model_params = collect_model_params(model, shards, settings.precision.assign_dtypes(model))
    context, buckets = _make_context([*model_params.values()], settings, divisor, shards)
    with ExitStack() as undo:  # restores the model if the optimizer is refused
        tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
        undo.callback(_restore_tensors, [(tensor, tensor.data, tensor.detach().clone()) for tensor in tensors])
        broadcast_tensors(tensors, comm)
        parameters = Parameters(model, model_params, placements, context, buckets)
        undo.callback(parameters.close)
        if isinstance(optimizer, torch.optim.Optimizer):
            undo.callback(
                _restore_param_groups,
                optimizer,
                [group["params"] for group in optimizer.param_groups],
                dict(optimizer.state),
            )

        def build_optimizer_and_schedule() -> tuple[torch.optim.Optimizer, Any]:
            built = build_optimizer(optimizer, settings, model_parameters, model_params, parameters.leaves)
            return built, build_schedule(lr_scheduler, settings.scheduler, built)

        built, schedule = require_same_on_all_ranks(
            comm, device, build_optimizer_and_schedule, lambda both: describe_param_groups(both[0], parameters.leaves)
        )
        undo.pop_all()
    parameters.mark_modules_owned()
    scale = LossScale(settings.precision.loss_scaling, model.parameters())
    gradients = Gradients(model_params, placements, context, buckets)
    tracker = context.memory_tracker
    engine = Engine(
        model, settings, placements, shards, model_params, parameters, gradients, built, schedule, scale, tracker
    )
    return engine, built, loader, schedule


def _make_context(
    model_params: list[ModelParam], settings: Settings, divisor: int, comm: Comm
) -> tuple[ShardingContext, tuple[Bucket, ...]]:
    """Return the ShardingContext of an engine, and the buckets in which its gradients are reduced."""
    buckets = assign_buckets(model_params, settings.bucket_size)
    tracker = UnshardedMemoryTracker()
    collectives = ShardCollectives(comm, divisor, NegotiatedAgreement(model_params, comm.all_ranks))
    prefetch_buckets = assign_buckets(model_params, settings.prefetch_size)
    prefetcher = Prefetcher(prefetch_buckets, settings.prefetch_size, collectives, tracker.set_prefetched_bytes)
    reduce_buckets = {member.name: bucket for bucket in buckets for member in bucket.members}
    return ShardingContext(comm, tracker, divisor, collectives, prefetcher, reduce_buckets), buckets


@torch.no_grad()
def _restore_tensors(saved: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
    """Restore the storage and values of tensors; ``saved`` has (tensor, its ``data``, a copy of its values)."""
    for tensor, data, values in saved:
        tensor.data = data
        tensor.copy_(values)


def _restore_param_groups(
    optimizer: torch.optim.Optimizer, saved_params: list[Any], saved_state: dict[Any, Any]
) -> None:
    """Restore the parameters and the state that the optimizer had before its parameters were replaced by leaves."""
    for group, params in zip(optimizer.param_groups, saved_params, strict=True):
        group["params"] = params
    optimizer.state.clear()
    optimizer.state.update(saved_state)
