"""The rank server: a process forked before any set-up, whose only work is to fork ranks."""

from __future__ import annotations

import atexit
import importlib
import io
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NoReturn

import torch

from zharness.errors import UsageError, WorldError
from zharness.world.cores import pin_to_cores
from zharness.world.limits import check_world_size, raise_file_limit
from zharness.world.orphans import adopt_orphans, die_with_parent, kill_orphans, kill_process_group
from zharness.world.outcome import GroupOutcome
from zharness.world.pools import RankPools, freeze_garbage_collector
from zharness.world.rank import inherited_function_placeholder
from zharness.world.task import CancelRequest, ClosePoolRequest, Group, RankTask
from zharness.world.task_watcher import ClientGone, TaskCancelled
from zharness.world.team import CannotStart, wait_for_end


@dataclass(frozen=True)
class RankEnvironment:
    """What a server has that its parent has not.

    ``search_path`` goes in front of sys.path (an engine release in a folder of its own), ``environment`` into
    os.environ, and ``warm_up`` (``module``, or ``module:function`` without arguments) runs once before the first rank:
    it may import, but must not run a tensor operation, or the children of this process hang in torch's thread pool.
    ``module`` is the package of which a release is in the first folder of ``search_path``; empty where there is none.
    ``echo`` has what the ranks print written to standard output as well, line by line with the rank in front.
    """

    search_path: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    warm_up: str = ""
    module: str = ""
    echo: bool = False


SHUTDOWN_TIMEOUT = 5.0  # seconds that a server gets to end its ranks before it is killed


class RankServer:
    """A handle on a rank server process. Use it as a context manager, or call ``close``."""

    def __init__(
        self, rank_environment: RankEnvironment | None = None, inherited_function: Callable[..., Any] | None = None
    ) -> None:
        """Fork the server. ``inherited`` reaches its ranks by the fork, so that nothing in it is pickled.

        Raises UsageError when this process has initialised CUDA, which no fork of it could use.
        """
        refuse_cuda()
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        # A private directory that the server removes when it ends, also when that is because this process was killed.
        self.scratch_dir = Path(tempfile.mkdtemp(prefix="zharness-"))
        arguments = (
            theirs,
            self._pipe,
            rank_environment or RankEnvironment(),
            inherited_function,
            self.scratch_dir,
            os.getpid(),
        )
        self._process: ForkProcess = context.Process(target=run_server, args=arguments, name="zharness rank server")
        try:
            with warnings.catch_warnings():
                # From 3.12 on Python warns where there are other threads, and a worker of xdist has one. It waits for
                # its controller, and holds nothing that the server needs.
                warnings.filterwarnings("ignore", message=".*multi-threaded", category=DeprecationWarning)
                self._process.start()
        except OSError:
            self._pipe.close()
            shutil.rmtree(self.scratch_dir, ignore_errors=True)
            raise
        finally:
            theirs.close()
        self._owner_pid = os.getpid()
        atexit.register(self.close)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int = 1,
        timeout: float = 60.0,
        group: Group = Group.DEFAULT,
    ) -> GroupOutcome:
        """Call ``function(*args)`` on every rank of a fresh group and return how each rank ended.

        Raises UsageError for a world size that cannot be had, WorldError when the server is gone.
        """
        check_world_size(world_size)
        return self.submit(RankTask(function, args, world_size, timeout, group))

    def call(self, *args: Any, **task_fields: Any) -> GroupOutcome:
        """``run`` for the function that the server inherited; ``how`` are fields of Work."""
        return self.submit(RankTask(inherited_function_placeholder, args, **task_fields))

    def submit(self, task: RankTask) -> GroupOutcome:
        """``run`` for a Work. An exception while ranks run, that of an interrupt say, ends these ranks."""
        answer = self._request(task)
        if isinstance(answer, GroupOutcome):
            return answer
        raise WorldError(str(answer))

    def close_pool(self, pool: str, world_size: int) -> GroupOutcome | None:
        """End the ranks of one pool and tell how they ended; None when there are none."""
        answer = self._request(ClosePoolRequest(pool, world_size))
        return answer if isinstance(answer, GroupOutcome) else None

    def _request(self, request: RankTask | ClosePoolRequest) -> object:
        try:
            self._pipe.send(request)
            return self._pipe.recv()
        except BaseException as error:
            # A pipe without a time-out raises no TimeoutError: that is one of a signal handler, like most others.
            if isinstance(error, (EOFError, OSError)) and not isinstance(error, TimeoutError):
                self.close()
                raise WorldError(f"the rank server ended with status {self._process.exitcode}") from error
            self._cancel()
            raise

    def _cancel(self) -> None:
        """Have the work ended whose answer nobody waits for any more, by a signal's exception say."""
        with suppress(Exception):  # whatever comes of the rest of an answer that was interrupted in its middle
            self._pipe.send(CancelRequest())
            while self._pipe.poll(SHUTDOWN_TIMEOUT):
                if isinstance(self._pipe.recv(), CancelRequest):
                    return
        self.close()

    def pin_to_cores(self, cores: Collection[int]) -> None:
        """Have the server, and ranks that it forks from now on, run on these cores alone; as they do, where none."""
        assert self._process.pid is not None, "forked, so it has a pid"
        pin_to_cores(cores, self._process.pid)

    @property
    def has_ended(self) -> bool:
        """Whether the server's process is gone."""
        return self._process.exitcode is not None

    def close(self) -> None:
        """End the server and whatever it still runs. A fork of the owner leaves it alone."""
        if os.getpid() != self._owner_pid:
            return
        atexit.unregister(self.close)
        # By signal, not by closing the pipe: a thread that still reads the pipe keeps it open and would never wake up.
        self._process.terminate()
        wait_for_end(self._process, SHUTDOWN_TIMEOUT)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        shutil.rmtree(self.scratch_dir, ignore_errors=True)
        with suppress(OSError):
            self._pipe.close()

    def __enter__(self) -> RankServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 1,
    timeout: float = 60.0,
    group: Group = Group.DEFAULT,
) -> list[Any]:
    """Call ``function(*args)`` on every rank of a fresh group and return the ranks' values in order.

    The server is forked here and now, so ``function`` may be a closure; the values are pickled. Raises RanksFailed when
    a rank does not return, UsageError for a world size that cannot be had.
    """
    check_world_size(world_size)
    with RankServer(inherited_function=partial(function, *args)) as server:
        return server.call(world_size=world_size, timeout=timeout, group=group).values()


