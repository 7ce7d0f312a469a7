"""The dtypes of a training run: of the parameters, their masters, the wire, and the forward."""

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
    """What a step does when a gradient is not finite on some rank."""

    RAISE = "raise NonFiniteError on every rank"
    SKIP = "skip the step on every rank"


@dataclass(frozen=True)
class AutocastConfig:
    """``torch.autocast`` around the model's forward; parameters of ``safe`` modules travel in ``dtype`` too."""

    dtype: torch.dtype
    safe_modules: tuple[type[nn.Module], ...]


@dataclass(frozen=True)
class Precision:
    """What the sections fp16, bf16, torch_autocast and communication_data_type come to.

    ``held`` and ``master`` are None where each parameter keeps its own dtype, as in plain PyTorch; ``wire`` is None
    where gradients travel as they were made. Only parameters that are trained are converted: buffers and frozen
    parameters keep their dtype and value (a model that mixes them in one operation converts those itself, beforehand).

    A user's own ``torch.autocast``: around the engine's call it works as in plain PyTorch, unless the torch_autocast
    section is on, whose settings then hold inside the forward; inside the forward, the innermost block always holds.
    """

    param_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    input_dtype: torch.dtype | None = None
    autocast: AutocastConfig | None = None
    loss_scaling: LossScaleConfig | None = None
    on_overflow: OnOverflow = OnOverflow.RAISE

    def assign_dtypes(self, module: nn.Module) -> dict[nn.Parameter, ParamDtypes]:
        """The dtypes of every parameter. Its own wire under autocast goes before the engine's."""
        low = self._low_precision_params(module)
        return {p: self._assign_param_dtypes(p, p in low) for p in module.parameters()}

    def _assign_param_dtypes(self, parameter: nn.Parameter, is_low_precision: bool) -> ParamDtypes:
        own = parameter.dtype
        convert = parameter.requires_grad and own.is_floating_point
        held = self.param_dtype if convert and self.param_dtype is not None else own
        master = self.master_dtype if convert and self.master_dtype is not None else held
        gathered = self.autocast.dtype if self.autocast is not None and is_low_precision else None
        wire = gathered or self.reduce_dtype
        return ParamDtypes(held, wire if wire is not None and own.is_floating_point else held, master, gathered)

    def _low_precision_params(self, module: nn.Module) -> set[nn.Parameter]:
        """The float32 parameters that safe modules alone hold: a tied one that another module reads is not among them.

        By the very class, as torch_autocast's other implementations do: a subclass may compute something else.
        """
        if self.autocast is None:
            return set()
        owned: dict[bool, set[nn.Parameter]] = {True: set(), False: set()}
        for each in module.modules():
            owned[type(each) in self.autocast.safe_modules].update(each.parameters(recurse=False))
        return {p for p in owned[True] - owned[False] if p.dtype == torch.float32}

    def autocast_context(self, device_type: str) -> AbstractContextManager[Any]:
        """The context of the model's forward."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device_type, dtype=self.autocast.dtype)

    def cast_inputs(self, value: Any) -> Any:
        """The forward's arguments, floating-point tensors in tuples, lists and dicts cast where fp16.auto_cast asks."""
        if self.input_dtype is None:
            return value
        if isinstance(value, Tensor):
            return value.to(self.input_dtype) if value.is_floating_point() else value
        if isinstance(value, Mapping):
            return {key: self.cast_inputs(each) for key, each in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self.cast_inputs(each) for each in value)
        return value
