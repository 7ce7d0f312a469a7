"""Append a command's results to the summary page of a GitHub workflow run."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
# "maximum size of 1MiB" for each step; GitHub does not show a larger summary at all:
# https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands#step-isolation-and-limits
MAX_SUMMARY_BYTES = 1 << 20
MAX_CLOSING_BYTES = 64  # bytes reserved to close an open code fence and <details> blocks
DETAILS_END = "</details>"
TRUNCATION_NOTICE = "\n\n... the rest is omitted: the summary of a step has at most 1 MiB\n"


def append_section(title: str, *parts: str) -> None:
    """Append a heading and Markdown parts to the file that GITHUB_STEP_SUMMARY names; do nothing if it is not set.

    A text that exceeds the size limit is cut at the end of a line, and a notice is added. If the file cannot be
    written, a message is printed to standard error, since a missing summary must not change the command's exit status.
    """
    file_name = os.environ.get(SUMMARY_VARIABLE)
    if not file_name:
        return
    path = Path(file_name)
    try:
        room = MAX_SUMMARY_BYTES - (path.stat().st_size if path.exists() else 0)
        text = truncate_markdown("\n\n".join([f"## {title}", *(part for part in parts if part)]) + "\n\n", room)
        with path.open("ab") as stream:
            stream.write(text)
    except OSError as error:
        print(f"zharness: cannot append to {SUMMARY_VARIABLE}={file_name!r}: {error.strerror}", file=sys.stderr)  # noqa: T201


def truncate_markdown(text: str, max_bytes: int) -> bytes:
    """Return ``text`` in UTF-8, cut at the end of a line so that it has at most ``max_bytes`` bytes.

    If ``text`` was cut, a notice is added. The result is empty if no line fits.
    """
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
    """Return the lines that close the code fence and the <details> blocks that are still open at the end of ``text``.

    The line that closes the innermost block comes first.
    """
    fence, details_count = "", 0
    for line in text.splitlines():
        if line.startswith("```") and not line.strip("`"):
            fence = line if not fence else "" if line == fence else fence
        elif not fence:
            details_count += line.startswith("<details>") - (line == DETAILS_END)
    return [*([fence] if fence else []), *[DETAILS_END] * details_count]


def render_code_block(text: str) -> str:
    """Return ``text`` as a Markdown code block, whose fence is longer than any run of backticks in ``text``."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}" if text else ""


def render_details(heading: str, text: str) -> str:
    """Return ``text`` as a code block in a collapsed <details> element, or "" if ``text`` is empty."""
    return f"<details><summary>{heading}</summary>\n\n{render_code_block(text)}\n\n{DETAILS_END}" if text else ""
