"""What the ranks print, gathered from pipes: bounded, cut into phases, echoed line by line where that is asked for."""

from __future__ import annotations

import codecs
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from zharness.world.outcome import Printed

HEAD = TAIL = 32 * 1024  # bytes kept of the beginning and of the end of each phase and stream
CHUNK = 1 << 18
# A rank writes this between two phases. NUL and RS do not occur in text that is meant to be read.
_MARKER = re.compile(rb"\x00\x1ezharness:(\w*)\x00")
_OPENING = b"\x00\x1e"
_LONGEST_MARKER = 64
_LONGEST_LINE = 1 << 16  # characters that an echo waits for the end of a line; a longer one is echoed in pieces


def marker(label: str) -> bytes:
    """The bytes that begin the phase ``label`` in a stream."""
    return b"\x00\x1ezharness:" + label.encode() + b"\x00"


@dataclass
class Cut:
    """The beginning and the end of a long text; what lay between is counted only."""

    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    lost: int = 0

    def add(self, data: bytes) -> None:
        room = HEAD - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > 2 * TAIL:  # twice, so that not every small write moves the whole tail
            self.lost += len(self.tail) - TAIL
            del self.tail[:-TAIL]

    def text(self) -> str:
        head, tail, lost = bytes(self.head), bytes(self.tail), self.lost
        if len(tail) > TAIL:
            lost += len(tail) - TAIL
            tail = tail[-TAIL:]
        middle = f"\n... {lost:,} bytes left out ...\n" if lost else ""
        return head.decode(errors="replace") + middle + tail.decode(errors="replace")


class Stream:
    """One stream of one rank: the reading end of its pipe, and what came out of it so far."""

    def __init__(self, name: str, source: int, echo: Callable[[str], None] | None) -> None:
        self.name = name
        self.source = source
        self.label = ""
        self._cuts: dict[str, Cut] = {}
        self._carry = b""
        self._line = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._echo = echo
        os.set_blocking(source, False)

    def pump(self) -> bool:
        """Take in what is there; False at the end of the stream."""
        try:
            data = os.read(self.source, CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if data:
            self._take(self._carry + data)
        return bool(data)

    def drain(self) -> None:
        """Take in all that is there, of a rank that has ended or waits: a pipe holds 64 KiB, so this ends."""
        for _ in range(8):
            try:
                data = os.read(self.source, CHUNK)
            except OSError:
                break
            if not data:
                break
            self._take(self._carry + data)

    def taken(self) -> tuple[Printed, ...]:
        """What was printed since the last call, phase by phase."""
        self._keep(self._carry)
        self._carry = b""
        self._flush_echo()
        found = tuple(Printed(label, self.name, cut.text()) for label, cut in self._cuts.items())
        self._cuts = {}
        return tuple(part for part in found if part.text)

    def close(self) -> None:
        os.close(self.source)

    def _take(self, data: bytes) -> None:
        at = 0
        for found in _MARKER.finditer(data):
            self._keep(data[at : found.start()])
            self.label = found[1].decode()
            at = found.end()
        rest = data[at:]
        opening = rest.rfind(_OPENING[:1], max(0, len(rest) - _LONGEST_MARKER))
        unfinished = opening >= 0 and rest[opening : opening + 2] in (_OPENING, _OPENING[:1])
        self._carry = rest[opening:] if unfinished else b""
        self._keep(rest[:opening] if unfinished else rest)

    def _keep(self, data: bytes) -> None:
        if not data:
            return
        self._cuts.setdefault(self.label, Cut()).add(data)
        if self._echo is not None:
            *lines, self._line = (self._line + self._decoder.decode(data)).split("\n")
            if len(self._line) > _LONGEST_LINE:
                lines, self._line = [*lines, self._line], ""
            for line in lines:
                self._echo(line)

    def _flush_echo(self) -> None:
        if self._echo is None:
            return
        line, self._line = self._line + self._decoder.decode(b"", final=True), ""
        if line:
            self._echo(line)


def echo_for(rank: int) -> Callable[[str], None]:
    """Writes one line to this process's standard output with the rank in front of it."""

    def echo(line: str) -> None:
        sys.stdout.write(f"[rank {rank}] {line}\n")
        sys.stdout.flush()

    return echo
