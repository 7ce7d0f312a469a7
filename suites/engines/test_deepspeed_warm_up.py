"""A rank server that has warmed up for DeepSpeed leaves its ranks almost nothing to import."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from torch import nn

from zharness.engines.deepspeed import CAPABILITIES
from zharness.engines.protocol import EngineConfig
from zharness.engines.registry import get
from zharness.engines.warm_up import build_warm_up_environment
from zharness.world import RankServer

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

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


def test_ranks_of_a_warm_server_import_few_modules() -> None:
    with RankServer(build_warm_up_environment("deepspeed")) as server:
        (imported,) = server.run(train_a_step_at_every_stage).values()
    assert len(imported) <= MOST_MODULES, imported
