"""The dtypes of a training run: of the parameters, their masters, the wire, and the forward."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from zharness.reference.layout import Formats
from zharness.reference.loss_scale import Scaling


class OnOverflow(Enum):
    """What a step does when a gradient is not finite on some rank."""

    RAISE = "raise NonFiniteError on every rank"
    SKIP = "skip the step on every rank"


@dataclass(frozen=True)
class Autocast:
    """``torch.autocast`` around the model's forward; parameters of ``safe`` modules travel in ``dtype`` too."""

    dtype: torch.dtype
    safe: tuple[type[nn.Module], ...]


@dataclass(frozen=True)
class Precision:
    """What the sections fp16, bf16, torch_autocast and communication_data_type come to.

    ``held`` and ``master`` are None where each parameter keeps its own dtype, as in plain PyTorch; ``wire`` is None
    where gradients travel as they were made. Only parameters that are trained are converted: buffers and frozen
    parameters keep their dtype and value (a model that mixes them in one operation converts those itself, beforehand).

    A user's own ``torch.autocast``: around the engine's call it works as in plain PyTorch, unless the torch_autocast
    section is on, whose settings then hold inside the forward; inside the forward, the innermost block always holds.
    """

    held: torch.dtype | None = None
    master: torch.dtype | None = None
    wire: torch.dtype | None = None
    inputs: torch.dtype | None = None
    autocast: Autocast | None = None
    scaling: Scaling | None = None
    on_overflow: OnOverflow = OnOverflow.RAISE

    def formats(self, module: nn.Module) -> dict[nn.Parameter, Formats]:
        """The dtypes of every parameter. Its own wire under autocast goes before the engine's."""
        low = self._low(module)
        return {p: self._formats(p, p in low) for p in module.parameters()}

    def _formats(self, parameter: nn.Parameter, low: bool) -> Formats:
        own = parameter.dtype
        convert = parameter.requires_grad and own.is_floating_point
        held = self.held if convert and self.held is not None else own
        master = self.master if convert and self.master is not None else held
        gathered = self.autocast.dtype if self.autocast is not None and low else None
        wire = gathered or self.wire
        return Formats(held, wire if wire is not None and own.is_floating_point else held, master, gathered)

    def _low(self, module: nn.Module) -> set[nn.Parameter]:
        """The float32 parameters that safe modules alone hold: a tied one that another module reads is not among them.

        By the very class, as torch_autocast's other implementations do: a subclass may compute something else.
        """
        if self.autocast is None:
            return set()
        owned: dict[bool, set[nn.Parameter]] = {True: set(), False: set()}
        for each in module.modules():
            owned[type(each) in self.autocast.safe].update(each.parameters(recurse=False))
        return {p for p in owned[True] - owned[False] if p.dtype == torch.float32}

    def forward(self, device: str) -> AbstractContextManager[Any]:
        """The context of the model's forward."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device, dtype=self.autocast.dtype)

    def arguments(self, value: Any) -> Any:
        """The forward's arguments, floating-point tensors in tuples, lists and dicts cast where fp16.auto_cast asks."""
        if self.inputs is None:
            return value
        if isinstance(value, Tensor):
            return value.to(self.inputs) if value.is_floating_point() else value
        if isinstance(value, Mapping):
            return {key: self.arguments(each) for key, each in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self.arguments(each) for each in value)
        return value
