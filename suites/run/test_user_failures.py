"""Files of expected failures whose engine is built around another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from suites.run.failure_files import ENTRY, load_entries
from zharness.cell import Cell
from zharness.errors import UsageError
from zharness.run.matching_failures import find_expected_failure


def test_an_engine_by_path_has_the_failures_of_the_engine_around_which_it_is_built(tmp_path: Path) -> None:
    entries = load_entries(tmp_path, 'engine = "mine:engine"\naround = "torch_pp"\n' + ENTRY)
    cell = Cell.parse("pipeline.windows[mine:engine-zero0-w2.pp2-fp32-chain-accumulated]")
    found = find_expected_failure(cell, "(no release)", entries)
    assert entries[0].upstream == "ours#1"
    assert found is not None
    assert found.location.startswith("zharness/expected_failures/torch_pp.toml")
    assert not any(entry.engine_variants for entry in entries)
    assert find_expected_failure(cell, "(no release)", entries[:1]) is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('engine = "mine:engine"\naround = "torch_pipe"', "did you mean 'torch_pp'"),
        ('around = "torch_pp"', "expected the path of a factory"),
        ('engine = "ddp"\naround = "torch_pp"', "expected the path of a factory"),
    ],
)
def test_a_wrong_engine_around_which_another_is_built_is_refused(tmp_path: Path, keys: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_entries(tmp_path, keys + "\n")
