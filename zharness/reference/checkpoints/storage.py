"""Write and read checkpoints on disk, in torch.distributed.checkpoint's format.

A save or load either succeeds completely or leaves everything unchanged. A checkpoint is the folder ``folder/tag/``.
This folder contains each rank's tensors and ``.metadata`` as torch writes them, ``facts.pt`` with the state that is
common to all ranks, ``rank_<r>.pt`` with the state of each rank, and ``manifest.json`` with the length and checksum of
every file. The file ``folder/latest`` contains the newest tag. All ranks have to share the file system.
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

from zharness.comm import Comm, all_gather_objects
from zharness.errors import CheckpointError
from zharness.reference.checkpoints import unpickling
from zharness.reference.checkpoints.raise_on_all_ranks import raise_on_all_ranks

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
    save_latest: bool = True,
) -> Path:
    """Write ``local_tensors``, rank 0's ``common_state`` and each rank's ``rank_state`` to ``folder/tag``.

    This is a collective. Returns the path of the checkpoint. Every file is first written and synced in a draft folder,
    and ``latest`` is replaced last, if ``save_latest`` is True. So after an interruption the previous checkpoint is
    complete and is the one that is loaded. Raises CheckpointError on every rank if the save fails on any rank.
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
                _publish(draft, target, save_latest)
    finally:
        if comm.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)  # it exists only if something failed
    return target


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was verified to be complete and undamaged.

    ``common_state`` is the state that all ranks share. ``rank_state`` is the state that was saved by this rank, or by
    rank 0 if the checkpoint has no state of this rank.
    """

    path: Path
    files: frozenset[str]
    common_state: StateValues
    rank_state: StateValues

    def read_tensors(self, local_tensors: Mapping[str, Tensor]) -> None:
        """Fill ``local_tensors`` in place with the saved tensors of the same names. This is a collective.

        Raises CheckpointError on every rank if the read fails on any rank.
        """
        from zharness.reference.checkpoints import dcp as tensors

        tensors.read_tensors(local_tensors, self.path, self.files)


def open_checkpoint(folder: Path, tag: str | None, comm: Comm) -> SavedCheckpoint:
    """Open and verify the checkpoint ``folder/tag``, or the latest one if ``tag`` is None. This is a collective.

    Raises CheckpointError on every rank if the checkpoint is missing or damaged.
    """
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
                f"{path} is not a checkpoint of format {FORMAT_VERSION}, the only format that this engine reads"
            )
        rank_file = path / _rank_state_file(comm.rank if _rank_state_file(comm.rank) in files else 0)
        rank_state = unpickling.load_safely(rank_file, str(rank_file))
        return SavedCheckpoint(path, frozenset(files), common_state, rank_state)


def _rank_state_file(rank: int) -> str:
    """Return the name of the file that contains the state of ``rank``."""
    return f"rank_{rank}.pt"


def _check_tag(tag: str) -> None:
    """Raise CheckpointError unless ``tag`` can be the name of a checkpoint's folder."""
    if not tag or Path(tag).name != tag or tag.startswith(".") or tag == LATEST_FILE:
        raise CheckpointError(
            f"got the tag {tag!r}; expected a folder name that does not start with a dot and is not {LATEST_FILE!r}"
        )


def _encode_state(state: StateValues) -> bytes:
    """Serialise ``state``. Raises CheckpointError if the result could not be loaded without running code."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    buffer.seek(0)
    unpickling.load_safely(buffer, "client_state, a module's extra state, or the state of a schedule,")
    return buffer.getvalue()


def _write_manifest(draft: Path, comm: Comm) -> None:
    """Write the length and checksum of every file in ``draft`` to its manifest. This is a collective.

    Each rank computes the checksums of some of the files.
    """
    with raise_on_all_ranks(comm):
        names = sorted(path.name for path in draft.iterdir())
        own_measures = {name: _measure(draft / name) for name in names[comm.rank :: comm.world_size]}
    all_names, measured = zip(*all_gather_objects((names, own_measures), comm), strict=True)
    with raise_on_all_ranks(comm):
        if any(other_names != names for other_names in all_names):
            raise CheckpointError(
                f"the ranks do not see the same files in {draft}; save to a file system that all ranks share"
            )
        if comm.rank == 0:
            files = {name: measure for part in measured for name, measure in part.items()}
            _write_file(draft / MANIFEST_FILE, json.dumps({"files": files}, indent=1).encode())


def _measure(path: Path) -> list[int]:
    """Return the length and CRC-32 checksum of a file, which detect damage but not tampering."""
    length = checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            length, checksum = length + len(block), zlib.crc32(block, checksum)
    return [length, checksum]


def _write_file(path: Path, content: bytes) -> None:
    """Write ``content`` to a file, and fsync the file."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _publish(draft: Path, target: Path, save_latest: bool) -> None:
    """Rename the complete folder ``draft`` to ``target``, and write its tag to ``latest`` if ``save_latest`` is True.

    An older checkpoint of the same tag is renamed first and deleted last, so a complete checkpoint exists at every
    moment.
    """
    previous = target.with_name(PREVIOUS_PREFIX + target.name)
    _fsync_folder(draft)
    if target.exists():
        shutil.rmtree(previous, ignore_errors=True)
        target.rename(previous)
    draft.rename(target)
    if save_latest:
        new_latest = target.with_name(f".{LATEST_FILE}")
        _write_file(new_latest, target.name.encode())
        new_latest.replace(target.with_name(LATEST_FILE))
    _fsync_folder(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _fsync_folder(folder: Path) -> None:
    """Fsync ``folder``, so that created and renamed files in it survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_latest_tag(folder: Path) -> str:
    """Return the tag that the file ``latest`` contains. Raises CheckpointError if that file does not exist."""
    if not (folder / LATEST_FILE).is_file():
        raise CheckpointError(
            f"no checkpoint in {folder}: it has no file {LATEST_FILE!r}; save a checkpoint first, or pass its tag"
        )
    return (folder / LATEST_FILE).read_text(encoding="utf-8").strip()


def _find_checkpoint_folder(folder: Path, tag: str) -> Path:
    """Return the folder of the checkpoint ``tag``.

    If a save was interrupted between its two renames, returns the folder of the older checkpoint, which then has a
    temporary name. Raises CheckpointError if neither folder exists.
    """
    _check_tag(tag)
    for path in (folder / tag, folder / (PREVIOUS_PREFIX + tag)):
        if path.is_dir():
            return path
    raise CheckpointError(f"no checkpoint {tag!r} in {folder}")


def _read_manifest(path: Path) -> dict[str, list[int]]:
    """Return the length and checksum of each file of a checkpoint, as its manifest lists them.

    Raises CheckpointError if the folder ``path`` is not a complete checkpoint.
    """
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
