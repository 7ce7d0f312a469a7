"""Implement the rank server: a process that is forked before any tensor operation, and that forks ranks."""

from __future__ import annotations

import atexit
import gc
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

from zharness.device import is_gpu_requested, require_usable_gpus, require_visible_gpus
from zharness.environment import look_for_gpus_by_nvml
from zharness.errors import UsageError, WorldError
from zharness.torch_private import is_cuda_lost_by_fork
from zharness.world.cores import pin_to_cores
from zharness.world.limits import check_world_size, raise_file_limit
from zharness.world.orphans import adopt_orphans, die_with_parent, kill_orphans, kill_process_group
from zharness.world.outcome import GroupOutcome
from zharness.world.pools import RankPools, freeze_garbage_collector
from zharness.world.rank import inherited_function_placeholder
from zharness.world.task import CancelRequest, ClosePoolRequest, GroupMode, RankTask
from zharness.world.task_watcher import ClientGone, TaskCancelled
from zharness.world.team import CannotStart, wait_for_end


@dataclass(frozen=True)
class RankEnvironment:
    """The settings that a rank server and its ranks have beyond those of the parent process.

    ``search_path`` is prepended to sys.path; its first folder may contain a release of an engine. ``module`` is the
    package of that engine, or empty. ``environment`` updates os.environ. ``warm_up`` is a module that is imported, or a
    function, written ``module:function``, that is called once before the first rank is forked. The warm-up may import
    modules but must not run tensor operations, after which the forked ranks would hang in torch's thread pool. If
    ``echo`` is True, the ranks' output is also written to standard output, each line prefixed with the rank.
    """

    search_path: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    warm_up: str = ""
    module: str = ""
    echo: bool = False


SHUTDOWN_TIMEOUT = 5.0  # seconds for a server to end its ranks before it is killed


