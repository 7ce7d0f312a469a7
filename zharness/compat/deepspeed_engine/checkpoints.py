"""Save and load checkpoints in the reference engine's format, with the arguments of DeepSpeed's methods."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zharness.compat.deepspeed_engine.refusals import require
from zharness.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from zharness.compat.deepspeed_engine.engine import DeepSpeedEngine

COUNTS = ("global_steps", "global_samples", "micro_steps")


def save_checkpoint(
    engine: DeepSpeedEngine,
    save_dir: Any,
    tag: Any,
    client_state: dict[str, Any] | None,
    save_latest: bool,
    exclude_frozen_parameters: bool,
) -> None:
    """Save a checkpoint, with the schedule and the engine's counts beside the client's state. This is a collective.

    Raises ValueError without a ``save_dir``, and if the ranks differ in the tag AssertionError under the JSON's
    ``tag_validation`` FAIL, else CheckpointError, because the checkpoint would be in several folders.
    """
    if not save_dir:
        raise ValueError(f"save_checkpoint: save_dir is {save_dir!r}; pass a folder")
    if engine.has_strict_tags:
        tags: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(tags, tag)
        require(
            len(set(map(str, tags))) == 1,
            f"save_checkpoint: the ranks differ in the tag, by rank {tags}; pass the same tag on every rank",
        )
    state = {
        "client": client_state or {},
        "counts": {name: getattr(engine, name) for name in COUNTS},
        "skipped_steps": engine.skipped_steps,
        "schedule": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
    }
    name = str(tag) if tag is not None else f"global_step{engine.global_steps}"
    engine.reference.save_checkpoint(str(save_dir), name, state, save_latest, exclude_frozen_parameters)


def load_checkpoint(
    engine: DeepSpeedEngine,
    load_dir: Any,
    tag: Any,
    load_module_strict: bool,
    load_optimizer_states: bool,
    load_lr_scheduler_states: bool,
    load_module_only: bool,
    custom_load_fn: Any,
) -> tuple[str | None, dict[str, Any] | None]:
    """Load a checkpoint; return its path and the client's state, or None twice if there is no file ``latest``.

    This is a collective. As in DeepSpeed, the schedule and the counts are loaded unless ``load_module_only`` is True,
    also without the optimizer's states. Raises UsageError for a ``custom_load_fn``, which needs DeepSpeed's files.
    """
    if custom_load_fn is not None:
        raise UsageError("load_checkpoint: the reference engine does not implement custom_load_fn")
    if tag is None and not (Path(load_dir) / "latest").exists():
        return None, None
    schedule = engine.lr_scheduler
    before = None if schedule is None else copy.deepcopy(schedule.state_dict())
    path, state = engine.reference.load_checkpoint(
        str(load_dir),
        None if tag is None else str(tag),
        load_module_only or not load_optimizer_states,
        load_module_strict,
    )
    if state.keys() != {"client", "counts", "skipped_steps", "schedule"}:
        raise CheckpointError(f"{path} was not saved by an engine of zharness.compat.deepspeed_engine")
    if not load_module_only:
        vars(engine).update(state["counts"])
        engine.reference.skipped_steps = state["skipped_steps"]
        if schedule is not None:
            schedule.load_state_dict(state["schedule"] if load_lr_scheduler_states else before)
    return str(path), state["client"]


def save_16bit_model(engine: DeepSpeedEngine, save_dir: Any, save_filename: str, exclude_frozen: bool) -> None:
    """Write the full ``state_dict`` to one file on rank 0. This is a collective."""
    full = engine.reference.full_state_dict()
    frozen = {name for name, parameter in engine.module.named_parameters() if not parameter.requires_grad}
    if dist.get_rank() == 0:
        Path(save_dir).mkdir(parents=True, exist_ok=True)
        kept = {name: value for name, value in full.items() if not exclude_frozen or name not in frozen}
        torch.save(kept, Path(save_dir) / save_filename)
