"""The rank server: a process forked before any set-up, whose only work is to fork ranks."""

from __future__ import annotations

import atexit
import gc
import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NoReturn

from zharness.errors import WorldError
from zharness.world.group import Abandoned, run_group, wait_for_end
from zharness.world.limits import check_world_size
from zharness.world.orphans import adopt_orphans, die_with_parent, end_process_group
from zharness.world.outcome import GroupOutcome
from zharness.world.work import Group, Work


@dataclass(frozen=True)
class Surroundings:
    """What a server has that its parent has not.

    ``search_path`` goes in front of sys.path (an engine release in a folder of its own), ``environment`` into
    os.environ, and ``warm_up`` (``module:function``, no arguments) runs once before the first rank: it may import, but
    must not run a tensor operation, or the children of this process hang in torch's thread pool.
    """

    search_path: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    warm_up: str = ""


PATIENCE = 5.0  # seconds that a server gets to end its ranks before it is killed


class RankServer:
    """A handle on a rank server process. Use it as a context manager, or call ``close``."""

    def __init__(self, surroundings: Surroundings | None = None, inherited: Work | None = None) -> None:
        """Fork the server. ``inherited`` is work that reaches it by the fork, so that nothing in it is pickled."""
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        # A private directory that the server removes when it ends, also when that is because this process was killed.
        self.room = Path(tempfile.mkdtemp(prefix="zharness-"))
        arguments = (theirs, self._pipe, surroundings or Surroundings(), inherited, self.room, os.getpid())
        self._process: ForkProcess = context.Process(target=serve, args=arguments, name="zharness rank server")
        self._process.start()
        theirs.close()
        self._owner = os.getpid()
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
        return self.submit(Work(function, args, world_size, timeout, group))

    def submit(self, work: Work) -> GroupOutcome:
        """``run`` for a Work. An interrupt while ranks run ends the server and its ranks."""
        try:
            self._pipe.send(work)
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise WorldError(f"the rank server ended with status {self._process.exitcode}") from error
        except BaseException:
            self.close()
            raise
        if isinstance(answer, GroupOutcome):
            return answer
        raise WorldError(str(answer))

    def close(self) -> None:
        """End the server and whatever it still runs. A fork of the owner leaves it alone."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.close)
        # By signal, not by closing the pipe: a thread that still reads the pipe keeps it open and would never wake up.
        self._process.terminate()
        wait_for_end(self._process, PATIENCE)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
            shutil.rmtree(self.room, ignore_errors=True)
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
    work = Work(function, args, world_size, timeout, group)
    with RankServer(inherited=work) as server:
        return server.submit(Work(_inherited)).values()


def _inherited() -> None:
    """Stands in a message for the work that the server got by fork."""


def serve(
    pipe: Connection,
    parents_end: Connection,
    surroundings: Surroundings,
    inherited: Work | None,
    room: Path,
    parent: int,
) -> None:
    """The server's loop: one Work in, one GroupOutcome out, until SIGTERM or the client's end closes."""
    parents_end.close()  # while this process held it too, the client's death would not close the pipe
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: leave(room))
    adopt_orphans()
    # A pytest parent may have replaced the streams by objects of its own; ranks write to their own files anyway.
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    try:
        die_with_parent(parent, signal.SIGTERM)  # not SIGKILL: there are ranks to end and files to remove
        trouble = prepare(surroundings)
        while True:
            work = pipe.recv()
            pipe.send(trouble or answer(work if inherited is None else inherited, room, pipe))
    except (EOFError, OSError, Abandoned):
        pass  # the client is gone
    finally:
        shutil.rmtree(room, ignore_errors=True)


def leave(room: Path) -> NoReturn:
    """End the ranks, remove the files, and end this process, from within a signal handler.

    Not by raising: an exception out of a handler is lost where it happens to meet a callback that cannot raise, and
    foreign code that is being imported may catch it.
    """
    for child in multiprocessing.active_children():
        if child.pid is not None:
            child.kill()
            end_process_group(child.pid)
    shutil.rmtree(room, ignore_errors=True)
    os._exit(0)


def prepare(surroundings: Surroundings) -> str:
    """Make this process what its ranks should be forked from; in words what went wrong, or the empty string."""
    sys.path[:0] = surroundings.search_path
    os.environ.update(surroundings.environment)
    module, _, function = surroundings.warm_up.partition(":")
    try:
        if function:
            getattr(importlib.import_module(module), function)()
    except Exception as error:  # noqa: BLE001 - whatever a foreign import raises, every request is answered with it
        return f"the rank server's warm-up {surroundings.warm_up} raised {type(error).__name__}: {error}"
    # Ranks share this process's memory until they write to it, and a garbage collection writes to every object it sees.
    gc.collect()
    gc.freeze()
    return ""


def answer(work: Work, room: Path, client: Connection) -> GroupOutcome | str:
    """The outcome of ``work``, or in words why no group could be made."""
    try:
        return run_group(work, room, client)
    except OSError as error:
        return f"cannot start {work.world_size} ranks: {error}"
