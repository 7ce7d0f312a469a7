"""The heat map below a failure: its size, its levels, and the edges of shards."""

from __future__ import annotations

import math

import pytest
import torch

from zharness.cell import Cell
from zharness.parity.mismatch_report import MismatchReport, build_heat_map
from zharness.report.failures import render_failures
from zharness.report.heat_map import RATIO_CHARACTERS, render_heat_map
from zharness.run import Record, Verdict


def evidence(ratio: torch.Tensor, ranks: int = 2) -> MismatchReport:
    """Return evidence with these ratios, of a parameter in ``ranks`` shards of one size."""
    each = math.ceil(ratio.numel() / ranks)
    starts = enumerate(range(0, ratio.numel(), each))
    return {
        "parameter": "first.weight",
        "part": "reduction",
        "step": 0,
        "shape": list(ratio.shape),
        "heat": build_heat_map(ratio.double()),
        "shards": [{"rank": rank, "start": at, "stop": min(at + each, ratio.numel())} for rank, at in starts],
        "ulps": None,
        "layers": None,
        "curves": {},
    }


def test_a_wrong_shard_is_shown_on_the_lines_of_its_rank() -> None:
    ratio = torch.zeros(16, 12)
    ratio[8:] = 560.0
    assert render_heat_map(evidence(ratio)) == [
        "error / bound of first.weight (16 x 12), 4 x 1 elements per character:",
        "  rank 0 |            |",
        "  rank 0 |            |",
        "  rank 1 |============|",
        "  rank 1 |============|",
        "  . within the bound, : up to 10 x, then -=+*#%@ 10 x each",
    ]


def test_every_level_has_its_character_and_a_bar_separates_the_shards_of_a_row() -> None:
    levels = [0.0, 0.5, 2.0, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, math.inf]
    line = render_heat_map(evidence(torch.tensor(levels)))[1]
    assert line == f"  rank 0-1 |{RATIO_CHARACTERS[:5]}|{RATIO_CHARACTERS[5:]}|"


@pytest.mark.parametrize("shape", [(2,), (100_003,), (3, 5), (999, 7), (64, 3, 5, 5), (1, 4096)])
@pytest.mark.parametrize("ranks", [1, 2, 256])
def test_a_map_has_at_most_eight_lines_of_sixty_columns(shape: tuple[int, ...], ranks: int) -> None:
    lines = render_heat_map(evidence(torch.full(shape, 2.0), ranks))
    assert 3 <= len(lines) <= 8
    assert max(map(len, lines[1:])) <= 60


def test_there_is_no_map_for_a_single_number_or_without_evidence() -> None:
    assert render_heat_map(evidence(torch.tensor(2.0))) == []
    assert render_heat_map(evidence(torch.tensor([2.0]))) == []
    assert render_heat_map(None) == []


def test_the_map_is_printed_below_the_cause() -> None:
    cell = Cell("training.grads", "reference", 3, 2, "fp32", "mlp")
    failed = Record(cell, 0, Verdict.FAIL, "1.0", "2.13.0", cause="wrong", evidence=evidence(torch.full((4, 4), 2.0)))
    lines = render_failures([failed]).splitlines()
    assert lines[1:3] == ["  wrong", "  error / bound of first.weight (4 x 4), 1 x 1 elements per character:"]
    assert "::::" in lines[3]
    assert lines[-1].startswith("  again: ")
