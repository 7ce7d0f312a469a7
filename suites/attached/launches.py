"""Run commands with a time limit, and under torchrun: one agent, two on one machine, or two in network namespaces."""

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
GONE_WITHIN = 5.0  # seconds for the last process of a launch to end after its agents


@dataclass(frozen=True)
class LaunchResult:
    """The exit status and the output of each agent of one launch; rank 0 runs under the first agent."""

    statuses: tuple[int, ...]
    outputs: tuple[str, ...]
    leftovers: tuple[str, ...]  # command lines of processes that outlived the agents

    @property
    def output(self) -> str:
        """Return the output of all agents."""
        return "\n".join(self.outputs)

    def lines(self, start: str) -> list[str]:
        """Return the lines of the output that begin with ``start``."""
        return [line for line in self.output.splitlines() if line.startswith(start)]


def run_one_agent(ranks: int, *command: str, cwd: Path, **environment: str) -> LaunchResult:
    """Run ``python -m command`` under one torchrun agent with ``ranks`` ranks, as forks of the warm Python."""
    return run_in_warm_python([["--standalone", f"--nproc-per-node={ranks}", "-m", *command]], ranks, cwd, environment)


def run_two_agents(ranks: int, *command: str, cwd: Path, **environment: str) -> LaunchResult:
    """Run ``python -m command`` under two torchrun agents with ``ranks`` ranks each, as forks of the warm Python."""
    return run_in_warm_python(build_two_agent_commands(ranks, "127.0.0.1", *command), ranks, cwd, environment)


def run_one_agent_from_shell(ranks: int, *command: str, cwd: Path) -> LaunchResult:
    """Run one agent as a shell does: no process is a fork of the warm Python."""
    return run_in_new_python([["--standalone", f"--nproc-per-node={ranks}", "-m", *command]], cwd, {})


def run_two_agents_from_shell(
    ranks: int, *command: str, cwd: Path, prefixes: Sequence[Sequence[str]], address: str, **environment: str
) -> LaunchResult:
    """Run two agents as a shell does, each behind one of the command prefixes; ``address`` is their rendezvous."""
    return run_in_new_python(build_two_agent_commands(ranks, address, *command), cwd, environment, prefixes)


def build_two_agent_commands(ranks: int, address: str, *command: str) -> list[list[str]]:
    """Return torchrun's arguments for each of two agents."""
    options = [
        "--nnodes=2",
        f"--nproc-per-node={ranks}",
        f"--master-addr={address}",
        f"--master-port={find_free_port()}",
    ]
    return [[*options, f"--node-rank={node}", "-m", *command] for node in (0, 1)]


def find_free_port() -> int:
    """Return a free TCP port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a launch: this process's without variables of pytest and torchrun."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TORCHELASTIC_"))}
    return {**outer, "OMP_NUM_THREADS": "1", "COLUMNS": "160", **environment}


def run_in_warm_python(
    agents: Sequence[Sequence[str]], ranks: int, cwd: Path, environment: Mapping[str, str]
) -> LaunchResult:
    """Run agents and their ranks as forks of the warm Python, which has imported torch."""
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in agents]
        programs = [
            stack.enter_context(Program((*RUN, *agent), file, file, cwd, launch_environment(environment), spares=ranks))
            for agent, file in zip(agents, files, strict=True)
        ]
        statuses = tuple(program.wait(LIMIT) for program in programs)
        leftovers = tuple(line for program in programs for line in program.wait_for_leftovers().values())
        return LaunchResult(statuses, tuple(map(read_output, files)), leftovers)


def run_in_new_python(
    agents: Sequence[Sequence[str]],
    cwd: Path,
    environment: Mapping[str, str],
    prefixes: Sequence[Sequence[str]] = ((),),
) -> LaunchResult:
    """Run each agent as a new Python process behind its command prefix; the agents start new processes as ranks."""
    commands = [[*prefix, sys.executable, *RUN, *agent] for agent, prefix in zip(agents, prefixes, strict=True)]
    return run_commands([(command, launch_environment(environment)) for command in commands], cwd)


def run_commands(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], cwd: Path, limit: float = LIMIT
) -> LaunchResult:
    """Run commands with their environments at once, and kill every process that they leave.

    Raises subprocess.TimeoutExpired if one does not end within ``limit`` seconds.
    """
    token = uuid.uuid4().hex
    try:
        processes = [
            subprocess.Popen(
                command,
                cwd=cwd,
                env={**environment, MARK: token},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for command, environment in commands
        ]
        outputs = tuple(process.communicate(timeout=limit)[0] for process in processes)
        leftovers = tuple(line for pid in find_marked_processes(token) if (line := describe_if_alive(pid)))
        return LaunchResult(tuple(process.returncode for process in processes), outputs, leftovers)
    finally:
        for pid in find_marked_processes(token):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def find_marked_processes(token: str) -> list[int]:
    """Return the processes whose environment has the token of one launch."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={token}".encode() in (process / "environ").read_bytes():
                pids.append(int(process.name))
    return pids


def describe_if_alive(pid: int) -> str:
    """Return the command line of a process that does not end within ``GONE_WITHIN``; "" for one that ends."""
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
def connect_two_namespaces() -> Iterator[tuple[list[str], list[str]]]:
    """Connect two new network namespaces; yield the command prefix that runs a program in each.

    Each has an interface named ``cable`` with one of ADDRESSES. Raises OSError without the rights to create them.
    """
    names = [f"zh{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            run_ip("netns", "add", name)
        run_ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            run_ip("link", "set", name, "netns", name)
            run_ip("-n", name, "link", "set", name, "name", "cable")
            run_ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            run_ip("-n", name, "link", "set", "cable", "up")
            run_ip("-n", name, "link", "set", "lo", "up")
        yield ["ip", "netns", "exec", names[0]], ["ip", "netns", "exec", names[1]]
    finally:
        for name in names:
            subprocess.run(["ip", "link", "del", name], capture_output=True)  # noqa: S607 - wherever the system has it
            subprocess.run(["ip", "netns", "del", name], capture_output=True)  # noqa: S607 - as above


def run_ip(*arguments: str) -> None:
    """Run the command ``ip``. Raises OSError if it fails."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)  # noqa: S607 - as above
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
