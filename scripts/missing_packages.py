"""Print the dependencies of pyproject.toml that this Python lacks, one a line; torch is not among them."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def read_dependencies(text: str) -> list[str]:
    """Return the requirements of the project that apply to this Python, without using a TOML parser."""
    block = text.partition("\ndependencies = [")[2].partition("\n]")[0]
    found = [line.partition('"')[2].partition('"')[0] for line in block.splitlines() if '"' in line]
    is_old = sys.version_info < (3, 11)
    return [line.partition(";")[0].strip() for line in found if is_old or "python_version" not in line]


def is_installed(requirement: str) -> bool:
    """Return whether the package of a requirement is installed, in any version."""
    try:
        version(re.split(r"[<>=!~ ]", requirement)[0])
    except PackageNotFoundError:
        return False
    return True


def main() -> None:
    """Print the missing requirements."""
    for requirement in read_dependencies(PROJECT.read_text(encoding="utf-8")):
        if not requirement.startswith("torch") and not is_installed(requirement):
            print(requirement)


if __name__ == "__main__":
    main()
