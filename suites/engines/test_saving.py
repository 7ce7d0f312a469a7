"""Checkpoints of torch's own engines: other world sizes, interrupted saves and failed loads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # torch.optim imports it at first use, a second that every rank would spend after its fork
import torch.distributed.fsdp
from torch import Tensor, nn

from zharness.engines import ddp, fsdp2, torch_checkpoint, zero1
from zharness.engines.protocol import EngineConfig, OptimizerSpec
from zharness.errors import CheckpointError
from zharness.world import GroupMode, run

WORLD_SIZE = 2
ADAPTERS = {"ddp": ddp, "zero1": zero1, "fsdp2": fsdp2}
engines = pytest.mark.parametrize(("name", "stage"), [("ddp", 0), ("zero1", 1), ("fsdp2", 2)])


def build(name: str, stage: int) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = EngineConfig(stage=stage, optimizer=OptimizerSpec("adamw", {"lr": 0.5}))
    return ADAPTERS[name].factory(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), config)


def train_step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    engine.zero_grad()


def collect_state(engine: Any) -> dict[str, Tensor]:
    moments = engine.full_optimizer_state()
    flat = {f"{name}/{key}": value for name, entry in moments.items() for key, value in entry.items()}
    return {**engine.full_params(), **flat}


def equal_tensors(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return got.keys() == expected.keys() and all(torch.equal(value, expected[key]) for key, value in got.items())


def run_on_ranks(function: Callable[..., Any], *args: Any, ranks: int = WORLD_SIZE) -> list[Any]:
    return run(function, *args, world_size=ranks, timeout=30, group=GroupMode.DEFAULT)


def save_and_step(name: str, stage: int, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the saved state, and the state after one more step on the same inputs on every rank."""
    engine = build(name, stage)
    train_step(engine)
    engine.save(folder)
    kept = collect_state(engine)
    train_step(engine)
    return kept, collect_state(engine)


def load_and_step(name: str, stage: int, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = build(name, stage)
    engine.load(folder)
    found = collect_state(engine)
    train_step(engine)
    return found, collect_state(engine)


@pytest.mark.parametrize(("name", "stage", "then"), [("ddp", 0, 0), ("zero1", 1, 1), ("fsdp2", 2, 3)])
def test_a_checkpoint_loads_at_larger_and_smaller_world_sizes(name: str, stage: int, then: int, tmp_path: Path) -> None:
    expected = run_on_ranks(save_and_step, name, stage, tmp_path / "kept")[0]
    for ranks in (1, 4):
        for found in run_on_ranks(load_and_step, name, then, tmp_path / "kept", ranks=ranks):
            # All ranks have the same gradient, so its mean over 1, 2 or 4 ranks is exact.
            assert [equal_tensors(*pair) for pair in zip(found, expected, strict=True)] == [True, True]


def failing_replace(source: Any, target: Any, rename: Callable[[Any, Any], None] = os.replace) -> None:
    """``os.replace`` that fails when it would give a new checkpoint its name."""
    if Path(target).name in (torch_checkpoint.FILE_NAME, torch_checkpoint.FOLDER_NAME):
        raise OSError("the disk is gone")
    rename(source, target)


def interrupt_save(name: str, stage: int, folder: Path) -> tuple[str, bool]:
    engine = build(name, stage)
    train_step(engine)
    engine.save(folder)
    kept = collect_state(engine)
    train_step(engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", failing_replace)
        with pytest.raises(CheckpointError) as caught:
            engine.save(folder)
    engine.load(folder)
    return str(caught.value), equal_tensors(collect_state(engine), kept)


@engines
def test_an_interrupted_save_raises_on_every_rank_and_keeps_the_previous_checkpoint(
    name: str, stage: int, tmp_path: Path
) -> None:
    for message, restored in run_on_ranks(interrupt_save, name, stage, tmp_path / "kept"):
        assert "the disk is gone" in message
        assert restored


def save_below_file(name: str, stage: int, file: Path) -> str:
    engine = build(name, stage)
    with pytest.raises(CheckpointError) as caught:
        engine.save(file / "below")
    return str(caught.value)


@engines
def test_saving_below_a_file_raises_on_every_rank(name: str, stage: int, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for message in run_on_ranks(save_below_file, name, stage, tmp_path / "file"):
        assert "file" in message


def fail_load(name: str, stage: int, folder: Path, damage: Callable[[Path], None]) -> bool:
    engine = build(name, stage)
    train_step(engine)
    engine.save(folder)
    train_step(engine)
    kept = collect_state(engine)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        damage(folder)
    torch.distributed.barrier()
    with pytest.raises(CheckpointError):
        engine.load(folder)
    return equal_tensors(collect_state(engine), kept)


def truncate_checkpoint(folder: Path) -> None:
    """Truncate rank 1's file, so that rank 0 can still read its own; or the single file."""
    shards = sorted(folder.glob(f"{torch_checkpoint.FOLDER_NAME}/__1_*"))
    file = shards[0] if shards else folder / torch_checkpoint.FILE_NAME
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def reshape_second_weight(folder: Path) -> None:
    """Change the shape of the second weight; the first one still fits."""
    content = torch.load(folder / torch_checkpoint.FILE_NAME, weights_only=True)
    content["model"]["1.weight"] = content["model"]["1.weight"][:2]
    torch.save(content, folder / torch_checkpoint.FILE_NAME)


@pytest.mark.parametrize(
    ("name", "stage", "damage"),
    [("ddp", 0, reshape_second_weight), ("zero1", 1, truncate_checkpoint), ("fsdp2", 2, truncate_checkpoint)],
)
def test_a_failed_load_changes_nothing_on_any_rank(
    name: str, stage: int, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    assert run_on_ranks(fail_load, name, stage, tmp_path / "kept", damage) == [True] * WORLD_SIZE
