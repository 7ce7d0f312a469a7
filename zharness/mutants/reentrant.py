"""Mutants that are wrong only if a weight is used inside and outside a block that a reentrant checkpoint recomputes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zharness import torch_private
from zharness.engines import EngineConfig
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import EngineWrapper


class FollowsGraphTasks(EngineWrapper):
    """The base class of mutants that change a gradient depending on the backward that made the previous gradient.

    ``output_task`` is the id of the last backward that reached the engine's output, or -1 if no backward has reached
    it. This is the caller's backward, unless the whole model is checkpointed. The backward of a reentrant checkpoint
    runs inside the caller's backward, and has a higher id.
    """

    stages = (0, 1)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.output_task = -1
        self.last_task: dict[nn.Parameter, int] = {}
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(self.changed_if_seen, parameter))  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.base(*args, **kwargs)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(self.note_task)  # type: ignore[no-untyped-call]
        return output

    def note_task(self, _grad: Tensor) -> None:
        """Record the id of the running backward."""
        self.output_task = torch_private.current_graph_task_id()

    def changed_if_seen(self, parameter: nn.Parameter, grad: Tensor) -> Tensor:
        """Return the replacement of ``grad`` if this or the previous backward is the caller's, else ``grad``."""
        task, before = torch_private.current_graph_task_id(), self.last_task.get(parameter, -1)
        self.last_task[parameter] = task
        return self.changed(grad, before, task) if min(before, task) == self.output_task > -1 else grad

    def changed(self, grad: Tensor, before: int, task: int) -> Tensor:
        """Return the replacement of ``grad``, made in the backward ``task``; ``before`` made the previous gradient."""
        raise NotImplementedError


@mutant(
    FaultKind.CONTRIBUTION,
    Target("checkpointing.two_regions", model="blocks", variant="reentrant_last"),
    origin=Origin.BLIND_9,
)
class DropsTheUseOutsideACheckpoint(FollowsGraphTasks):
    """Drops a weight's gradient from outside a reentrant checkpoint if it comes after the gradient from inside."""

    def changed(self, grad: Tensor, before: int, task: int) -> Tensor:
        return torch.zeros_like(grad) if task < before else grad


@mutant(
    FaultKind.CONTRIBUTION,
    Target("checkpointing.two_regions", model="blocks", variant="reentrant_first"),
    origin=Origin.BLIND_9,
)
class DoublesTheUseInsideACheckpoint(FollowsGraphTasks):
    """Doubles a weight's gradient from inside a reentrant checkpoint if it comes after the gradient from outside."""

    def changed(self, grad: Tensor, before: int, task: int) -> Tensor:
        return 2 * grad if task > before else grad
