"""Where a module's graph saved a gathered parameter, and the promise to gather it again that takes its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from zharness.reference import torch_private as private
from zharness.reference.gathered import Copy

# Operations whose output shares the storage of their input.
VIEWS = frozenset(
    f"{name}Backward0" for name in ("Permute", "Select", "Slice", "Split", "T", "Transpose", "Unsqueeze", "View")
)
CAST = "ToCopyBackward0"


def promise(output: Any, copies: list[Copy], begin: int) -> None:
    """Replace what the nodes behind ``output`` saved of ``copies``. A tensor that is missed is only held longer."""
    promisers = {copy.holds(): copy for copy in copies}
    with private.outside_transforms():
        for node in _nodes(output, begin):
            for saved, tensor in private.saved_tensors(node):
                address = tensor.untyped_storage()._cdata
                if address not in promisers and (source := _source_of_cast(tensor)) is not None:
                    promisers[address] = source.cast(tensor.dtype)
                if address in promisers:
                    saved.register_hooks(promisers[address].pack, promisers[address].unpack)


def _source_of_cast(tensor: Tensor) -> Copy | None:
    """The copy of which ``tensor`` views a cast; torch.autocast makes such, and autograd saves them instead of it.

    The cast of a part of a parameter is not recognised: which part it was is not to be read off the graph.
    """
    node = tensor.grad_fn
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    if node is None or node.name() != CAST:
        return None
    copy = getattr(node.next_functions[0][0], "copy", None)
    if not isinstance(copy, Copy):
        return None
    same_size = tensor.untyped_storage().nbytes() == copy.original.layout.numel * tensor.dtype.itemsize
    return copy if same_size else None


def _nodes(output: Any, begin: int) -> Iterator[Node]:
    """The autograd nodes behind ``output`` that were made since ``begin``, each once."""
    stack = [tensor.grad_fn for tensor in map(private.unwrapped, _tensors(output)) if tensor.grad_fn is not None]
    met = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for below, _ in node.next_functions:
            if below is not None and below not in met and private.made_since(below, begin):
                met.add(below)
                stack.append(below)


def _tensors(value: Any) -> Iterator[Tensor]:
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
        yield from _tensors(item)
