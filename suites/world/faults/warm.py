"""A Python that has imported what every session of pytest needs, and forks one of itself for each: run as a program.

It reads one order a line: the folder of a session, pytest's arguments, environment variables, and what is to be its
standard input. Into the folder go ``pid``, what pytest prints (``output.txt``) and, once it has ended, ``status``: as a
return code of subprocess.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed  # noqa: F401 - half of the time that a session takes to begin


def keep(folder: Path, arguments: list[str], variables: dict[str, str], typed: str) -> NoReturn:
    """Run one session in a process of its own, wait for it, and tell how it ended."""
    pid = os.fork()
    if pid == 0:
        session(folder, arguments, variables, typed)
    tell(folder / "pid", pid)
    _, status = os.waitpid(pid, 0)
    tell(folder / "status", os.waitstatus_to_exitcode(status))
    os._exit(0)


def tell(path: Path, number: int) -> None:
    """Write it so that nobody reads half of it."""
    path.with_suffix(".part").write_text(str(number))
    path.with_suffix(".part").rename(path)


def session(folder: Path, arguments: list[str], variables: dict[str, str], typed: str) -> NoReturn:
    """pytest, leading a session of processes, by which all that it starts can be found."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored below a shell's background
    os.chdir(folder)
    output = os.open("output.txt", os.O_CREAT | os.O_WRONLY)
    for descriptor, target in ((os.open(typed, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)
    for name in [name for name in os.environ if name.startswith(("PYTEST", "ZHARNESS"))]:
        del os.environ[name]
    os.environ.update(variables)
    sys.path[0] = str(folder)
    sys.argv = ["pytest", *arguments]
    sys.exit(int(pytest.main(arguments)))


def main() -> None:
    """Until nobody is left to order anything."""
    gc.freeze()  # pytest collects garbage five times at its end, which looks at all that torch is made of
    for line in sys.stdin:
        folder, arguments, variables, typed = json.loads(line)
        if os.fork() == 0:
            keep(Path(folder), arguments, variables, typed)
        while any_ended():
            continue


def any_ended() -> bool:
    """Reap one that has ended, if there is one."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


if __name__ == "__main__":
    main()
