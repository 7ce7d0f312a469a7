"""Buffers are judged by plain PyTorch: what an engine's own kernels write, and what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from zharness.law_kit.buffers import bound_own_kernel, compare_buffers, run_plain_forwards
from zharness.law_kit.judge_context import JudgeContext
from zharness.laws.state.resume import compare_loaded_buffers
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


def load_buffers(shared: bool, loaded: list[Mapping[str, Tensor]]) -> bool:
    """Return whether the law accepts the ``loaded`` buffers of two ranks, of which rank r saved r + 1 and r + 3."""
    saved = [{"mean": torch.tensor(rank + 1.0), "variance": torch.tensor(rank + 3.0)} for rank in range(2)]
    evidence = tuple(
        RankEvidence(
            (
                Snapshot("shared", 0, {"shared": torch.tensor(shared)}),
                Snapshot("buffers-never", 0, saved[rank]),
                Snapshot("buffers-before-load", 0, {name: torch.zeros(()) for name in saved[rank]}),
                Snapshot("buffers-resumed", 0, loaded[rank]),
            ),
            {},
        )
        for rank in range(2)
    )
    ctx = JudgeContext(Baseline(model_spec("mlp"), 0, 2), evidence, torch.float32)
    return all(comparison.mismatch is None for comparison in compare_loaded_buffers(ctx))


@pytest.mark.parametrize(
    ("shared", "numbers", "is_right"),
    [
        (False, ((1, 3), (2, 4)), True),
        (False, ((1, 3), (1, 3)), False),
        (True, ((1, 3), (1, 3)), True),
        (True, ((2, 4), (2, 4)), True),
        (True, ((2, 4), (1, 3)), False),  # swapped between ranks
        (True, ((1, 4), (1, 4)), False),  # each buffer of another rank
        (True, ((5, 3), (5, 3)), False),
    ],
)
def test_a_checkpoint_that_holds_each_buffer_once_holds_those_of_one_rank(
    shared: bool, numbers: tuple[tuple[float, float], ...], is_right: bool
) -> None:
    loaded = [{"mean": torch.tensor(float(mean)), "variance": torch.tensor(float(var))} for mean, var in numbers]
    assert load_buffers(shared, loaded) is is_right
