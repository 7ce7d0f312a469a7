"""Reshard after a module's forward: put hooks in place of the unsharded parameters that its graph saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from zharness import torch_private as private
from zharness.reference.unshard import UnshardedParam

# Nodes of operations whose output shares the storage of their input.
VIEW_NODE_NAMES = frozenset(
    f"{name}Backward0" for name in ("Permute", "Select", "Slice", "Split", "T", "Transpose", "Unsqueeze", "View")
)
CAST_NODE_NAME = "ToCopyBackward0"


def replace_saved_tensors(output: Any, unsharded_params: list[UnshardedParam], first_sequence_number: int) -> None:
    """Replace saved unsharded parameters in the graph of ``output`` by hooks that unshard the parameters again.

    Only nodes from ``first_sequence_number`` on are examined, since the running forward made them. A saved tensor that
    is not recognised keeps the full parameter in memory until backward; the result is still correct.
    """
    by_address = {unsharded.storage_address(): unsharded for unsharded in unsharded_params}
    with private.suspend_transforms():
        for node in _graph_nodes(output, first_sequence_number):
            for saved, tensor in private.iter_saved_tensors(node):
                address = tensor.untyped_storage()._cdata
                if address not in by_address and (source := _find_cast_source(tensor)) is not None:
                    by_address[address] = source.with_dtype(tensor.dtype)
                if address in by_address:
                    saved.register_hooks(by_address[address].pack_hook, by_address[address].unpack_hook)


def _find_cast_source(tensor: Tensor) -> UnshardedParam | None:
    """Return the unsharded parameter that torch.autocast has cast, if ``tensor`` is the cast or a view of the cast.

    Returns None for other tensors, and for the cast of a part of a parameter, since the graph does not record the part.
    """
    node = tensor.grad_fn
    while node is not None and node.name() in VIEW_NODE_NAMES:
        node = node.next_functions[0][0]
    if node is None or node.name() != CAST_NODE_NAME:
        return None
    source = getattr(node.next_functions[0][0], "unsharded_param", None)  # set by AllGatherParam.setup_context
    if not isinstance(source, UnshardedParam):
        return None
    is_whole = tensor.untyped_storage().nbytes() == source.model_param.layout.numel * tensor.dtype.itemsize
    return source if is_whole else None


def _graph_nodes(output: Any, first_sequence_number: int) -> Iterator[Node]:
    """Yield each autograd node behind ``output`` once, if the running forward made the node."""
    stack = [
        tensor.grad_fn
        for tensor in map(private.unwrap_functorch, _output_tensors(output))
        if tensor.grad_fn is not None
    ]
    visited = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for next_node, _ in node.next_functions:
            if (
                next_node is not None
                and next_node not in visited
                and private.is_made_since(next_node, first_sequence_number)
            ):
                visited.add(next_node)
                stack.append(next_node)


def _output_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a module's output, which may nest tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
        return
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (tuple, list)):
        items = value
    elif is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name) for field in fields(value)]
    for item in items:
        yield from _output_tensors(item)
