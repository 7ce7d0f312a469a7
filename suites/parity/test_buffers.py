"""Buffers are judged by plain PyTorch: what an engine's own kernels write, and what a checkpoint holds."""

from __future__ import annotations

import pytest
import torch

from zharness.law_kit.buffers import bound_own_kernel, compare_buffers, run_plain_forwards
from zharness.law_kit.judge_context import JudgeContext
from zharness.parity import RankEvidence
from zharness.parity.baseline import Baseline
from zharness.parity.bounds import unit_roundoff
from zharness.parity.snapshot import Snapshot
from zharness.workload import model_spec

ONES = torch.ones(4)
U = unit_roundoff(torch.float32)


def test_the_bound_of_an_own_kernel_follows_from_the_worst_of_all_plain_runs() -> None:
    exact, off = (ONES, ONES.double()), (ONES + 64 * U, ONES.double())
    assert float(bound_own_kernel([exact])) == 2 * U
    assert float(bound_own_kernel([exact, off, exact])) == 2 * 64 * U
    assert float(bound_own_kernel([(torch.ones(0), torch.ones(0).double())])) == 0


@pytest.mark.parametrize(("factor", "is_right"), [(1, True), (1 + 1e-5, False)])
def test_statistics_of_an_own_kernel_are_compared_within_the_error_of_plain_runs(factor: float, is_right: bool) -> None:
    baseline = Baseline(model_spec("suites.model.zoo:batch_norm"), 0, 1)
    before = [dict(baseline.build_module().named_buffers())]
    plain = JudgeContext(baseline, (), torch.float32)
    (after,) = run_plain_forwards(plain, 0, None, before, wide=False, order_seed=99)
    variance = {**after, "1.running_var": after["1.running_var"] * factor}
    ctx = JudgeContext(baseline, (RankEvidence((Snapshot("buffers", 0, variance),), {}),), torch.float32)
    found = list(compare_buffers(ctx, 0, None, before, own_kernels=True))
    assert all(comparison.mismatch is None for comparison in found) is is_right
