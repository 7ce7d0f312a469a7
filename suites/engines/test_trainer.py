"""The Trainer over DDP: laws of its loop hold, and calls that a whole training does not have are refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from zharness.cell import Cell
from zharness.engines.protocol import EngineConfig
from zharness.engines.registry import info
from zharness.engines.warm_up import build_warm_up_environment
from zharness.errors import UsageError
from zharness.run import PlannedCell, Runner, Verdict

pytestmark = pytest.mark.skipif(info("trainer_ddp").version() is None, reason="transformers is not installed")


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner({"trainer_ddp": build_warm_up_environment("trainer_ddp")}) as started:
        yield started


@pytest.mark.parametrize("case", ["training", "items", "clipping"])
def test_a_law_of_the_loop_holds(runner: Runner, case: str) -> None:
    variant = {"training": "remainder", "items": "accumulated_items", "clipping": "clipped"}[case]
    record = runner.run(PlannedCell(Cell.parse(f"loop.{case}[trainer_ddp-zero0-w2-fp32-chain-{variant}]")))
    assert record.verdict is Verdict.PASS, record.cause


@pytest.mark.world_size(2)
def test_a_whole_training_has_no_forward_and_no_step() -> None:
    from zharness.engines import trainer_ddp

    engine = trainer_ddp.factory(nn.Linear(1, 1), EngineConfig())
    for call in (lambda: engine(torch.ones(1, 1)), engine.step):
        with pytest.raises(UsageError, match="this engine has train, which runs all batches and steps"):
            call()
    engine.close()
