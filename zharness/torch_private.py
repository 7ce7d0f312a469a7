"""Every private name of torch that this package uses, each with the reason and the release that introduced it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef


class WeakStorage:
    """A weak reference to a tensor's storage (StorageWeakRef, torch 1.0).

    Autograd can keep the storage after the tensor's Python object is freed, so a ``weakref`` to the object is not
    enough.
    """

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.nbytes = storage.nbytes()
        self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def is_alive(self) -> bool:
        """Return whether the storage has not been freed."""
        return not self._reference.expired()  # type: ignore[no-untyped-call]

    def address(self) -> int:
        """Return the address of the storage; no other storage gets it while this object exists."""
        return int(self._reference.cdata)


def are_storages_expired(addresses: Iterable[int]) -> list[bool]:
    """Return for each address whether its storage was freed; each address must be that of an existing WeakStorage.

    The result is that of ``not is_alive()``, without one Python call per storage (_expired, torch 2.0).
    """
    return list(map(torch.UntypedStorage._expired, addresses))  # type: ignore[arg-type]  # the stub has another signature


def build_without_memory() -> AbstractContextManager[Any]:
    """Return a context in which new tensors have a shape, dtype and device but no memory (FakeTensorMode, torch 2.0).

    Tensors that existed before, such as loaded weights, may take part.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_transforming() -> bool:
    """Return whether a torch.func transform is running (peek_interpreter_stack, torch 2.0)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def suspend_transforms() -> AbstractContextManager[Any]:
    """Suspend all torch.func transforms inside the block, since collectives do not support them (torch 2.1)."""
    return temporarily_clear_interpreter_stack() if is_transforming() else nullcontext()


def unwrap_functorch(tensor: Tensor) -> Tensor:
    """Return the plain tensor inside all torch.func wrappers, whose graph outlives the transforms (torch 2.0)."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_legacy_batched(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is batched by autograd.grad(is_grads_batched=True) (torch 1.11)."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor)


