"""Lightning Fabric over DDP and FSDP2 runs under the laws, and its adapters refuse a set-up that shards nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import nn

from zharness.cell import Cell
from zharness.engines import info
from zharness.engines.warm_up import build_warm_up_environment
from zharness.errors import EngineContractError
from zharness.run import PlannedCell, Runner
from zharness.run.verdicts import Verdict

ENGINES = ("fabric_ddp", "fabric_fsdp2")
pytestmark = pytest.mark.skipif(info("fabric_ddp").version() is None, reason="lightning-fabric is not installed")


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner({name: build_warm_up_environment(name) for name in ENGINES}) as started:
        yield started


@pytest.mark.parametrize(
    "case",
    [
        "training.sgd_step[fabric_ddp-zero0-w2-fp32-mlp]",
        "training.accumulation[fabric_ddp-zero0-w2-fp32-mlp-caller]",
        "training.sgd_step[fabric_fsdp2-zero3-w2-fp32-mlp]",
        "training.clip_and_norm[fabric_fsdp2-zero2-w2-fp32-mlp]",
    ],
)
def test_fabric_trains_as_plain_pytorch(runner: Runner, case: str) -> None:
    record = runner.run(PlannedCell(Cell.parse(case)))
    assert record.verdict is Verdict.PASS, record.cause


@pytest.mark.world_size(2)
def test_a_set_up_without_ddp_is_refused() -> None:
    from zharness.engines import fabric_ddp

    with pytest.raises(EngineContractError, match="expected DistributedDataParallel for 2"):
        fabric_ddp.require_ddp(nn.Linear(1, 1), 2)
