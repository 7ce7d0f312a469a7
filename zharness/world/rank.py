"""Life of one rank, from its fork to its report."""

from __future__ import annotations

import datetime
import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore  # torch.distributed.FileStore, which has no public stub

from zharness.world.orphans import die_with_parent
from zharness.world.outcome import End, RankOutcome
from zharness.world.work import Group, Work

LOOPBACK = {"linux": "lo", "darwin": "lo0"}


def output_file(room: Path, rank: int) -> Path:
    """Where rank's standard output and standard error go."""
    return room / f"output.{rank}"


def stack_file(room: Path, rank: int) -> Path:
    """Where the rank writes its stacks when it is asked with SIGUSR1."""
    return room / f"stack.{rank}"


def live(work: Work, rank: int, room: Path, report: Connection, server: int) -> None:
    """Run ``work`` as ``rank`` and send one RankOutcome through ``report``; the process ends with status 0 then.

    ``room`` is a private directory that the whole group shares; it holds the rendezvous file.
    """
    os.setpgid(0, 0)  # children that the rank leaves behind are killed with its process group
    die_with_parent(server)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it ends the ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the server's own handler came along with the fork
    try:
        redirect(output_file(room, rank))
    except FileNotFoundError:
        os._exit(1)  # the server was told to leave, and took the room with it, while this rank was being forked
    with stack_file(room, rank).open("w") as stacks:
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        report.send(attempt(work, rank, room))
    report.close()
    sys.stdout.flush()
    sys.stderr.flush()


def redirect(path: Path) -> None:
    """Send file descriptors 1 and 2, C code's output included, to ``path``."""
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process


def attempt(work: Work, rank: int, room: Path) -> RankOutcome:
    """The outcome of ``work`` on this rank; every exception, SystemExit included, becomes part of it."""
    try:
        torch.set_num_threads(1)
        if work.group is Group.DEFAULT:
            join_group(rank, work.world_size, room, work.timeout)
        value = work.function(*work.args)
        payload = pickle.dumps(value)
        # Leave together: a rank that is gone while a peer still connects or sends would look like a fault.
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        return RankOutcome(rank, End.RETURNED, time.monotonic_ns(), payload=payload)
    except BaseException as error:  # noqa: BLE001 - a rank reports whatever ended it, and nothing is swallowed
        return raised(rank, error)


def raised(rank: int, error: BaseException) -> RankOutcome:
    """The outcome of a rank whose function raised; made of strings only, so it can always be sent."""
    at_ns = time.monotonic_ns()
    frames = traceback.extract_tb(error.__traceback__)
    message = str(error).strip() or "(no message)"
    return RankOutcome(
        rank,
        End.RAISED,
        at_ns,
        cause=f"{type(error).__name__}: {message}",
        exception=f"{type(error).__module__}.{type(error).__qualname__}",
        innermost=frames[-1].filename if frames else "",
        traceback="".join(traceback.format_exception(error)),
    )


def join_group(rank: int, world_size: int, room: Path, timeout: float) -> None:
    """Set the variables that launchers set, and form the default group over the loopback interface."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
        GLOO_SOCKET_IFNAME=LOOPBACK.get(sys.platform, "lo"),
    )
    device = rank_device(rank, world_size)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=FileStore(str(room / "rendezvous"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout),
        device_id=device if device.type == "cuda" else None,
    )


def rank_device(rank: int, world_size: int) -> torch.device:
    """A GPU of its own for every rank where ``ZHARNESS_DEVICE=cuda`` asks for it, else the CPU.

    Asked for by name, because whether CUDA may be touched is decided before a process forks.
    """
    if os.environ.get("ZHARNESS_DEVICE", "cpu") != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", rank % max(torch.cuda.device_count(), 1))
    torch.cuda.set_device(device)
    return device
