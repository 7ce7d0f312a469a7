"""The overhead of a backward: the number of Python calls grows linearly with the number of parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
import torch._dynamo  # imported once here: torch.optim imports it at the first step, a second in each rank
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zharness.reference import initialize
from zharness.reference.inspection.memory import UnshardedMemoryTracker

PACKAGE = "zharness/reference"


class Scales(nn.Module):
    """A model of ``count`` parameters, each in a layer of its own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.LayerNorm(1, bias=False) for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Checkpointed(Scales):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def count_backward_calls(stage: int, net: Callable[[int], nn.Module], count: int) -> int:
    """Count the calls of the engine's functions in the second backward over ``count`` parameters."""
    optimizer = {"type": "SGD", "params": {"lr": 0.5}}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    engine, *_ = initialize(model=net(count), config={**config, "optimizer": optimizer})
    calls = 0

    def counting(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call" and PACKAGE in frame.f_code.co_filename

    for profile in (None, counting):
        loss = engine(torch.ones(1, 1)).sum()
        sys.setprofile(profile)
        try:
            loss.backward()
        finally:
            sys.setprofile(None)
        engine.step()
    return calls


@pytest.mark.parametrize(("stage", "net"), [(0, Scales), (1, Scales), (2, Scales), (3, Scales), (3, Checkpointed)])
@pytest.mark.world_size(2)
def test_the_calls_of_a_backward_grow_linearly_with_the_parameters(stage: int, net: Callable[[int], nn.Module]) -> None:
    few, some, many = (count_backward_calls(stage, net, count) for count in (10, 30, 50))
    assert many - some == some - few


@contextmanager
def record_calls(calls: list[str]) -> Iterator[None]:
    """Append the names of all functions that are called inside the block to ``calls``."""

    def count(frame: FrameType, event: str, _argument: object) -> None:
        if event in ("call", "c_call"):
            calls.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_tracking_a_tensor_examines_the_others_only_if_the_peak_may_rise() -> None:
    tracker, costs = UnshardedMemoryTracker(), []
    for _ in range(2):
        alive = []
        for _ in range(50):
            alive.append(torch.ones(3))
            calls: list[str] = []
            with record_calls(calls):
                tracker.add(alive[-1])
            costs.append(len(calls))
        view = alive.pop().view(3, 1)
        alive.clear()
        assert tracker.live_bytes() == view.nbytes
        del view
        assert (tracker.live_bytes(), tracker.peak) == (0, 50 * 12)
    assert set(costs[51:]) == {costs[51]}
