"""What the ranks print, gathered from pipes: bounded, cut into phases, echoed line by line where that is asked for."""

from __future__ import annotations

import codecs
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from zharness.world.outcome import CapturedOutput

HEAD_BYTES = TAIL_BYTES = 32 * 1024  # bytes kept of the beginning and of the end of each phase and stream
READ_BYTES = 1 << 18
# A rank writes this between two phases. NUL and RS do not occur in text that is meant to be read.
_MARKER = re.compile(rb"\x00\x1ezharness:(\w*)\x00")
_MARKER_START = b"\x00\x1e"
_MAX_MARKER_BYTES = 64
_MAX_LINE_CHARS = 1 << 16  # characters that an echo waits for the end of a line; a longer one is echoed in pieces


def phase_marker(phase: str) -> bytes:
    """The bytes that begin the phase ``label`` in a stream."""
    return b"\x00\x1ezharness:" + phase.encode() + b"\x00"


@dataclass
class TruncatedOutput:
    """The beginning and the end of a long text; what lay between is counted only."""

    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    dropped_bytes: int = 0

    def add(self, data: bytes) -> None:
        room = HEAD_BYTES - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > 2 * TAIL_BYTES:  # twice, so that not every small write moves the whole tail
            self.dropped_bytes += len(self.tail) - TAIL_BYTES
            del self.tail[:-TAIL_BYTES]

    def text(self) -> str:
        head, tail, lost = bytes(self.head), bytes(self.tail), self.dropped_bytes
        if len(tail) > TAIL_BYTES:
            lost += len(tail) - TAIL_BYTES
            tail = tail[-TAIL_BYTES:]
        middle = f"\n... {lost:,} bytes left out ...\n" if lost else ""
        return head.decode(errors="replace") + middle + tail.decode(errors="replace")


class RankStream:
    """One stream of one rank: the reading end of its pipe, and what came out of it so far."""

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
        """Take in what is there; False at the end of the stream."""
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
        """Take in all that is there, of a rank that has ended or waits: a pipe holds 64 KiB, so this ends."""
        for _ in range(8):
            try:
                data = os.read(self.descriptor, READ_BYTES)
            except OSError:
                break
            if not data:
                break
            self._split_phases(self._unparsed + data)

    def take_output(self) -> tuple[CapturedOutput, ...]:
        """What was printed since the last call, phase by phase."""
        self._store_bytes(self._unparsed)
        self._unparsed = b""
        self._flush_echo()
        found = tuple(CapturedOutput(label, self.name, cut.text()) for label, cut in self._outputs.items())
        self._outputs = {}
        return tuple(part for part in found if part.text)

    def close(self) -> None:
        os.close(self.descriptor)

    def _split_phases(self, data: bytes) -> None:
        at = 0
        for found in _MARKER.finditer(data):
            self._store_bytes(data[at : found.start()])
            self.phase = found[1].decode()
            at = found.end()
        rest = data[at:]
        opening = rest.rfind(_MARKER_START[:1], max(0, len(rest) - _MAX_MARKER_BYTES))
        unfinished = opening >= 0 and rest[opening : opening + 2] in (_MARKER_START, _MARKER_START[:1])
        self._unparsed = rest[opening:] if unfinished else b""
        self._store_bytes(rest[:opening] if unfinished else rest)

    def _store_bytes(self, data: bytes) -> None:
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
        if self._echo is None:
            return
        line, self._partial_line = self._partial_line + self._decoder.decode(b"", final=True), ""
        if line:
            self._echo(line)


def make_echo(rank: int) -> Callable[[str], None]:
    """Writes one line to this process's standard output with the rank in front of it."""

    def echo(line: str) -> None:
        sys.stdout.write(f"[rank {rank}] {line}\n")
        sys.stdout.flush()

    return echo
