"""Record the parts that one backward adds up to a gradient, and bound the change that another order of addition makes.

A weight that a reentrant checkpoint uses gets its gradient in several parts: the backward of the checkpoint runs inside
the caller's, and adds its own part to ``.grad``. An engine that keeps gradients elsewhere may add up the same parts in
another order. Two parts have the same sum in either order; three do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce

import torch
from torch import Tensor, nn

from zharness.parity.baseline import LocalResult, run_backward
from zharness.parity.bounds import gamma


def run_backward_by_parts(model: nn.Module, loss: Tensor, loss_scale: float = 1.0) -> LocalResult:
    """Run backward as ``run_backward`` does, and record the parts of gradients that have several."""
    parts: dict[str, list[Tensor]] = {}

    def record(name: str, grad: Tensor) -> None:
        """Record what autograd is about to add to the gradient of a parameter."""
        parts.setdefault(name, []).append(grad.detach().clone() / loss_scale)

    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    handles = [weight.register_hook(partial(record, name)) for name, weight in trained]  # type: ignore[no-untyped-call]
    try:
        result = run_backward(model, loss, loss_scale)
    finally:
        for handle in handles:
            handle.remove()
    return replace(result, parts={name: each for name, each in parts.items() if len(each) > 1})


def bound_orders(name: str, micros: Sequence[Sequence[LocalResult]]) -> Tensor | float:
    """Return the error bound of the mean of one parameter's local gradients if a rank adds their parts in any order.

    ``micros[m][at]`` is the result on micro-batch m of data coordinate ``at``. Gradients without parts have no such
    error: the sums of micro-batches and ranks have a bound of their own.
    """
    errors = [bound_orders_of_rank(name, results) for results in zip(*micros, strict=True)]
    return sum(errors) / (len(micros) * len(errors))


def bound_orders_of_rank(name: str, results: Sequence[LocalResult]) -> Tensor | float:
    """Return the error bound of the sum of one parameter's gradients on one rank if their parts are added in any order.

    Plain PyTorch's sum and the engine's sum may each be off by gamma of the number of parts.
    """
    if not any(name in result.parts for result in results):
        return 0.0
    parts = [
        part for result in results if name in result.grads for part in result.parts.get(name, [result.grads[name]])
    ]
    return 2 * gamma(len(parts), parts[0].dtype) * reduce(torch.add, [part.double().abs() for part in parts])
