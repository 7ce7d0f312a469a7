"""DeepSpeedGlobalState restores what DeepSpeed changes in a process. DeepSpeed itself is not used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch

from zharness.engines import deepspeed_process
from zharness.engines.deepspeed_process import DeepSpeedGlobalState, name_last_place

OFF = (False, None)
ON = (True, torch.bfloat16)


class Process:
    """The global state of a process: DeepSpeed's autocast flags, off at first, and torch's linear."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._module = SimpleNamespace(TORCH_AUTOCAST_INITIALIZED=False, TORCH_AUTOCAST_DTYPE=None)
        monkeypatch.setattr(deepspeed_process, "import_autocast_module", lambda: self._module)
        monkeypatch.setattr(DeepSpeedGlobalState, "_open_engines", WeakSet())
        monkeypatch.setattr(DeepSpeedGlobalState, "_originals", None)
        self.original_linear = torch.nn.functional.linear
        monkeypatch.setattr(torch.nn.functional, "linear", self.original_linear)  # restored after the test

    @property
    def linear(self) -> Callable[..., Any]:
        return torch.nn.functional.linear

    @property
    def flags(self) -> tuple[bool, torch.dtype | None]:
        return self._module.TORCH_AUTOCAST_INITIALIZED, self._module.TORCH_AUTOCAST_DTYPE

    def build(self, autocast: bool = True) -> DeepSpeedGlobalState:
        """Change the state as an engine at stage 3 does, with or without torch_autocast."""
        engine = DeepSpeedGlobalState(autocast)
        if autocast:
            self._module.TORCH_AUTOCAST_INITIALIZED, self._module.TORCH_AUTOCAST_DTYPE = ON
        torch.nn.functional.linear = replaced
        return engine


def replaced() -> None: ...


def fail() -> None:
    raise AssertionError


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first built, first closed", "first built, last closed"])
def test_changed_state_stays_until_the_last_engine_is_closed(process: Process, order: tuple[int, int]) -> None:
    engines = [process.build(), process.build()]
    engines[order[0]].restore()
    assert process.linear is replaced, "the open engine keeps the kernels that it was built with"
    assert process.flags == ON, "the open engine keeps communicating as before"
    engines[order[1]].restore()
    assert process.linear is process.original_linear
    assert process.flags == OFF


def test_closing_an_engine_restores_the_state_before_one_that_was_never_closed(process: Process) -> None:
    process.build()  # garbage-collected at once
    process.build().restore()
    assert process.linear is process.original_linear
    assert process.flags == OFF


@pytest.mark.parametrize("first", [True, False], ids=["built first", "built last"])
def test_autocast_is_restored_with_the_last_engine_that_uses_it(process: Process, first: bool) -> None:
    older, newer = process.build(first), process.build(not first)
    with_autocast, without = (older, newer) if first else (newer, older)
    with_autocast.restore()
    assert process.flags == OFF, "the open engine does not use autocast"
    assert process.linear is replaced
    without.restore()
    assert process.linear is process.original_linear


def test_closing_an_engine_twice_leaves_the_state_of_a_later_engine(process: Process) -> None:
    first = process.build()
    first.restore()
    second = process.build()
    first.restore()
    assert process.flags == ON
    second.restore()
    assert process.flags == OFF


def test_a_release_without_torch_autocast_has_no_flags_to_restore(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed_process, "import_autocast_module", lambda: None)
    process.build(autocast=False).restore()
    assert process.linear is process.original_linear


def test_the_group_of_hpz_is_destroyed_with_the_last_engine(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    group, destroyed = object(), []
    groups = SimpleNamespace(**{deepspeed_process._HPZ_GROUP: group, deepspeed_process._GRID: None})
    monkeypatch.setitem(sys.modules, "deepspeed.utils.groups", groups)
    monkeypatch.setattr(deepspeed_process.dist, "destroy_process_group", destroyed.append)
    engines = [process.build(), process.build()]
    engines[0].restore()
    assert not destroyed, "the open engine may use the group"
    engines[1].restore()
    assert destroyed == [group]
    assert groups == SimpleNamespace(**{deepspeed_process._HPZ_GROUP: None, deepspeed_process._GRID: None}), (
        "DeepSpeed would hand the destroyed group to an engine"
    )


def test_an_assertion_without_a_message_is_named_by_its_last_place_in_deepspeed() -> None:
    engine: dict[str, Any] = {"__name__": "deepspeed.runtime.zero.utils", "fail": fail}
    source = "def defragment():\n    fail()\n"
    exec(compile(source, "/site-packages/deepspeed/runtime/zero/utils.py", "exec"), engine)  # noqa: S102
    with pytest.raises(AssertionError) as raised:
        engine["defragment"]()
    assert name_last_place(raised.value) == " at deepspeed/runtime/zero/utils.py:2 in defragment"
    with pytest.raises(AssertionError) as elsewhere:
        fail()
    assert name_last_place(elsewhere.value) == ""
