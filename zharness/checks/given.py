"""What backwards give to the parameters of a plain model, one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

Given = Mapping[str, Sequence[Sequence[Tensor]]]  # by parameter, of each backward that reached it, the entries


def gradients_given(module: nn.Module) -> dict[str, list[list[Tensor]]]:
    """A dictionary that from now on holds, by parameter, the gradient of every backward that reached it, by entries."""
    given: dict[str, list[list[Tensor]]] = {}

    def keep(name: str, grad: Tensor) -> None:
        given.setdefault(name, []).append(entries(grad))

    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(partial(keep, name))  # type: ignore[no-untyped-call]
    return given


def taken_from(given: dict[str, list[list[Tensor]]]) -> Given:
    """What is in it, which goes on empty."""
    taken = {name: tuple(grads) for name, grads in given.items()}
    given.clear()
    return taken


def in_entries(given: Given) -> bool:
    """Whether any gradient came in several entries, whose sum may be small where they are large."""
    return any(len(grad) > 1 for grads in given.values() for grad in grads)


def entries(grad: Tensor) -> list[Tensor]:
    """Dense tensors of a parameter's shape that add up to ``grad``; of a sparse one, in none of them is a row twice.

    Of a sparse one without any row: zeros.
    An engine may divide every entry of a sparse gradient by the number of ranks before they are added, as DDP does.
    """
    if grad.layout is torch.strided:
        return [grad.detach().clone()]
    found: list[Tensor] = []
    seen: Counter[int] = Counter()
    for row, value in zip(grad._indices()[0].tolist(), grad._values(), strict=True):
        if seen[row] == len(found):
            found.append(torch.zeros(grad.shape, dtype=grad.dtype))
        found[seen[row]][row] = value
        seen[row] += 1
    return found or [torch.zeros(grad.shape, dtype=grad.dtype)]


def dense(grad: Tensor) -> Tensor:
    """A gradient without its graph, as the tensor of its parameter's shape that a sparse one stands for."""
    return grad.detach() if grad.layout is torch.strided else grad.detach().to_dense()


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    """Of at least one tensor."""
    return torch.stack([*parts]).sum(0)
