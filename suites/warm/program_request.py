"""Requests to the warm Python to run a program, and how to find the processes below one."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

MAX_REQUEST_BYTES = 1 << 17


@dataclass(frozen=True)
class ProgramRequest:
    """A program to run: its arguments after ``python``, its folder and its environment.

    ``spares`` is the number of forks that wait to become the Python programs that it starts.
    """

    arguments: Sequence[str]
    folder: str
    environment: Mapping[str, str]
    spares: int = 0
    new_session: bool = True


def send_request(channel: socket.socket, request: ProgramRequest, descriptors: Sequence[int]) -> None:
    """Send a request and the descriptors over a packet socket."""
    packet = json.dumps(asdict(request)).encode()
    assert len(packet) <= MAX_REQUEST_BYTES, f"a request of {len(packet)} bytes"
    socket.send_fds(channel, [packet], descriptors)


def receive_request(channel: socket.socket) -> tuple[ProgramRequest, list[int]] | None:
    """Return the next request and its descriptors; None when the other end is closed."""
    packet, descriptors, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, 4)
    return (ProgramRequest(**json.loads(packet)), descriptors) if packet else None


def find_descendants(pid: int) -> dict[int, str]:
    """Return the command lines of all living processes below ``pid`` by process id.

    A process that ends during a scan leaves its children to ``pid``, whose own children are already listed; so an empty
    scan is repeated while ``pid`` has living children.
    """
    while not (descendants := scan_descendants(pid)) and any(map(is_alive, list_children(pid))):
        continue
    return descendants


def list_children(pid: int) -> list[int]:
    """Return the children of a process from /proc; none if it has ended."""
    try:
        return [
            int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in read_proc_fields(task / "children")
        ]
    except OSError:
        return []


def scan_descendants(pid: int) -> dict[int, str]:
    """Return the command lines of living processes below ``pid`` from one scan, descendants before their parents."""
    descendants: dict[int, str] = {}
    for child in list_children(pid):
        descendants |= scan_descendants(child)
        if is_alive(child):
            descendants[child] = " ".join(read_proc_fields(Path(f"/proc/{child}/cmdline"), "\0")).strip()
    return descendants


def read_proc_fields(path: Path, separator: str | None = None) -> list[str]:
    """Return the separated fields of a file in /proc; none if its process has ended."""
    try:
        return path.read_text().split(separator)
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    """Return whether a process is running; False for a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
