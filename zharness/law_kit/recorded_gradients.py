"""What backwards give to the parameters of a plain model, one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

RecordedGradients = Mapping[
    str, Sequence[Sequence[Tensor]]
]  # by parameter, of each backward that reached it, the entries


def record_gradients(module: nn.Module) -> dict[str, list[list[Tensor]]]:
    """A dictionary that from now on holds, by parameter, the gradient of every backward that reached it, by entries."""
    given: dict[str, list[list[Tensor]]] = {}

    def save_gradient(name: str, grad: Tensor) -> None:
        given.setdefault(name, []).append(split_gradient(grad))

    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(partial(save_gradient, name))  # type: ignore[no-untyped-call]
    return given


def drain_gradients(gradients: dict[str, list[list[Tensor]]]) -> RecordedGradients:
    """What is in it, which goes on empty."""
    taken = {name: tuple(grads) for name, grads in gradients.items()}
    gradients.clear()
    return taken


def has_split_gradients(gradients: RecordedGradients) -> bool:
    """Whether any gradient came in several entries, whose sum may be small where they are large."""
    return any(len(grad) > 1 for grads in gradients.values() for grad in grads)


def split_gradient(grad: Tensor) -> list[Tensor]:
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


def densify(grad: Tensor) -> Tensor:
    """A gradient without its graph, as the tensor of its parameter's shape that a sparse one stands for."""
    return grad.detach() if grad.layout is torch.strided else grad.detach().to_dense()


def sum_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Of at least one tensor."""
    return torch.stack([*tensors]).sum(0)
