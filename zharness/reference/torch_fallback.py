"""The legacy forms that run where torch lacks an API. Each looks for the API when it is used, not when it is imported.

| where torch lacks | what runs instead |
|---|---|
| ``Function.setup_context`` (torch 2.0) | ``legacy``: the same function as ``forward(ctx, ...)``, without torch.func |
| ``queue_callback`` | ``EndOfBackward`` counts the gradients that the backward is going to make |
| ``SavedTensor.data`` (before torch 2.13) | nothing: at stage 3 gathered copies live as long as their graph |
| ``_current_graph_task_id`` (torch 2.1) | ``EndOfBackward`` knows one backward at a time; ``reset`` ends a failed one |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from zharness import torch_private as private


class GraphTaskPhase(Enum):
    """Where a graph task is: one run of autograd's engine."""

    RUNNING = "a parameter has its gradient, the end is to come"
    NOT_RUNNING = "not begun, or ended"


class EndOfBackward:
    """Calls ``callback`` at the end of every graph task in which a parameter's hook called ``arrived``, once for each.

    A backward is a graph task. So is a reentrant checkpoint's part of one, and a backward that a Function calls in its
    forward: a rank leaves and enters again within one step. ``callback`` therefore must be right at the end of each of
    them, whichever is the last. It adds what is new to what is there; nothing here can run it too early or twice.

    A graph task that an exception ends never calls back. With ids its successors do not care; ``reset`` forgets it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], callback: Callable[[], None]) -> None:
        self._parameters = tuple(parameters)
        self._callback = callback
        self._phases: dict[int, GraphTaskPhase] = {}
        self._expected_params: set[nn.Parameter] = set()

    def on_grad_ready(self, parameter: nn.Parameter) -> None:
        """To be called once for each gradient that a graph task makes, by the parameter's own hook."""
        if not private.can_queue_callback():
            self._count_grad(parameter)
            return
        task = private.current_graph_task_id()
        if self._phases.get(task, GraphTaskPhase.NOT_RUNNING) is GraphTaskPhase.NOT_RUNNING:
            self._phases[task] = GraphTaskPhase.RUNNING
            private.queue_backward_callback(partial(self._end, task))

    def _end(self, task: int) -> None:
        try:
            self._callback()
        finally:
            self._phases.pop(task, None)

    def _count_grad(self, parameter: nn.Parameter) -> None:
        """One look at all parameters for each graph task: at its first gradient, which nobody expected."""
        if parameter not in self._expected_params:
            self._expected_params.update(p for p in self._parameters if private.will_get_gradient(p))
        self._expected_params.discard(parameter)
        if not self._expected_params:
            self._callback()

    def reset(self) -> None:
        """Forget what is running: for the end of a step, where nothing is."""
        self._phases.clear()
        self._expected_params.clear()


@cache
def make_legacy_function(function: type) -> type:
    """``function``, written as forward without ctx plus setup_context, in the one form that torch < 2.0 takes."""

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = function.forward(*inputs)  # type: ignore[attr-defined]
        function.setup_context(ctx, inputs, output)  # type: ignore[attr-defined]
        return output

    rules = {name: staticmethod(getattr(function, name)) for name in ("backward", "jvp")}
    body = {"forward": staticmethod(forward), **rules}
    return type(function.__name__, (torch.autograd.Function,), body)


def apply_function(function: type, *inputs: Any) -> Any:
    """``function.apply(*inputs)``, in a form that this torch takes: outside torch.func the legacy one does, for less.

    At every call of the other torch looks up the signature of its forward: a third of what a read at stage 3 costs.
    """
    form = function if private.has_setup_context() and private.is_transforming() else make_legacy_function(function)
    return form.apply(*inputs)  # type: ignore[attr-defined]
