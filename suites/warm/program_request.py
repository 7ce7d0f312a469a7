"""What a warm Python is asked to run, and how that is sent to it."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

MAX_REQUEST_BYTES = 1 << 17  # bytes of an order


@dataclass(frozen=True)
class ProgramRequest:
    """The words of a command after ``python``, and its surroundings.

    ``spares`` are processes that wait beside it to become the programs which it starts.
    """

    arguments: Sequence[str]
    folder: str
    environment: Mapping[str, str]
    spares: int = 0
    new_session: bool = True


def send_request(channel: socket.socket, request: ProgramRequest, descriptors: Sequence[int]) -> None:
    """Over a socket of packets: the order and copies of the descriptors."""
    packet = json.dumps(asdict(request)).encode()
    assert len(packet) <= MAX_REQUEST_BYTES, f"an order of {len(packet)} bytes"
    socket.send_fds(channel, [packet], descriptors)


def receive_request(channel: socket.socket) -> tuple[ProgramRequest, list[int]] | None:
    """The next order and its descriptors; None when nobody is left to order anything."""
    packet, descriptors, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, 4)
    return (ProgramRequest(**json.loads(packet)), descriptors) if packet else None


def find_descendants(pid: int) -> dict[int, str]:
    """The command lines of living processes below ``pid``; none only where there is none.

    What ends while it is looked at leaves its children to ``pid``, whose own have been listed by then: once more.
    """
    while not (found := scan_descendants(pid)) and any(map(is_alive, list_children(pid))):
        continue
    return found


def list_children(pid: int) -> list[int]:
    """By the kernel's own list; none of a process that is gone."""
    try:
        return [
            int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in read_proc_fields(task / "children")
        ]
    except OSError:
        return []


def scan_descendants(pid: int) -> dict[int, str]:
    """The command lines of living processes below ``pid`` as they are met, the newest first."""
    found: dict[int, str] = {}
    for child in list_children(pid):
        found |= scan_descendants(child)
        if is_alive(child):
            found[child] = " ".join(read_proc_fields(Path(f"/proc/{child}/cmdline"), "\0")).strip()
    return found


def read_proc_fields(path: Path, separator: str | None = None) -> list[str]:
    """The words of a file of /proc; none, where its process is gone."""
    try:
        return path.read_text().split(separator)
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    """Whether it runs; one that has ended and waits to be asked for its status does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
