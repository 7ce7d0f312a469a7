"""Experts over the axis ep: what DeepSpeed's MoE computes, and where an expert lies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from suites.mesh.cells import check_cell, find_refusal, start_runner
from zharness.engines import deepspeed
from zharness.engines.protocol import EngineConfig, Piece
from zharness.mesh import Mesh
from zharness.run import Runner, Verdict
from zharness.workload import model_spec

pytest.importorskip("deepspeed")

CELLS = {
    "mesh.training[deepspeed-zero0-w2.ep2-fp32-routed]": Verdict.PASS,
    "mesh.training[deepspeed-zero1-w2.ep1-fp32-routed]": Verdict.PASS,
    "mesh.norm[deepspeed-zero2-w2.ep2-fp32-routed]": Verdict.PASS,
    "mesh.clip[deepspeed-zero0-w2.ep2-fp32-routed]": Verdict.FAIL,
    "mesh.clip[deepspeed-zero0-w4.ep4-fp32-routed]": Verdict.FAIL,
    "mesh.norm[deepspeed-zero0-w4.ep4-fp32-routed]": Verdict.FAIL,
    "mesh.clip[deepspeed-zero1-w4.ep2-fp32-routed]": Verdict.PASS,
    # Expected only with the hint that says whose norm it is, without experts.
    "training.clip_and_norm[deepspeed-zero0-w2.ep2-bf16-random_routed-sum]": Verdict.FAIL,
}
EP2 = Mesh.parse("ep2")


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with start_runner("deepspeed") as started:
        yield started


@pytest.mark.parametrize(("case", "verdict"), CELLS.items(), ids=CELLS)
def test_a_cell_passes_or_fails_as_the_findings_say(runner: Runner, case: str, verdict: Verdict) -> None:
    check_cell(runner, case, verdict)


def test_experts_are_unsupported_at_a_stage_that_cannot_have_them() -> None:
    assert "does not claim the axis ep at stage 3" in find_refusal("mesh.training[deepspeed-zero3-w2.ep2-fp32-routed]")


def test_neighbours_have_different_experts() -> None:
    assert [EP2.coordinates(rank, 4)["ep"] for rank in range(4)] == [0, 1, 0, 1]
    assert EP2.data_size(4) == 4
    assert EP2.describe_rank(3, 4) == "dp_shard 3, ep 1"
    assert [EP2.rank_at_start("ep", rank, 4) for rank in range(4)] == [0, 0, 2, 2]


@pytest.mark.world_size(2)
def test_each_rank_owns_its_experts_and_every_rank_the_gate() -> None:
    spec = model_spec("routed")
    engine = deepspeed.factory(spec.model(0), EngineConfig(mesh=EP2, ep_plan=tuple(spec.ep_plan)))
    layout = engine.layout()
    assert layout["moe.experts.1.bias"] == (Piece(0, 0, 16),)
    assert layout["moe.experts.2.bias"] == (Piece(1, 0, 16),)
    assert "moe.gate.weight" not in layout
    assert list(engine.full_params()) == [name for name, _ in spec.model(0).named_parameters()]
    engine.close()
