"""Collect the output of ranks from their pipes, limit the size of the output, and split the output by test phase."""

from __future__ import annotations

import codecs
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from zharness.world.outcome import CapturedOutput

HEAD_BYTES = TAIL_BYTES = 32 * 1024  # bytes kept of the beginning and of the end of the output, per phase and stream
READ_BYTES = 1 << 18
# A rank writes this marker at the beginning of each phase. Text does not contain NUL followed by RS.
_MARKER = re.compile(rb"\x00\x1ezharness:(\w*)\x00")
_MARKER_START = b"\x00\x1e"
_MAX_MARKER_BYTES = 64
_MAX_LINE_CHARS = 1 << 16  # a longer line is echoed in pieces


def phase_marker(phase: str) -> bytes:
    """Return the bytes that a rank writes into its output streams to mark the beginning of the test phase ``phase``."""
    return b"\x00\x1ezharness:" + phase.encode() + b"\x00"


@dataclass
class TruncatedOutput:
    """An output of which only the beginning and the end are kept, with the number of bytes dropped in between."""

    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    dropped_bytes: int = 0

    def add(self, data: bytes) -> None:
        """Append ``data`` to the output; drop bytes from the middle when the output becomes too long."""
        room = HEAD_BYTES - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > 2 * TAIL_BYTES:  # cut at twice the size, so that not every small write moves the tail
            self.dropped_bytes += len(self.tail) - TAIL_BYTES
            del self.tail[:-TAIL_BYTES]

    def text(self) -> str:
        """Return the output as text. If bytes were dropped, a line in the middle states how many."""
        head, tail, dropped = bytes(self.head), bytes(self.tail), self.dropped_bytes
        if len(tail) > TAIL_BYTES:
            dropped += len(tail) - TAIL_BYTES
            tail = tail[-TAIL_BYTES:]
        middle = f"\n... {dropped:,} bytes left out ...\n" if dropped else ""
        return head.decode(errors="replace") + middle + tail.decode(errors="replace")


class RankStream:
    """One output stream of one rank: the reading end of the rank's pipe, and the output read so far in each test phase.

    ``echo`` is a function that is called with each complete line, or None.
    """

    def __init__(self, name: str, descriptor: int, echo: Callable[[str], None] | None) -> None:
        self.name = name
        self.descriptor = descriptor
        self.phase = ""
        self._outputs: dict[str, TruncatedOutput] = {}
        self._unparsed = b""
        self._partial_line = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._echo = echo
        os.set_blocking(descriptor, False)

    def read_available(self) -> bool:
        """Read the output that is available now, in one read; return False at the end of the stream."""
        try:
            data = os.read(self.descriptor, READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if data:
            self._split_phases(self._unparsed + data)
        return bool(data)

    def drain(self) -> None:
        """Read until the pipe is empty, but at most 8 times: a rank that keeps printing must not block the caller."""
        for _ in range(8):
            try:
                data = os.read(self.descriptor, READ_BYTES)
            except OSError:
                break
            if not data:
                break
            self._split_phases(self._unparsed + data)

    def take_output(self) -> tuple[CapturedOutput, ...]:
        """Return the output that was read since the last call of this method, as one part for each test phase."""
        self._store_bytes(self._unparsed)
        self._unparsed = b""
        self._flush_echo()
        parts = tuple(CapturedOutput(phase, self.name, output.text()) for phase, output in self._outputs.items())
        self._outputs = {}
        return tuple(part for part in parts if part.text)

    def close(self) -> None:
        """Close the reading end of the pipe."""
        os.close(self.descriptor)

    def _split_phases(self, data: bytes) -> None:
        """Split ``data`` at the phase markers and store the parts; keep an incomplete last marker for the next read."""
        at = 0
        for marker in _MARKER.finditer(data):
            self._store_bytes(data[at : marker.start()])
            self.phase = marker[1].decode()
            at = marker.end()
        rest = data[at:]
        opening = rest.rfind(_MARKER_START[:1], max(0, len(rest) - _MAX_MARKER_BYTES))
        unfinished = opening >= 0 and rest[opening : opening + 2] in (_MARKER_START, _MARKER_START[:1])
        self._unparsed = rest[opening:] if unfinished else b""
        self._store_bytes(rest[:opening] if unfinished else rest)

    def _store_bytes(self, data: bytes) -> None:
        """Append ``data`` to the output of the current phase, and echo every line that ``data`` completes."""
        if not data:
            return
        self._outputs.setdefault(self.phase, TruncatedOutput()).add(data)
        if self._echo is not None:
            *lines, self._partial_line = (self._partial_line + self._decoder.decode(data)).split("\n")
            if len(self._partial_line) > _MAX_LINE_CHARS:
                lines, self._partial_line = [*lines, self._partial_line], ""
            for line in lines:
                self._echo(line)

    def _flush_echo(self) -> None:
        """Echo the last line of the output, which does not end with a newline."""
        if self._echo is None:
            return
        line, self._partial_line = self._partial_line + self._decoder.decode(b"", final=True), ""
        if line:
            self._echo(line)


def make_echo(rank: int) -> Callable[[str], None]:
    """Return a function that writes a line to standard output with the rank as its prefix."""

    def echo(line: str) -> None:
        """Write ``line`` with the prefix, and flush standard output."""
        sys.stdout.write(f"[rank {rank}] {line}\n")
        sys.stdout.flush()

    return echo
