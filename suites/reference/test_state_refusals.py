"""Incomplete, damaged and unsafe checkpoints, and those of other models, are refused on every rank."""

from __future__ import annotations

import io
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
import torch._dynamo  # imported once here: torch.optim imports it at the first step, a second in each rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata

from zharness.errors import CheckpointError
from zharness.reference import Engine, initialize
from zharness.reference.checkpoints import storage
from zharness.reference.checkpoints.dcp import MetadataUnpickler
from zharness.world import RanksFailed, run

# These tests check results in hundreds of collectives; comparing the calls of each would double their time.
pytestmark = pytest.mark.collectives("trusted")

two_ranks = pytest.mark.world_size(2)


def build_engine(stage: int = 3, net: Callable[[], nn.Module] = lambda: nn.Linear(5, 3), steps: int = 0) -> Engine:
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


def collect_state(engine: Engine) -> dict[str, Tensor]:
    state = {f"{n}/{k}": v for n, entry in engine.full_optimizer_state().items() for k, v in entry.items()}
    return {**engine.full_params(), **state, "steps": torch.tensor(engine.steps)}


def assert_refused(engine: Engine, folder: Path, words: str, tag: str | None = None) -> None:
    """Assert that loading raises this message on every rank and leaves the engine unchanged."""
    before = collect_state(engine)
    with pytest.raises(CheckpointError, match=words):
        engine.load_checkpoint(folder, tag)
    after = collect_state(engine)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def on_rank_0(edit: Callable[[], Any]) -> None:
    if dist.get_rank() == 0:
        edit()
    dist.barrier()


def update_manifest(path: Path) -> None:
    """Update the manifest for files that the test replaced."""
    files = {
        p.name: [p.stat().st_size, zlib.crc32(p.read_bytes())]
        for p in path.iterdir()
        if p.name != storage.MANIFEST_FILE
    }
    (path / storage.MANIFEST_FILE).write_text(json.dumps({"files": files}))


