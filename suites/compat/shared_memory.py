"""Tests of DeepSpeed's shared-memory operator on ranks, as the source of a test file, and what they need."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from zharness.engines.deepspeed_operators import SHM_OPERATOR, SHM_VARIABLE

SOURCE = """
import deepspeed.comm as ds
from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(operator.name())
        return operator(*args, **(kwargs or {}))


class TestSharedMemory(DistributedTest):
    @pytest.mark.parametrize("turn", [0, 1])
    def test_it(self, turn):
        value = torch.full((8,), float(dist.get_rank() + 1))
        with Operators() as operators:
            ds.inference_all_reduce(value)
        assert operators.names == ["deepspeed::inference_all_reduce_"]
        assert value.eq(3).all()


class TestReused(TestSharedMemory):
    reuse_dist_env = True
"""


def find_missing_needs() -> Iterator[str]:
    """Yield what the operator needs and this machine lacks; without AVX2 DeepSpeed's inference_all_reduce avoids it."""
    if importlib.util.find_spec("deepspeed") is None:
        yield "DeepSpeed"
    yield from (program for program in ("c++", "ninja") if shutil.which(program) is None)
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        yield "a CPU with AVX2"


def leave_lock_of_killed_build(built: Path) -> Path:
    """Make the lock file that a killed build leaves in torch's folder ``built`` of operators, and return its path."""
    lock = built / SHM_OPERATOR / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    return lock


def build_variables(built: Path) -> dict[str, str]:
    """Return the environment variables that switch the operator on, with ``built`` as torch's folder of operators."""
    return {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(built), SHM_VARIABLE: "1"}
