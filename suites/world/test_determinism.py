"""Operators without a deterministic algorithm are named. On a CPU torch has one such operator, put_."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from zharness.device.determinism import collect_nondeterministic_operators, use_deterministic_algorithms
from zharness.parity.contamination import ProcessConditions
from zharness.parity.snapshot import open_evidence_writer, read_evidence


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Use deterministic algorithms as ranks on a GPU do."""
    settings: Any = torch.utils.deterministic
    mode, fill = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    use_deterministic_algorithms()
    yield
    torch.set_deterministic_debug_mode(mode)
    settings.fill_uninitialized_memory = fill


def put() -> None:
    torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))


@pytest.mark.usefixtures("deterministic")
def test_an_operator_without_a_deterministic_algorithm_is_named_once_in_each_block() -> None:
    for _ in range(2):
        with collect_nondeterministic_operators() as operators:
            put()
            put()
            torch.ones(3).sum()
        assert operators == ["put_"]


@pytest.mark.usefixtures("deterministic")
def test_other_warnings_are_shown_and_nothing_is_named_without_the_mode() -> None:
    with pytest.warns(UserWarning, match="of the engine"), collect_nondeterministic_operators() as operators:
        warnings.warn("of the engine", UserWarning, stacklevel=1)
    assert operators == []
    torch.set_deterministic_debug_mode("default")
    with collect_nondeterministic_operators() as operators:
        put()
    assert operators == []


def test_the_evidence_of_a_rank_names_its_operators_in_a_note(tmp_path) -> None:
    open_evidence_writer(tmp_path, 0).finish({}, ProcessConditions({}, (), ("put_", "cumsum_cuda_kernel")))
    [note] = read_evidence(tmp_path, 0).conditions.describe_differences(ProcessConditions({}, ()))
    assert note == "in the engine's process, torch has no deterministic algorithm for put_, cumsum_cuda_kernel"
