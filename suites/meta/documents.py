"""Parse the documentation: code blocks, commands, links and heading anchors."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# (\w+\.py)\n")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_SPAN = re.compile(r"`([^`\n]+)`")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """One command of a page: the arguments as a shell splits them, and the line as the page has it."""

    page: str
    line: str
    arguments: tuple[str, ...]


def code_blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    return [text for found, text in _BLOCK.findall(page.read_text(encoding="utf-8")) if found == language]


def python_files(page: Path) -> dict[str, str]:
    """Return the Python blocks that are whole files, by file name. Such a block begins with a comment `# name.py`."""
    found = ((_FILE.match(block), block) for block in code_blocks(page, "python"))
    return {match[1]: block for match, block in found if match}


def parse_commands(page: Path) -> Iterator[Command]:
    """Yield the commands behind `$ ` prompts, without the explanation that follows two spaces."""
    for block in code_blocks(page, "console"):
        for line in block.splitlines():
            assert line.startswith("$ "), f"{page.name}: in a block of commands, and no prompt: {line!r}"
            spelled = re.split(r" {2,}", line[2:])[0]
            for part in spelled.split(" && "):
                yield Command(page.name, part, tuple(shlex.split(part, comments=True)))


def parse_inline_commands(page: Path) -> Iterator[Command]:
    """Yield the zharness commands in inline code."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    for span in _SPAN.findall(text):
        if span.startswith("zharness "):
            yield Command(page.name, span, tuple(shlex.split(span)))


def local_links(page: Path) -> list[str]:
    """Return the targets of links and pictures that are not on another site."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    return [target for target in _LINK.findall(text) if "://" not in target]


def heading_anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of headings: lower case, hyphens for spaces, no punctuation."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(text)}
