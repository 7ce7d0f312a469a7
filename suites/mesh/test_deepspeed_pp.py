"""DeepSpeed's pipelines: cells, what the adapter and a law say of clipping, and what it cannot be built around."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from suites.mesh.cells import check_cell, find_refusal, start_runner
from zharness.engines import deepspeed, deepspeed_pp
from zharness.engines.protocol import EngineConfig, Piece
from zharness.errors import ConfigError, UsageError
from zharness.mesh import Mesh
from zharness.run import Runner, Verdict

pytest.importorskip("deepspeed")

CELLS = {
    "pipeline.training[deepspeed_pp-zero0-w2.pp2-fp32-skips-1f1b]": Verdict.PASS,
    "pipeline.training[deepspeed_pp-zero1-w4.pp2-fp32-tied_ends-dualpipev]": Verdict.PASS,
    "pipeline.windows[deepspeed_pp-zero1-w2.pp2-fp32-chain-other_batch]": Verdict.PASS,
    "pipeline.norm[deepspeed_pp-zero0-w2.pp2-fp32-chain-1f1b]": Verdict.FAIL,
    "pipeline.norm[deepspeed_pp-zero1-w2.pp2-fp32-tied_ends-1f1b]": Verdict.PASS,
    "pipeline.clip[deepspeed_pp-zero0-w4.pp2-fp32-chain-1f1b]": Verdict.FAIL,
    "pipeline.clip[deepspeed_pp-zero1-w2.pp2-fp32-chain-1f1b]": Verdict.PASS,
    "pipeline.learning_rate[deepspeed_pp-zero1-w4.pp2-fp32-tied_ends]": Verdict.PASS,
    "pipeline.not_finite[deepspeed_pp-zero0-w2.pp2-fp32-chain-last_clipped]": Verdict.FAIL,
    "pipeline.not_finite[deepspeed_pp-zero1-w2.pp2-fp32-chain-first]": Verdict.PASS,
    "pipeline.resume[deepspeed_pp-zero1-w4.pp2-fp32-skips-new_engine]": Verdict.PASS,
    "pipeline.frozen[deepspeed_pp-zero0-w2.pp2-fp32-chain-last_later]": Verdict.PASS,
    "pipeline.frozen[deepspeed_pp-zero0-w2.pp2-fp32-chain-first]": Verdict.CRASH,
    "pipeline.frozen[deepspeed_pp-zero1-w4.pp2-fp32-chain-last]": Verdict.CRASH,
    "pipeline.any_order[deepspeed_pp-zero1-w2.pp2-fp32-chain-1f1b]": Verdict.PASS,  # a loss is divided, also by 3
    "pipeline.any_order[deepspeed_pp-zero0-w4.pp2-fp32-tied_ends-single]": Verdict.PASS,
    "pipeline.any_order[deepspeed_pp-zero0-w2.pp2-fp32-chain-clipped]": Verdict.FAIL,
    "pipeline.dropout[deepspeed_pp-zero1-w2.pp2-fp32-dropped_chain-dualpipev_recomputed]": Verdict.PASS,
    "pipeline.buffers[deepspeed_pp-zero0-w2.pp2-fp32-chain-evaluated]": Verdict.FAIL,
    "pipeline.token_loss[deepspeed_pp-zero1-w4.pp2-fp32-token_chain-dualpipev]": Verdict.PASS,
    "pipeline.replicas[deepspeed_pp-zero1-w4.pp2-fp32-tied_ends-1f1b]": Verdict.PASS,
    "pipeline.wire[deepspeed_pp-zero1-w4.pp2-fp32-skips-dualpipev]": Verdict.PASS,
    "pipeline.wire[deepspeed_pp-zero0-w4.pp2-bf16-chain-1f1b]": Verdict.PASS,  # its optimizer has shards
    "pipeline.training[deepspeed_pp-zero0-w4.pp4-fp32-masked_chain-1f1b]": Verdict.FAIL,
    "pipeline.training[deepspeed_pp-zero1-w6.pp3-fp32-masked_chain-1f1b]": Verdict.FAIL,
    "pipeline.training[deepspeed_pp-zero1-w4.pp2-fp32-masked_chain-dualpipev]": Verdict.PASS,
    "pipeline.unequal_micro_batches[deepspeed_pp{dynamic_shape}-zero0-w2.pp2-fp32-skips-1f1b]": Verdict.PASS,
    "pipeline.unequal_micro_batches[deepspeed_pp{dynamic_shape}-zero1-w4.pp2-fp32-tied_ends-after_equal]": Verdict.PASS,
    "pipeline.unequal_micro_batches[deepspeed_pp{dynamic_shape}-zero1-w4.pp4-fp32-odd_chain-1f1b]": Verdict.PASS,
    "pipeline.unequal_micro_batches[deepspeed_pp-zero1-w4.pp2-fp32-odd_chain-large_first]": Verdict.PASS,
    "pipeline.unequal_micro_batches[deepspeed_pp-zero0-w2.pp2-fp32-skips-small_first_dualpipev]": Verdict.PASS,
}
PP2 = Mesh.parse("pp2")


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with start_runner("deepspeed_pp") as started:
        yield started


@pytest.mark.parametrize(("case", "verdict"), CELLS.items(), ids=CELLS)
def test_a_cell_passes_or_fails_as_the_findings_say(runner: Runner, case: str, verdict: Verdict) -> None:
    check_cell(runner, case, verdict)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("pipeline.training[deepspeed_pp-zero0-w2.pp2-fp32-chain-gpipe]", "does not claim the schedule gpipe"),
        ("pipeline.training[deepspeed_pp-zero0-w2.pp2-fp32-tied_chain-1f1b]", "does not claim the model tied_chain"),
        ("pipeline.windows[deepspeed_pp-zero0-w2.pp2-fp32-chain-accumulated]", "several calls of train_batch"),
        ("pipeline.unequal_micro_batches[deepspeed_pp-zero0-w2.pp2-fp32-chain-1f1b]", "set the option dynamic_shape"),
        (
            "pipeline.training[deepspeed_pp{dynamic_shape}-zero0-w2.pp2-fp32-chain-dualpipev]",
            "only with the schedule 1f1b",
        ),
    ],
)
def test_what_the_engine_cannot_run_is_unsupported_before_ranks_start(case: str, words: str) -> None:
    assert words in find_refusal(case)


def count_process_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def build() -> nn.Sequential:
    """Return a model of two layers, which a plan names "0" and "1"."""
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.mark.world_size(2)
def test_each_rank_owns_the_parameters_of_its_stage_and_has_no_forward() -> None:
    engine = deepspeed_pp.factory(build(), EngineConfig(mesh=PP2, pp_plan=("0", "1")))
    assert engine.layout()["0.weight"] == (Piece(0, 0, 4),)
    assert engine.layout()["1.bias"] == (Piece(1, 0, 2),)
    with pytest.raises(UsageError, match="got a forward; this engine has train_batch"):
        engine(0)
    engine.close()


@pytest.mark.world_size(2)
def test_a_closed_pipeline_leaves_nothing_to_later_engines() -> None:
    config = EngineConfig(mesh=PP2, pp_plan=("0", "1", "0"))  # a tied layer has a group, too
    deepspeed_pp.factory(build(), config).close()
    before = count_process_groups()
    engines = [deepspeed_pp.factory(build(), config) for _ in range(2)]
    assert count_process_groups() > before
    for engine in engines:
        engine.close()
    assert count_process_groups() == before
    plain = deepspeed.factory(build(), EngineConfig(stage=1))
    plain.backward(plain(torch.ones(1, 2)).sum())
    plain.step()
    plain.close()


@pytest.mark.world_size(2)
def test_a_closed_pipeline_gives_the_grid_to_one_that_is_open() -> None:
    config = EngineConfig(mesh=PP2, pp_plan=("0", "1"))
    groups = importlib.import_module("deepspeed.utils.groups")
    first, second = (deepspeed_pp.factory(build(), config) for _ in range(2))
    second.close()
    assert groups.mpu is not None
    assert groups.mpu.get_pipe_parallel_world_size() == 2
    dist.barrier(group=groups.mpu.get_pipe_parallel_group())
    first.close()
    assert groups.mpu is None


def raise_error(output: Tensor, target: Tensor) -> Tensor:
    """Raise the error of a loss, as a cross-entropy does for targets of another shape."""
    raise ValueError("the loss got another shape")


BATCH = (torch.ones(1, 2), torch.ones(1, 2))


@pytest.mark.world_size(2)
def test_too_few_micro_batches_are_refused() -> None:
    config = EngineConfig(mesh=PP2, pp_plan=("0", "1", "0", "1"), options={"schedule": "dualpipev"})
    engine = deepspeed_pp.factory(build(), config)
    with pytest.raises(UsageError, match="got 3 micro-batches; the schedule needs 4 or more"):
        engine.train_batch([BATCH] * 3, raise_error)
    engine.close()


@pytest.mark.world_size(1)
def test_micro_batches_of_several_sizes_are_refused_without_dynamic_shapes() -> None:
    engine = deepspeed_pp.factory(build(), EngineConfig(mesh=Mesh.parse("pp1"), pp_plan=("0", "1")))
    batches = [(torch.ones(size, 2), torch.ones(size, 2)) for size in (1, 3)]
    with pytest.raises(UsageError, match=r"got micro-batches of \[1, 3\] samples; .* or dynamic_shape"):
        engine.train_batch(batches, nn.functional.mse_loss)
    engine.close()


@pytest.mark.world_size(1)
def test_an_error_of_a_loss_is_not_one_of_usage() -> None:
    engine = deepspeed_pp.factory(build(), EngineConfig(mesh=Mesh.parse("pp1"), pp_plan=("0", "1")))
    with pytest.raises(ValueError, match="the loss got another shape"):
        engine.train_batch([BATCH], raise_error)
    engine.close()


@pytest.mark.world_size(2)
def test_gradients_in_bf16_are_read_from_stages_with_unequal_numbers_of_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    engine = deepspeed_pp.factory(model, EngineConfig(mesh=PP2, pp_plan=("0", "1"), dtype="bf16"))
    inputs, target = (tensor.bfloat16() for tensor in BATCH)
    engine.train_batch([(inputs, target)], nn.functional.mse_loss)
    assert list(engine.full_grads()) == ["0.weight", "0.bias", "1.weight"]
    engine.close()


class TiedChain(nn.Module):
    """Two layers that share their weight, and not their bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 2), nn.Linear(2, 2)
        self.down.weight = self.up.weight


@pytest.mark.parametrize(
    ("model", "config", "words"),
    [
        (build(), EngineConfig(pp_plan=("0", "1")), "a mesh without the axis pp"),
        (build(), EngineConfig(mesh=PP2, pp_plan=("0", "1"), options={"schedule": "gpipe"}), "schedule"),
        (
            build(),
            EngineConfig(mesh=PP2, pp_plan=("0", "1"), options={"dynamic_shape": "no"}),
            "got dynamic_shape 'no'; expected true or false",
        ),
        (
            build(),
            EngineConfig(mesh=PP2, pp_plan=("0", "1"), options={"dynamic_shape": True, "schedule": "dualpipev"}),
            "got dynamic_shape and schedule dualpipev",
        ),
        (TiedChain(), EngineConfig(mesh=PP2, pp_plan=("up", "down")), r"down\.weight is tied to one of up"),
    ],
)
def test_a_config_that_the_engine_cannot_have_is_refused(model: nn.Module, config: EngineConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        deepspeed_pp.factory(model, config)
