"""Pipelines on the axes pp and rep, which no engine has: what copies of a stage send is right once in each batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from suites.mesh.cells import check_cell, start_runner
from zharness.run import Runner, Verdict

ENGINE = "zharness.mutants.pipeline_excess:CopiesStages"
CELLS = [
    f"pipeline.wire[{ENGINE}-zero0-w4.pp2.rep2-fp32-chain-1f1b]",
    f"pipeline.wire[{ENGINE}-zero0-w8.pp2.rep2-fp32-skips-1f1b]",  # one group along rep and what is left over
]


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with start_runner(ENGINE) as started:
        yield started


@pytest.mark.parametrize("case", CELLS)
def test_gradients_are_reduced_once_over_the_copies_of_a_stage(runner: Runner, case: str) -> None:
    check_cell(runner, case, Verdict.PASS)
