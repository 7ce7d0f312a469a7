"""Real torchruns: one agent, two on one machine, two on two "machines"."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from suites.warm.programs import Program, read_output

RUN = ("-m", "torch.distributed.run")
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
    return warm([["--standalone", f"--nproc-per-node={ranks}", "-m", *command]], ranks, cwd, environment)


def two_agents(ranks: int, *command: str, cwd: Path, **environment: str) -> Launched:
    """Each with that many ranks."""
    return warm(agents_of_two(ranks, "127.0.0.1", *command), ranks, cwd, environment)


def one_started_agent(ranks: int, *command: str, cwd: Path) -> Launched:
    """As ``one_agent``, and as a shell starts it: no process is a fork of one that has imported anything."""
    return started([["--standalone", f"--nproc-per-node={ranks}", "-m", *command]], cwd, {})


def two_started_agents(
    ranks: int, *command: str, cwd: Path, prefixes: Sequence[Sequence[str]], address: str, **environment: str
) -> Launched:
    """Each run by a command, a prefix; ``address`` is where the agents meet."""
    return started(agents_of_two(ranks, address, *command), cwd, environment, prefixes)


def agents_of_two(ranks: int, address: str, *command: str) -> list[list[str]]:
    where = ["--nnodes=2", f"--nproc-per-node={ranks}", f"--master-addr={address}", f"--master-port={free_port()}"]
    return [[*where, f"--node-rank={node}", "-m", *command] for node in (0, 1)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def surroundings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a launch: no pytest's, and no other launch's."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TORCHELASTIC_"))}
    return {**outer, "OMP_NUM_THREADS": "1", "COLUMNS": "160", **environment}


def warm(agents: Sequence[Sequence[str]], ranks: int, cwd: Path, environment: Mapping[str, str]) -> Launched:
    """Agents and ranks that are processes of their own and have no torch to import."""
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in agents]
        programs = [
            stack.enter_context(Program((*RUN, *agent), file, file, cwd, surroundings(environment), spares=ranks))
            for agent, file in zip(agents, files, strict=True)
        ]
        statuses = tuple(program.wait(LIMIT) for program in programs)
        left = tuple(words for program in programs for words in program.wait_for_leftovers().values())
        return Launched(statuses, tuple(map(read_output, files)), left)


def started(
    agents: Sequence[Sequence[str]],
    cwd: Path,
    environment: Mapping[str, str],
    prefixes: Sequence[Sequence[str]] = ((),),
) -> Launched:
    """Agents that are started anew, by the commands that are ``prefixes``, and start their ranks anew."""
    token = uuid.uuid4().hex
    try:
        processes = [
            subprocess.Popen(
                [*prefix, sys.executable, *RUN, *agent],
                cwd=cwd,
                env={**surroundings(environment), MARK: token},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for agent, prefix in zip(agents, prefixes, strict=True)
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
