"""The adapter awaits each all-gather on releases of DeepSpeed that await the last one only. DeepSpeed is not used."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from zharness.engines.deepspeed_gathers import await_all_gathers, gather_one_by_one
from zharness.engines.deepspeed_process import import_deepspeed

MODULE = "deepspeed.runtime.zero.partition_parameters"


class Init:
    """Stage 3 of a release with the bug: of the all-gathers of a call, the last is complete when it returns."""

    def _allgather_params_coalesced(self, params: list[SimpleNamespace], hierarchy: int = 0) -> None:
        params[-1].gathered_by = hierarchy


def list_gathered(init: Any, count: int = 3) -> list[int | None]:
    params = [SimpleNamespace(gathered_by=None) for _ in range(count)]
    init._allgather_params_coalesced(params, hierarchy=7)
    return [param.gathered_by for param in params]


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> type[Init]:
    fresh = type("Init", (), {"_allgather_params_coalesced": Init._allgather_params_coalesced})
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(Init=fresh))
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return fresh  # type: ignore[return-value]


def test_every_parameter_is_gathered_when_the_call_returns(release: type[Init]) -> None:
    assert list_gathered(release()) == [None, None, 7]
    await_all_gathers("0.19.5")
    assert list_gathered(release()) == [7, 7, 7]


def test_deepspeeds_own_tests_run_on_the_release_as_it_is(release: type[Init], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(sys.modules["deepspeed"], "__version__", "0.19.5", raising=False)
    for name in ("deepspeed.comm", "deepspeed.comm.torch"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(build_shm_op=None))
    import_deepspeed("cpu")
    assert list_gathered(release()) == [None, None, 7]


def test_a_list_without_parameters_starts_nothing(release: type[Init]) -> None:
    await_all_gathers("0.19.7")
    release()._allgather_params_coalesced([])


def test_a_second_import_changes_nothing(release: type[Init]) -> None:
    await_all_gathers("0.16.4")
    changed = release._allgather_params_coalesced
    await_all_gathers("0.16.4")
    assert release._allgather_params_coalesced is changed


@pytest.mark.parametrize("version", ["0.19.8", "0.19.9+1a2b3c4d5e6f"])
def test_a_release_that_awaits_each_of_them_is_left_as_it_is(release: type[Init], version: str) -> None:
    await_all_gathers(version)
    assert release._allgather_params_coalesced is Init._allgather_params_coalesced


def test_the_method_keeps_its_name() -> None:
    assert gather_one_by_one(Init._allgather_params_coalesced).__name__ == "_allgather_params_coalesced"
