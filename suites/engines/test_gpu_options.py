"""Options of a GPU: what a CPU leaves out and why, and what runs there: captured graphs and fused optimizers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.backends.distributed import DDPOptimizer

from zharness import engines
from zharness.cell import Cell
from zharness.device import DEVICE_VARIABLE
from zharness.engines import Capabilities, EngineConfig, OptimizerSpec
from zharness.engines.deepspeed_machine import missing_for_fused_adam
from zharness.engines.fsdp2_options import build_offload_policy
from zharness.engines.gpu_options import (
    build_fused_optimizer,
    compile_in_place,
    drop_compiled_graphs,
    missing_for_graphs,
    missing_for_inductor,
    shared_options,
)
from zharness.engines.options import find_exclusion
from zharness.engines.warm_up import build_warm_up_environment
from zharness.errors import ConfigError
from zharness.laws import get_law
from zharness.run import Verdict
from zharness.run.cell_planner import PlannedCell, unsupported_reason
from zharness.run.runner import Runner

ENGINES = ("ddp", "fsdp2")


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner({name: build_warm_up_environment(name) for name in ENGINES}) as started:
        yield started


@pytest.mark.parametrize("engine", ["ddp{captured}-zero0", "fsdp2{captured}-zero3"])
def test_a_captured_model_gives_torchs_own_numbers(runner: Runner, engine: str) -> None:
    record = runner.run(PlannedCell(Cell.parse(f"training.grads[{engine}-w2-fp32-mlp]")))
    assert (record.verdict, record.tier) == (Verdict.PASS, "S"), record.cause


@pytest.mark.parametrize(
    "case",
    [
        "training.sgd_step[ddp{fused_optimizer}-zero0-w2-fp32-mlp]",
        "state.resume[fsdp2{fused_optimizer}-zero2-w2-fp32-mlp-adamw]",
    ],
)
def test_a_fused_optimizer_steps_within_the_bound(runner: Runner, case: str) -> None:
    record = runner.run(PlannedCell(Cell.parse(case)))
    assert record.verdict is Verdict.PASS, record.cause


def claims(engine: str, stage: int) -> Capabilities:
    found = engines.capabilities(engine, stage)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("engine", "stage", "option", "reason"),
    [
        ("fsdp2", 3, "offload_unpinned", "a CPU has no pinned memory"),
        ("ddp", 0, "compiled", "on a CPU torch.compile builds C++ for each model"),
        ("fsdp2", 2, "compiled", "on a CPU torch.compile builds C++ for each model"),
        ("ddp", 0, "cuda_graphs", "a CPU has no CUDA graphs"),
        ("fsdp2", 3, "cuda_graphs", "a CPU has no CUDA graphs"),
        ("deepspeed", 3, "offload_param_unpinned", "a CPU has no pinned memory"),
        ("deepspeed", 0, "fused_adam", "FusedAdam is a kernel of CUDA"),
    ],
)
def test_a_cpu_leaves_an_option_out_with_a_reason(engine: str, stage: int, option: str, reason: str) -> None:
    assert claims(engine, stage).engine_options[option].absent.startswith(reason)


def test_a_gpu_has_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    needs = (missing_for_inductor, missing_for_graphs, missing_for_fused_adam)
    for found in needs:
        found.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert missing_for_inductor() == "torch.compile needs triton on a GPU (pip install triton)"
    (tmp_path / "fused_adam").mkdir()
    (tmp_path / "fused_adam" / "fused_adam.so").touch()
    assert missing_for_graphs() == missing_for_fused_adam() == ""
    for found in needs:
        found.cache_clear()


def test_compiled_kernels_are_judged_by_tiers_x_and_c_alone() -> None:
    captured, compiled = (claims("ddp", 0).with_options([name]) for name in ("captured", "compiled"))
    assert not captured.own_kernels
    assert compiled.own_kernels == {0: "torch.compile fuses kernels"}
    cell = Cell.parse("training.grads[ddp{captured}-zero0-w2-fp32-mlp]")
    assert unsupported_reason(get_law(cell.law), cell, claims("ddp", 0)) == ""
    assert set(shared_options()["compiled"].laws) < set(shared_options()["captured"].laws)


def test_memory_is_pinned_on_a_gpu_unless_an_option_says_otherwise() -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    pinned = EngineConfig(options={"cpu_offload": True})
    unpinned = EngineConfig(options={"cpu_offload": True, "pin_memory": False})
    found = [build_offload_policy(config, device) for config in (pinned, unpinned) for device in (gpu, cpu)]
    assert [getattr(policy, "pin_memory", None) for policy in found] == [True, False, False, False]


def test_a_wrong_backend_is_refused_and_a_fused_form_is_set_where_there_is_one() -> None:
    with pytest.raises(ConfigError, match="unknown compile 'inducter'; did you mean 'inductor'"):
        compile_in_place(torch.nn.Linear(1, 1), {"compile": "inducter"})
    weight = torch.nn.Parameter(torch.ones(2))
    for name, fused in (("adamw", True), ("rmsprop", None)):
        optimizer = build_fused_optimizer({"weight": weight}, OptimizerSpec(name, {"lr": 0.1}))
        assert optimizer.defaults.get("fused") is fused


def test_small_buckets_exclude_graphs_which_torch_splits_by_buckets() -> None:
    known = claims("ddp", 0).engine_options
    for name in ("captured", "compiled", "cuda_graphs"):
        assert find_exclusion({each: known[each] for each in ("small_buckets", name)}).startswith(
            f"small_buckets excludes {name}: torch.compile's splitting"
        )
    with pytest.raises(AssertionError, match="First bucket should be smaller/equal"):
        DDPOptimizer(int(1e-4 * 2**20), lambda graph, _inputs: graph)


def test_inductor_compiles_in_the_rank_and_starts_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 16)
    compile_in_place(torch.nn.Linear(1, 1), {"compile": "eager"})
    assert torch._inductor.config.compile_threads == 16
    compile_in_place(torch.nn.Linear(1, 1), {"compile": "inductor"})
    assert torch._inductor.config.compile_threads == 1


def test_the_backend_of_cuda_graphs_has_torchs_own_numbers_on_a_cpu() -> None:
    """Without a GPU the backend replays nothing; what AOTAutograd traced runs, forward and backward."""
    torch.manual_seed(0)
    plain, graphed = (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)) for _ in "ab")
    graphed.load_state_dict(plain.state_dict())
    assert compile_in_place(graphed, {"compile": "cudagraphs"})
    batches = torch.randint(-4, 5, (2, 3, 4)).float()
    for batch in batches:
        for model in (plain, graphed):
            model(batch).sum().backward()
    for expected, found in zip(plain.parameters(), graphed.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)
    drop_compiled_graphs()
