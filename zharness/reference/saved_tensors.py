"""Where a module's graph saved a gathered parameter, and the promise to gather it again that takes its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from zharness import torch_private as private
from zharness.reference.unshard import UnshardedParam

# Operations whose output shares the storage of their input.
VIEW_NODE_NAMES = frozenset(
    f"{name}Backward0" for name in ("Permute", "Select", "Slice", "Split", "T", "Transpose", "Unsqueeze", "View")
)
CAST_NODE_NAME = "ToCopyBackward0"


def replace_saved_tensors(output: Any, unsharded_params: list[UnshardedParam], first_sequence_number: int) -> None:
    """Replace what the nodes behind ``output`` saved of ``copies``. A tensor that is missed is only held longer."""
    promisers = {copy.storage_address(): copy for copy in unsharded_params}
    with private.suspend_transforms():
        for node in _graph_nodes(output, first_sequence_number):
            for saved, tensor in private.iter_saved_tensors(node):
                address = tensor.untyped_storage()._cdata
                if address not in promisers and (source := _find_cast_source(tensor)) is not None:
                    promisers[address] = source.with_dtype(tensor.dtype)
                if address in promisers:
                    saved.register_hooks(promisers[address].pack_hook, promisers[address].unpack_hook)


def _find_cast_source(tensor: Tensor) -> UnshardedParam | None:
    """The copy of which ``tensor`` views a cast; torch.autocast makes such, and autograd saves them instead of it.

    The cast of a part of a parameter is not recognised: which part it was is not to be read off the graph.
    """
    node = tensor.grad_fn
    while node is not None and node.name() in VIEW_NODE_NAMES:
        node = node.next_functions[0][0]
    if node is None or node.name() != CAST_NODE_NAME:
        return None
    copy = getattr(node.next_functions[0][0], "unsharded_param", None)
    if not isinstance(copy, UnshardedParam):
        return None
    same_size = tensor.untyped_storage().nbytes() == copy.model_param.layout.numel * tensor.dtype.itemsize
    return copy if same_size else None


def _graph_nodes(output: Any, first_sequence_number: int) -> Iterator[Node]:
    """The autograd nodes behind ``output`` that were made since ``begin``, each once."""
    stack = [
        tensor.grad_fn
        for tensor in map(private.unwrap_functorch, _output_tensors(output))
        if tensor.grad_fn is not None
    ]
    met = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for below, _ in node.next_functions:
            if below is not None and below not in met and private.is_made_since(below, first_sequence_number):
                met.add(below)
                stack.append(below)


def _output_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a module's output: tuples, lists, dicts, dataclasses and their nestings."""
    if isinstance(value, Tensor):
        yield value
        return
    inside: Any = ()
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, (tuple, list)):
        inside = value
    elif is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, each.name) for each in fields(value)]
    for item in inside:
        yield from _output_tensors(item)
