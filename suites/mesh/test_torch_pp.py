"""Pipelines: every schedule trains as plain accumulation, a finding, plans, and calls that a pipeline does not have."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from suites.mesh.cells import check_cell, find_refusal, start_runner
from zharness.engines import torch_pp
from zharness.engines.protocol import EngineConfig, Piece
from zharness.errors import ConfigError, UsageError
from zharness.laws.pipeline import hint_divided_again
from zharness.mesh import Mesh
from zharness.parity import Part, compare_bitwise
from zharness.parity.baseline import LocalResult
from zharness.parity.comparison import TensorLocation
from zharness.run import Runner, Verdict

CELLS = {
    "pipeline.training[torch_pp-zero0-w2.pp2-fp32-chain-1f1b]": Verdict.PASS,
    "pipeline.training[torch_pp-zero0-w2.pp2-fp32-skips-zbv]": Verdict.PASS,
    "pipeline.training[torch_pp-zero0-w4.pp4-fp32-masked_chain-1f1b]": Verdict.PASS,
    "pipeline.unequal_micro_batches[torch_pp-zero0-w2.pp2-fp32-skips-large_first]": Verdict.PASS,
    "pipeline.unequal_micro_batches[torch_pp-zero0-w2.pp2-fp32-chain-large_first_zbv]": Verdict.PASS,
    "pipeline.unequal_micro_batches[torch_pp{fully_shard}-zero0-w4.pp2-fp32-chain-small_first]": Verdict.PASS,
    "pipeline.unequal_micro_batches[torch_pp-zero0-w4.pp2-fp32-odd_chain-small_first]": Verdict.CRASH,
    "pipeline.windows[torch_pp-zero0-w2.pp2-fp32-chain-accumulated]": Verdict.FAIL,
    "pipeline.windows[torch_pp-zero0-w2.pp2-fp32-skips-other_batch]": Verdict.PASS,
    "pipeline.windows[torch_pp-zero0-w2.pp2-fp32-tied_chain-accumulated_singles]": Verdict.PASS,
    "pipeline.training[torch_pp-zero0-w2.pp2-fp32-tied_chain-interleaved]": Verdict.PASS,
    "pipeline.training[torch_pp-zero0-w2.pp2-fp32-tied_chain-zbv]": Verdict.FAIL,
    "pipeline.norm[torch_pp-zero0-w2.pp2-fp32-tied_chain-gpipe]": Verdict.PASS,
    "pipeline.resume[torch_pp-zero0-w2.pp2-fp32-skips]": Verdict.PASS,
    "pipeline.learning_rate[torch_pp-zero0-w2.pp2-fp32-tied_chain]": Verdict.PASS,
    "pipeline.not_finite[torch_pp-zero0-w2.pp2-fp32-chain-last_clipped]": Verdict.PASS,
    "pipeline.training[torch_pp-zero0-w4.pp2-fp32-chain-interleaved]": Verdict.PASS,
    "pipeline.training[torch_pp-zero0-w4.pp2-fp32-chain-zbv]": Verdict.FAIL,
    "pipeline.windows[torch_pp-zero0-w4.pp2-fp32-chain-stepped]": Verdict.CRASH,
    "pipeline.learning_rate[torch_pp-zero0-w4.pp2-fp32-chain]": Verdict.CRASH,
    "pipeline.learning_rate[torch_pp-zero0-w4.pp2-fp32-random_chain-single]": Verdict.PASS,
    "pipeline.learning_rate[torch_pp-zero0-w4.pp2.tp2-fp32-random_chain]": Verdict.PASS,
    "pipeline.any_order[torch_pp-zero0-w4.pp2.tp2-fp32-random_chain-gpipe]": Verdict.PASS,
    "pipeline.dropout[torch_pp-zero0-w4.pp2.tp2-fp32-dropped_chain-1f1b_recomputed]": Verdict.PASS,
    "pipeline.resume[torch_pp-zero0-w4.pp2-fp32-tied_chain-single]": Verdict.PASS,
    "pipeline.training[torch_pp-zero0-w4.pp2-fp32-tied_chain-zbv]": Verdict.CRASH,
    "pipeline.training[torch_pp-zero0-w4.pp2-fp32-tied_chain-zero_bubble]": Verdict.FAIL,
    "pipeline.training[torch_pp{fully_shard}-zero0-w4.pp2-fp32-skips-zbv]": Verdict.PASS,
    "pipeline.training[torch_pp{resharded}-zero0-w4.pp2-fp32-skips-zbv]": Verdict.FAIL,
    "pipeline.windows[torch_pp{fully_shard}-zero0-w4.pp2-fp32-chain-stepped]": Verdict.PASS,
    "pipeline.training[torch_pp-zero0-w4.pp2.tp2-fp32-tied_chain-1f1b]": Verdict.PASS,
    "pipeline.norm[torch_pp-zero0-w4.pp2.tp2-fp32-tied_chain-gpipe]": Verdict.PASS,
    "pipeline.training[torch_pp-zero0-w4.pp4-fp32-skips-1f1b]": Verdict.PASS,
    "pipeline.one_hot[torch_pp-zero0-w4.pp2-fp32-chain]": Verdict.PASS,
    "pipeline.frozen[torch_pp-zero0-w2.pp2-fp32-chain-last_later]": Verdict.PASS,
    "pipeline.frozen[torch_pp-zero0-w2.pp2-fp32-chain-first_zero_bubble]": Verdict.FAIL,
    "pipeline.frozen[torch_pp-zero0-w4.pp2-fp32-chain-first]": Verdict.PASS,  # the frozen stage has no DDP
    "pipeline.frozen[torch_pp-zero0-w4.pp2-fp32-chain-unfrozen]": Verdict.FAIL,
    "pipeline.any_order[torch_pp-zero0-w2.pp2-fp32-chain-zbv]": Verdict.PASS,
    "pipeline.any_order[torch_pp-zero0-w4.pp2-fp32-tied_chain-clipped]": Verdict.PASS,
    "pipeline.any_order[torch_pp-zero0-w4.pp2-fp32-chain-1f1b]": Verdict.PASS,
    "pipeline.any_order[torch_pp{fully_shard}-zero0-w4.pp2-fp32-chain-accumulated_losses]": Verdict.FAIL,
    "pipeline.dropout[torch_pp-zero0-w2.pp2-fp32-dropped_chain-zbv_recomputed]": Verdict.PASS,
    "pipeline.dropout[torch_pp-zero0-w4.pp2-fp32-dropped_chain-1f1b]": Verdict.PASS,
    "pipeline.buffers[torch_pp-zero0-w2.pp2-fp32-chain-first]": Verdict.FAIL,
    "pipeline.buffers[torch_pp{fully_shard}-zero0-w4.pp2-fp32-chain-loaded]": Verdict.PASS,
    "pipeline.resume[torch_pp-zero0-w2.pp2-fp32-chain-unstepped]": Verdict.FAIL,
    "pipeline.token_loss[torch_pp-zero0-w2.pp2-fp32-token_chain-zbv]": Verdict.PASS,
    "pipeline.token_loss[torch_pp-zero0-w4.pp2-fp32-token_chain-1f1b]": Verdict.PASS,
    "pipeline.token_loss[torch_pp-zero0-w4.pp2-fp32-token_chain-zbv]": Verdict.FAIL,
    "pipeline.token_loss[torch_pp-zero0-w4.pp2.tp2-fp32-token_chain-interleaved]": Verdict.PASS,
    "pipeline.replicas[torch_pp-zero0-w4.pp4-fp32-tied_chain-gpipe]": Verdict.PASS,
    "pipeline.replicas[torch_pp-zero0-w4.pp2-fp32-tied_chain-zero_bubble]": Verdict.FAIL,
    "pipeline.replicas[torch_pp-zero0-w4.pp2.tp2-fp32-tied_chain-1f1b]": Verdict.PASS,
    "pipeline.wire[torch_pp-zero0-w2.pp2-fp32-skips-zbv]": Verdict.PASS,
    "pipeline.wire[torch_pp-zero0-w4.pp2-bf16-chain-gpipe]": Verdict.PASS,
    "pipeline.wire[torch_pp-zero0-w4.pp2-fp32-chain-1f1b]": Verdict.PASS,
    "pipeline.wire[torch_pp-zero0-w4.pp2-fp32-chain-first]": Verdict.FAIL,
    "pipeline.wire[torch_pp{resharded}-zero0-w4.pp2-fp32-skips-zbv]": Verdict.FAIL,
    "pipeline.wire[torch_pp-zero0-w4.pp2.tp2-fp32-skips-zbv]": Verdict.PASS,
    "pipeline.wire[torch_pp{fully_shard}-zero0-w8.pp2.tp2-bf16-chain-first]": Verdict.PASS,
    "pipeline.wire[torch_pp-zero0-w4.pp2.tp2-fp32-chain-first]": Verdict.PASS,
    "pipeline.wire[torch_pp{resharded}-zero0-w4.pp2-fp32-chain-first]": Verdict.PASS,
    "pipeline.other_mesh[torch_pp-zero0-w4.pp2-fp32-skips-from_others_zbv]": Verdict.PASS,
    "pipeline.other_mesh[torch_pp-zero0-w2.pp2-fp32-tied_chain-from_others_zbv]": Verdict.FAIL,
    "pipeline.other_mesh[torch_pp{resharded}-zero0-w4.pp2-fp32-chain-to_others_zbv]": Verdict.FAIL,
}
PP2 = Mesh.parse("pp2")


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with start_runner("torch_pp") as started:
        yield started


@pytest.mark.parametrize(("case", "verdict"), CELLS.items(), ids=CELLS)
def test_a_cell_passes_or_fails_as_the_findings_say(runner: Runner, case: str, verdict: Verdict) -> None:
    check_cell(runner, case, verdict)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("mesh.training[torch_pp-zero0-w2.pp2-fp32-exact]", "torch_pp has train_batch"),
        ("pipeline.training[fsdp2-zero3-w4.tp2-fp32-chain-gpipe]", "fsdp2 has a forward and a backward"),
        ("pipeline.training[torch_pp-zero0-w4.pp4-fp32-chain-zbv]", "chain has no plan of 8 modules"),
        ("pipeline.any_order[torch_pp-zero0-w4.pp4-fp32-chain-1f1b]", "the schedule 1f1b needs 4 micro-batches on pp4"),
        ("pipeline.training[torch_pp-zero0-w8.pp2.tp2-fp32-chain-gpipe]", "only with the option fully_shard"),
        ("pipeline.training[torch_pp-zero0-w4.tp2-fp32-chain-gpipe]", "torch_pp has tp beside pp alone"),
        ("pipeline.unequal_micro_batches[torch_pp-zero0-w2.pp2-fp32-chain-gpipe]", "pytorch/issues/126600"),
    ],
)
def test_a_cell_that_a_pipeline_cannot_have_is_unsupported_before_ranks_start(case: str, words: str) -> None:
    assert words in find_refusal(case)


def test_a_plan_is_split_into_even_stages() -> None:
    assert torch_pp.split_plan(["a", "b", "c", "d", "e"], 2) == [["a", "b"], ["c", "d", "e"]]
    with pytest.raises(ConfigError, match="cannot be split into 2 stages"):
        torch_pp.split_plan(["a"], 2)


def sum_output(output: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
    """Return the sum of the output, which is a loss."""
    return output.sum()


def build() -> nn.Sequential:
    """Return a model of two layers, which a plan names "0" and "1"."""
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.mark.world_size(2)
def test_each_rank_owns_the_parameters_of_its_stage_and_has_no_forward() -> None:
    engine = torch_pp.factory(build(), EngineConfig(mesh=PP2, pp_plan=("0", "1")))
    assert engine.layout()["0.weight"] == (Piece(0, 0, 4),)
    assert engine.layout()["1.bias"] == (Piece(1, 0, 2),)
    with pytest.raises(UsageError, match="got a forward; this engine has train_batch"):
        engine(torch.ones(1, 2))
    engine.close()


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (EngineConfig(mesh=PP2, pp_plan=("0",)), "has 1 modules"),
        (EngineConfig(mesh=PP2, pp_plan=("0", "1"), options={"width": 2}), "unknown option"),
        (
            EngineConfig(mesh=PP2, pp_plan=("0", "1"), dtype="bf16", options={"data_parallel": "ddp"}),
            "only fully_shard keeps fp32 weights",
        ),
    ],
)
def test_a_config_that_a_pipeline_cannot_have_is_refused(config: EngineConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        torch_pp.factory(build(), config)


@pytest.mark.world_size(2)
def test_a_plan_that_leaves_out_a_parameter_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"leaves out the parameters 2\.weight"):
        torch_pp.factory(model, EngineConfig(mesh=PP2, pp_plan=("0", "1")))


TWO, ONE = [2.0, 4.0], [6.0]  # the gradients of the micro-batches of a batch of two, and of a batch of one


@pytest.mark.parametrize(
    ("batches", "rank_grads", "is_hinted"),
    [
        ((TWO, TWO), (6.0, 4.5), True),  # 3 / 2 + 3 on rank 1 alone
        ((TWO, TWO), (4.5, 6.0), False),  # rank 1, which is wrong, has another fault
        ((ONE, ONE), (12.0, 12.0), False),  # a division by 1
        ((ONE, ONE), (12.0, 7.0), False),  # rank 0 is right
    ],
)
def test_the_hint_of_a_second_division_is_about_the_wrong_rank_and_several_micro_batches(
    batches: tuple[list[float], list[float]], rank_grads: tuple[float, float], is_hinted: bool
) -> None:
    first, second = ([[LocalResult(torch.zeros(1), {"weight": torch.tensor([g])})] for g in grads] for grads in batches)
    records = [{"weight": torch.tensor([grad])} for grad in rank_grads]
    ctx: Any = SimpleNamespace(rank_records=lambda label, step: records)
    place = TensorLocation("weight", Part.REDUCTION, 1, seen_on=1)
    wrong = compare_bitwise(place, torch.tensor([99.0]), records[1]["weight"])
    mismatch = hint_divided_again(ctx, wrong, first, second).mismatch
    assert mismatch is not None
    assert bool(mismatch.hint) is is_hinted


class TiedChain(nn.Module):
    """Two layers that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 2), nn.Linear(2, 2)
        self.down.weight = self.up.weight


