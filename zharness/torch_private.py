"""The names of torch that are not public, each with the reason why it is needed and the release that brought it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef


class WeakStorage:
    """A weak reference to a tensor's bytes (StorageWeakRef, torch 1.0).

    A tensor's Python object can die while autograd still holds its storage, so a ``weakref`` to it would not tell.
    """

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.nbytes = storage.nbytes()
        self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def is_alive(self) -> bool:
        return not self._reference.expired()  # type: ignore[no-untyped-call]

    def address(self) -> int:
        """The address of the storage: while this object exists, no other storage gets it."""
        return int(self._reference.cdata)


def are_storages_expired(addresses: Iterable[int]) -> list[bool]:
    """Of the storages at these addresses, each that of a living WeakStorage, whether their bytes are gone.

    What ``not alive()`` says, without a call of Python for each (_expired, torch 2.0).
    """
    return list(map(torch.UntypedStorage._expired, addresses))  # type: ignore[arg-type]  # the stub is another's


def is_transforming() -> bool:
    """Whether a torch.func transform is running (peek_interpreter_stack, torch 2.0)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def suspend_transforms() -> AbstractContextManager[Any]:
    """Collectives know nothing of vmap or grad: they run below all transforms (pyfunctorch, torch 2.1)."""
    return temporarily_clear_interpreter_stack() if is_transforming() else nullcontext()


def unwrap_functorch(tensor: Tensor) -> Tensor:
    """The plain tensor below every torch.func wrapper: its graph is the one that outlives the transform (torch 2.0)."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_legacy_batched(tensor: Tensor) -> bool:
    """Whether ``tensor`` is batched by autograd.grad(is_grads_batched=True) (torch 1.11)."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor)


def map_batch_rows(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """``function(tensor)``; row by row where autograd.grad(is_grads_batched=True) runs its own, older vmap.

    That vmap has no rule for a Function and no public way out: _remove_batch_dim and _add_batch_dim are torch 1.7.
    """
    if not is_legacy_batched(tensor):
        return function(tensor)
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    rows = torch._remove_batch_dim(tensor, level, 1, 0)  # the size is used only for a tensor that is not batched
    return torch._add_batch_dim(torch.stack([function(row) for row in rows]), 0, level)


def next_sequence_number() -> int:
    """The number that the next autograd node gets: marks where a forward begins (_get_sequence_nr, torch 2.1)."""
    return torch._C._autograd._get_sequence_nr()


def is_made_since(node: Node, first_sequence_number: int) -> bool:
    """Whether ``node`` was made after ``begin``; leaves count as made at the end of time (_sequence_nr, torch 2.1)."""
    number: int = node._sequence_nr()
    return number >= first_sequence_number


def iter_saved_tensors(node: Node) -> Iterator[tuple[Any, Tensor]]:
    """The SavedTensors of ``node`` that hold a tensor as it is, with that tensor.

    ``_raw_saved_*`` are torch 1.9; ``data`` and ``unpack_hook`` look without unpacking (there in torch 2.13; where they
    are missing nothing is found, and gathered copies live as long as their graph). SavedTensors under hooks already,
    checkpoint's or ours, are left out: unpacking one would recompute a region or gather a weight.
    """
    if not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"):
        return
    for name in _raw_saved_names(type(node)):
        raw = getattr(node, name)
        for saved in raw if isinstance(raw, tuple) else (raw,):
            if saved.unpack_hook is None and isinstance(saved.data, Tensor):
                yield saved, saved.data


@cache
def _raw_saved_names(node_type: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(node_type) if name.startswith("_raw_saved_"))


def current_graph_task_id() -> int:
    """Which backward is running on this thread; -1 outside one, or where it cannot be told (torch 2.1)."""
    number: int = getattr(torch._C, "_current_graph_task_id", lambda: -1)()
    return number


def is_backward_multithreaded() -> bool:
    """Whether a backward may run on threads of its own, for each device one (_is_multithreading_enabled, torch 1.10).

    ``torch.autograd.set_multithreading_enabled`` switches it, and nothing public tells how it is.
    """
    return bool(torch._C._is_multithreading_enabled())


def can_queue_callback() -> bool:
    """Whether the end of a backward calls back (queue_callback, torch 0.4); ``fallback`` counts where it does not."""
    return hasattr(torch.autograd.Variable._execution_engine, "queue_callback")


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward has succeeded: the innermost graph task, where several are nested."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def will_get_gradient(parameter: nn.Parameter) -> bool:
    """Whether the running backward accumulates into ``parameter`` (_will_engine_execute_node, torch 2.0)."""
    if not parameter.requires_grad:
        return False
    accumulator = torch.autograd.graph.get_gradient_edge(parameter).node
    return bool(torch._C._will_engine_execute_node(accumulator))


def has_setup_context() -> bool:
    """Whether a Function may be written as forward without ctx, which torch.func can transform (torch 2.0)."""
    return hasattr(torch.autograd.Function, "setup_context")


@contextmanager
def safe_globals(classes: Sequence[type]) -> Iterator[None]:
    """Classes that ``torch.load(weights_only=True)`` may make in here (add_safe_globals, torch 2.4)."""
    before = list(torch.serialization.get_safe_globals())
    torch.serialization.add_safe_globals(list(classes))
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)
