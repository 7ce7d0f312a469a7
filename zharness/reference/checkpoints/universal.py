"""Read universal checkpoints, which DeepSpeed's script ``ds_to_universal`` writes, into this engine.

The folder ``folder/zero/<parameter>/`` contains ``fp32.pt``, ``exp_avg.pt`` and ``exp_avg_sq.pt`` of the full
parameter. If the checkpoint was saved at stage 1 or 2, these tensors have the parameter's shape and tensor-parallel
layout, and the folder also contains ``step.pt``; if it was saved at stage 3, they are flat. The file
``folder/zero/optimizer_state.pt`` contains the optimizer state that is common to all parameters. The files
``folder/*_model_states.pt`` contain buffers, counters, the schedule, and at stage 3 the frozen weights. Settings of the
configuration, such as clipping, are not read.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zharness.errors import CheckpointError
from zharness.reference.checkpoints import unpickling
from zharness.reference.checkpoints.training_state import (
    CheckpointContents,
    TrainingState,
    buffer_key,
    moment_key,
    weight_key,
)

FP32, STEP, MOMENTS = "fp32", "step", {"exp_avg", "exp_avg_sq"}
# The keys that DeepSpeed itself writes into a model file; all others are the client's.
DEEPSPEED_KEYS = """
module buffer_names optimizer param_shapes frozen_param_shapes frozen_param_fragments shared_params lr_scheduler folding
data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size num_experts ds_config
ds_version checkpoint_parallel_dimensions universal_checkpoint_info ds_autoep_layers sparse_tensor_module_names
"""


@dataclass(frozen=True)
class UniversalCheckpoint:
    """A universal checkpoint that fits this engine, converted to the form of one of this engine's own checkpoints."""

    contents: CheckpointContents
    local_tensors: Mapping[str, Tensor]
    extra_state: Mapping[str, Any]
    client_state: dict[str, Any]


@dataclass(frozen=True)
class TensorParallelSlice:
    """The tensor-parallel rank and size, which determine which slice of each parameter this rank's model has."""

    rank: int = 0
    size: int = 1

    @classmethod
    def from_mpu(cls, mpu: Any) -> TensorParallelSlice:
        """Read the tensor-parallel rank and size from ``mpu``, a model-parallel unit as DeepSpeed defines it.

        The methods of ``mpu`` may have any of the names that DeepSpeed accepts. If ``mpu`` is None, issues a warning
        and assumes size 1.
        """
        if mpu is None:
            warnings.warn("no mpu is given: assuming tensor-parallel size 1", stacklevel=4)
            return cls()
        rank = ("get_tensor_model_parallel_rank", "get_slice_parallel_rank", "get_model_parallel_rank")
        size = ("get_slice_parallel_world_size", "get_tensor_model_parallel_world_size")
        return cls(_call_first(mpu, rank), _call_first(mpu, size))

    def slice_param(self, name: str, full: Tensor, metadata: Mapping[str, Any], shape: tuple[int, ...]) -> Tensor:
        """Return this rank's slice of the full parameter, cut as in DeepSpeed's load_hp_checkpoint_state.

        ``shape`` is the shape of the slice. A parameter that already has this shape is replicated over the
        tensor-parallel ranks. An embedding over the vocabulary is first padded with zeros to a multiple of the
        tensor-parallel size. In a parameter that consists of several sub-parameters, each sub-parameter is sliced.
        Raises CheckpointError if the slice does not have ``shape``.
        """
        if tuple(full.shape) == shape:
            return full
        if metadata.get("vocab_tensor") and shape:
            full = torch.cat([full, full.new_zeros(max(0, shape[0] * self.size - len(full)), *full.shape[1:])])
        dim = metadata.get("cat_dim", 0)
        if full.dim() > dim:
            parts = [part.chunk(self.size, dim) for part in full.chunk(metadata.get("param_n_sub_params", 1), dim)]
            if all(len(part) == self.size for part in parts):
                full = torch.cat([part[self.rank] for part in parts], dim)
        if tuple(full.shape) != shape:
            raise CheckpointError(
                f"checkpoint of another model: parameter {name!r} has shape {tuple(full.shape)} in the checkpoint for "
                f"tensor-parallel rank {self.rank} of {self.size}, and {shape} in this model"
            )
        return full


