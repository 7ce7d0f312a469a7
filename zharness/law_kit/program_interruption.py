"""Interrupt a forward or backward halfway by raising an exception, and check that the exception reaches the caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch import Tensor, nn

from zharness.errors import EngineContractError, HarnessFault
from zharness.workload.programs import Act


@contextmanager
def inject_interruption(module: nn.Module, act: Act) -> Iterator[None]:
    """Raise InterruptedError halfway through a forward or backward in the ``with`` block, and catch it after the block.

    In a forward, the exception is raised after the second child module that runs (or after the only one). In a
    backward, the exception is raised before the backward of that child, or of the next child whose output requires a
    gradient. Raises EngineContractError if the exception did not reach the caller, or if the backward did not run
    through the chosen child. Raises HarnessFault if no child ran that could be interrupted.
    """
    children = [*module.children()]
    calls, chosen, raised = count(1), list[nn.Module](), list[Act]()

    def interrupt(*_: object) -> None:
        """Raise InterruptedError, and record that it was raised."""
        raised.append(act)
        raise InterruptedError

    def forward_hook(child: nn.Module, _inputs: object, output: Any) -> None:
        """Raise InterruptedError in the chosen child's forward, or register the hook that raises in its backward."""
        if next(calls) < min(2, len(children)) or chosen:
            return
        if act is Act.FAILED_FORWARD:
            interrupt()
        if isinstance(output, Tensor) and output.requires_grad:
            chosen.append(child)
            output.register_hook(interrupt)  # type: ignore[no-untyped-call]

    hooks = [child.register_forward_hook(forward_hook) for child in children]
    try:
        yield
    except InterruptedError:
        if not raised:
            raise
        return
    finally:
        for hook in hooks:
            hook.remove()
    if raised:
        raise EngineContractError("an exception within a forward or a backward did not reach the engine's caller")
    if chosen:
        raise EngineContractError("a backward returned without running through the child modules that its forward used")
    raise HarnessFault(
        f"none of the {len(children)} child modules of the engine's module ran, so nothing was interrupted"
    )
