"""DistributedDataParallel on ranks whose collectives are compared."""

from __future__ import annotations

from pathlib import Path

from suites.pytest_ranks.beside_plugins import ISOLATIONS, ON_RANKS, start_beside

SOURCE = f"""
import pytest, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
ranks = {ON_RANKS}

@ranks
@pytest.mark.parametrize("static_graph", [False, True])
def test_trains(rank, static_graph):
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    model = DistributedDataParallel(torch.nn.Linear(2, 2), static_graph=static_graph)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 2) * rank).sum().backward()
    assert model.module.weight.grad.eq(0.5).all()

@ranks
def test_is_compared(rank):
    DistributedDataParallel(torch.nn.Linear(2, 2))
    dist.all_reduce(torch.ones(2 + rank))
"""


def test_it_trains_and_later_collectives_are_still_compared(tmp_path: Path) -> None:
    sessions = {mode: start_beside(tmp_path / mode, SOURCE, f"--isolation={mode}", plugins=()) for mode in ISOLATIONS}
    for mode, session in sessions.items():
        done = session.finish()
        assert done.verdicts() == {
            "test_trains[w2-False]": "passed",
            "test_trains[w2-True]": "passed",
            "test_is_compared[w2]": "call failed",
        }, f"{mode}: {done.output}"
        assert "TensorShape=[3]" in done.output, f"{mode}: {done.output}"