def read_universal_checkpoint(path: Path, state: TrainingState, mpu: Any) -> UniversalCheckpoint:
    """Read the universal checkpoint in ``path``, or in the folder that the file ``path/latest_universal`` names.

    Every rank reads the whole checkpoint. Raises CheckpointError for a checkpoint that is missing, incomplete or
    damaged, contains code, or belongs to another model.
    """
    parallel, folder = TensorParallelSlice.from_mpu(mpu), _resolve_universal_folder(path)
    engine_contents = state.collect_contents(0, 0)
    global_state = _OptimizerGlobalState.load(folder / "zero" / "optimizer_state.pt")
    models = _load_model_files(folder, parallel)
    _check_param_names(folder / "zero", state)
    groups = global_state.merge_param_groups(engine_contents.groups)
    local_tensors, steps = _read_buffers(engine_contents, models[0]), {}
    for name, shape in engine_contents.parameters.items():
        values = _read_parameter(folder / "zero" / name, name, shape, global_state, models, state.is_trained(name))
        for key, (full, metadata) in values.items():
            sliced = parallel.slice_param(name, full, metadata, shape)
            tensor_key = weight_key(name) if key == FP32 else moment_key(name, key)
            local_tensors[tensor_key] = state.shard_full_tensor(name, sliced.float())
        if values.keys() >= MOMENTS:
            steps[name] = global_state.step if global_state.step is not None else _read_step(folder / "zero" / name)
    contents = replace(
        engine_contents,
        world_size=1,
        steps=int(models[0]["global_steps"]),
        skipped_steps=int(models[0]["skipped_steps"]),
        groups=groups,
        moments={name: dict.fromkeys(MOMENTS, torch.float32) for name in steps},
        counts=_collect_step_counts(groups, steps, engine_contents),
        stateful=_merge_stateful(engine_contents, global_state.loss_scale, models[0]["lr_scheduler"]),
    )
    return UniversalCheckpoint(
        contents,
        {key: tensor for key, tensor in local_tensors.items() if tensor.numel()},
        _read_extra_state(state, models[0]),
        {key: value for key, value in models[0].items() if key not in DEEPSPEED_KEYS.split()},
    )


