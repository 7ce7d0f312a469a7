"""Define all fallbacks for APIs that a release of torch may lack.

Each function looks for the API when it is called, not at import.

| missing in torch | what runs instead |
|---|---|
| ``Function.setup_context`` (torch 2.0) | the same function as ``forward(ctx, ...)``, without torch.func |
| ``queue_callback`` | ``EndOfBackward`` counts the gradients that the backward is going to make |
| ``_current_graph_task_id`` (torch 2.1) | ``EndOfBackward`` handles one backward at a time; ``reset`` ends it |
| ``SavedTensor.data`` (before torch 2.13) | nothing: unsharded parameters live as long as the graph that saved them |

Every supported torch (2.4 and later) has the first three. Their fallbacks stay because DeepSpeed has such fallbacks
too, and bugs in them: tests hide each API in turn and run the fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from zharness import torch_private as private


def call_after_backward(callback: Callable[[], None]) -> bool:
    """Call ``callback`` when the running backward has ended. Returns False if this release of torch cannot do that."""
    if not private.can_queue_callback():
        return False
    private.queue_backward_callback(callback)
    return True


class GraphTaskPhase(Enum):
    """The phase of a graph task, which is one run of autograd's engine."""

    RUNNING = "the graph task has computed a gradient and has not ended"
    NOT_RUNNING = "the graph task has not begun, or has ended"


class EndOfBackward:
    """Calls ``callback`` at the end of every graph task in which a parameter's hook called ``on_grad_ready``.

    A graph task is one run of autograd's engine, such as a backward. The backward of a reentrant checkpoint, and a
    backward that a Function calls in its forward, are graph tasks of their own, which run inside or before the outer
    one. So ``callback`` must be correct at the end of each graph task: it has to process the new gradients, and must
    not assume that no other call follows.

    A graph task that ended with an exception never calls ``callback``. If torch has graph task ids, later graph tasks
    are not affected; otherwise ``reset`` discards the record of the failed one.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], callback: Callable[[], None]) -> None:
        self._parameters = tuple(parameters)
        self._callback = callback
        self._phases: dict[int, GraphTaskPhase] = {}
        self._expected_params: set[nn.Parameter] = set()

    def on_grad_ready(self, parameter: nn.Parameter) -> None:
        """Record that the running graph task computed the gradient of ``parameter``.

        The parameter's hook calls this method.
        """
        if not private.can_queue_callback():
            self._count_grad(parameter)
            return
        task = private.current_graph_task_id()
        if self._phases.get(task, GraphTaskPhase.NOT_RUNNING) is GraphTaskPhase.NOT_RUNNING:
            self._phases[task] = GraphTaskPhase.RUNNING
            private.queue_backward_callback(partial(self._end, task))

    def _end(self, task: int) -> None:
        """Call ``callback`` at the end of the graph task with the id ``task``, and discard that task's record."""
        try:
            self._callback()
        finally:
            self._phases.pop(task, None)

    def _count_grad(self, parameter: nn.Parameter) -> None:
        """Record one gradient, and call ``callback`` when the graph task has computed all of them.

        This method is used if torch has no ``queue_callback``. At the first gradient of a graph task, it examines all
        parameters to find those that will get a gradient.
        """
        if parameter not in self._expected_params:
            self._expected_params.update(p for p in self._parameters if private.will_get_gradient(p))
        self._expected_params.discard(parameter)
        if not self._expected_params:
            self._callback()

    def reset(self) -> None:
        """Discard the records of all graph tasks.

        Call this method at the end of a step, when no graph task is running.
        """
        self._phases.clear()
        self._expected_params.clear()


@cache
def make_legacy_function(function: type) -> type:
    """Return the autograd Function ``function`` in torch's older form, where ``forward`` takes ``ctx`` first.

    ``function`` itself has a ``forward`` without ctx and a ``setup_context``.
    """

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = function.forward(*inputs)  # type: ignore[attr-defined]
        function.setup_context(ctx, inputs, output)  # type: ignore[attr-defined]
        return output

    rules = {name: staticmethod(getattr(function, name)) for name in ("backward", "jvp")}
    body = {"forward": staticmethod(forward), **rules}
    return type(function.__name__, (torch.autograd.Function,), body)


def apply_function(function: type, *inputs: Any) -> Any:
    """Call ``function.apply(*inputs)``, in the legacy form unless a torch.func transform is running.

    The legacy form is faster, because for the newer one torch inspects the signature of ``forward`` at every call,
    which takes a third of the time of a read at stage 3.
    """
    is_legacy = not (private.has_setup_context() and private.is_transforming())
    form = make_legacy_function(function) if is_legacy else function
    return form.apply(*inputs)  # type: ignore[attr-defined]
