"""Check a pipeline engine by the path of its factory, which cannot be built without a mesh to ask for its claims."""

from __future__ import annotations

import os
import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from suites.warm import programs
from zharness.errors import UnknownStage, UsageError
from zharness.run.plan import first_buildable_claims

ROOT = Path(__file__).parents[2]
UNDECLARED = """
from zharness.engines import torch_pp

def factory(model, config):
    return torch_pp.factory(model, config)
"""

UNSCHEDULED = """
from dataclasses import replace

from zharness.engines import torch_pp
from zharness.engines.protocol import Feature
from zharness.errors import ConfigError

def factory(model, config):
    if len(config.optimizer.schedule) > 1:
        raise ConfigError("a learning-rate schedule")
    return torch_pp.factory(model, config)

claims = torch_pp.CAPABILITIES
factory.capabilities = replace(claims, refuses={**claims.refuses, Feature.SCHEDULE: "it has no schedule"})
"""


def check(folder: Path, *arguments: str) -> CompletedProcess[str]:
    """Run ``zharness check`` in ``folder``, from which a factory is imported."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = ("--mesh", "pp2", "--depth", "1", "--model", "chain")
    return programs.run("-m", "zharness", "check", *arguments, *options, folder=folder, environment=environment)


def test_the_documentation_s_pipeline_is_checked_with_the_failures_of_the_engine_that_it_calls(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "your-engine.md").read_text(encoding="utf-8")
    for name in ("my_pipeline.py", "expected.toml"):
        block = re.search(rf"```\w+\n(# {name}\n.*?)```", page, re.DOTALL)
        assert block is not None, name
        (tmp_path / name).write_text(block[1], encoding="utf-8")
    arguments = ("pipeline.windows", "--engine", "my_pipeline:factory")
    done = check(tmp_path, *arguments, "--expected-failures", "expected.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 excused, 3 pass" in done.stdout
    alone = check(tmp_path, *arguments)
    assert alone.returncode == 1, alone.stdout + alone.stderr
    assert "1 fail, 3 pass" in alone.stdout


def test_the_message_says_why_a_factory_without_capabilities_could_not_be_built(tmp_path: Path) -> None:
    (tmp_path / "undeclared.py").write_text(UNDECLARED, encoding="utf-8")
    done = check(tmp_path, "pipeline.windows", "--engine", "undeclared:factory")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "got a mesh without the axis pp; expected one such as pp2" in done.stderr
    assert "its attribute 'capabilities'" in done.stderr
    assert "unknown stage" not in done.stderr


def test_checkpoints_of_an_engine_without_a_learning_rate_schedule_are_checked(tmp_path: Path) -> None:
    (tmp_path / "unscheduled.py").write_text(UNSCHEDULED, encoding="utf-8")
    (tmp_path / "expected.toml").write_text('engine = "unscheduled:factory"\naround = "torch_pp"\n', encoding="utf-8")
    arguments = ("pipeline.resume", "--engine", "unscheduled:factory", "--expected-failures", "expected.toml")
    done = check(tmp_path, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 cells" in done.stdout
    assert "1 excused, 5 pass" in done.stdout


def test_the_reason_is_the_first_that_is_not_about_a_stage() -> None:
    errors = (UnknownStage("no 0"), UnknownStage("no 1"), UsageError("no disk"), UsageError("no network"))

    def refuse(_engine: str, stage: int) -> None:
        raise errors[stage]

    with pytest.raises(UsageError, match="no disk"):
        first_buildable_claims("mine:engine", (0, 1, 2, 3), refuse)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no 0"):
        first_buildable_claims("mine:engine", (0, 1), refuse)  # type: ignore[arg-type]
