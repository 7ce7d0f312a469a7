"""What DeepSpeed leaves in a process, and when it is undone; without DeepSpeed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from zharness.engines import deepspeed_process
from zharness.engines.deepspeed_process import Leftovers


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["the first built is closed first", "and last"])
def test_the_linear_of_stage_3_stays_until_the_last_engine_is_closed(
    order: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = SimpleNamespace(TORCH_AUTOCAST_INITIALIZED=False, TORCH_AUTOCAST_DTYPE=None)
    monkeypatch.setattr(deepspeed_process, "importlib", SimpleNamespace(import_module=lambda _name: flags))
    own = torch.nn.functional.linear

    def replaced() -> None: ...

    replaced.__module__ = "deepspeed.runtime.zero.linear"
    engines = [Leftovers()]
    monkeypatch.setattr(torch.nn.functional, "linear", replaced)
    engines.append(Leftovers())
    engines[order[0]].undo()
    assert torch.nn.functional.linear is replaced, "an engine lives on, with the kernels that it began with"
    engines[order[1]].undo()
    assert torch.nn.functional.linear is own