def refuse_cuda(culprit: str = "") -> None:
    """Raises UsageError when CUDA is initialised in this process; ``culprit`` is who did it, where that is known."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UsageError(
            f"CUDA was initialised in this process{culprit and f' by {culprit}'}, so no rank can be forked from it: "
            "expected that nothing touches a GPU before the ranks do; move that into a test, a fixture or the function"
        )


def run_server(
    pipe: Connection,
    parent_pipe: Connection,
    rank_environment: RankEnvironment,
    inherited_function: Callable[..., Any] | None,
    scratch_dir: Path,
    parent_pid: int,
) -> None:
    """The server's loop: one Work in, one GroupOutcome out, until SIGTERM or the client's end closes."""
    parent_pipe.close()  # while this process held it too, the client's death would not close the pipe
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: exit_server(scratch_dir))
    adopt_orphans()
    # A pytest parent may have replaced the streams by objects of its own; ranks write to their own files anyway.
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    if rank_environment.echo and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what ranks print may not fit the encoding here
    raise_file_limit()
    pools = RankPools(scratch_dir, inherited_function, rank_environment.echo)
    try:
        die_with_parent(parent_pid, signal.SIGTERM)  # not SIGKILL: there are ranks to end and files to remove
        trouble = None
        while True:
            request = pipe.recv()
            trouble = (
                prepare_process(rank_environment) if trouble is None else trouble
            )  # not before: a spare may never be asked
            pipe.send(
                request if isinstance(request, CancelRequest) else trouble or handle_request(request, pools, pipe)
            )
            pools.import_rank_modules()
    except (EOFError, OSError, ClientGone):
        pass  # the client is gone
    finally:
        pools.close()
        shutil.rmtree(scratch_dir, ignore_errors=True)


def exit_server(scratch_dir: Path) -> NoReturn:
    """End the ranks, remove the files, and end this process, from within a signal handler.

    Not by raising: an exception out of a handler is lost where it happens to meet a callback that cannot raise, and
    foreign code that is being imported may catch it.
    """
    for child in multiprocessing.active_children():
        if child.pid is not None:
            child.kill()
            kill_process_group(child.pid)
    kill_orphans(())
    shutil.rmtree(scratch_dir, ignore_errors=True)
    os._exit(0)


def prepare_process(rank_environment: RankEnvironment) -> str:
    """Make this process what its ranks should be forked from; in words what went wrong, or the empty string."""
    trouble = describe_shadowed_module(rank_environment)
    if trouble:
        return trouble
    sys.path[:0] = rank_environment.search_path
    os.environ.update(rank_environment.environment)
    # Python reads the variable at its start only; beside the sources of a checkout no bytecode must be written.
    sys.dont_write_bytecode |= "PYTHONDONTWRITEBYTECODE" in rank_environment.environment
    module, _, function = rank_environment.warm_up.partition(":")
    try:
        imported = importlib.import_module(module) if module else None
        if function:
            getattr(imported, function)()
    except Exception as error:  # noqa: BLE001 - whatever a foreign import raises, every request is answered with it
        return f"the rank server's warm-up {rank_environment.warm_up} raised {type(error).__name__}: {error}"
    freeze_garbage_collector()
    return describe_shadowed_module(rank_environment)


def describe_shadowed_module(rank_environment: RankEnvironment) -> str:
    """In words which other release of ``module`` this process has imported; the empty string where it has none.

    The ranks would run that one, under the name of the release in ``search_path``.
    """
    found = sys.modules.get(rank_environment.module)
    if found is None or Path(getattr(found, "__file__", None) or "").is_relative_to(rank_environment.search_path[0]):
        return ""
    version = getattr(found, "__version__", "")
    return (
        f"{rank_environment.module} {version} is already imported by this session, where the release in "
        f"{rank_environment.search_path[0]} is to be tested; run zharness check, or keep imports out of module level"
    )


def handle_request(
    request: RankTask | ClosePoolRequest, pools: RankPools, client: Connection
) -> GroupOutcome | CancelRequest | str:
    """The outcome of work, or in words why there is none."""
    try:
        if isinstance(request, ClosePoolRequest):
            return pools.close_pool(request, client) or "there is no such pool"
        return pools.run(request, client)
    except TaskCancelled:
        return CancelRequest()
    except CannotStart as error:
        return str(error)
    except OSError as error:
        return (
            f"the ranks' control files or pipes broke while they ran (did a test remove {pools.scratch_dir}?): {error}"
        )
