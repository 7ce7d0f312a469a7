"""accelerate over DeepSpeed: laws of a loop hold or fail as FINDINGS.md says, and accelerate is left as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from torch import nn

from zharness.cell import Cell
from zharness.engines.protocol import EngineConfig
from zharness.engines.registry import info
from zharness.engines.warm_up import build_warm_up_environment
from zharness.errors import EngineContractError
from zharness.run import PlannedCell, Runner, Verdict

ENGINE = "accelerate_deepspeed"
pytestmark = pytest.mark.skipif(
    info(ENGINE).version() is None or info("deepspeed").version() is None, reason="accelerate or deepspeed is missing"
)
CELLS = {
    f"loop.training[{ENGINE}-zero2-w2-fp32-chain-accumulated]": Verdict.PASS,
    f"loop.training[{ENGINE}-zero1-w2-fp32-chain-remainder]": Verdict.FAIL,
    f"loop.items[{ENGINE}-zero1-w2-fp32-chain-accumulated_items]": Verdict.PASS,
    f"loop.clipping[{ENGINE}-zero2-w2-fp32-chain-clipped]": Verdict.PASS,
}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner({ENGINE: build_warm_up_environment(ENGINE)}) as started:
        yield started


@pytest.mark.parametrize(("case", "verdict"), CELLS.items(), ids=CELLS)
def test_a_cell_passes_or_fails_as_the_findings_say(runner: Runner, case: str, verdict: Verdict) -> None:
    record = runner.run(PlannedCell(Cell.parse(case)))
    assert record.is_expected, record.cause
    assert record.verdict is verdict, record.cause


@pytest.mark.world_size(1)
def test_a_model_that_deepspeed_did_not_get_is_an_error_and_accelerate_is_left_as_it_was() -> None:
    from accelerate.state import AcceleratorState, PartialState

    from zharness.engines import accelerate_deepspeed

    with accelerate_deepspeed.accelerate_state("cpu"):
        accelerator = accelerate_deepspeed.build_accelerator(EngineConfig(stage=1))
        with pytest.raises(EngineContractError, match="prepared a Linear of stage None for 1 processes; expected"):
            accelerate_deepspeed.require_deepspeed(accelerator, nn.Linear(1, 1), 1)
    assert (AcceleratorState._shared_state, PartialState._shared_state) == ({}, {})
    assert accelerate_deepspeed.USE_DEEPSPEED not in os.environ
