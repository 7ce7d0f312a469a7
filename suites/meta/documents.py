"""README and docs/ taken apart: blocks of code, commands, links and the anchors that they may name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# (\w+\.py)\n")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_SPAN = re.compile(r"`([^`\n]+)`")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """One command of a page, in the words that a shell makes of it; ``line`` is how the page spells it."""

    page: str
    line: str
    words: tuple[str, ...]


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of code in one language."""
    return [text for found, text in _BLOCK.findall(page.read_text(encoding="utf-8")) if found == language]


def files(page: Path) -> dict[str, str]:
    """The Python blocks that are whole files, which begin with their name, by that name."""
    found = ((_FILE.match(block), block) for block in blocks(page, "python"))
    return {match[1]: block for match, block in found if match}


def commands(page: Path) -> Iterator[Command]:
    """What stands behind a prompt, without the words that say what it does."""
    for block in blocks(page, "console"):
        for line in block.splitlines():
            assert line.startswith("$ "), f"{page.name}: in a block of commands, and no prompt: {line!r}"
            spelled = re.split(r" {2,}", line[2:])[0]
            for part in spelled.split(" && "):
                yield Command(page.name, part, tuple(shlex.split(part, comments=True)))


def spans(page: Path) -> Iterator[Command]:
    """What the text calls a command of this package."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    for span in _SPAN.findall(text):
        if span.startswith("zharness "):
            yield Command(page.name, span, tuple(shlex.split(span)))


def links(page: Path) -> list[str]:
    """Where its links and pictures lead, those to other sites left out."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    return [target for target in _LINK.findall(text) if "://" not in target]


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives the headings: lower case, hyphens for spaces, other signs left out."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(text)}
