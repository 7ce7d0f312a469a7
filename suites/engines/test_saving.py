"""What is on disk, and in the engine, after a save or a load of torch's own engines that failed."""

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
from zharness.world import Group, run

WORLD_SIZE = 2
ADAPTERS = {"ddp": ddp, "zero1": zero1, "fsdp2": fsdp2}
engines = pytest.mark.parametrize(("name", "stage"), [("ddp", 0), ("zero1", 1), ("fsdp2", 2)])


def build(name: str, stage: int) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = EngineConfig(stage=stage, optimizer=OptimizerSpec("adamw", {"lr": 0.5}))
    return ADAPTERS[name].factory(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), config)


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    engine.zero_grad()


def state(engine: Any) -> dict[str, Tensor]:
    moments = engine.full_optimizer_state()
    flat = {f"{name}/{key}": value for name, entry in moments.items() for key, value in entry.items()}
    return {**engine.full_params(), **flat}


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return got.keys() == expected.keys() and all(torch.equal(value, expected[key]) for key, value in got.items())


def on_ranks(function: Callable[..., Any], *args: Any, ranks: int = WORLD_SIZE) -> list[Any]:
    return run(function, *args, world_size=ranks, timeout=30, group=Group.DEFAULT)


def saved(name: str, stage: int, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state that was saved, and that after one more step on the same numbers on every rank."""
    engine = build(name, stage)
    step(engine)
    engine.save(folder)
    kept = state(engine)
    step(engine)
    return kept, state(engine)


def loaded(name: str, stage: int, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = build(name, stage)
    engine.load(folder)
    found = state(engine)
    step(engine)
    return found, state(engine)


@pytest.mark.parametrize(("name", "stage", "then"), [("ddp", 0, 0), ("zero1", 1, 1), ("fsdp2", 2, 3)])
def test_what_some_ranks_saved_is_loaded_by_more_and_by_fewer(name: str, stage: int, then: int, tmp_path: Path) -> None:
    expected = on_ranks(saved, name, stage, tmp_path / "kept")[0]
    for ranks in (1, 4):
        for found in on_ranks(loaded, name, then, tmp_path / "kept", ranks=ranks):
            # All ranks have the same gradient, and its mean over a power of two of them is exact.
            assert [same(*pair) for pair in zip(found, expected, strict=True)] == [True, True]


def cut_off(source: Any, target: Any, rename: Callable[[Any, Any], None] = os.replace) -> None:
    """``os.replace`` that fails where it would give a new checkpoint its name."""
    if Path(target).name in (torch_checkpoint.FILE_NAME, torch_checkpoint.FOLDER_NAME):
        raise OSError("the disk is gone")
    rename(source, target)


def after_a_save_that_was_cut_short(name: str, stage: int, folder: Path) -> tuple[str, bool]:
    engine = build(name, stage)
    step(engine)
    engine.save(folder)
    kept = state(engine)
    step(engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", cut_off)
        with pytest.raises(CheckpointError) as caught:
            engine.save(folder)
    engine.load(folder)
    return str(caught.value), same(state(engine), kept)


@engines
def test_a_save_that_is_cut_short_fails_on_every_rank_and_leaves_the_checkpoint_before(
    name: str, stage: int, tmp_path: Path
) -> None:
    for message, restored in on_ranks(after_a_save_that_was_cut_short, name, stage, tmp_path / "kept"):
        assert "the disk is gone" in message
        assert restored


def after_a_save_to_no_folder(name: str, stage: int, file: Path) -> str:
    engine = build(name, stage)
    with pytest.raises(CheckpointError) as caught:
        engine.save(file / "below")
    return str(caught.value)


@engines
def test_a_place_that_is_no_folder_is_refused_on_every_rank(name: str, stage: int, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for message in on_ranks(after_a_save_to_no_folder, name, stage, tmp_path / "file"):
        assert "file" in message


def after_a_load_that_failed(name: str, stage: int, folder: Path, spoil: Callable[[Path], None]) -> bool:
    engine = build(name, stage)
    step(engine)
    engine.save(folder)
    step(engine)
    kept = state(engine)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        spoil(folder)
    torch.distributed.barrier()
    with pytest.raises(CheckpointError):
        engine.load(folder)
    return same(state(engine), kept)


def cut_short(folder: Path) -> None:
    """Rank 1's file, where ranks have files of their own: rank 0 reads its own all the same."""
    shards = sorted(folder.glob(f"{torch_checkpoint.FOLDER_NAME}/__1_*"))
    file = shards[0] if shards else folder / torch_checkpoint.FILE_NAME
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def of_another_model(folder: Path) -> None:
    """The second weight is another's: the first one fits."""
    content = torch.load(folder / torch_checkpoint.FILE_NAME, weights_only=True)
    content["model"]["1.weight"] = content["model"]["1.weight"][:2]
    torch.save(content, folder / torch_checkpoint.FILE_NAME)


@pytest.mark.parametrize(
    ("name", "stage", "spoil"),
    [("ddp", 0, of_another_model), ("zero1", 1, cut_short), ("fsdp2", 2, cut_short)],
)
def test_a_load_that_fails_changes_nothing_on_any_rank(
    name: str, stage: int, spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    assert on_ranks(after_a_load_that_failed, name, stage, tmp_path / "kept", spoil) == [True] * WORLD_SIZE
