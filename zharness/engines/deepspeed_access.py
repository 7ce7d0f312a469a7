"""Read and write DeepSpeed's gradients, fp32 weights and optimizer state with the functions of ``deepspeed.utils``.

DeepSpeed documents these functions for debugging and for modifying partitioned states
(https://deepspeed.readthedocs.io/en/latest/zero3.html#debugging), and this file calls nothing else. The other laws use
``DeepSpeedTensorReader``, which corrects DeepSpeed's results; this file corrects nothing.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor

from zharness.engines.deepspeed_tensors import DeepSpeedTensorReader
from zharness.engines.torch_engine import snapshot


class DeepSpeedTensorAccess:
    """The methods of SupportsReadOut, SupportsWriteIn and SupportsShardAccess of a DeepSpeed engine."""

    _reader: DeepSpeedTensorReader
    _coalesce_block: ExitStack

    def read_grad(self, name: str) -> Tensor | None:
        from deepspeed.utils import safe_get_full_grad

        self._coalesce_block.close()
        return _snapshot_or_none(safe_get_full_grad(self._param(name)))

    def read_param(self, name: str) -> Tensor | None:
        from deepspeed.utils import safe_get_full_fp32_param

        return _snapshot_or_none(safe_get_full_fp32_param(self._param(name)))

    def read_optimizer_state(self, name: str, key: str) -> Tensor | None:
        from deepspeed.utils import safe_get_full_optimizer_state

        return _snapshot_or_none(safe_get_full_optimizer_state(self._param(name), key))

    def write_grad(self, name: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_grad

        self._coalesce_block.close()
        safe_set_full_grad(self._param(name), self._to_device(name, value))

    def write_param(self, name: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_fp32_param

        safe_set_full_fp32_param(self._param(name), self._to_device(name, value))

    def write_optimizer_state(self, name: str, key: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        safe_set_full_optimizer_state(self._param(name), self._to_device(name, value), key)

    def read_grad_shard(self, name: str) -> Tensor:
        from deepspeed.utils import safe_get_local_grad

        return snapshot(safe_get_local_grad(self._param(name)).flatten())

    def read_param_shard(self, name: str) -> Tensor:
        from deepspeed.utils import safe_get_local_fp32_param

        return snapshot(safe_get_local_fp32_param(self._param(name)).flatten())

    def read_optimizer_state_shard(self, name: str, key: str) -> Tensor:
        from deepspeed.utils import safe_get_local_optimizer_state

        return snapshot(safe_get_local_optimizer_state(self._param(name), key).flatten())

    def write_grad_shard(self, name: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_local_grad

        safe_set_local_grad(self._param(name), self._to_device(name, value))

    def write_param_shard(self, name: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_local_fp32_param

        safe_set_local_fp32_param(self._param(name), self._to_device(name, value))

    def write_optimizer_state_shard(self, name: str, key: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_local_optimizer_state

        safe_set_local_optimizer_state(self._param(name), self._to_device(name, value), key)

    def _param(self, name: str) -> Any:
        """Return the parameter with this original name."""
        return self._reader.params[name]

    def _to_device(self, name: str, value: Tensor) -> Tensor:
        """Return ``value`` on the device of the parameter ``name``."""
        return value.to(self._reader.params[name].device)


def _snapshot_or_none(tensor: Tensor | None) -> Tensor | None:
    """Return a copy of ``tensor`` on CPU, or None if DeepSpeed has none for the parameter."""
    return None if tensor is None else snapshot(tensor)
