"""Laws of optimizers hold where torch takes its foreach kernels by default, as it does for tensors of a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from zharness.cell import Cell
from zharness.engines.warm_up import build_warm_up_environment
from zharness.run import Verdict
from zharness.run.cell_planner import PlannedCell
from zharness.run.runner import Runner

ENGINES = ("reference", "ddp", "fsdp2")


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """Start ranks and judges in which torch counts the CPU among the devices with foreach kernels."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
            module = importlib.import_module(name)  # torch.optim deletes its attribute
            patch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cpu", "cuda"])
        with Runner({name: build_warm_up_environment(name) for name in ENGINES}) as started:
            yield started


@pytest.mark.parametrize(
    "case",
    [
        "training.optimizers[reference-zero3-w2-fp32-mlp-others]",
        "training.optimizers[ddp-zero0-w2-fp32-mlp-rprop]",
        "training.clip_and_norm[reference-zero2-w2-fp32-mlp]",
        "training.trajectory[fsdp2-zero3-w2-fp32-mlp-adamw]",
    ],
)
def test_a_law_holds_with_the_default_kernels_of_a_gpu(runner: Runner, case: str) -> None:
    record = runner.run(PlannedCell(Cell.parse(case)))
    assert record.verdict is Verdict.PASS, record.cause


def test_fsdp2s_rprop_fails_as_it_does_on_a_gpu(runner: Runner) -> None:
    record = runner.run(PlannedCell(Cell.parse("training.optimizers[fsdp2-zero3-w2-fp32-mlp-rprop]")))
    assert (record.verdict, bool(record.expected_failure)) == (Verdict.CRASH, True), record.cause
    assert "_foreach_copy_" in record.cause
