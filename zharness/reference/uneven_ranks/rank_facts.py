"""Collect the facts about configuration, model and data that ``initialize`` compares between ranks."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from zharness.errors import ConfigError
from zharness.reference.deepspeed_json.settings import Settings


def collect_rank_facts(settings: Settings, model: nn.Module, training_data: Dataset[Any] | None) -> dict[str, str]:
    """Return descriptions, by name, of all facts that must be the same on all ranks before the model is changed.

    Raises ConfigError for a parameter that cannot be trained, and for a ``grad_accum_dtype`` that is not the dtype in
    which gradients accumulate.
    """
    facts = {f"configuration: {field.name}": repr(getattr(settings, field.name)) for field in fields(settings)}
    dtypes = settings.precision.assign_dtypes(model)
    for name, p in model.named_parameters():
        if not p.is_floating_point() and p.requires_grad:
            raise ConfigError(
                f"parameter {name!r} is {p.dtype}; expected a real floating-point dtype, or a frozen parameter"
            )
        accum_dtype = dtypes[p].param_dtype if settings.stage < 2 else dtypes[p].master_dtype
        if p.requires_grad and settings.grad_accum_dtype not in (None, accum_dtype):
            raise ConfigError(
                f"data_types.grad_accum_dtype is {settings.grad_accum_dtype}, but the gradients of parameter {name!r}, "
                f"which is {p.dtype}, accumulate in {accum_dtype}; leave the key out, or enable bf16 or fp16 at stage "
                "2 or 3"
            )
        facts[f"parameter {name!r}"] = f"{p.dtype} {tuple(p.shape)}, {'trained' if p.requires_grad else 'frozen'}"
    facts |= {f"buffer {name!r}": f"{buffer.dtype} {tuple(buffer.shape)}" for name, buffer in model.named_buffers()}
    return facts | {"training_data": _describe_data(training_data)}


def _describe_data(training_data: Dataset[Any] | None) -> str:
    """Return a description of a data set: its number of samples."""
    if training_data is None:
        return "none"
    return f"{len(training_data)} samples" if hasattr(training_data, "__len__") else "?"
