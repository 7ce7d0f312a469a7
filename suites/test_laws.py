"""Every law on every engine: one test for each cell, with the cell's own id."""

import pytest

from zharness.run.record import Record
from zharness.run.session import problem


@pytest.mark.cells("reference", world_sizes=(1, 2, 3, 4))
@pytest.mark.cells("ddp")
@pytest.mark.cells("fsdp2")
@pytest.mark.cells("deepspeed")
def test_the_law_holds(record: Record) -> None:
    assert not problem(record), problem(record)
