"""Ignore Ctrl-C while ranks are ended, and restore the caller's handler afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ignore_interrupts() -> Iterator[None]:
    """Ignore SIGINT inside the block, and restore its handler at the end.

    Python sets handlers only in the main thread, which is also the only one that Ctrl-C interrupts. A handler that
    Python did not install cannot be restored, so it stays in place.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
