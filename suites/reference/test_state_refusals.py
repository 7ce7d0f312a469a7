"""What is no whole, harmless checkpoint of this very model is refused on every rank, and changes nothing."""

from __future__ import annotations

import json
import os
import pickle
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # torch.optim imports it at the first step: here once, else a second in every rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from zharness.errors import CheckpointError
from zharness.reference import Engine, initialize
from zharness.reference.checkpoints import storage
from zharness.world import RanksFailed, run

# What the engine computes is judged here, in hundreds of collectives; comparing each of them doubles the time.
pytestmark = pytest.mark.collectives("trusted")

two_ranks = pytest.mark.world_size(2)


def built(stage: int = 3, net: Callable[[], nn.Module] = lambda: nn.Linear(5, 3), steps: int = 0) -> Engine:
    torch.manual_seed(steps)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = initialize(model=net(), config=config)
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 5)).pow(2).sum())
        engine.step()
    return engine


def everything(engine: Engine) -> dict[str, Tensor]:
    state = {f"{n}/{k}": v for n, entry in engine.full_optimizer_state().items() for k, v in entry.items()}
    return {**engine.full_params(), **state, "steps": torch.tensor(engine.steps)}


def refused(engine: Engine, folder: Path, words: str, tag: str | None = None) -> None:
    """On every rank loading raises in those words, and the engine is as it was."""
    before = everything(engine)
    with pytest.raises(CheckpointError, match=words):
        engine.load_checkpoint(folder, tag)
    after = everything(engine)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def on_rank_0(edit: Callable[[], Any]) -> None:
    if dist.get_rank() == 0:
        edit()
    dist.barrier()


def sign(path: Path) -> None:
    """Make the manifest agree with files that were exchanged on purpose."""
    files = {
        p.name: [p.stat().st_size, zlib.crc32(p.read_bytes())]
        for p in path.iterdir()
        if p.name != storage.MANIFEST_FILE
    }
    (path / storage.MANIFEST_FILE).write_text(json.dumps({"files": files}))


