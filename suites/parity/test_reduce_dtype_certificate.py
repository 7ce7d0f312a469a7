"""The certificate of exactness holds for the narrower of the cell's dtype and the dtype of the reduction."""

from __future__ import annotations

import pytest
import torch

from zharness.law_kit.judge_context import JudgeContext
from zharness.parity.baseline import Baseline
from zharness.workload import model_spec


@pytest.mark.parametrize(
    ("dtype", "reduce_dtype", "is_exact"),
    [
        (torch.float32, None, True),
        (torch.float32, torch.float32, True),
        (torch.float32, torch.bfloat16, False),
        (torch.bfloat16, torch.float32, False),
    ],
)
def test_sums_in_bf16_are_not_certified_by_the_bits_of_fp32(
    dtype: torch.dtype, reduce_dtype: torch.dtype | None, is_exact: bool
) -> None:
    ctx = JudgeContext(Baseline(model_spec("similar"), 0, 2), (), dtype, declared_reduce_dtype=reduce_dtype)
    certificate = ctx.certify_exactness(range(1))
    assert bool(certificate) is is_exact
    assert is_exact or "bits of bfloat16" in certificate.reason


def test_a_sum_in_bf16_rounds_what_fp32_holds() -> None:
    baseline = Baseline(model_spec("similar"), 0, 2)
    grads = [result.grads for result in baseline.run_all_ranks(0)]
    sums = {name: sum(rank[name] for rank in grads) for name in grads[0]}
    assert any(not torch.equal(value.bfloat16().float(), value) for value in sums.values())
