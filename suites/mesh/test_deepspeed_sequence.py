"""Sequences over the axis cp: what DeepSpeed's Ulysses computes, and which rank has which part."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from suites.mesh.cells import check_cell, find_refusal, start_runner
from zharness.cell import Cell
from zharness.engines import deepspeed
from zharness.engines.deepspeed_sequence import draw_for_part
from zharness.engines.protocol import EngineConfig
from zharness.errors import ConfigError
from zharness.kill_matrix import MutantRunner
from zharness.mesh import Mesh
from zharness.mutants import PATH
from zharness.run import PlannedCell, Runner, Verdict
from zharness.run.mesh_claims import explain_unclaimed_mesh
from zharness.workload import model_spec
from zharness.workload.generators import fork_seeded_generators

pytest.importorskip("deepspeed")

CELLS = {
    "mesh.training[deepspeed-zero0-w2.cp2-fp32-context]": Verdict.PASS,
    "mesh.training[deepspeed-zero2-w4.cp2-fp32-context]": Verdict.PASS,
    "mesh.training[deepspeed-zero3-w2.cp2-fp32-context]": Verdict.FAIL,
    "mesh.one_hot[deepspeed-zero1-w4.cp2-fp32-context]": Verdict.PASS,
    "mesh.mean_gradient[deepspeed-zero1-w2.cp2-fp32-random_context]": Verdict.PASS,
    "resources.close[deepspeed-zero1-w2.cp2-fp32-context]": Verdict.PASS,
    "mesh.wire[deepspeed-zero0-w4.cp2-bf16-context]": Verdict.PASS,
    "mesh.wire[deepspeed-zero3-w2.cp2-fp32-context]": Verdict.PASS,
    "mesh.wire[deepspeed{reduce_bf16}-zero2-w2.cp2-fp32-context]": Verdict.PASS,
    "mesh.dropout[deepspeed-zero2-w4.cp2-fp32-dropped_context]": Verdict.PASS,
    "mesh.dropout[deepspeed-zero1-w2.cp2-fp32-dropped_context-recomputed]": Verdict.PASS,
    "mesh.dropout[deepspeed-zero3-w4.cp2-fp32-dropped_context-masks]": Verdict.PASS,
    "mesh.token_loss[deepspeed-zero1-w4.cp2-fp32-context_tokens]": Verdict.PASS,
    "mesh.token_loss[deepspeed-zero3-w2.cp2-fp32-context_tokens]": Verdict.FAIL,
}
# What is broken, and what the first divergence says of it.
CAUSES = {
    "mesh.training[{}attends_within_each_part-zero0-w4.cp2-fp32-context]": "rank 0 is dp_shard 0, cp 0",
    "mesh.wire[{}exchanges_keys_again-zero0-w4.cp2-fp32-context]": "elements of activations along cp",
    "mesh.dropout[{}recomputes_the_last_part_with_a_new_mask-zero0-w4.cp2-fp32-dropped_context-recomputed]": (
        "the recomputation drew another mask; rank 1 is dp_shard 0, cp 1"
    ),
    "mesh.dropout[{}drops_the_same_of_each_part_of_a_sequence-zero0-w2.cp2-fp32-dropped_context-masks]": (
        "4 of 4 masks of this part of the sequence are another rank's along cp; rank 0 is cp 0"
    ),
    "mesh.dropout[{}seeds_dropout_by_the_place_alone-zero0-w2.cp2-fp32-dropped_context-masks]": (
        "3 of 4 steps repeat a mask of an earlier step; rank 0 is cp 0"
    ),
    "mesh.token_loss[{}gathers_outputs_by_torch-zero1-w2.cp2-fp32-context_tokens]": (
        "it is 2 x the right gradient; rank 0 is cp 0"
    ),
    "mesh.clip[{}clips_by_the_norm_of_the_own_shard-zero2-w4.cp2-fp32-context]": (
        "is the norm of what rank 0 has (dp_shard 0, cp 0)"
    ),
}
CP2 = Mesh.parse("cp2")


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with start_runner("deepspeed") as started:
        yield started


@pytest.mark.parametrize(("case", "verdict"), CELLS.items(), ids=CELLS)
def test_a_cell_passes_or_fails_as_the_findings_say(runner: Runner, case: str, verdict: Verdict) -> None:
    check_cell(runner, case, verdict)


@pytest.fixture(scope="module")
def broken() -> Iterator[MutantRunner]:
    with MutantRunner() as started:
        yield started


@pytest.mark.parametrize(("case", "hint"), CAUSES.items(), ids=CAUSES)
def test_the_first_divergence_names_the_axis_and_the_coordinate(broken: MutantRunner, case: str, hint: str) -> None:
    assert hint in broken.run(PlannedCell(Cell.parse(case.format(PATH)))).cause


def test_each_part_of_a_sequence_draws_numbers_of_its_own_from_those_that_come_next() -> None:
    with fork_seeded_generators(7):
        state = torch.get_rng_state()
        with draw_for_part(0):
            pass
        assert torch.equal(torch.get_rng_state(), state), "without a draw the generator is where it was"
        drawn = []
        for place in (0, 1, 0):
            torch.set_rng_state(state)
            with draw_for_part(place):
                drawn.append(torch.rand(8))
            after = torch.get_rng_state()
            with draw_for_part(place):
                drawn.append(torch.rand(8))
        first, second, other, other_second, again, _ = drawn
        assert torch.equal(first, again)
        assert not any(map(torch.equal, (first, first, other), (second, other, other_second)))
        torch.set_rng_state(state)
        torch.randint(1 << 30, ())
        assert torch.equal(torch.get_rng_state(), after), "every part leaves the generator in one state"


@pytest.mark.parametrize(("axes", "others"), [("cp2,tp2", "tp"), ("cp2,ep2", "ep"), ("rep2,cp2", "dp_replicate")])
def test_sequences_beside_another_axis_are_refused_before_ranks_start(axes: str, others: str) -> None:
    mesh, reason = Mesh.parse(axes), f"cannot have cp beside {others}: .* the same groups"
    claims = replace(deepspeed.CAPABILITIES, mesh_axes=frozenset(mesh.axes))
    assert re.search(f"^deepspeed {reason}", explain_unclaimed_mesh("deepspeed", mesh, 4, claims))
    assert "cannot have" not in explain_unclaimed_mesh("deepspeed", CP2, 4, claims)
    with pytest.raises(ConfigError, match=f"^DeepSpeed {reason}"):
        deepspeed.factory(model_spec("context").model(0), EngineConfig(mesh=mesh))


def test_gradients_that_each_part_rounds_are_not_compared_with_plain_ones() -> None:
    refusal = find_refusal("training.grads[deepspeed-zero2-w2.cp2-bf16-context]")
    assert refusal.startswith("each part of a sequence rounds its gradient to bf16 before the sum over cp2")
    for case in (
        "mesh.wire[deepspeed-zero2-w2.cp2-bf16-context]",
        "training.grads[deepspeed-zero2-w2.cp2-fp32-context]",
    ):
        assert not find_refusal(case)


def test_the_option_of_sequences_alone_decides_what_is_sent_on_cp() -> None:
    option, ignored = "seq_parallel_communication_data_type", {"communication_data_type": "bf16"}
    claims = replace(deepspeed.CAPABILITIES, variants={"narrow": {option: "bf16"}, "ignored": ignored})
    for name, dtype in {"narrow": "bf16", "ignored": "fp32"}.items():
        sent = claims.with_options([name]).sent_dtype_on_cp
        assert sent is not None
        assert (sent.key, sent.value) == (option, dtype)


def test_neighbours_have_parts_of_one_sequence() -> None:
    assert [CP2.coordinates(rank, 4)["cp"] for rank in range(4)] == [0, 1, 0, 1]
    assert [CP2.data_coordinate(rank, 4) for rank in range(4)] == [0, 0, 1, 1]


def test_models_of_attention_stand_in_for_others_on_cp_alone() -> None:
    assert find_refusal("training.grads[deepspeed-zero0-w2.cp2-fp32-context]") == ""
    assert "no attention" in find_refusal("training.grads[deepspeed-zero0-w2.cp2-fp32-mlp]")


def test_stand_ins_are_refused_where_every_gradient_is_divided_by_the_parts() -> None:
    assert find_refusal("access.read_state[deepspeed-zero3-w2.cp2-fp32-similar_context-adam]") == ""
    assert find_refusal("checkpointing.block[deepspeed-zero2-w2.cp2-fp32-blocks_context-reentrant]") == ""
    reason = find_refusal("checkpointing.block[deepspeed-zero3-w2.cp2-fp32-blocks_context-reentrant]")
    assert "stage 3 divides every gradient by the ranks of a sequence" in reason


@pytest.mark.world_size(2)
def test_each_rank_runs_its_part_and_has_the_whole_output(rank: int) -> None:
    spec = model_spec("context")
    model, batch = spec.model(0), spec.micro_batch(0, 0, 0)
    whole = model(batch.inputs)
    seen = []
    engine = deepspeed.factory(model, EngineConfig(micro_batch_size=4, mesh=CP2, cp_plan=spec.cp_plan))
    engine.module.get_submodule("embed").register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    output = engine(batch.inputs)
    assert torch.equal(seen[0], batch.inputs[:, 2 * rank : 2 * rank + 2])
    assert torch.equal(output, whole)
    leaf, plain = (batch.inputs.clone().requires_grad_() for _ in range(2))
    engine.backward(engine(leaf).sum())
    spec.model(0)(plain).sum().backward()
    assert leaf.grad is not None
    assert plain.grad is not None
    assert torch.equal(leaf.grad, plain.grad), "every rank has the gradient of the whole input"
    engine.close()
    assert torch.equal(spec.model(0)(batch.inputs), model(batch.inputs)), "the model has its own attention back"
    dist.barrier()


@pytest.mark.world_size(4)
def test_a_second_size_beside_an_open_engine_is_refused() -> None:
    spec = model_spec("context")
    engine = deepspeed.factory(spec.model(0), EngineConfig(micro_batch_size=4, mesh=CP2, cp_plan=spec.cp_plan))
    config = EngineConfig(micro_batch_size=4, mesh=Mesh.parse("cp4"), cp_plan=spec.cp_plan)
    with pytest.raises(ConfigError, match=r"got cp4 beside an open engine with cp2; .* close that engine first"):
        deepspeed.factory(spec.model(0), config)
    engine.close()
    dist.barrier()
