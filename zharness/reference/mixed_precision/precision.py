"""Define the dtypes of a run: those of parameters, master weights, reduced gradients and the forward."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from zharness.reference.layout import ParamDtypes
from zharness.reference.mixed_precision.loss_scale import LossScaleConfig


class OnOverflow(Enum):
    """The reaction of a step to a gradient that is not finite on some rank: skip the update, or raise an error."""

    RAISE = "raise NonFiniteError on every rank"
    SKIP = "skip the step on every rank"


@dataclass(frozen=True)
class AutocastConfig:
    """The settings of ``torch.autocast`` around the forward.

    Parameters and gradients of modules whose class is in ``safe_modules`` are sent in ``dtype``.
    """

    dtype: torch.dtype
    safe_modules: tuple[type[nn.Module], ...]


@dataclass(frozen=True)
class Precision:
    """The dtypes that the sections fp16, bf16 and torch_autocast and the key communication_data_type configure.

    ``param_dtype`` and ``master_dtype`` are None if each parameter keeps its dtype, as in plain PyTorch.
    ``reduce_dtype`` is None if gradients are reduced in the dtype of their parameter. ``input_dtype`` is the dtype to
    which fp16.auto_cast casts the inputs. Buffers keep their dtype, so the user has to convert those that the model
    combines with parameters in one operation. A frozen parameter is converted too, so that a LoRA layer trains; its
    original values stay its master weight, and are what ``full_params`` returns and a checkpoint saves.

    A user's own ``torch.autocast`` around the engine's call works as in plain PyTorch, unless the section
    torch_autocast is enabled, which then applies in the forward. Inside the forward the innermost ``torch.autocast``
    block always applies.
    """

    param_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    input_dtype: torch.dtype | None = None
    autocast: AutocastConfig | None = None
    loss_scaling: LossScaleConfig | None = None
    on_overflow: OnOverflow = OnOverflow.RAISE

    @property
    def skips_on_overflow(self) -> bool:
        """Whether a step is skipped on every rank if a gradient is not finite on some rank."""
        return self.on_overflow is OnOverflow.SKIP

    def assign_dtypes(self, module: nn.Module) -> dict[nn.Parameter, ParamDtypes]:
        """Return the dtypes of every parameter of ``module``.

        For parameters of autocast's safe modules the autocast dtype has precedence over ``reduce_dtype``.
        """
        low_precision = self._low_precision_params(module)
        return {p: self._assign_param_dtypes(p, p in low_precision) for p in module.parameters()}

    def _assign_param_dtypes(self, parameter: nn.Parameter, is_low_precision: bool) -> ParamDtypes:
        """Return the dtypes of ``parameter``.

        If ``is_low_precision`` is True, the parameter is sent and its gradient is reduced in the autocast dtype.
        """
        original_dtype = parameter.dtype
        is_converted = original_dtype.is_floating_point and self.param_dtype is not None
        param_dtype = self.param_dtype if is_converted and self.param_dtype is not None else original_dtype
        master_dtype = original_dtype
        if parameter.requires_grad:
            master_dtype = self.master_dtype if is_converted and self.master_dtype is not None else param_dtype
        unshard_dtype = self.autocast.dtype if self.autocast is not None and is_low_precision else None
        reduce_dtype = unshard_dtype or self.reduce_dtype
        if reduce_dtype is None or not original_dtype.is_floating_point:
            reduce_dtype = param_dtype
        return ParamDtypes(param_dtype, reduce_dtype, master_dtype, unshard_dtype)

    def _low_precision_params(self, module: nn.Module) -> set[nn.Parameter]:
        """Return the float32 parameters that belong only to modules whose class is one of autocast's safe classes.

        A tied parameter that also belongs to another module is left out. As in DeepSpeed, subclasses of the safe
        classes are left out too, since they may compute something else.
        """
        if self.autocast is None:
            return set()
        params_by_safety: dict[bool, set[nn.Parameter]] = {True: set(), False: set()}
        for submodule in module.modules():
            is_safe = type(submodule) in self.autocast.safe_modules
            params_by_safety[is_safe].update(submodule.parameters(recurse=False))
        return {p for p in params_by_safety[True] - params_by_safety[False] if p.dtype == torch.float32}

    def autocast_context(self, device_type: str) -> AbstractContextManager[Any]:
        """Return the context manager for the model's forward: torch.autocast if configured, else a null context."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device_type, dtype=self.autocast.dtype)

    def cast_inputs(self, value: Any) -> Any:
        """Return the forward's arguments with floating-point tensors cast to ``input_dtype``, if it is set."""
        if self.input_dtype is None:
            return value
        if isinstance(value, Tensor):
            return value.to(self.input_dtype) if value.is_floating_point() else value
        if isinstance(value, Mapping):
            return {key: self.cast_inputs(entry) for key, entry in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self.cast_inputs(entry) for entry in value)
        return value