class RankServer:
    """A handle on the process of a rank server. Use the handle as a context manager, or call ``close`` at the end."""

    def __init__(
        self, rank_environment: RankEnvironment | None = None, inherited_function: Callable[..., Any] | None = None
    ) -> None:
        """Fork the server. The ranks inherit ``inherited_function`` by the fork, so it is never pickled.

        Raises UsageError if this process has initialized CUDA, because forked processes could not use CUDA then.
        """
        refuse_cuda()
        look_for_gpus_by_nvml()
        require_visible_gpus()
        context = multiprocessing.get_context("fork")
        self._pipe, server_pipe = context.Pipe()
        # The server removes this directory when it ends, also if this process is killed.
        self.scratch_dir = Path(tempfile.mkdtemp(prefix="zharness-"))
        arguments = (
            server_pipe,
            self._pipe,
            rank_environment or RankEnvironment(),
            inherited_function,
            self.scratch_dir,
            os.getpid(),
        )
        self._process: ForkProcess = context.Process(target=run_server, args=arguments, name="zharness rank server")
        try:
            with warnings.catch_warnings():
                # Since 3.12 Python warns about a fork in a process with other threads. A worker of xdist has another
                # thread, which waits for its controller and holds no lock that the server needs.
                warnings.filterwarnings("ignore", message=".*multi-threaded", category=DeprecationWarning)
                self._process.start()
        except OSError:
            self._pipe.close()
            shutil.rmtree(self.scratch_dir, ignore_errors=True)
            raise
        finally:
            server_pipe.close()
        self._owner_pid = os.getpid()
        atexit.register(self.close)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int = 1,
        timeout: float = 60.0,
        group: GroupMode = GroupMode.DEFAULT,
    ) -> GroupOutcome:
        """Call ``function(*args)`` on ``world_size`` new ranks, and return how each rank ended.

        Raises UsageError if this machine cannot start so many ranks, and WorldError if the server has died.
        """
        check_world_size(world_size)
        return self.submit(RankTask(function, args, world_size, timeout, group))

    def call(self, *args: Any, **task_fields: Any) -> GroupOutcome:
        """Call the inherited function with ``args`` on the ranks; ``task_fields`` are the other fields of the task."""
        return self.submit(RankTask(inherited_function_placeholder, args, **task_fields))

    def submit(self, task: RankTask) -> GroupOutcome:
        """Run a task and return its outcome. If Ctrl-C interrupts this method, the task's ranks are ended.

        Raises WorldError if the ranks cannot be started or the server has died.
        """
        answer = self._request(task)
        if isinstance(answer, GroupOutcome):
            return answer
        raise WorldError(str(answer))

    def close_pool(self, pool: str, world_size: int) -> GroupOutcome | None:
        """End the ranks of one pool with this world size, and return how they ended; None if no pool matches."""
        answer = self._request(ClosePoolRequest(pool, world_size))
        return answer if isinstance(answer, GroupOutcome) else None

    def _request(self, request: RankTask | ClosePoolRequest) -> object:
        """Send a request to the server and return its answer. Raises WorldError if the server has ended."""
        try:
            self._pipe.send(request)
            return self._pipe.recv()
        except BaseException as error:
            # The pipe has no time-out, so a TimeoutError (an OSError) was raised by a signal handler.
            if isinstance(error, (EOFError, OSError)) and not isinstance(error, TimeoutError):
                self.close()
                raise WorldError(f"the rank server ended with status {self._process.exitcode}") from error
            self._cancel()
            raise

    def _cancel(self) -> None:
        """Make the server end the ranks of the running task; close the server if it does not answer."""
        with suppress(Exception):  # the rest of a half-read answer may not unpickle
            self._pipe.send(CancelRequest())
            while self._pipe.poll(SHUTDOWN_TIMEOUT):
                if isinstance(self._pipe.recv(), CancelRequest):
                    return
        self.close()

    def pin_to_cores(self, cores: Collection[int]) -> None:
        """Pin the server and the ranks that it forks from now on to ``cores``. Does nothing if ``cores`` is empty."""
        assert self._process.pid is not None, "a started process has a pid"
        pin_to_cores(cores, self._process.pid)

    @property
    def has_ended(self) -> bool:
        """Return whether the server's process has ended."""
        return self._process.exitcode is not None

    def close(self) -> None:
        """End the server and its ranks. Does nothing in a process other than the one that created this handle."""
        if os.getpid() != self._owner_pid:
            return
        atexit.unregister(self.close)
        # End the server by a signal, not by closing the pipe: a thread that still reads from the pipe keeps it open.
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
    group: GroupMode = GroupMode.DEFAULT,
) -> list[Any]:
    """Call ``function(*args)`` on ``world_size`` new ranks, and return their return values in rank order.

    This call forks its own rank server, so ``function`` may be a closure. The return values have to be picklable.
    Raises RanksFailed if the function does not return on some rank, and UsageError if this machine cannot start so
    many ranks.
    """
    check_world_size(world_size)
    require_usable_gpus(world_size)
    with RankServer(inherited_function=partial(function, *args)) as server:
        return server.call(world_size=world_size, timeout=timeout, group=group).values()


