"""Micro-batches of several sizes: an engine that runs each of them alone passes, and which samples each one has."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from suites.mesh.cells import check_cell, start_runner
from zharness.laws.pipeline_unequal import BATCHES, EQUAL, UNEQUAL, begin_with, cut_batches
from zharness.run import Runner, Verdict
from zharness.workload import Batch
from zharness.workload.models import SAMPLES

ENGINE = "zharness.mutants.pipeline_unequal:RunsEachAlone"
CELLS = [
    f"pipeline.unequal_micro_batches[{ENGINE}-zero0-w2.pp2-fp32-odd_chain-gpipe]",
    f"pipeline.unequal_micro_batches[{ENGINE}-zero0-w2.pp2-fp32-tied_chain-after_equal]",
    f"pipeline.unequal_micro_batches[{ENGINE}-zero0-w4.pp2-fp32-skips-gpipe]",
]


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with start_runner(ENGINE) as started:
        yield started


@pytest.mark.parametrize("case", CELLS)
def test_an_engine_that_runs_each_micro_batch_alone_passes(runner: Runner, case: str) -> None:
    check_cell(runner, case, Verdict.PASS)


def test_data_coordinates_have_other_sizes_in_one_batch() -> None:
    assert begin_with(1) == (UNEQUAL[1], UNEQUAL[2], UNEQUAL[0])
    whole = [Batch(torch.arange(SAMPLES), torch.arange(SAMPLES)) for _ in UNEQUAL[0]]
    for coordinate, sizes in enumerate(begin_with(1)):
        batches = cut_batches(whole, begin_with(1), coordinate)
        assert tuple(len(batch.inputs) for batch in batches) == sizes
        assert all(batch.target.equal(torch.arange(len(batch.inputs))) for batch in batches)
    assert len(cut_batches(whole, EQUAL, 3)[0].inputs) == SAMPLES


def test_each_variant_has_sizes_that_grow_and_that_shrink() -> None:
    for batches in BATCHES.values():
        sizes = [own for batch in batches.sizes for own in batch[0]]
        steps = {after > before for before, after in pairwise(sizes) if after != before}
        assert steps == {True, False}
