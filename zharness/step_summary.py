"""What a command found, on the page of a GitHub workflow's run."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

VARIABLE = "GITHUB_STEP_SUMMARY"
# "maximum size of 1MiB" for each step, and what is larger is not shown at all:
# https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands#step-isolation-and-limits
LIMIT = 1 << 20
LONGEST = 64  # bytes kept for the end of a fence, and of what opens on a click
FOLDED = "</details>"
CUT = "\n\n... cut here: a step's summary has at most 1 MiB\n"


def append(title: str, *parts: str) -> None:
    """Append a heading and parts in Markdown to the file that GITHUB_STEP_SUMMARY names; nothing without it.

    What exceeds the limit is cut at a line's end and says so. A file that cannot be written is a sentence on standard
    error: what was measured counts, not where it is shown.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return
    path = Path(named)
    try:
        room = LIMIT - (path.stat().st_size if path.exists() else 0)
        text = fitted("\n\n".join([f"## {title}", *(part for part in parts if part)]) + "\n\n", room)
        with path.open("ab") as stream:
            stream.write(text)
    except OSError as error:
        print(f"zharness: cannot append to {VARIABLE}={named!r}: {error.strerror}", file=sys.stderr)  # noqa: T201


def fitted(text: str, room: int) -> bytes:
    """``text`` in UTF-8, cut at the end of a line where it has more bytes than ``room``; nothing where none fits."""
    whole = text.encode("utf-8", "replace")
    if len(whole) <= room:
        return whole
    left = room - len(CUT.encode()) - LONGEST
    if left <= 0:
        return b""
    kept = whole[:left].rpartition(b"\n")[0]
    ends = "\n\n".join(still_open(kept.decode("utf-8")))
    return kept + (f"\n{ends}" if 0 < len(ends) < LONGEST else "").encode() + CUT.encode()


def still_open(text: str) -> list[str]:
    """What ends the blocks that are open at the end of ``text``, the innermost first: a fence, what a click opens."""
    fence, folds = "", 0
    for line in text.splitlines():
        if line.startswith("```") and not line.strip("`"):
            fence = line if not fence else "" if line == fence else fence
        elif not fence:
            folds += line.startswith("<details>") - (line == FOLDED)
    return [*([fence] if fence else []), *[FOLDED] * folds]


def block(text: str) -> str:
    """Text as the terminal has it. The fence is longer than any row of backticks in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}" if text else ""


def folded(heading: str, text: str) -> str:
    """A block under a heading that opens on a click."""
    return f"<details><summary>{heading}</summary>\n\n{block(text)}\n\n{FOLDED}" if text else ""