@pytest.mark.world_size(2)
def test_a_weight_that_is_tied_over_two_stages_is_refused_with_fully_shard() -> None:
    config = EngineConfig(mesh=PP2, pp_plan=("up", "down"), options={"data_parallel": "fully_shard"})
    with pytest.raises(ConfigError, match=r"the weight down\.weight of stage 1 is tied to one of stage 0"):
        torch_pp.factory(TiedChain(), config)


@pytest.mark.world_size(2)
def test_copies_of_a_tied_weight_have_one_gradient_also_after_two_batches() -> None:
    model = TiedChain()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    engine = torch_pp.factory(model, EngineConfig(mesh=PP2, pp_plan=("up", "down")))
    for _ in range(2):
        engine.train_batch([(torch.ones(1, 2), torch.zeros(1, 2))], sum_output)
    # Of each batch 2 as the first layer's, and 3 as the second one's.
    assert engine.full_grads()["up.weight"].equal(torch.full((2, 2), 10.0))
    engine.close()


class UnusedTie(TiedChain):
    """Two layers that share a weight, which neither uses."""

    def __init__(self) -> None:
        super().__init__()
        self.up.spare = self.down.spare = nn.Parameter(torch.ones(1))


@pytest.mark.world_size(2)
def test_a_tied_weight_that_no_stage_uses_has_no_gradient() -> None:
    engine = torch_pp.factory(UnusedTie().double(), EngineConfig(mesh=PP2, pp_plan=("up", "down")))
    engine.train_batch([(torch.ones(1, 2).double(), torch.zeros(1, 2).double())], sum_output)
    grads = engine.full_grads()
    assert "up.spare" not in grads
    assert grads["up.weight"].dtype is torch.float64
    engine.close()


@pytest.mark.world_size(2)
def test_a_schedule_without_enough_micro_batches_is_refused() -> None:
    config = EngineConfig(mesh=PP2, pp_plan=("0", "1"), options={"schedule": "1f1b"})
    engine = torch_pp.factory(build(), config)
    batch = (torch.ones(1, 2), torch.ones(1, 2))
    with pytest.raises(UsageError, match="got 1 micro-batches for 2 stages of Schedule1F1B"):
        engine.train_batch([batch], nn.functional.mse_loss)
    engine.close()


@pytest.mark.world_size(2)
def test_micro_batches_of_several_sizes_are_refused() -> None:
    engine = torch_pp.factory(build(), EngineConfig(mesh=PP2, pp_plan=("0", "1")))
    batches = [(torch.ones(size, 2), torch.ones(size, 2)) for size in (1, 3)]
    with pytest.raises(UsageError, match=r"got micro-batches of \[1, 3\] samples"):
        engine.train_batch(batches, nn.functional.mse_loss)
    engine.close()
