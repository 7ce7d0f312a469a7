"""Detecting from torchrun's environment variables whether this process is one of its ranks."""

from __future__ import annotations

import os

import pytest

from zharness.errors import UsageError
from zharness.world.launch import Launch, detect_launch

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "far.example",
    "MASTER_PORT": "29500",
}


def test_a_process_that_torchrun_started_is_the_rank_that_its_variables_name() -> None:
    launch = detect_launch(dict(TORCHRUN))
    assert launch == Launch(5, 8, 1, 4, "far.example", 29500, restart_count=1, uses_agent_store=True)
    assert launch.describe() == "8 ranks that torchrun started by 2 agents"


def test_a_process_with_rank_but_without_torchrun_s_run_id_is_not_launched() -> None:
    assert detect_launch({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}) is None


def test_children_of_a_launched_rank_are_not_that_rank() -> None:
    environment = dict(TORCHRUN)
    assert detect_launch(environment) is not None
    assert detect_launch(environment) is not None
    below = {name: value.replace(f" {os.getpid()}", " 1") for name, value in environment.items()}
    assert detect_launch(below) is None


def test_a_launch_inside_of_a_launch_is_detected() -> None:
    environment = dict(TORCHRUN)
    assert detect_launch(environment) is not None
    inner = {**environment, "MASTER_PORT": "29501", "ZHARNESS_ATTACHED": "none@far.example:29500 by 1"}
    assert detect_launch(inner) is not None


def test_wrong_and_missing_variables_are_named() -> None:
    with pytest.raises(UsageError, match="WORLD_SIZE='many', LOCAL_RANK=None"):
        detect_launch(
            {name: value for name, value in TORCHRUN.items() if name != "LOCAL_RANK"} | {"WORLD_SIZE": "many"}
        )
