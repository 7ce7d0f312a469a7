"""The helper functions that DeepSpeed's test files import: their names and behaviour."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zharness import world
from zharness.compat import deepspeed as compat
from zharness.compat.deepspeed import DistributedTest
from zharness.errors import MissingEngine
from zharness.pytest_ranks.rank_requirements import parse_world_sizes

# Every name that DeepSpeed's test files (0.16 to 0.19) import from unit.common.
IMPORTED = (
    "DEEPSPEED_TEST_TIMEOUT",
    "DistributedExec",
    "DistributedFixture",
    "DistributedTest",
    "EnableDeterminism",
    "allclose_on_all_ranks",
    "enable_determinism",
    "get_master_port",
    "get_start_method_for_platform",
    "get_test_path",
    "get_xdist_worker_id",
    "is_rocm_pytorch",
    "preferred_dtype",
    "reduce_boolean_flags",
    "set_accelerator_visible",
)


def test_every_name_that_deepspeeds_test_files_import_exists() -> None:
    assert sorted(IMPORTED) == sorted(compat.__all__)
    assert all(hasattr(compat, name) for name in IMPORTED)


def test_importing_the_module_does_not_import_deepspeed() -> None:
    code = "import sys, zharness.compat.deepspeed; sys.exit('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_helper_that_needs_deepspeed_raises_missing_engine_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(MissingEngine, match="pip install"):
        compat.preferred_dtype()


def test_the_path_of_a_test_is_found_beside_the_caller_or_above() -> None:
    assert compat.get_test_path(Path(__file__).name) == __file__
    assert compat.get_test_path("pyproject.toml") == str(Path(__file__).parents[2] / "pyproject.toml")
    assert compat.get_test_path("nowhere.json") == str(Path(__file__).parent / "nowhere.json")


def test_ports_are_free_and_of_a_range_for_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    assert compat.get_xdist_worker_id() == 3
    assert 32500 <= int(compat.get_master_port()) < 33500
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    assert compat.get_xdist_worker_id() is None


def test_enable_determinism_restores_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)

    @compat.enable_determinism(5)
    def drawn() -> tuple[float, float]:
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
        return random.random(), torch.rand(1).item()  # noqa: S311 - no secret

    random.seed(1)
    expected = random.random()  # noqa: S311 - no secret
    random.seed(1)
    assert drawn() == drawn()
    assert random.random() == expected  # noqa: S311 - no secret
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def flags_of_two_ranks() -> tuple[bool, bool, str]:
    rank = world.current_rank().rank
    try:
        compat.allclose_on_all_ranks(torch.tensor(float(rank)), torch.tensor(0.0), "not close")
        message = ""
    except AssertionError as error:
        message = str(error)
    return compat.reduce_boolean_flags(rank == 0), compat.reduce_boolean_flags(rank == 0, any), message


def test_ranks_agree_on_flags_and_fail_a_comparison_together() -> None:
    for everyone, someone, message in world.run(flags_of_two_ranks, world_size=2):
        assert (everyone, someone) == (False, True)
        assert "1 of 2 ranks: rank 1: not close" in message


def test_without_a_group_a_comparison_fails_locally() -> None:
    assert compat.reduce_boolean_flags(False) is False
    with pytest.raises(AssertionError, match="not close on all ranks"):
        compat.allclose_on_all_ranks(torch.tensor(1.0), torch.tensor(0.0))


def test_visible_devices_are_rotated_for_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    compat.set_accelerator_visible()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,2,3,0"


def marks(cls: type[DistributedTest]) -> dict[str, pytest.Mark]:
    """Return a class's markers by name as pytest collects them: those of base classes first, so the last one counts."""
    collected = [mark for base in reversed(cls.__mro__) for mark in base.__dict__.get("pytestmark", [])]
    return {mark.name: getattr(mark, "mark", mark) for mark in collected}


def test_attributes_that_a_class_sets_become_its_markers() -> None:
    # Create the classes with type(), so that pytest does not collect them.
    base = type("Base", (DistributedTest,), {"world_size": [2, 4], "reuse_dist_env": True})
    decorated = pytest.mark.world_size(3)(base)
    derived = type("Derived", (decorated,), {"reuse_dist_env": False})
    assert parse_world_sizes(marks(base)["world_size"]) == (3,)
    assert parse_world_sizes(marks(derived)["world_size"]) == (3,)  # a marker of a base is not undone by its attribute
    assert marks(base)["isolation"].args == ("pooled",)
    assert marks(derived)["isolation"].args == ("fresh",)


def test_markers_of_a_class_override_its_attributes() -> None:
    body = {"world_size": 2, "exec_timeout": 9.0, "pytestmark": pytest.mark.rank_timeout(5)}
    found = marks(type("Marked", (DistributedTest,), body))
    assert found["rank_timeout"].args == (5,)
    assert parse_world_sizes(found["world_size"]) == (2,)


def test_an_attribute_of_a_mixin_is_used() -> None:
    mixin = type("Mixin", (), {"world_size": 3})
    assert parse_world_sizes(marks(type("Mixed", (mixin, DistributedTest), {}))["world_size"]) == (3,)
