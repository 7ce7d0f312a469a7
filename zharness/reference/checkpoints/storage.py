"""Checkpoints on disk, in torch.distributed.checkpoint's format, written and read completely or not at all.

``folder/tag/`` contains each rank's tensors and ``.metadata`` as torch writes them, ``facts.pt`` with the state that is
common to all ranks, ``rank_<r>.pt`` with the state of each rank, and ``manifest.json`` with the length and checksum of
every file. ``folder/latest`` has the newest tag. All ranks have to share the file system.
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
DRAFT_FOLDER, PREVIOUS_PREFIX = ".draft", ".previous-"  # they start with a dot, which tags may not


StateValues = Mapping[str, Any]


def save_checkpoint(
    folder: Path,
    tag: str,
    local_tensors: Mapping[str, Tensor],
    common_state: StateValues,
    rank_state: StateValues,
    comm: Comm,
) -> Path:
    """Write ``local_tensors``, rank 0's ``common_state`` and each rank's ``rank_state`` to ``folder/tag``.

    Returns the path. Collective. Everything is written and synced in a draft folder first, and ``latest`` is replaced
    last, so after an interruption the previous checkpoint is complete and is the one that loads. Raises CheckpointError
    on every rank.
    """
    from zharness.reference.checkpoints import dcp as tensors

    target, draft, tags = folder / tag, folder / DRAFT_FOLDER, all_gather_objects(tag, comm)
    with raise_on_all_ranks(comm):
        _check_tag(tag)
        if set(tags) != {tag}:
            raise CheckpointError(f"the ranks differ in the tag: {tags}; pass the same tag on every rank")
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
            shutil.rmtree(draft, ignore_errors=True)  # it exists only if something failed
    return target


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete, undamaged checkpoint: its common state, and this rank's state (rank 0's if it has none)."""

    path: Path
    files: frozenset[str]
    common_state: StateValues
    rank_state: StateValues

    def read_tensors(self, local_tensors: Mapping[str, Tensor]) -> None:
        """Fill ``local_tensors`` in place by name. Collective; raises CheckpointError on every rank."""
        from zharness.reference.checkpoints import dcp as tensors

        tensors.read_tensors(local_tensors, self.path, self.files)


def open_checkpoint(folder: Path, tag: str | None, comm: Comm) -> SavedCheckpoint:
    """Open and verify ``folder/tag``, or the latest. Collective; raises CheckpointError on every rank."""
    with raise_on_all_ranks(comm):
        path = _find_checkpoint_folder(folder, _read_latest_tag(folder) if tag is None else tag)
        files = _read_manifest(path)
    with raise_on_all_ranks(comm):  # each file is verified by one rank
        for name in sorted(files)[comm.rank :: comm.world_size]:
            _check_file(path / name, files[name])
    with raise_on_all_ranks(comm):
        common_state = unpickling.load_safely(path / COMMON_STATE_FILE, str(path / COMMON_STATE_FILE))
        if common_state.pop("format", None) != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} is not a checkpoint of format {FORMAT_VERSION}, the only one that this engine reads"
            )
        rank_file = path / _rank_state_file(comm.rank if _rank_state_file(comm.rank) in files else 0)
        rank_state = unpickling.load_safely(rank_file, str(rank_file))
        return SavedCheckpoint(path, frozenset(files), common_state, rank_state)


def _rank_state_file(rank: int) -> str:
    """Return the name of the file with the state of ``rank``."""
    return f"rank_{rank}.pt"


def _check_tag(tag: str) -> None:
    """Raise CheckpointError unless ``tag`` can name a folder of ``folder/``."""
    if not tag or Path(tag).name != tag or tag.startswith(".") or tag == LATEST_FILE:
        raise CheckpointError(
            f"tag {tag!r}: expected a folder name that does not start with a dot and is not {LATEST_FILE!r}"
        )


def _encode_state(state: StateValues) -> bytes:
    """Serialise ``state``. Raises CheckpointError if it could not be read back safely."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    buffer.seek(0)
    unpickling.load_safely(buffer, "client_state, a module's extra state, or the state of a schedule,")
    return buffer.getvalue()


def _write_manifest(draft: Path, comm: Comm) -> None:
    """Write length and checksum of every file in ``draft``; each rank measures some of them. Collective."""
    with raise_on_all_ranks(comm):
        names = sorted(path.name for path in draft.iterdir())
        own_measures = {name: _measure(draft / name) for name in names[comm.rank :: comm.world_size]}
    all_names, measured = zip(*all_gather_objects((names, own_measures), comm), strict=True)
    with raise_on_all_ranks(comm):
        if any(other_names != names for other_names in all_names):
            raise CheckpointError(f"the ranks do not see the same files in {draft}: save to a file system they share")
        if comm.rank == 0:
            files = {name: measure for part in measured for name, measure in part.items()}
            _write_file(draft / MANIFEST_FILE, json.dumps({"files": files}, indent=1).encode())


def _measure(path: Path) -> list[int]:
    """Return length and CRC-32 of a file, which detect damage but not tampering."""
    length = checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            length, checksum = length + len(block), zlib.crc32(block, checksum)
    return [length, checksum]


def _write_file(path: Path, content: bytes) -> None:
    """Write and fsync a file."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _publish(draft: Path, target: Path) -> None:
    """Rename the complete draft to ``target`` and make it the latest.

    An older checkpoint of that name is kept under another name until then, so one of the two always exists.
    """
    previous = target.with_name(PREVIOUS_PREFIX + target.name)
    _fsync_folder(draft)
    if target.exists():
        shutil.rmtree(previous, ignore_errors=True)
        target.rename(previous)
    draft.rename(target)
    new_latest = target.with_name(f".{LATEST_FILE}")
    _write_file(new_latest, target.name.encode())
    new_latest.replace(target.with_name(LATEST_FILE))
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
    """Read the tag in ``latest``. Raises CheckpointError if there is none."""
    if not (folder / LATEST_FILE).is_file():
        raise CheckpointError(f"no checkpoint in {folder}: it has no file {LATEST_FILE!r}; save one, or pass tag=")
    return (folder / LATEST_FILE).read_text(encoding="utf-8").strip()


def _find_checkpoint_folder(folder: Path, tag: str) -> Path:
    """Return the folder of a checkpoint; the kept older one if a save was interrupted between two renames."""
    _check_tag(tag)
    for path in (folder / tag, folder / (PREVIOUS_PREFIX + tag)):
        if path.is_dir():
            return path
    raise CheckpointError(f"no checkpoint {tag!r} in {folder}")


def _read_manifest(path: Path) -> dict[str, list[int]]:
    """Read length and checksum of each file. Raises CheckpointError for a folder that is not a complete checkpoint."""
    if not (path / MANIFEST_FILE).is_file():
        raise CheckpointError(
            f"{path} has no {MANIFEST_FILE}: it is not a checkpoint of this engine, or not a complete one"
        )
    files: dict[str, list[int]] = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))["files"]
    if not {COMMON_STATE_FILE, ".metadata"} <= files.keys() or any(Path(name).name != name for name in files):
        raise CheckpointError(f"{path / MANIFEST_FILE} does not list the files of a checkpoint")
    return files


def _check_file(path: Path, expected: list[int]) -> None:
    """Raise CheckpointError unless the file has the expected length and checksum."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    length, checksum = _measure(path)
    if length != expected[0]:
        raise CheckpointError(f"{path} is damaged: {length} bytes, expected {expected[0]}")
    if checksum != expected[1]:
        raise CheckpointError(f"{path} is damaged: its checksum differs from the one in {MANIFEST_FILE}")
