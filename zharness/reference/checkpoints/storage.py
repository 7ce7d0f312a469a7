"""A checkpoint on disk, in torch.distributed.checkpoint's format: written whole or not at all, and read so.

``folder/tag/`` holds each rank's tensors and ``.metadata`` as torch writes them, ``facts.pt`` with everything that is
no tensor of the model and alike on all ranks, ``rank_<r>.pt`` with what is each rank's own, and ``manifest.json``, the
length and checksum of every file. ``folder/latest`` names the newest tag. All ranks have to see one file system.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zharness.comm import Comm
from zharness.errors import CheckpointError
from zharness.reference.checkpoints import unpickling
from zharness.reference.uneven_ranks.rank_errors import all_gather_objects, raise_on_all_ranks

FORMAT_VERSION = 2
COMMON_STATE_FILE, MANIFEST_FILE, LATEST_FILE = "facts.pt", "manifest.json", "latest"
DRAFT_FOLDER, PREVIOUS_PREFIX = ".draft", ".previous-"  # before a tag; no tag starts with a dot


StateValues = Mapping[str, Any]


def save_checkpoint(
    folder: Path,
    tag: str,
    local_tensors: Mapping[str, Tensor],
    common_state: StateValues,
    rank_state: StateValues,
    comm: Comm,
) -> Path:
    """Write ``pieces``, rank 0's ``facts`` and each rank's ``own`` to ``folder/tag``, the latest then; its path.

    Collective.

    Everything is written and synced under another name first, and ``latest`` is replaced last: whatever interrupts,
    the checkpoint before is whole, and is the one that is found. Raises CheckpointError on every rank.
    """
    from zharness.reference.checkpoints import dcp as tensors

    target, draft, tags = folder / tag, folder / DRAFT_FOLDER, all_gather_objects(tag, comm)
    with raise_on_all_ranks(comm):
        _check_tag(tag)
        if set(tags) != {tag}:
            raise CheckpointError(f"the tags of the ranks differ: {tags}; save under one name")
        encoded = {_rank_state_file(comm.rank): _encode_state(rank_state)}
        if comm.rank == 0:
            encoded[COMMON_STATE_FILE] = _encode_state({"format": FORMAT_VERSION, **common_state})
        if comm.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
    try:
        tensors.write_tensors(local_tensors, draft)
        with raise_on_all_ranks(comm):
            for name, content in encoded.items():
                _write_file(draft / name, content)
        _write_manifest(draft, comm)
        with raise_on_all_ranks(comm):
            if comm.rank == 0:
                _publish(draft, target)
    finally:
        if comm.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)  # there only when something failed
    return target


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint whose files are all there and undamaged, with its facts, and this rank's own or else rank 0's."""

    path: Path
    files: frozenset[str]
    common_state: StateValues
    rank_state: StateValues

    def read_tensors(self, local_tensors: Mapping[str, Tensor]) -> None:
        """Read the tensors of those names, in place. Collective; raises CheckpointError on every rank."""
        from zharness.reference.checkpoints import dcp as tensors

        tensors.read_tensors(local_tensors, self.path, self.files)


def open_checkpoint(folder: Path, tag: str | None, comm: Comm) -> SavedCheckpoint:
    """The checkpoint ``folder/tag``, or the latest. Collective; raises CheckpointError on every rank."""
    with raise_on_all_ranks(comm):
        path = _find_checkpoint_folder(folder, _read_latest_tag(folder) if tag is None else tag)
        files = _read_manifest(path)
    with raise_on_all_ranks(comm):  # each file is read by one rank for this
        for name in sorted(files)[comm.rank :: comm.world_size]:
            _check_file(path / name, files[name])
    with raise_on_all_ranks(comm):
        facts = unpickling.load_safely(path / COMMON_STATE_FILE, str(path / COMMON_STATE_FILE))
        if facts.pop("format", None) != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} is no checkpoint of format {FORMAT_VERSION}, the only one that this engine reads"
            )
        own = path / (_rank_state_file(comm.rank) if _rank_state_file(comm.rank) in files else _rank_state_file(0))
        return SavedCheckpoint(path, frozenset(files), facts, unpickling.load_safely(own, str(own)))


