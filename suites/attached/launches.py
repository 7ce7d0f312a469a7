"""Real torchruns as a user starts them: one agent, two on one machine, two on two "machines"."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "ZHARNESS_SUITE"
LIMIT = 120.0  # seconds for a whole launch
GONE_WITHIN = 5.0  # seconds for the last process of a launch to be gone after its agents


@dataclass(frozen=True)
class Launched:
    """How the agents of one launch ended; the first is that of rank 0, unless the launcher saw to it otherwise."""

    statuses: tuple[int, ...]
    outputs: tuple[str, ...]
    left: tuple[str, ...]  # command lines of what outlived the agents

    @property
    def output(self) -> str:
        return "\n".join(self.outputs)

    def lines(self, start: str) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith(start)]


def one_agent(ranks: int, *command: str, cwd: Path, **environment: str) -> Launched:
    return launch([["--standalone", f"--nproc-per-node={ranks}", "-m", *command]], cwd, environment)


def two_agents(ranks: int, *command: str, cwd: Path, prefixes: Sequence[Sequence[str]] = ((), ()), **environment: str):  # type: ignore[no-untyped-def]
    """Each with that many ranks; ``prefixes`` are commands that run the agents."""
    address = environment.pop("MASTER", "127.0.0.1")
    where = ["--nnodes=2", f"--nproc-per-node={ranks}", f"--master-addr={address}", f"--master-port={free_port()}"]
    agents = [[*where, f"--node-rank={node}", "-m", *command] for node in (0, 1)]
    return launch(agents, cwd, environment, prefixes)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(
    agents: Sequence[Sequence[str]],
    cwd: Path,
    environment: dict[str, str],
    prefixes: Sequence[Sequence[str]] = ((), ()),
) -> Launched:
    token = uuid.uuid4().hex
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TORCHELASTIC_"))}
    inherited = {**outer, "OMP_NUM_THREADS": "1", "COLUMNS": "160", **environment, MARK: token}
    try:
        processes = [
            subprocess.Popen(
                [*prefix, sys.executable, "-m", "torch.distributed.run", *agent],
                cwd=cwd,
                env=inherited,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for agent, prefix in zip(agents, prefixes, strict=False)
        ]
        outputs = tuple(process.communicate(timeout=LIMIT)[0] for process in processes)
        left = tuple(words for pid in marked(token) if (words := outlives(pid)))
        return Launched(tuple(process.returncode for process in processes), outputs, left)
    finally:
        for pid in marked(token):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def marked(token: str) -> list[int]:
    """The processes of one launch, which no other has started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={token}".encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def outlives(pid: int) -> str:
    """The command line of a process that does not end in time."""
    try:
        ended = os.pidfd_open(pid)
    except ProcessLookupError:
        return ""
    try:
        ready, _, _ = select.select([ended], [], [], GONE_WITHIN)
        return "" if ready else Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    finally:
        os.close(ended)


ADDRESSES = ("10.213.7.1", "10.213.7.2")


@contextmanager
def two_machines() -> Iterator[tuple[list[str], list[str]]]:
    """Two network namespaces joined by a cable; commands that run something in either. Raises OSError without rights.

    Each has an interface named ``cable`` with one of ADDRESSES, and nothing else in common with the other.
    """
    names = [f"zh{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("link", "set", name, "netns", name)
            ip("-n", name, "link", "set", name, "name", "cable")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield ["ip", "netns", "exec", names[0]], ["ip", "netns", "exec", names[1]]
    finally:
        for name in names:
            subprocess.run(["ip", "link", "del", name], capture_output=True)  # noqa: S607 - wherever the system has it
            subprocess.run(["ip", "netns", "del", name], capture_output=True)  # noqa: S607 - as above


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)  # noqa: S607 - as above
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
