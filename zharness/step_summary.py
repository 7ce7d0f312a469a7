"""What a command found, on the page of a GitHub workflow's run."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
# "maximum size of 1MiB" for each step, and what is larger is not shown at all:
# https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands#step-isolation-and-limits
MAX_SUMMARY_BYTES = 1 << 20
MAX_CLOSING_BYTES = 64  # bytes kept for the end of a fence, and of what opens on a click
DETAILS_END = "</details>"
TRUNCATION_NOTICE = "\n\n... cut here: a step's summary has at most 1 MiB\n"


def append_section(title: str, *parts: str) -> None:
    """Append a heading and parts in Markdown to the file that GITHUB_STEP_SUMMARY names; nothing without it.

    What exceeds the limit is cut at a line's end and says so. A file that cannot be written is a sentence on standard
    error: what was measured counts, not where it is shown.
    """
    named = os.environ.get(SUMMARY_VARIABLE)
    if not named:
        return
    path = Path(named)
    try:
        room = MAX_SUMMARY_BYTES - (path.stat().st_size if path.exists() else 0)
        text = truncate_markdown("\n\n".join([f"## {title}", *(part for part in parts if part)]) + "\n\n", room)
        with path.open("ab") as stream:
            stream.write(text)
    except OSError as error:
        print(f"zharness: cannot append to {SUMMARY_VARIABLE}={named!r}: {error.strerror}", file=sys.stderr)  # noqa: T201


def truncate_markdown(text: str, max_bytes: int) -> bytes:
    """``text`` in UTF-8, cut at the end of a line where it has more bytes than ``room``; nothing where none fits."""
    whole = text.encode("utf-8", "replace")
    if len(whole) <= max_bytes:
        return whole
    left = max_bytes - len(TRUNCATION_NOTICE.encode()) - MAX_CLOSING_BYTES
    if left <= 0:
        return b""
    kept = whole[:left].rpartition(b"\n")[0]
    ends = "\n\n".join(list_open_blocks(kept.decode("utf-8")))
    return kept + (f"\n{ends}" if 0 < len(ends) < MAX_CLOSING_BYTES else "").encode() + TRUNCATION_NOTICE.encode()


def list_open_blocks(text: str) -> list[str]:
    """What ends the blocks that are open at the end of ``text``, the innermost first: a fence, what a click opens."""
    fence, folds = "", 0
    for line in text.splitlines():
        if line.startswith("```") and not line.strip("`"):
            fence = line if not fence else "" if line == fence else fence
        elif not fence:
            folds += line.startswith("<details>") - (line == DETAILS_END)
    return [*([fence] if fence else []), *[DETAILS_END] * folds]


def render_code_block(text: str) -> str:
    """Text as the terminal has it. The fence is longer than any row of backticks in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}" if text else ""


def render_details(heading: str, text: str) -> str:
    """A block under a heading that opens on a click."""
    return f"<details><summary>{heading}</summary>\n\n{render_code_block(text)}\n\n{DETAILS_END}" if text else ""