class Command:
    """Unpickling one of these runs a command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@two_ranks
def test_a_missing_or_damaged_piece_is_named_before_anything_is_loaded(shared_tmp_path: Path) -> None:
    path = built(steps=1).save_checkpoint(shared_tmp_path, "t")
    engine = built(steps=2)
    kept = {name: (path / name).read_bytes() for name in sorted(os.listdir(path))}
    dist.barrier()
    for name, whole in kept.items():
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 8
        damages = {"missing|no manifest": None, "bytes, expected": whole[:-7], "checksum": bytes(flipped)}
        for words, content in damages.items():
            edit = (path / name).unlink if content is None else lambda c=content, n=name: (path / n).write_bytes(c)
            on_rank_0(edit)
            refused(engine, shared_tmp_path, ".*" if name == storage.MANIFEST_FILE and content else words)
            on_rank_0(lambda w=whole, n=name: (path / n).write_bytes(w))
    engine.load_checkpoint(shared_tmp_path)


@two_ranks
@pytest.mark.parametrize("name", [".metadata", "facts.pt", "rank_0.pt", "__0_0.distcp", "__1_0.distcp"])
def test_a_file_that_carries_a_command_is_refused_and_the_command_never_runs(name: str, shared_tmp_path: Path) -> None:
    path = built(steps=1).save_checkpoint(shared_tmp_path, "t")
    marker = shared_tmp_path / "ran"

    def plant() -> None:
        if name == ".metadata":
            (path / name).write_bytes(pickle.dumps(Command(marker)))
        else:
            torch.save(Command(marker), path / name)
        sign(path)

    on_rank_0(plant)
    engine = built(steps=2)
    refused(engine, shared_tmp_path, "mkdir" if not name.endswith(".distcp") else "could not be read")
    assert not marker.exists()


@two_ranks
def test_metadata_cannot_lead_to_an_unsafe_reader_or_out_of_the_checkpoint(shared_tmp_path: Path) -> None:
    path = built(steps=1).save_checkpoint(shared_tmp_path, "t")
    engine = built(steps=2)
    whole = (path / ".metadata").read_bytes()

    def bytes_entry(metadata: Any) -> None:
        metadata.state_dict_metadata["weights/weight"] = BytesStorageMetadata()

    def stray(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = "../elsewhere"

    for edit, words in ((bytes_entry, "not a tensor"), (stray, "not its own")):
        metadata = pickle.loads(whole)  # noqa: S301 - written two lines above
        edit(metadata)
        on_rank_0(lambda m=metadata: ((path / ".metadata").write_bytes(pickle.dumps(m)), sign(path)))
        refused(engine, shared_tmp_path, words)


@two_ranks
def test_a_checkpoint_of_another_model_is_refused_by_the_first_difference(shared_tmp_path: Path) -> None:
    built(1, steps=1).save_checkpoint(shared_tmp_path)
    for net, words in (
        (lambda: nn.Linear(5, 4), r"parameter 'weight' has shape \(3, 5\) there, and here is one of shape \(4, 5\)"),
        (lambda: nn.Linear(5, 3, bias=False), r"parameter 'bias' has shape \(3,\) there, and here is no such"),
        (lambda: nn.Sequential(nn.Linear(5, 3)), r"parameter '0.weight' has none there"),
        (lambda: nn.Sequential(nn.BatchNorm1d(5)), "has none there"),
    ):
        refused(built(1, net), shared_tmp_path, f"another model: {words}" if "parameter" in words else words)


@two_ranks
def test_what_is_not_there_is_said_with_what_to_do(shared_tmp_path: Path, tmp_path: Path) -> None:
    engine = built()
    refused(engine, shared_tmp_path, "no checkpoint in .* save one, or pass tag=")
    refused(engine, shared_tmp_path, "no checkpoint 'x' in", tag="x")
    refused(engine, shared_tmp_path, "expected a name for a folder", tag="../x")
    with pytest.raises(CheckpointError, match=r"client_state.* is refused: it asks for .*mkdir"):
        engine.save_checkpoint(shared_tmp_path, client_state={"x": Command(tmp_path)})
    with pytest.raises(CheckpointError, match="expected a name"):
        engine.save_checkpoint(shared_tmp_path, tag="latest")
    with pytest.raises(CheckpointError, match=r"tags of the ranks differ: .*a.*b"):
        engine.save_checkpoint(shared_tmp_path, tag="ab"[dist.get_rank()])
    engine.backward(engine(torch.ones(2, 5)).sum())
    with pytest.raises(CheckpointError, match="gradients from before the accumulation boundary"):
        engine.save_checkpoint(shared_tmp_path)
    assert not any(shared_tmp_path.iterdir())


class Forgetful:
    """A schedule that only steps."""

    def step(self) -> None:
        pass


@two_ranks
def test_a_schedule_that_does_not_tell_its_state_is_refused_by_name(shared_tmp_path: Path) -> None:
    engine, *_ = initialize(
        model=nn.Linear(5, 3),
        config={"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
        lr_scheduler=Forgetful(),
    )
    with pytest.raises(CheckpointError, match="the schedule, a Forgetful, has no state_dict and load_state_dict"):
        engine.save_checkpoint(shared_tmp_path)


class Full(OSError):
    """No space left."""


@two_ranks
@pytest.mark.parametrize(
    ("where", "tag"),
    [
        ("write_pieces", "old"),
        ("write_pieces", "new"),
        ("_write_file", "old"),
        ("_measure", "new"),
        ("_publish", "old"),
        ("rename", "old"),
        ("rename", "new"),
    ],
)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_one_before(
    where: str, tag: str, shared_tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = built(steps=1)
    engine.save_checkpoint(shared_tmp_path, "old")
    wanted = everything(engine)
    engine.steps = 7
    calls: list[int] = []

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if where == "rename" and len(calls) == 1 and tag == "old":
            return rename(*args)  # the old one is out of the way, the new one not yet in its place
        raise Full("no space left")

    rename = Path.rename
    with monkeypatch.context() as patched:
        if where == "rename":
            patched.setattr(Path, "rename", fail)
        elif where == "write_pieces":
            patched.setattr(filesystem, "_write_item", fail if rank == 1 else filesystem._write_item)
        elif rank == (where == "_measure"):
            patched.setattr(storage, where, fail)
        with pytest.raises(CheckpointError, match="no space left"):
            engine.save_checkpoint(shared_tmp_path, tag)
    other = built()
    other.load_checkpoint(shared_tmp_path)
    assert all(torch.equal(everything(other)[name], value) for name, value in wanted.items())
    assert not (shared_tmp_path / storage.DRAFT_FOLDER).exists()
    engine.save_checkpoint(shared_tmp_path, tag)
    other.load_checkpoint(shared_tmp_path)
    assert other.steps == 7
    assert sorted(p.name for p in shared_tmp_path.iterdir()) == sorted({"latest", "old", tag})


def die_while_saving(folder: Path) -> None:
    engine = built(steps=1)
    engine.save_checkpoint(folder, "t")
    engine.steps = 7
    if dist.get_rank() == 1:
        filesystem._write_item = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    engine.save_checkpoint(folder, "t")


def read_back(folder: Path) -> int:
    engine = built()
    engine.load_checkpoint(folder)
    engine.save_checkpoint(folder, "t")  # what the killed one left is no obstacle
    return engine.steps


def test_after_a_kill_in_the_middle_of_a_save_the_one_before_is_whole(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run(die_while_saving, tmp_path, world_size=2)
    assert run(read_back, tmp_path, world_size=2) == [1, 1]
    assert sorted(os.listdir(tmp_path)) == ["latest", "t"]


def test_plain_torch_would_have_run_the_command(tmp_path: Path) -> None:
    """What the refusals above are for: torch's own reader of the same metadata."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Command(tmp_path / "ran")))
    with pytest.raises(AttributeError):
        filesystem.FileSystemReader(tmp_path).read_metadata()
    assert (tmp_path / "ran").exists()
