"""Ordinary models pass on right engines, fail on wrong ones, and get one clear sentence where they cannot be judged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zharness import engines
from zharness.cell import Cell
from zharness.engines import Feature
from zharness.errors import EngineContractError, UsageError
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.training_run import total_norm_and_bound
from zharness.laws import get_law
from zharness.parity.baseline import Baseline, CastCache
from zharness.parity.calibration import calibrate
from zharness.parity.sample_draws import SharedDrawError, find_sample_dims, record_draws, replay_draws
from zharness.parity.sample_runs import INDEPENDENCE_TOLERANCE, SampleRuns
from zharness.raising_frame import describe_raising_frame
from zharness.run import Record, Verdict
from zharness.run.missing_claims import describe_missing_claims
from zharness.run.model_check import ModelCheckRequest, announce_unused_parameters, plan_model_cells
from zharness.run.model_facts import measure_model
from zharness.run.observe_and_judge import build_baseline
from zharness.run.plan import Request, plan
from zharness.run.pytest_cells import describe_problem
from zharness.workload import model_spec
from zharness.workload.generators import have_drawn_since, read_generator_states

ZOO, PARTS = "suites.model.zoo", "suites.model.zoo_parts"
BUFFERS = ("training.ranks_agree", "state.resume")


@pytest.mark.cells("reference", stages=(2,), checks=BUFFERS, models=(f"{ZOO}:batch_norm",))
@pytest.mark.cells("ddp", stages=(0,), checks=BUFFERS, models=(f"{ZOO}:batch_norm",))
@pytest.mark.cells("fsdp2", stages=(3,), checks=BUFFERS, models=(f"{ZOO}:conv_net",))
@pytest.mark.cells("deepspeed", stages=(2,), checks=BUFFERS, models=(f"{ZOO}:conv_net",))
@pytest.mark.cells("fsdp2", stages=(3,), checks=("training.forward_alone",), models=(f"{ZOO}:recurrent",))
@pytest.mark.cells("reference", stages=(3,), checks=("training.forward_alone",), models=(f"{PARTS}:encoder",))
@pytest.mark.cells("reference", stages=(3,), checks=("precision.autocast_states",), models=(f"{PARTS}:gru",))
@pytest.mark.cells("deepspeed", stages=(2,), checks=("training.grads",), models=(f"{ZOO}:unused",))
@pytest.mark.cells("deepspeed", stages=(3,), checks=("training.kernels",), models=(f"{ZOO}:dropping",))
@pytest.mark.cells("deepspeed", stages=(3,), checks=("model.accumulation",), models=(f"{ZOO}:dropping",))
@pytest.mark.cells("deepspeed", stages=(3,), checks=("training.kernels",), models=(f"{ZOO}:recurrent",))
@pytest.mark.cells("ddp", stages=(0,), checks=("training.clip_and_norm",), models=(f"{PARTS}:float64_part",))
@pytest.mark.cells("reference", stages=(3,), checks=("training.accumulation",), models=(f"{PARTS}:float64_part",))
@pytest.mark.cells("fsdp2", stages=(3,), checks=("training.grads",), models=(f"{PARTS}:nested_output",))
@pytest.mark.cells("deepspeed", stages=(2,), checks=("training.grads",), models=(f"{PARTS}:experts",))
def test_an_ordinary_model_is_not_red(record: Record) -> None:
    assert not describe_problem(record), describe_problem(record)


def test_gradients_of_a_cell_called_for_each_position_depend_on_when_autocast_casts_its_weight() -> None:
    once = Baseline(model_spec(f"{PARTS}:gru"), 0, 1, autocast=torch.bfloat16)
    each_use = replace(once, cast_cache=CastCache.EACH_USE)
    first, second = once.run_rank(0, 0), each_use.run_rank(0, 0)
    assert torch.equal(first.loss, second.loss)
    assert not torch.equal(first.grads["cell.weight_hh"], second.grads["cell.weight_hh"])
    claims = engines.capabilities("reference", 3)
    assert claims is not None
    sharded, whole = (Cell("training.grads", "reference", stage, 2, "fp32", f"{PARTS}:gru") for stage in (3, 2))
    assert build_baseline(sharded, 0, claims).cast_cache is CastCache.EACH_USE
    assert build_baseline(whole, 0, claims).cast_cache is CastCache.ONCE


@pytest.mark.cells(
    "zharness.mutants:shares_statistics", stages=(0,), checks=("training.ranks_agree",), models=(f"{ZOO}:batch_norm",)
)
def test_averaged_statistics_break_the_promise_of_local_ones(record: Record) -> None:
    assert record.verdict is Verdict.FAIL, record.cause
    assert "the engine claims BufferPromise.LOCAL" in record.cause


@pytest.mark.cells(
    "zharness.mutants:loses_a_micro_batch", stages=(0,), checks=("model.accumulation",), models=(f"{ZOO}:dropping",)
)
@pytest.mark.cells(
    "zharness.mutants:never_divides_by_the_accumulation",
    stages=(2,),
    checks=("model.accumulation",),
    models=(f"{ZOO}:dropping",),
)
def test_a_wrong_window_differs_from_its_micro_batches_alone(record: Record) -> None:
    is_right = "never_divides" in record.cell.engine and record.cell.variant == "caller"  # the caller divides
    assert record.verdict is (Verdict.PASS if is_right else Verdict.FAIL), record.cause


@pytest.mark.cells(
    "zharness.mutants:counts_evaluations",
    stages=(0,),
    checks=("training.accumulation",),
    models=("suites.model.tiny:perceptron",),
)
def test_an_evaluation_within_a_window_counts_as_no_micro_batch(record: Record) -> None:
    expected = (
        Verdict.FAIL if record.cell.variant == "evaluated_by_engine" else Verdict.PASS
    )  # the caller counts itself
    assert record.verdict is expected, record.cause


@pytest.mark.cells("reference", stages=(2,), checks=("training.grads",), models=(f"{ZOO}:raises",))
def test_a_crash_names_the_line_that_raised(record: Record) -> None:
    assert record.verdict is Verdict.CRASH
    assert record.raising_frame.startswith("suites/model/zoo.py, line ")
    assert record.raising_frame.endswith(", in forward")
    assert record.as_json()["raising_frame"] == record.raising_frame


def test_no_frame_has_no_description() -> None:
    assert describe_raising_frame([]) == ""


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("not_a_number", "the parameter 'weight' .* contains NaN or infinity"),
        ("in_bf16", "are bf16, but they would be trained in fp32; give --dtype bf16"),
        ("zoo_parts:lazy", "'0.weight' .* has no shape before the first forward; run a forward on a batch of zeros"),
        (
            "zoo_parts:complex_weight",
            "'weight' .* is torch.complex64, which ZeRO and FSDP do not shard; keep torch.view",
        ),
        (
            "own_sync_norm",
            "SyncBatchNorm .* of a class of its own, which torch runs on GPUs only; expected torch.nn.SyncBatchNorm",
        ),
    ],
)
def test_a_model_that_cannot_be_judged_gets_one_sentence(model: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        measure_model(f"suites.model.{model}" if ":" in model else f"{ZOO}:{model}", "fp32", "")


def test_later_forwards_of_a_model_that_reads_its_written_buffers_are_not_compared() -> None:
    facts = measure_model(f"{PARTS}:quantized", "fp32", "")
    assert {"0.scale", "0.activation_post_process.min_val"} <= set(facts.read_buffers)
    assert not measure_model(f"{ZOO}:batch_norm", "fp32", "").read_buffers
    check_request = ModelCheckRequest(f"{PARTS}:quantized", stages=(3,))
    claims = engines.capabilities("reference", 3)
    assert claims is not None
    cells = plan_model_cells(check_request.build_request(), check_request, facts, lambda _engine, _stage: claims)
    reasons = {cell.cell.law: cell.unsupported_reason for cell in cells}
    assert "forward reads buffers that earlier forwards wrote (0." in reasons["model.configured"]
    assert reasons["training.grads"] == reasons["training.sgd_step"] == ""
    assert get_law("training.accumulation").compares_later_forwards


def test_the_norm_of_float32_gradients_beside_float64_ones_rounds_in_float32() -> None:
    grads = {"a": torch.ones(3), "b": torch.ones(3, dtype=torch.float64)}
    _, mixed = total_norm_and_bound(grads)
    _, wide = total_norm_and_bound({name: grad.double() for name, grad in grads.items()})
    assert float(mixed) > 1e6 * float(wide) > 0


def test_a_float64_parameter_stays_one_in_fp32_cells() -> None:
    weights = Baseline(model_spec(f"{PARTS}:float64_part"), 0, 1).build_module().state_dict()
    assert weights["last.weight"].dtype is torch.float64
    low = Baseline(model_spec(f"{PARTS}:float64_part"), 0, 1, torch.bfloat16).build_module().state_dict()
    assert low["last.weight"].dtype is torch.bfloat16


def test_ddp_gets_the_option_that_it_asks_for_if_a_parameter_is_unused() -> None:
    facts = measure_model(f"{ZOO}:unused", "fp32", "")
    assert facts.unused_parameters == ("unused.weight", "unused.bias")
    lines: list[str] = []

    def claims(engine: str, stage: int) -> engines.Capabilities:
        found = engines.capabilities(engine, stage)
        assert found is not None
        return found

    request = Request(engines=("ddp",), models=(f"{ZOO}:unused",))
    assert announce_unused_parameters(request, facts, claims, lines.append).engine_variant == "find_unused_parameters"
    assert "does not use 2 parameters (unused.weight, unused.bias)" in lines[0]
    other = Request(engines=("deepspeed",), models=(f"{ZOO}:unused",))
    assert announce_unused_parameters(other, facts, claims, lines.append) == other


def test_zeros_of_an_unused_parameter_are_right_where_the_engine_says_so() -> None:
    refusing = engines.Capabilities(frozenset(), refuses={Feature.NO_GRADIENT: "a flat partition"})
    baseline = Baseline(model_spec(f"{ZOO}:unused"), 0, 1)
    grads = {name: torch.zeros(1) for name in baseline.parameter_names}
    used = [name for name in grads if not name.startswith("unused")]
    JudgeContext(baseline, (), torch.float32, claims=refusing).check_gradient_names(used, grads)
    with pytest.raises(EngineContractError, match=r"gradients of \['unused.weight', 'unused.bias'\], which no rank's"):
        JudgeContext(baseline, (), torch.float32).check_gradient_names(used, grads)
    wrong = {**grads, "unused.bias": torch.ones(1)}
    with pytest.raises(EngineContractError, match="not zero"):
        JudgeContext(baseline, (), torch.float32, claims=refusing).check_gradient_names(used, wrong)


def test_each_sample_keeps_its_dropout_mask() -> None:
    batch, layer = torch.ones(4, 6), nn.Dropout(0.5)
    whole: list[Any] = []
    draws = record_draws(lambda: whole.append(layer(batch)))
    for rows in (torch.tensor([2]), torch.tensor([3, 0])):
        assert torch.equal(replay_draws(lambda chosen=rows: layer(batch[chosen]), draws, rows, 4), whole[0][rows])
    with pytest.raises(SharedDrawError, match="a row for each sample"):
        replay_draws(lambda: layer(torch.ones(3, 6)), draws, torch.tensor([0]), 4)


def drop_as_a_gpu(inputs: Tensor) -> Tensor:
    """Drop half of the elements by the operation that torch runs on GPUs."""
    return torch.ops.aten.native_dropout(inputs, 0.5, True)[0]


def test_each_sample_keeps_the_mask_of_a_gpus_dropout() -> None:
    inputs = torch.rand(4, 8, requires_grad=True)
    outputs: list[Tensor] = []
    draws = record_draws(lambda: outputs.append(drop_as_a_gpu(inputs)))
    [dropped] = outputs
    assert torch.equal(draws[0], dropped != 0)
    rows = torch.tensor([2, 0])
    replayed = replay_draws(lambda: drop_as_a_gpu(inputs[rows]), draws, rows, len(inputs))
    assert torch.equal(replayed, dropped[rows])
    [grad] = torch.autograd.grad(replayed.sum(), inputs)
    assert torch.equal(grad[rows], 2.0 * draws[0][rows])


def test_the_generator_of_a_gpu_tells_a_draw_too(monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter(torch.tensor([[1], [2], [2]], dtype=torch.uint8))
    monkeypatch.setattr("zharness.workload.generators.is_gpu_requested", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: next(states))
    before = read_generator_states()
    assert have_drawn_since(before)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.tensor([1], dtype=torch.uint8))
    assert not have_drawn_since(before)


@pytest.mark.parametrize("seed", range(3))
def test_samples_behind_the_positions_of_a_sequence_meet_their_own_random_numbers(seed: int) -> None:
    baseline = Baseline(model_spec(f"{ZOO}:recurrent"), seed, 1)
    batch = baseline.batch(0, 0)
    assert batch.inputs[0].shape[0] == batch.inputs[0].shape[1] - 1, "otherwise a mix-up would show by shape alone"
    runs = SampleRuns.record(baseline, 0, 0)
    assert set(runs.sample_dims) == {1}
    whole = runs.compute_grads(torch.arange(4), wide=True)
    alone, turned = (
        runs.compute_mean_grads(order, 1, wide=True) for order in (torch.arange(4), torch.arange(4).flip(0))
    )
    for name, grad in whole.items():
        for other in (alone[name], turned[name]):
            assert float((other - grad).abs().max()) <= INDEPENDENCE_TOLERANCE * float(grad.abs().max()), name


def test_a_draw_without_a_dimension_for_samples_is_assigned_to_none() -> None:
    draws = (torch.ones(6, 4, 2), torch.ones(3), torch.ones(4, 4))
    assert find_sample_dims(draws, (torch.ones(6, 2, 2), torch.ones(3), torch.ones(2, 2))) == (1, 0, 0)
    assert find_sample_dims(draws, draws[:1]) == (0, 0, 0)


@pytest.mark.parametrize("model", ["dropping", "batch_norm", "conv_net", "recurrent"])
def test_tier_c_sees_a_small_error_in_models_with_dropout_and_batch_norm(model: str) -> None:
    calibration = calibrate(Baseline(model_spec(f"{ZOO}:{model}"), 0, 1), 0)
    assert calibration.limits.max_error < 1e-3
    assert calibration.zero_names == ({"0.bias"} if model in ("batch_norm", "conv_net") else set())


def test_samples_of_a_batch_norm_are_not_run_alone() -> None:
    baseline = Baseline(model_spec(f"{ZOO}:conv_net"), 0, 1)
    runs = SampleRuns.record(baseline, 0, 0)
    alone = runs.compute_mean_grads(torch.arange(4), 1, wide=True)
    whole = runs.compute_grads(torch.arange(4), wide=True)
    assert float((alone["0.weight"] - whole["0.weight"]).abs().max()) > 1e-3, "the samples depend on each other"


def test_a_run_says_which_claim_adds_which_laws() -> None:
    refuses = dict.fromkeys((Feature.VARIATIONS, Feature.CLIP), "not written")
    claims = engines.Capabilities(frozenset({0}), refuses=refuses)
    request = Request(("training",), ("my_engine:MyEngine",), (0,))
    lines = describe_missing_claims(plan(request, lambda _engine, _stage: claims), lambda _engine, _stage: claims)
    assert any(line.startswith("CLAIM Feature.VARIATIONS (") and "cells: training." in line for line in lines)
