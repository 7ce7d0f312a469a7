"""Sums that cp and ep split round nothing in the models that say so, with random weights, also in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zharness.workload.models import MODELS

SEED = 1
EXPERTS = "moe."


def compute_gradients(name: str, weights: torch.dtype, computed: torch.dtype) -> dict[str, Tensor]:
    """Return the float64 gradients of a model whose weights are rounded to ``weights``, computed in ``computed``."""
    spec = MODELS[name]
    model, batch = spec.model(SEED).to(weights).to(computed), spec.micro_batch(SEED, 0, 0).to(computed)
    spec.loss(model(batch.inputs), batch.target).backward()
    return {path: param.grad.double() for path, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name, spec in MODELS.items() if spec.splits_exactly])
def test_no_sum_that_the_axis_splits_is_rounded(name: str, dtype: torch.dtype) -> None:
    # On ep the axis splits the layer of experts alone; on cp it splits every sum over tokens.
    split = EXPERTS if MODELS[name].ep_plan else ""
    rounded, wide = compute_gradients(name, dtype, dtype), compute_gradients(name, dtype, torch.float64)
    compared = [path for path in wide if path.startswith(split)]
    assert compared
    assert not [path for path in compared if not torch.equal(rounded[path], wide[path])]