def refuse_cuda(culprit: str = "") -> None:
    """Raise UsageError if CUDA is initialized in this process. ``culprit`` names the code that initialized CUDA."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UsageError(
            f"CUDA was initialised in this process{culprit and f' by {culprit}'}, so no rank can be forked from it; "
            "use the GPU only inside of a test, a fixture or the function that runs on the ranks"
        )


def run_server(
    pipe: Connection,
    parent_pipe: Connection,
    rank_environment: RankEnvironment,
    inherited_function: Callable[..., Any] | None,
    scratch_dir: Path,
    parent_pid: int,
) -> None:
    """Run the server process: answer requests until SIGTERM arrives or the client closes its pipe."""
    parent_pipe.close()  # with an open duplicate here, the client's death would not close the pipe
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: exit_server(scratch_dir))
    adopt_orphans()
    # pytest may have replaced the streams of the parent by its own objects; ranks have their own pipes in any case.
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    if rank_environment.echo and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # ranks may print characters that the encoding lacks
    raise_file_limit()
    pools = RankPools(scratch_dir, inherited_function, rank_environment.echo)
    try:
        die_with_parent(parent_pid, signal.SIGTERM)  # not SIGKILL: the handler ends ranks and removes files
        problem = None
        while True:
            request = pipe.recv()
            if problem is None:  # at the first request: a spare server may never get one
                problem = prepare_process(rank_environment)
            pipe.send(
                request if isinstance(request, CancelRequest) else problem or handle_request(request, pools, pipe)
            )
    except (EOFError, OSError, ClientGone):
        pass  # the client has ended
    finally:
        pools.close()
        shutil.rmtree(scratch_dir, ignore_errors=True)


def exit_server(scratch_dir: Path) -> NoReturn:
    """Kill the ranks, remove the server's files and exit. This function is called from a signal handler.

    The function calls ``os._exit`` instead of raising SystemExit, because an exception from a signal handler is lost in
    callbacks that cannot raise, and a module that is being imported may catch the exception.
    """
    for child in multiprocessing.active_children():
        if child.pid is not None:
            child.kill()
            kill_process_group(child.pid)
    kill_orphans(())
    shutil.rmtree(scratch_dir, ignore_errors=True)
    os._exit(0)


def prepare_process(rank_environment: RankEnvironment) -> str:
    """Apply ``rank_environment`` to this process and run its warm-up; return an error message, empty on success."""
    problem = describe_lost_cuda() or describe_shadowed_module(rank_environment)
    if problem:
        return problem
    sys.path[:0] = rank_environment.search_path
    os.environ.update(rank_environment.environment)
    # Python reads this variable only at its start; without it, imports would write bytecode into a checkout.
    sys.dont_write_bytecode |= "PYTHONDONTWRITEBYTECODE" in rank_environment.environment
    module, _, function = rank_environment.warm_up.partition(":")
    # Imports make almost no garbage, and garbage collections during imports took a fifth of their CPU time.
    gc.disable()
    try:
        imported = importlib.import_module(module) if module else None
        if function:
            getattr(imported, function)()
    except Exception as error:  # noqa: BLE001 - an import may raise any exception; every request is answered with it
        return f"the rank server's warm-up {rank_environment.warm_up} raised {type(error).__name__}: {error}"
    finally:
        gc.enable()
    freeze_garbage_collector()
    return describe_shadowed_module(rank_environment)


def describe_lost_cuda() -> str:
    """Return an error message if ranks use GPUs and processes forked from this process cannot, else empty text."""
    if not (is_gpu_requested() and is_cuda_lost_by_fork()):
        return ""
    return (
        "the process that started the ranks has asked CUDA's driver for GPUs, which forked ranks cannot use then; "
        "set PYTORCH_NVML_BASED_CUDA_CHECK=1 before that process starts, so that torch.cuda.is_available() asks NVML"
    )


def describe_shadowed_module(rank_environment: RankEnvironment) -> str:
    """Return an error message if this process has already imported another release of the engine, else empty text.

    The forked ranks would run the imported release instead of the release in ``search_path``.
    """
    imported = sys.modules.get(rank_environment.module)
    if imported is None or Path(getattr(imported, "__file__", None) or "").is_relative_to(
        rank_environment.search_path[0]
    ):
        return ""
    version = getattr(imported, "__version__", "")
    return (
        f"{rank_environment.module} {version} is already imported by this session, but the ranks have to import "
        f"the release in {rank_environment.search_path[0]}; run `zharness check`, or import "
        f"{rank_environment.module} only inside functions"
    )


def handle_request(
    request: RankTask | ClosePoolRequest, pools: RankPools, client: Connection
) -> GroupOutcome | CancelRequest | str:
    """Run a request on the pools; return its outcome, or an error message if the request could not be run."""
    try:
        if isinstance(request, ClosePoolRequest):
            return pools.close_pool(request, client) or "no rank pool has this name and world size"
        return pools.run(request, client)
    except TaskCancelled:
        return CancelRequest()
    except CannotStart as error:
        return str(error)
    except OSError as error:
        return (
            f"the ranks' control files or pipes broke during the task (did a test remove {pools.scratch_dir}?): {error}"
        )