def _rank_state_file(rank: int) -> str:
    return f"rank_{rank}.pt"


def _check_tag(tag: str) -> None:
    if not tag or Path(tag).name != tag or tag.startswith(".") or tag == LATEST_FILE:
        raise CheckpointError(
            f"tag {tag!r}: expected a name for a folder, without a dot before it, other than {LATEST_FILE!r}"
        )


def _encode_state(state: StateValues) -> bytes:
    """``facts`` as bytes that can be read back. Raises CheckpointError where they could not be."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    buffer.seek(0)
    unpickling.load_safely(buffer, "client_state, a module's extra state, or the state of a schedule,")
    return buffer.getvalue()


def _write_manifest(draft: Path, comm: Comm) -> None:
    with raise_on_all_ranks(comm):
        names = sorted(path.name for path in draft.iterdir())
        mine = {name: _measure(draft / name) for name in names[comm.rank :: comm.world_size]}
    views, measured = zip(*all_gather_objects((names, mine), comm), strict=True)
    with raise_on_all_ranks(comm):
        if any(view != names for view in views):
            raise CheckpointError(f"the ranks do not see the same files in {draft}: save to a file system they share")
        if comm.rank == 0:
            files = {name: measure for part in measured for name, measure in part.items()}
            _write_file(draft / MANIFEST_FILE, json.dumps({"files": files}, indent=1).encode())


def _measure(path: Path) -> list[int]:
    """Length and CRC-32: for damage, not for malice."""
    length = checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            length, checksum = length + len(block), zlib.crc32(block, checksum)
    return [length, checksum]


def _write_file(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _publish(draft: Path, target: Path) -> None:
    """Give the complete draft its name. Of an older checkpoint of that name, one or the other is always there."""
    previous = target.with_name(PREVIOUS_PREFIX + target.name)
    _fsync_folder(draft)
    if target.exists():
        shutil.rmtree(previous, ignore_errors=True)
        target.rename(previous)
    draft.rename(target)
    fresh = target.with_name(f".{LATEST_FILE}")
    _write_file(fresh, target.name.encode())
    fresh.replace(target.with_name(LATEST_FILE))
    _fsync_folder(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _fsync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable, as fsync of a file makes its content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_latest_tag(folder: Path) -> str:
    if not (folder / LATEST_FILE).is_file():
        raise CheckpointError(f"no checkpoint in {folder}: it has no file {LATEST_FILE!r}; save one, or pass tag=")
    return (folder / LATEST_FILE).read_text(encoding="utf-8").strip()


def _find_checkpoint_folder(folder: Path, tag: str) -> Path:
    _check_tag(tag)
    for path in (
        folder / tag,
        folder / (PREVIOUS_PREFIX + tag),
    ):  # the second after a save that died between two renames
        if path.is_dir():
            return path
    raise CheckpointError(f"no checkpoint {tag!r} in {folder}")


def _read_manifest(path: Path) -> dict[str, list[int]]:
    if not (path / MANIFEST_FILE).is_file():
        raise CheckpointError(
            f"{path} has no {MANIFEST_FILE}: it is no checkpoint of this engine, or not a complete one"
        )
    files: dict[str, list[int]] = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))["files"]
    if not {COMMON_STATE_FILE, ".metadata"} <= files.keys() or any(Path(name).name != name for name in files):
        raise CheckpointError(f"{path / MANIFEST_FILE} does not list the files of a checkpoint")
    return files


def _check_file(path: Path, expected: list[int]) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    length, checksum = _measure(path)
    if length != expected[0]:
        raise CheckpointError(f"{path} is damaged: {length} bytes, expected {expected[0]}")
    if checksum != expected[1]:
        raise CheckpointError(f"{path} is damaged: its checksum is not the one it was written with")
