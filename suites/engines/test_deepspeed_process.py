"""What DeepSpeed leaves in a process, and when it is undone; without DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch

from zharness.engines import deepspeed_process
from zharness.engines.deepspeed_process import DeepSpeedGlobalState

OFF = (False, None)
ON = (True, torch.bfloat16)


class Process:
    """A process in which DeepSpeed's autocast is off, and what an engine that is built sets in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._module = SimpleNamespace(TORCH_AUTOCAST_INITIALIZED=False, TORCH_AUTOCAST_DTYPE=None)
        monkeypatch.setattr(deepspeed_process, "importlib", SimpleNamespace(import_module=lambda _name: self._module))
        monkeypatch.setattr(DeepSpeedGlobalState, "_open", WeakSet())
        monkeypatch.setattr(DeepSpeedGlobalState, "_before", None)
        self.own = torch.nn.functional.linear
        monkeypatch.setattr(torch.nn.functional, "linear", self.own)  # put back whatever a test leaves

    @property
    def linear(self) -> Callable[..., Any]:
        return torch.nn.functional.linear

    @property
    def flags(self) -> tuple[bool, torch.dtype | None]:
        return self._module.TORCH_AUTOCAST_INITIALIZED, self._module.TORCH_AUTOCAST_DTYPE

    def build(self, autocast: bool = True) -> DeepSpeedGlobalState:
        """An engine at stage 3, under torch_autocast or not."""
        engine = DeepSpeedGlobalState(autocast)
        if autocast:
            self._module.TORCH_AUTOCAST_INITIALIZED, self._module.TORCH_AUTOCAST_DTYPE = ON
        torch.nn.functional.linear = replaced
        return engine


def replaced() -> None: ...


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["the first built is closed first", "and last"])
def test_what_an_engine_sets_stays_until_the_last_one_is_closed(process: Process, order: tuple[int, int]) -> None:
    engines = [process.build(), process.build()]
    engines[order[0]].restore()
    assert process.linear is replaced, "an engine lives on, with the kernels that it began with"
    assert process.flags == ON, "an engine lives on, and communicates as it has from the start"
    engines[order[1]].restore()
    assert process.linear is process.own
    assert process.flags == OFF


def test_what_was_there_before_an_engine_that_is_never_closed_is_put_back_by_the_next(process: Process) -> None:
    process.build()  # forgotten at once
    process.build().restore()
    assert process.linear is process.own
    assert process.flags == OFF


@pytest.mark.parametrize("first", [True, False], ids=["built first", "built last"])
def test_autocast_ends_with_the_last_engine_that_asks_for_it(process: Process, first: bool) -> None:
    one, other = process.build(first), process.build(not first)
    asking, plain = (one, other) if first else (other, one)
    asking.restore()
    assert process.flags == OFF, "the engine that lives on did not ask for it"
    assert process.linear is replaced
    plain.restore()
    assert process.linear is process.own


def test_an_engine_closed_twice_puts_back_nothing_of_a_later_one(process: Process) -> None:
    first = process.build()
    first.restore()
    second = process.build()
    first.restore()
    assert process.flags == ON
    second.restore()
    assert process.flags == OFF
