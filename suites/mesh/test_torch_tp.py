"""Tensor parallelism alone: cells that pass, cells that fail as FINDINGS.md says, and gradients of partial sums."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from suites.mesh.cells import check_cell, start_runner
from zharness.engines import torch_tp
from zharness.engines.protocol import EngineConfig
from zharness.mesh import Mesh
from zharness.run import Runner, Verdict

CELLS = {
    "mesh.training[torch_tp-zero0-w2.tp2-fp32-exact]": Verdict.PASS,
    "mesh.training[torch_tp-zero0-w2.tp2-fp32-sequence]": Verdict.PASS,
    "mesh.replicas[torch_tp-zero0-w2.tp2-fp32-sequence]": Verdict.PASS,
    "mesh.norm[torch_tp-zero0-w2.tp2-fp32-heads]": Verdict.CRASH,
    "double_backward.gradient_penalty[torch_tp-zero0-w2.tp2-fp32-blocks]": Verdict.FAIL,
}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with start_runner("torch_tp") as started:
        yield started


@pytest.mark.parametrize(("case", "verdict"), CELLS.items(), ids=CELLS)
def test_a_cell_passes_or_fails_as_the_findings_say(runner: Runner, case: str, verdict: Verdict) -> None:
    check_cell(runner, case, verdict)


@pytest.mark.parametrize("seed", [600, 605, 607])
def test_a_sum_that_is_clipped_in_parts_may_round_each_part(seed: int) -> None:
    with start_runner("torch_tp", seed) as seeded:
        check_cell(seeded, "mesh.norm[torch_tp-zero0-w2.tp2-fp32-sequence]", Verdict.PASS)


class SequenceParallelNorm(nn.Module):
    """A norm that is split along the sequence, before a layer that gathers it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.last = nn.Linear(2, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.norm(inputs))
        return output


@pytest.mark.world_size(2)
def test_a_written_gradient_of_a_sequence_parallel_norm_is_what_is_read_and_stepped_with() -> None:
    plan = {"norm": "sequence_parallel", "last": "sequence_to_colwise_gather_output"}
    config = EngineConfig(mesh=Mesh.parse("tp2"), tp_plan=plan)
    engine = torch_tp.factory(SequenceParallelNorm(), config)
    engine.backward(engine(torch.ones(1, 4, 2)).sum())
    before, written = engine.read_param("norm.weight"), torch.tensor([1.0, 2.0])
    engine.write_grad_shard("norm.weight", written)
    assert engine.read_grad_shard("norm.weight").equal(written)
    engine.step()
    assert engine.read_param("norm.weight").equal(before - written)
