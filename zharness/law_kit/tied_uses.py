"""Compute the gradient of each use of a tied weight, whose sum is the weight's gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from zharness.parity.baseline import Baseline, run_local
from zharness.workload import Batch


def untie(model: nn.Module, name: str) -> list[str]:
    """Give each use of the parameter ``name`` a copy of its own, and return the names of all, ``name`` first."""
    tied = model.get_parameter(name)
    uses = [other for other, param in model.named_parameters(remove_duplicate=False) if param is tied]
    for other in uses:
        path, _, last = other.rpartition(".")
        setattr(model.get_submodule(path), last, nn.Parameter(tied.detach().clone()))
    return uses


def compute_use_means(
    baseline: Baseline,
    name: str,
    steps: Sequence[int],
    params: Mapping[str, Tensor] | None = None,
    data_ranks: Sequence[int] | None = None,
) -> list[Tensor]:
    """Return, for each use of a weight, its mean gradients over data ranks, stacked over the micro-batches ``steps``.

    ``params`` are the weights (None: the initial weights), and ``data_ranks`` are the data ranks (None: all).
    """
    ranks = range(baseline.data_size) if data_ranks is None else data_ranks
    return average_uses(baseline, name, [[baseline.batch(rank, step) for rank in ranks] for step in steps], params)


def average_uses(
    baseline: Baseline, name: str, rows: Iterable[Sequence[Batch]], params: Mapping[str, Tensor] | None = None
) -> list[Tensor]:
    """Return, for each use of a weight, its mean gradients over the batches of a row, stacked over ``rows``."""
    means = []
    for row in rows:
        grads = []
        for batch in row:
            model = baseline.build_module(params)
            uses = untie(model, name)
            own = run_local(model, batch, baseline.objective).grads
            grads.append(torch.stack([own[use] for use in uses]))
        means.append(torch.stack(grads).mean(dim=0))
    return list(torch.stack(means, dim=1))
