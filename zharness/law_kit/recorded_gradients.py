"""Record the gradient that each backward computes for each parameter of a plain PyTorch model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from zharness import torch_private

RecordedGradients = Mapping[
    str, Sequence[Sequence[Tensor]]
]  # by parameter, then by backward, the entries of its gradient


def record_gradients(module: nn.Module) -> dict[str, list[list[Tensor]]]:
    """Return a dictionary that collects, by parameter, the gradient of every later backward, split into entries."""
    recorded: dict[str, list[list[Tensor]]] = {}

    def save_gradient(name: str, grad: Tensor) -> None:
        """Append the gradient that one backward computed for the parameter ``name``.

        A batch of gradients comes from autograd.grad; it is ignored, because autograd adds it to no ``.grad``.
        """
        if not torch_private.is_legacy_batched(grad):
            recorded.setdefault(name, []).append(split_gradient(grad))

    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(partial(save_gradient, name))  # type: ignore[no-untyped-call]
    return recorded


def drain_gradients(gradients: dict[str, list[list[Tensor]]]) -> RecordedGradients:
    """Return the collected gradients, and empty the dictionary."""
    drained = {name: tuple(grads) for name, grads in gradients.items()}
    gradients.clear()
    return drained


def has_split_gradients(gradients: RecordedGradients) -> bool:
    """Return whether any gradient consists of several entries; entries may be large although their sum is small."""
    return any(len(grad) > 1 for grads in gradients.values() for grad in grads)


def split_gradient(grad: Tensor) -> list[Tensor]:
    """Split ``grad`` into dense tensors whose sum is ``grad``; each contains every sparse row at most once.

    An empty sparse gradient becomes a tensor of zeros. The entries are kept apart because an engine may divide each of
    them by the world size before it adds them, as DDP does.
    """
    if grad.layout is torch.strided:
        return [grad.detach().clone()]
    found: list[Tensor] = []
    seen: Counter[int] = Counter()
    for row, value in zip(grad._indices()[0].tolist(), grad._values(), strict=True):
        if seen[row] == len(found):
            found.append(torch.zeros_like(grad, layout=torch.strided))
        found[seen[row]][row] = value
        seen[row] += 1
    return found or [torch.zeros_like(grad, layout=torch.strided)]


def densify(grad: Tensor) -> Tensor:
    """Return ``grad`` as a dense tensor that is detached from its graph."""
    return grad.detach() if grad.layout is torch.strided else grad.detach().to_dense()


def sum_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of a sequence of at least one tensor."""
    return torch.stack([*tensors]).sum(0)
