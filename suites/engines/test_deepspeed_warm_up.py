"""A rank server that has warmed up for DeepSpeed leaves its ranks almost nothing to import and no operator to load."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from zharness.engines.deepspeed import CAPABILITIES
from zharness.engines.deepspeed_operators import import_library, is_up_to_date, load_built_adam
from zharness.engines.protocol import EngineConfig
from zharness.engines.registry import get
from zharness.engines.warm_up import build_warm_up_environment
from zharness.world import RankServer

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

OPERATOR = "fused_adam"
MOST_MODULES = 100  # small ones of DeepSpeed; without the warm-up a rank imports about 1400


def train_a_step_at_every_stage() -> list[str]:
    """Return the names of the modules that this rank has imported meanwhile."""
    before = set(sys.modules)
    for stage in sorted(CAPABILITIES.stages):
        engine = get("deepspeed")(nn.Linear(2, 1), EngineConfig(stage=stage))
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        engine.close()
    return sorted(sys.modules.keys() - before)


@needs_deepspeed
def test_ranks_of_a_warm_server_import_few_modules() -> None:
    with RankServer(build_warm_up_environment("deepspeed")) as server:
        (imported,) = server.run(train_a_step_at_every_stage).values()
    assert len(imported) <= MOST_MODULES, imported


@pytest.mark.parametrize(
    ("files", "times"),
    [
        ({}, 0),
        ({"build.ninja": "build adam.o: compile /here/deepspeed/ops/adam.cpp"}, 0),
        ({"build.ninja": "build adam.o: compile /elsewhere/deepspeed/ops/adam.cpp", f"{OPERATOR}.so": ""}, 0),
        ({"build.ninja": "build adam.o: compile /here/deepspeed/ops/adam.cpp", f"{OPERATOR}.so": ""}, 1),
    ],
    ids=["never built", "build was killed", "built from other sources", "built"],
)
def test_an_operator_is_loaded_only_if_it_is_built_from_these_sources(
    files: dict[str, str], times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / OPERATOR).mkdir()
    for name, text in files.items():
        (tmp_path / OPERATOR / name).write_text(text)
    loads: list[str] = []
    builder = SimpleNamespace(load=lambda: loads.append(OPERATOR))
    accelerator = SimpleNamespace(create_op_builder=lambda name: builder)
    deepspeed = SimpleNamespace(
        __file__="/here/deepspeed/__init__.py", accelerator=SimpleNamespace(get_accelerator=lambda: accelerator)
    )
    load_built_adam(deepspeed)
    assert len(loads) == times


@pytest.mark.parametrize(
    ("capability", "option", "age", "expected"),
    [
        ("AVX2", "-D__AVX256__", 1, True),
        ("AVX2", "-D__AVX256__", -1, False),
        ("AVX2", "-D__AVX512__", 1, False),
        ("DEFAULT", "-D__SCALAR__", 1, False),
    ],
    ids=["built for this CPU", "older than a source", "built for another CPU", "unknown CPU"],
)
def test_an_operator_is_imported_without_a_build_only_if_nothing_has_changed(
    capability: str, option: str, age: int, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    source = tmp_path / "ops" / "csrc" / "adam.cpp"
    source.parent.mkdir(parents=True)
    library = tmp_path / f"{OPERATOR}.so"
    library.touch()
    source.touch()
    built = source.stat().st_mtime + age
    os.utime(library, (built, built))
    assert is_up_to_date(library, f"cflags = -O3 {option} -fPIC", tmp_path) is expected


def test_a_library_that_is_no_module_of_this_python_raises(tmp_path: Path) -> None:
    library = tmp_path / f"{OPERATOR}.so"
    library.touch()
    with pytest.raises(ImportError):
        import_library(library)