def map_batch_rows(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Return ``function(tensor)``, row by row if ``tensor`` is batched by autograd.grad(is_grads_batched=True).

    Such a batch comes from torch's older vmap, which cannot batch a Function and has no public way to remove the batch
    dimension (_remove_batch_dim and _add_batch_dim, torch 1.7).
    """
    if not is_legacy_batched(tensor):
        return function(tensor)
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    rows = torch._remove_batch_dim(tensor, level, 1, 0)  # the size 1 is ignored, as the tensor is batched
    return torch._add_batch_dim(torch.stack([function(row) for row in rows]), 0, level)


def next_sequence_number() -> int:
    """Return the number of the next autograd node, which marks the start of a forward (_get_sequence_nr, torch 2.1)."""
    return torch._C._autograd._get_sequence_nr()


def is_made_since(node: Node, first_sequence_number: int) -> bool:
    """Return whether ``node`` has ``first_sequence_number`` or a higher number (_sequence_nr, torch 2.1).

    Leaves have the highest possible number.
    """
    number: int = node._sequence_nr()
    return number >= first_sequence_number


def iter_saved_tensors(node: Node) -> Iterator[tuple[Any, Tensor]]:
    """Iterate over the SavedTensors of ``node`` that have no hooks, each with its tensor.

    ``_raw_saved_*`` exist since torch 1.9; ``data`` and ``unpack_hook``, which read a SavedTensor without unpacking it,
    exist since torch 2.13. Before torch 2.13 this yields nothing, and unsharded parameters live as long as their graph.
    A SavedTensor with hooks (of activation checkpointing or of this engine) is left out: unpacking it would recompute a
    region or all-gather a weight.
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
    """List the attributes of a class of nodes that hold SavedTensors."""
    return tuple(name for name in dir(node_type) if name.startswith("_raw_saved_"))


def current_graph_task_id() -> int:
    """Return the id of the backward that runs on this thread; -1 outside a backward, or before torch 2.1."""
    number: int = getattr(torch._C, "_current_graph_task_id", lambda: -1)()
    return number


def is_backward_multithreaded() -> bool:
    """Return whether a backward may use one thread per device (_is_multithreading_enabled, torch 1.10).

    ``torch.autograd.set_multithreading_enabled`` sets it; no public function returns it.
    """
    return bool(torch._C._is_multithreading_enabled())


def can_queue_callback() -> bool:
    """Return whether torch can call a function at the end of a backward (queue_callback, torch 0.4).

    ``torch_fallback`` has a replacement for a torch that cannot.
    """
    return hasattr(torch.autograd.Variable._execution_engine, "queue_callback")


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward (the innermost, if nested) has ended without an exception."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def will_get_gradient(parameter: nn.Parameter) -> bool:
    """Return whether the running backward accumulates into ``parameter`` (_will_engine_execute_node, torch 2.0)."""
    if not parameter.requires_grad:
        return False
    accumulator = torch.autograd.graph.get_gradient_edge(parameter).node
    return bool(torch._C._will_engine_execute_node(accumulator))


def has_setup_context() -> bool:
    """Return whether Functions may have ``setup_context``, which torch.func needs to transform them (torch 2.0)."""
    return hasattr(torch.autograd.Function, "setup_context")


@contextmanager
def safe_globals(classes: Sequence[type]) -> Iterator[None]:
    """Allow ``classes`` in ``torch.load(weights_only=True)`` inside the block (add_safe_globals, torch 2.4)."""
    before = list(torch.serialization.get_safe_globals())
    torch.serialization.add_safe_globals(list(classes))
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def skip_construction_log_of_ddp() -> None:
    """Make DistributedDataParallel log nothing when it is built (Logger, torch 1.8).

    Under DebugLevel.DETAIL a gloo group is a wrapper that compares collectives, which this log casts to gloo's own
    class: with torch 2.13 the process dies by SIGSEGV. The log is written for telemetry only.
    """
    torch.distributed.Logger.set_construction_data_and_log = lambda *_, **__: None  # type: ignore[attr-defined, method-assign]


@contextmanager
def default_group(group: dist.ProcessGroup) -> Iterator[None]:
    """Make ``group`` the default process group within the block (_update_default_pg, torch 2.1).

    Only ranks of ``group`` may enter; rank r of it has to be rank r of the whole world, too.
    """
    whole = dist.distributed_c10d._get_default_group()
    dist.distributed_c10d._update_default_pg(group)
    try:
        yield
    finally:
        dist.distributed_c10d._update_default_pg(whole)


def agree_on_group_names(device: torch.device) -> None:
    """Let every rank count the process groups as the rank that made the most (_world.group_count, torch 2.1).

    torch names a new group by that count, and a group of which the ranks have different names waits for ever. Ranks
    that made groups of their own, as inside ``default_group``, count differently. Every rank has to call this function.
    """
    world = dist.distributed_c10d._world
    count = torch.tensor(world.group_count, device=device)
    dist.all_reduce(count, dist.ReduceOp.MAX)
    world.group_count = int(count)


def count_collectives() -> dict[tuple[str, tuple[int, ...]], int]:
    """Return how many collectives, sends and receives this rank has started on each of its process groups.

    A group's key is its name and its ranks (_world.pg_map, _get_sequence_number_for_group, torch 2.1). A group that
    does not count has -1.
    """
    world = dist.distributed_c10d._world
    counts: dict[tuple[str, tuple[int, ...]], int] = {}
    for group in world.pg_map:
        key = world.pg_names[group], tuple(sorted(world.pg_group_ranks[group]))
        counter: Any = group  # torch's stubs do not have the method
        try:
            counts[key] = counter._get_sequence_number_for_group()
        except RuntimeError:
            counts[key] = -1
    return counts


def resolve_process_group(argument: Any) -> dist.ProcessGroup | None:
    """Return the group that an argument of a collective operator names, or None for another argument.

    It is a script object, or the name of a group (ProcessGroup.unbox, _resolve_process_group, torch 2.3).
    """
    if isinstance(argument, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(argument)
        except RuntimeError:  # the other script objects of a collective are operations of a reduction
            return None
    if not isinstance(argument, str) or argument in REDUCTIONS:
        return None
    name: Any = argument  # newer releases of torch declare a type of its own for it
    return torch._C._distributed_c10d._resolve_process_group(name)


REDUCTIONS = ("sum", "avg", "min", "max", "product")  # the names of a functional collective's operations


def is_backend_registered(name: str) -> bool:
    """Return whether torch.distributed has a backend ``name`` that was registered (Backend._plugins, torch 1.13)."""
    return name.upper() in dist.Backend._plugins


def read_premultiplied_factor(op: Any) -> float | Tensor:
    """Return the factor of a PREMUL_SUM reduction, which only its pickled state tells (torch 1.13)."""
    factor: float | Tensor = op.__getstate__()[1]
    return factor


def is_cuda_lost_by_fork() -> bool:
    """Return whether a process that this one was forked from has asked CUDA's driver (_is_in_bad_fork, torch 1.0).

    Then CUDA cannot start here.
    """
    return bool(torch.cuda._is_in_bad_fork())


def compile_in_this_process() -> None:
    """Let inductor compile kernels in this process instead of in a worker for each core (compile_threads, torch 2.0).

    Every rank would have workers of its own, each of which imports torch.
    """
    importlib.import_module("torch._inductor.config").compile_threads = 1  # type: ignore[attr-defined]