@dataclass(frozen=True)
class _OptimizerGlobalState:
    """The optimizer state that is common to all parameters, from ``optimizer_state.pt``.

    ``step`` is the step count of all parameters, or None if each parameter has its own, as at stages 1 and 2.
    """

    groups: list[dict[str, Any]]
    stage: int
    step: Any
    loss_scale: float

    @classmethod
    def load(cls, file: Path) -> _OptimizerGlobalState:
        """Read the optimizer state from ``file``.

        Raises CheckpointError if the file is missing, has no parameter groups, or contains unequal step counts.
        """
        if not file.is_file():
            raise CheckpointError(
                f"{file}, the optimizer's global state, is missing: convert the checkpoint again with ds_to_universal"
            )
        saved = unpickling.load_deepspeed_file(file)
        if not isinstance(saved, dict) or not isinstance(saved.get("param_groups"), list):
            raise CheckpointError(f"{file} has no param_groups, so it is not an optimizer's global state")
        inner = saved.get("optimizer_state_dict", {}).get("state", {})
        steps = [None if state.get(STEP) is None else float(state[STEP]) for state in inner.values()]
        if any(step != steps[0] for step in steps):
            raise CheckpointError(f"{file}: its step counts {steps} are not equal")
        scale = getattr(saved.get("loss_scaler"), "cur_scale", 1.0)
        return cls(saved["param_groups"], int(saved.get("zero_stage", 1)), steps[0] if steps else None, float(scale))

    def merge_param_groups(self, engine_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return this engine's parameter groups with the checkpoint's settings.

        Raises CheckpointError if the number of groups differs, or if the optimizer is not Adam or AdamW, or uses
        amsgrad.
        """
        if len(engine_groups) != len(self.groups):
            raise CheckpointError(
                f"the checkpoint has {len(self.groups)} parameter groups, but this engine has {len(engine_groups)}"
            )
        groups = [
            {**engine_group, **{key: value for key, value in saved.items() if key != "params"}}
            for engine_group, saved in zip(engine_groups, self.groups, strict=True)
        ]
        for engine_group, group in zip(engine_groups, groups, strict=True):
            if "betas" not in engine_group or group.get("amsgrad"):
                raise CheckpointError(
                    "a universal checkpoint contains only exp_avg and exp_avg_sq, the optimizer state of Adam; "
                    "use Adam or AdamW without amsgrad"
                )
        return groups


def _resolve_universal_folder(path: Path) -> Path:
    """Return the folder that contains ``zero/``: ``path``, or the folder that ``path/latest_universal`` names.

    Raises CheckpointError if there is no such folder.
    """
    latest = path / "latest_universal"
    folder = path / latest.read_text(encoding="utf-8").strip() if latest.is_file() else path
    if not (folder / "zero").is_dir():
        raise CheckpointError(
            f"no universal checkpoint in {folder}: it has no folder 'zero'; run ds_to_universal first"
        )
    return folder


def _load_model_files(folder: Path, parallel: TensorParallelSlice) -> list[Mapping[str, Any]]:
    """Load the model files of this tensor-parallel rank.

    A checkpoint from stage 3 has one file for each data-parallel rank, loaded in the order of ranks. A checkpoint from
    another stage has one file. Raises CheckpointError if a file is missing or lacks a required key.
    """
    pattern = re.compile(rf"(?:zero_pp_rank_(\d+)_)?mp_rank_{parallel.rank:02d}_model_states\.pt")
    rank_files = sorted((int(m[1] or 0), file) for file in folder.iterdir() if (m := pattern.fullmatch(file.name)))
    models = [unpickling.load_deepspeed_file(file) for _, file in rank_files]
    # Stage 3 writes one file for each rank, the other stages write one file for all ranks.
    is_stage_3 = bool(rank_files) and rank_files[0][1].name.startswith("zero_pp")
    expected_count = models[0].get("dp_world_size", 1) if is_stage_3 else 1
    if [rank for rank, _ in rank_files] != list(range(expected_count)):
        raise CheckpointError(f"the files *mp_rank_{parallel.rank:02d}_model_states.pt in {folder} are not complete")
    for (_, file), model in zip(rank_files, models, strict=True):
        missing = {"module", "global_steps", "skipped_steps", "lr_scheduler"} - set(model)
        if missing:
            raise CheckpointError(f"{file} lacks {sorted(missing)}")
    return models


def _check_param_names(zero: Path, state: TrainingState) -> None:
    """Raise CheckpointError if the checkpoint has a parameter that this model does not have."""
    unknown = sorted({item.name for item in zero.iterdir() if item.is_dir()} - state.state_dict_names())
    if unknown:
        raise CheckpointError(f"checkpoint of another model: this model does not have its parameter {unknown[0]!r}")


def _read_buffers(engine_contents: CheckpointContents, model: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return this model's buffers from a model file.

    Raises CheckpointError if a buffer is missing or has another shape.
    """
    buffers = {}
    for name, shape in engine_contents.buffers.items():
        saved = model["module"].get(name)
        if saved is None or tuple(saved.shape) != shape:
            raise CheckpointError(f"checkpoint of another model: it has no buffer {name!r} of shape {shape}")
        buffers[buffer_key(name, 0)] = saved
    return buffers


def _read_extra_state(state: TrainingState, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extra state of this engine's modules from a model file. Raises CheckpointError if any is missing."""
    missing = state.extra_state().keys() - model["module"].keys()
    if missing:
        raise CheckpointError(f"checkpoint of another model: it has no extra state {sorted(missing)}")
    return {name: model["module"][name] for name in state.extra_state()}


def _read_parameter(
    folder: Path,
    name: str,
    shape: tuple[int, ...],
    global_state: _OptimizerGlobalState,
    models: list[Mapping[str, Any]],
    is_trained: bool,
) -> dict[str, tuple[Tensor, Mapping[str, Any]]]:
    """Read the weight and the moments of one parameter, each with the metadata that was saved with it.

    Raises CheckpointError if a file is missing.
    """
    keys = {file.stem for file in folder.glob("*.pt")} - {STEP} if folder.is_dir() else set()
    if not keys and not is_trained:
        return {FP32: (_read_frozen_weight(name, shape, models), {})}
    # Stages 1 and 2 save neither moments nor a step for a parameter that never had a gradient.
    untouched = not is_trained or (global_state.stage < 3 and not (folder / f"{STEP}.pt").is_file())
    missing = {FP32, *(() if untouched and not keys & MOMENTS else MOMENTS)} - keys
    if missing:
        raise CheckpointError(f"{folder / sorted(missing)[0]}.pt is missing")
    return {key: _read_tensor(folder / f"{key}.pt", shape) for key in {FP32, *(keys & MOMENTS)}}


def _read_tensor(file: Path, shape: tuple[int, ...]) -> tuple[Tensor, Mapping[str, Any]]:
    """Read a tensor and its metadata; a tensor that was saved at stage 3 is flat and has no metadata.

    Raises CheckpointError if the file contains no tensor.
    """
    saved = unpickling.load_safely(file, str(file))
    metadata = saved if isinstance(saved, dict) else {"param": saved}
    tensor = metadata.get("param")
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{file} contains no tensor")
    is_flat = not isinstance(saved, dict) and tensor.numel() == torch.Size(shape).numel()
    return tensor.view(shape) if is_flat else tensor, metadata


def _read_frozen_weight(name: str, shape: tuple[int, ...], models: list[Mapping[str, Any]]) -> Tensor:
    """Return a frozen weight, joined from the padded shards in ``models``, the model files of all ranks at stage 3.

    Raises CheckpointError if a shard is missing, or if the shards have too few elements.
    """
    parts = [(model.get("frozen_param_fragments") or {}).get(name) for model in models]
    if any(part is None for part in parts):
        raise CheckpointError(f"checkpoint of another model: it does not have parameter {name!r}")
    flat = torch.cat([part.reshape(-1) for part in parts if part is not None])
    if flat.numel() < torch.Size(shape).numel():
        raise CheckpointError(f"checkpoint of another model: parameter {name!r} has too few elements for shape {shape}")
    return flat[: torch.Size(shape).numel()].view(shape)


def _read_step(folder: Path) -> Any:
    """Return the step count of the parameter in ``folder``, or None if the folder does not contain one."""
    file = folder / f"{STEP}.pt"
    return unpickling.load_safely(file, str(file)) if file.is_file() else None


def _collect_step_counts(
    groups: list[dict[str, Any]], steps: Mapping[str, Any], engine_contents: CheckpointContents
) -> dict[str, dict[str, Any]]:
    """Return each parameter's step count from the checkpoint, or this engine's count if the checkpoint has none.

    Raises CheckpointError if the counts of one group differ, or if neither the checkpoint nor this engine has a count
    for a parameter.
    """
    counts: dict[str, dict[str, Any]] = {}
    for group in groups:
        names = [name for name in group["params"] if name in steps]
        saved_steps = [steps[name] if steps[name] is None else float(steps[name]) for name in names]
        if any(step != saved_steps[0] for step in saved_steps):
            raise CheckpointError(
                f"the steps {saved_steps} of the parameters {names} of one parameter group are not equal"
            )
        for name, step in zip(names, saved_steps, strict=True):
            counts[name] = dict(engine_contents.counts.get(name, {})) if step is None else {STEP: torch.tensor(step)}
            if not counts[name]:
                raise CheckpointError(
                    f"the checkpoint has no step count for {name!r}, and this engine has not stepped it either"
                )
    return counts


def _merge_stateful(
    engine_contents: CheckpointContents, loss_scale: float, schedule: Mapping[str, Any] | None
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return this engine's states of the loss scale and the schedule, updated from the checkpoint.

    The schedule is updated only if the saved schedule has the same keys; otherwise a warning is issued.
    """
    merged = dict(engine_contents.stateful)
    for key, (kind, state) in engine_contents.stateful.items():
        if key == "loss_scale":
            merged[key] = (kind, {**state, "scale": loss_scale})
        elif schedule is not None and schedule.keys() == state.keys():
            merged[key] = (kind, dict(schedule))
        else:
            saved = (
                "no schedule" if schedule is None else f"another kind of schedule, with the state {sorted(schedule)}"
            )
            warnings.warn(f"the checkpoint contains {saved}; this engine's {kind} is not changed", stacklevel=4)
    return merged


def _call_first(mpu: Any, names: tuple[str, ...]) -> int:
    """Call the first of the methods ``names`` that ``mpu`` has, and return the result.

    Raises CheckpointError if ``mpu`` has none of these methods.
    """
    for name in names:
        if hasattr(mpu, name):
            return int(getattr(mpu, name)())
    raise CheckpointError(f"the mpu has none of the methods {', '.join(names)}")
