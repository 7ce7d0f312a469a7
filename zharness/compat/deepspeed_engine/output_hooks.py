"""Watch the outputs of a forward, to learn of backwards that the caller runs without the engine."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from zharness import torch_private as private
from zharness.reference.engine import Engine


class OutputHooks:
    """Counts the backwards that reach an output, and refuses one whose loss lacks the loss scale."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._backwards = 0
        self._last_graph_task = -1

    def watch(self, outputs: Any) -> Any:
        """Register the hooks on all tensors of ``outputs``, and return ``outputs``."""
        if not private.is_transforming():
            for value in pytree.tree_leaves(outputs):
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(self._on_backward)  # type: ignore[no-untyped-call]
        return outputs

    def _on_backward(self, grad: Tensor) -> None:
        """Count the running backward once. Raises RuntimeError if the loss scale is needed and missing."""
        if self._engine.loss_scaler.is_missing():
            raise RuntimeError(
                "Loss scaling is required for this configuration; call engine.backward(loss) or "
                "engine.scale(loss).backward()"
            )
        task = private.current_graph_task_id()
        self._backwards += task != self._last_graph_task
        self._last_graph_task = task

    def take_backward_count(self) -> int:
        """Return the number of backwards since the last call."""
        count, self._backwards = self._backwards, 0
        return count
