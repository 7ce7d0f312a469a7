"""Cells in tf32 from plan to verdict, on ranks and a judge that round factors on the CPU as a GPU does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from zharness import engines
from zharness.cell import Cell
from zharness.device.float32_products import Float32Products, multiply_with
from zharness.engines import Capabilities
from zharness.engines.warm_up import build_warm_up_environment
from zharness.errors import UsageError
from zharness.mutants.tf32 import RoundedFactors
from zharness.run import Request, Verdict, observe_and_judge, plan
from zharness.run.cell_planner import PlannedCell
from zharness.run.runner import Runner


@contextmanager
def multiply_as_a_gpu_does(products: Float32Products) -> Iterator[None]:
    with multiply_with(products):
        if products is Float32Products.FULL:
            yield
            return
        with RoundedFactors():
            yield


def claims(engine: str, stage: int) -> Capabilities:
    found = engines.capabilities(engine, stage)
    assert found is not None
    return found


def observe_without_rounding(*args: Any) -> None:
    observe_and_judge.multiply_with = multiply_with  # type: ignore[attr-defined]
    observe_and_judge.observe(*args)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(observe_and_judge, "multiply_with", multiply_as_a_gpu_does)

    def run_cell(text: str, observe: Callable[..., None] = observe_and_judge.observe) -> Any:
        with Runner({"reference": build_warm_up_environment("reference")}, observe=observe) as runner:
            return runner.run(PlannedCell(Cell.parse(text)))

    return run_cell


@pytest.mark.parametrize(("model", "tier"), [("exact", "X"), ("mlp", "S")])
def test_an_engine_whose_ranks_round_like_plain_pytorch_passes(run: Callable[..., Any], model: str, tier: str) -> None:
    record = run(f"training.grads[reference-zero3-w2-tf32-{model}]")
    assert (record.verdict, record.tier) == (Verdict.PASS, tier), record.cause


def test_an_engine_whose_ranks_do_not_round_fails(run: Callable[..., Any]) -> None:
    record = run("training.grads[reference-zero3-w2-tf32-mlp]", observe_without_rounding)
    assert record.verdict is Verdict.FAIL


def test_a_scenario_that_tf32_rounds_is_unsupported(run: Callable[..., Any]) -> None:
    record = run("double_backward.gradient_penalty[reference-zero0-w2-tf32-blocks]")
    assert record.verdict is Verdict.UNSUPPORTED
    assert "0/penalty is rounded on rank 0" in record.cause


def test_a_plan_has_tf32_only_on_a_gpu_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(("training.grads", "resources.no_leak"), ("reference",), (3,), (2,), ("tf32",))
    with pytest.raises(UsageError, match="tf32 is a way in which GPUs multiply"):
        plan(request, claims)
    monkeypatch.setattr(sys.modules["zharness.run.plan"], "find_tf32_problem", lambda uses_gpu: "")  # not its function
    cells = plan(request, claims)
    assert {cell.cell.dtype for cell in cells} == {"tf32"}
    assert not any(cell.unsupported_reason for cell in cells), "what is stated for fp32 is stated for tf32"
    bf16 = Request(("precision.output_containers",), ("reference",), (3,), (2,), ("tf32",))
    assert all("applies only to the dtypes" in cell.unsupported_reason for cell in plan(bf16, claims))
