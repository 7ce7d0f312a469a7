"""The Trainer over DeepSpeed: laws of its loop hold, also in a last window with fewer micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zharness.cell import Cell
from zharness.engines.registry import info
from zharness.engines.warm_up import build_warm_up_environment
from zharness.run import PlannedCell, Runner, Verdict

ENGINE = "trainer_deepspeed"
pytestmark = pytest.mark.skipif(
    info(ENGINE).version() is None or info("deepspeed").version() is None, reason="transformers or deepspeed is missing"
)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner({ENGINE: build_warm_up_environment(ENGINE)}) as started:
        yield started


@pytest.mark.parametrize("case", ["training-remainder", "items-accumulated_items", "clipping-clipped"])
def test_a_law_of_the_loop_holds(runner: Runner, case: str) -> None:
    law, _, variant = case.partition("-")
    record = runner.run(PlannedCell(Cell.parse(f"loop.{law}[{ENGINE}-zero2-w2-fp32-chain-{variant}]")))
    assert record.verdict is Verdict.PASS, record.cause
