"""Replaced functions of torch, different settings, and memory shared with the baseline are detected."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

from zharness.errors import HarnessFault, UsageError
from zharness.laws.resources.leaks import get_storage
from zharness.parity.contamination import read_process_conditions, require_clean_torch, require_no_shared_memory


def test_torch_as_released_is_clean() -> None:
    here = read_process_conditions()
    assert here.replacements == ()
    assert here.describe_differences(here) == []
    require_clean_torch(here)


class Kernel:
    """A callable that is not a function."""

    def __call__(self, *args):
        return args[0]


def wrapped(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    ("owner", "name", "where"),
    [
        (nn.functional, "linear", "torch.nn.functional.linear"),
        (nn.functional, "gelu", "torch.nn.functional.gelu"),
        (torch, "matmul", "torch.matmul"),
        (torch.Tensor, "sum", "torch.Tensor.sum"),
        (nn.Linear, "forward", "torch.nn.Linear.forward"),
        (torch.optim.AdamW, "step", "torch.optim.AdamW.step"),
    ],
)
@pytest.mark.parametrize("replacement", [lambda right: lambda *args: args, wrapped, lambda right: Kernel()])
def test_a_replaced_function_is_noticed_and_the_baseline_refused(
    monkeypatch: pytest.MonkeyPatch, owner, name: str, where: str, replacement
) -> None:
    monkeypatch.setattr(owner, name, replacement(getattr(owner, name)), raising=False)
    here = read_process_conditions()
    assert len(here.replacements) == 1
    assert here.replacements[0].startswith(f"{where} is replaced by ")
    with pytest.raises(HarnessFault, match=f"the baseline cannot run here: {where} is replaced by"):
        require_clean_torch(here)


def test_settings_that_change_numbers_are_told_beside_the_baseline_s() -> None:
    before, right = read_process_conditions(), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        message = read_process_conditions().describe_differences(before)
    finally:
        torch.set_float32_matmul_precision(right)
    assert message == [
        "the precision of float32 products is medium in the engine's process and highest in the baseline's"
    ]


def test_a_baseline_in_the_engine_s_memory_is_refused() -> None:
    engine = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    require_no_shared_memory(engine, copy.deepcopy(engine))
    tied = copy.deepcopy(engine)
    tied[0].weight = engine[0].weight
    with pytest.raises(UsageError, match=r"the baseline's 0.weight shares memory with the engine's 0.weight"):
        require_no_shared_memory(engine, tied)
    viewed = copy.deepcopy(engine)
    viewed[1].running_mean = engine[1].running_mean[:]
    with pytest.raises(UsageError, match=r"1.running_mean shares memory"):
        require_no_shared_memory(engine, viewed)


def test_modules_without_memory_are_apart() -> None:
    with torch.device("meta"):
        require_no_shared_memory(nn.Linear(2, 2), nn.Linear(2, 2))
    engine = nn.Linear(2, 2)
    engine.weight.untyped_storage().resize_(0)
    require_no_shared_memory(engine, copy.deepcopy(nn.Linear(2, 2)))


def test_what_a_process_holds_is_counted_whatever_kinds_of_tensor_another_cell_left_in_it() -> None:
    held = torch.ones(3)
    assert get_storage(held) == (held.data_ptr(), 12)
    assert get_storage(torch.ones(2, 2).to_sparse()) is None
