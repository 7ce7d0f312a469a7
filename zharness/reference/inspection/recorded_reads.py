"""Find the sharded Parameter of a full tensor that was read from a module of stage 3."""

from __future__ import annotations

from collections.abc import MutableMapping

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

# Of all engines; an entry ends with its tensor.
_parameter_of_read: MutableMapping[Tensor, nn.Parameter] = WeakTensorKeyDictionary()


def record_read(full: Tensor, parameter: nn.Parameter) -> None:
    """Record that ``full`` is the unsharded tensor of ``parameter``."""
    _parameter_of_read[full] = parameter


def find_parameter_of_read(read: Tensor) -> nn.Parameter | None:
    """Return the Parameter of which ``read`` is the unsharded tensor, of any engine, or None for other tensors."""
    return _parameter_of_read.get(read)
