"""Megatron-FSDP runs under the laws, and its adapter reads shards of other sizes than torch's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from suites.mesh.cells import check_cell, start_runner
from zharness.engines import info, megatron_fsdp
from zharness.engines.protocol import EngineConfig, OptimizerSpec, Piece
from zharness.run import Runner, Verdict

pytestmark = pytest.mark.skipif(
    info("megatron_fsdp").version() is None, reason='megatron-fsdp is not installed (the extra "megatron")'
)
CELLS = {
    "training.grads[megatron_fsdp-zero0-w2-fp32-mlp]": Verdict.PASS,
    "training.grads[megatron_fsdp-zero3-w2-fp32-mlp]": Verdict.PASS,
    "training.one_hot_rank[megatron_fsdp-zero3-w2-fp32-exact]": Verdict.PASS,
    "mesh.training[megatron_fsdp-zero3-w4.rep2-fp32-exact]": Verdict.PASS,
    "mesh.replicas[megatron_fsdp-zero3-w4.rep2-fp32-heads]": Verdict.PASS,
    "mesh.full_state_dict[megatron_fsdp-zero3-w4.rep2-fp32-exact]": Verdict.PASS,
    "training.clip_and_norm[megatron_fsdp-zero0-w2-fp32-mlp]": Verdict.PASS,
    "training.trajectory[megatron_fsdp-zero3-w2-fp32-mlp-adamw]": Verdict.PASS,
    "state.resume[megatron_fsdp-zero3-w2-fp32-mlp-adamw]": Verdict.PASS,
    "training.optimizer_options[megatron_fsdp{first_step_kept}-zero3-w2-fp32-mlp-adamw_amsgrad]": Verdict.FAIL,
}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with start_runner("megatron_fsdp") as started:
        yield started


@pytest.mark.parametrize(("case", "verdict"), CELLS.items(), ids=CELLS)
def test_a_cell_passes_or_fails_as_the_findings_say(runner: Runner, case: str, verdict: Verdict) -> None:
    check_cell(runner, case, verdict)


def build(stage: int) -> megatron_fsdp.MegatronEngine:
    """Return an engine around a layer of 5 rows, whose bias is on rank 1 alone."""
    torch.manual_seed(0)
    return megatron_fsdp.factory(nn.Sequential(nn.Linear(3, 5)), EngineConfig(stage=stage))


@pytest.mark.world_size(2)
def test_a_rank_without_a_part_of_a_weight_reads_and_writes_all_of_it(rank: int) -> None:
    engine, plain = build(3), nn.Sequential(nn.Linear(3, 5))
    assert engine.layout()["0.weight"] == (Piece(0, 0, 12), Piece(1, 12, 15))
    assert engine.layout()["0.bias"] == (Piece(0, 0, 0), Piece(1, 0, 5))
    for name, value in plain.named_parameters():
        engine.write_param(name, value.detach())
    assert all(torch.equal(engine.full_params()[name], value) for name, value in plain.named_parameters())
    inputs = torch.full((2, 3), 1.0 + rank)
    assert torch.equal(engine(inputs), plain(inputs)), "the next forward uses what was written"
    engine.backward(engine(inputs).sum())
    assert engine.full_grads()["0.bias"].tolist() == [2.0] * 5
    assert engine.read_grad_shard("0.bias").tolist() == [2.0] * 5 * rank
    engine.close()


@pytest.mark.world_size(2)
def test_the_step_before_training_is_undone_unless_it_is_asked_for() -> None:
    spec = OptimizerSpec("adamw", {"lr": 0.5, "weight_decay": 1.0})
    for options, factor in (({}, 1.0), ({"keep_first_step": True}, 0.5)):
        model = nn.Sequential(nn.Linear(3, 5))
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        engine = megatron_fsdp.factory(model, EngineConfig(stage=3, optimizer=spec, options=options))
        assert bool(engine.full_optimizer_state()) is bool(options)
        assert all(torch.equal(engine.full_params()[name], value * factor) for name, value in before.items())
        engine.close()