class Command:
    """An object that runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@two_ranks
def test_a_missing_or_damaged_file_is_named_before_anything_is_loaded(shared_tmp_path: Path) -> None:
    path = build_engine(steps=1).save_checkpoint(shared_tmp_path, "t")
    engine = build_engine(steps=2)
    kept = {name: (path / name).read_bytes() for name in sorted(os.listdir(path))}
    dist.barrier()
    for name, original in kept.items():
        flipped = bytearray(original)
        flipped[len(original) // 2] ^= 8
        damages = {"missing|no manifest": None, "bytes, expected": original[:-7], "checksum": bytes(flipped)}
        for words, content in damages.items():
            edit = (path / name).unlink if content is None else lambda c=content, n=name: (path / n).write_bytes(c)
            on_rank_0(edit)
            assert_refused(engine, shared_tmp_path, ".*" if name == storage.MANIFEST_FILE and content else words)
            on_rank_0(lambda w=original, n=name: (path / n).write_bytes(w))
    engine.load_checkpoint(shared_tmp_path)


@two_ranks
@pytest.mark.parametrize("name", [".metadata", "facts.pt", "rank_0.pt", "__0_0.distcp", "__1_0.distcp"])
def test_a_file_that_contains_code_is_refused_and_the_code_never_runs(name: str, shared_tmp_path: Path) -> None:
    path = build_engine(steps=1).save_checkpoint(shared_tmp_path, "t")
    marker = shared_tmp_path / "ran"

    def plant() -> None:
        if name == ".metadata":
            (path / name).write_bytes(pickle.dumps(Command(marker)))
        else:
            torch.save(Command(marker), path / name)
        update_manifest(path)

    on_rank_0(plant)
    engine = build_engine(steps=2)
    assert_refused(engine, shared_tmp_path, "mkdir" if not name.endswith(".distcp") else "could not be read")
    assert not marker.exists()


@two_ranks
def test_metadata_cannot_select_an_unsafe_reader_or_files_outside_the_checkpoint(shared_tmp_path: Path) -> None:
    path = build_engine(steps=1).save_checkpoint(shared_tmp_path, "t")
    engine = build_engine(steps=2)
    content = (path / ".metadata").read_bytes()
    dist.barrier()  # rank 0 overwrites the file below

    def bytes_entry(metadata: Any) -> None:
        metadata.state_dict_metadata["weights/weight"] = BytesStorageMetadata()

    def stray(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = "../elsewhere"

    for edit, words in ((bytes_entry, "not a tensor"), (stray, "files outside the checkpoint")):
        metadata = pickle.loads(content)  # noqa: S301 - written two lines above
        edit(metadata)
        on_rank_0(lambda m=metadata: ((path / ".metadata").write_bytes(pickle.dumps(m)), update_manifest(path)))
        assert_refused(engine, shared_tmp_path, words)


@two_ranks
def test_a_checkpoint_of_another_model_is_refused_with_the_first_difference(shared_tmp_path: Path) -> None:
    build_engine(1, steps=1).save_checkpoint(shared_tmp_path)
    for net, words in (
        (lambda: nn.Linear(5, 4), r"parameter 'weight' is of shape \(3, 5\) in the checkpoint, and of shape \(4, 5\)"),
        (
            lambda: nn.Linear(5, 3, bias=False),
            r"parameter 'bias' is of shape \(3,\) in the checkpoint, and missing in this",
        ),
        (lambda: nn.Sequential(nn.Linear(5, 3)), r"parameter '0.weight' is missing in the checkpoint"),
        (lambda: nn.Sequential(nn.BatchNorm1d(5)), "is missing in the checkpoint"),
    ):
        assert_refused(
            build_engine(1, net), shared_tmp_path, f"another model: {words}" if "parameter" in words else words
        )


@two_ranks
def test_usage_errors_name_the_cause_and_the_remedy(shared_tmp_path: Path, tmp_path: Path) -> None:
    engine = build_engine()
    assert_refused(engine, shared_tmp_path, "no checkpoint in .* save a checkpoint first, or pass its tag")
    assert_refused(engine, shared_tmp_path, "no checkpoint 'x' in", tag="x")
    assert_refused(engine, shared_tmp_path, "expected a folder name", tag="../x")
    with pytest.raises(CheckpointError, match=r"client_state.* is refused: it contains .*mkdir"):
        engine.save_checkpoint(shared_tmp_path, client_state={"x": Command(tmp_path)})
    with pytest.raises(CheckpointError, match="expected a folder name"):
        engine.save_checkpoint(shared_tmp_path, tag="latest")
    with pytest.raises(CheckpointError, match=r"the ranks differ in the tag: .*a.*b"):
        engine.save_checkpoint(shared_tmp_path, tag="ab"[dist.get_rank()])
    engine.backward(engine(torch.ones(2, 5)).sum())
    with pytest.raises(CheckpointError, match="gradients that no optimizer step has used"):
        engine.save_checkpoint(shared_tmp_path)
    assert not any(shared_tmp_path.iterdir())


class Forgetful:
    """A schedule without state_dict."""

    def step(self) -> None:
        pass


@two_ranks
def test_a_schedule_without_state_dict_is_refused_by_name(shared_tmp_path: Path) -> None:
    engine, *_ = initialize(
        model=nn.Linear(5, 3),
        config={"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
        lr_scheduler=Forgetful(),
    )
    with pytest.raises(CheckpointError, match="the schedule, a Forgetful, has no state_dict and load_state_dict"):
        engine.save_checkpoint(shared_tmp_path)


class Full(OSError):
    """The error that the test raises in the middle of a save, as if the disk was full."""


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
def test_a_save_that_fails_on_one_rank_fails_on_all_and_keeps_the_previous_checkpoint(
    where: str, tag: str, shared_tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(steps=1)
    engine.save_checkpoint(shared_tmp_path, "old")
    wanted = collect_state(engine)
    engine.steps = 7
    calls: list[int] = []

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if where == "rename" and len(calls) == 1 and tag == "old":
            # The next rename fails: the old checkpoint is moved away, and the new one is not in place yet.
            return rename(*args)
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
    other = build_engine()
    other.load_checkpoint(shared_tmp_path)
    assert all(torch.equal(collect_state(other)[name], value) for name, value in wanted.items())
    assert not (shared_tmp_path / storage.DRAFT_FOLDER).exists()
    engine.save_checkpoint(shared_tmp_path, tag)
    other.load_checkpoint(shared_tmp_path)
    assert other.steps == 7
    assert sorted(p.name for p in shared_tmp_path.iterdir()) == sorted({"latest", "old", tag})


def die_while_saving(folder: Path) -> None:
    engine = build_engine(steps=1)
    engine.save_checkpoint(folder, "t")
    engine.steps = 7
    if dist.get_rank() == 1:
        filesystem._write_item = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    engine.save_checkpoint(folder, "t")


def read_back(folder: Path) -> int:
    engine = build_engine()
    engine.load_checkpoint(folder)
    engine.save_checkpoint(folder, "t")  # what the killed save left does not disturb the next one
    return engine.steps


def test_after_a_kill_during_a_save_the_previous_checkpoint_is_complete(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run(die_while_saving, tmp_path, world_size=2)
    assert run(read_back, tmp_path, world_size=2) == [1, 1]
    assert sorted(os.listdir(tmp_path)) == ["latest", "t"]


def test_plain_torch_would_have_run_the_command(tmp_path: Path) -> None:
    """torch's own reader runs the code in the same metadata, which the refusals above prevent."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Command(tmp_path / "ran")))
    with pytest.raises(AttributeError):
        filesystem.FileSystemReader(tmp_path).read_metadata()
    assert (tmp_path / "ran").exists()


class Attribute:
    """Pickled as the attribute ``name`` of ``kind``, as Python 3.11.2 pickles a member of an enum."""

    def __init__(self, kind: type, name: str) -> None:
        self.kind, self.name = kind, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.kind, self.name)


def test_metadata_may_name_members_of_an_enum_as_attributes() -> None:
    member = MetadataUnpickler(io.BytesIO(pickle.dumps(Attribute(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST")))).load()
    assert member is _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    with pytest.raises(CheckpointError, match=r"reads 'mro' of .*Metadata'>; the load is refused"):
        MetadataUnpickler(io.BytesIO(pickle.dumps(Attribute(Metadata, "mro")))).load()
