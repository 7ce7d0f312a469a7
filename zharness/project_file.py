"""Find the file in which an engine's repository keeps its options for zharness and its expected failures.

The file is ``zharness.toml``, or ``pyproject.toml`` with a table ``[tool.zharness]``. It is searched in the current
folder and the folders above it, up to the root of the repository. The module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zharness.errors import UsageError
from zharness.toml_text import parse_toml

FILE_NAME = "zharness.toml"
COMMANDS = ("check", "model")  # each may have a table of options


@dataclass(frozen=True)
class ProjectFile:
    """The options of each command that a project sets, and the file that has them.

    ``expected_failures`` is the text of the file if the file has tables ``[[expected_failure]]``, else empty.
    """

    path: Path
    commands: Mapping[str, Mapping[str, Any]]
    expected_failures: str = ""


def find_project_file(folder: Path) -> ProjectFile | None:
    """Return the file of the project in ``folder`` or the nearest folder above it, or None if there is none.

    Raises UsageError if the file cannot be read, or has a key that is not allowed.
    """
    for candidate in list_folders(folder):
        path = candidate / FILE_NAME
        if path.is_file():
            text = read_text(path)
            content = parse_toml(text, str(path))
            # A file of expected failures also has the keys engine, around and releases.
            require_keys(content, (*COMMANDS, "engine", "around", "releases", "expected_failure"), path)
            return ProjectFile(path, read_commands(content, path), text if "expected_failure" in content else "")
        path = candidate / "pyproject.toml"
        if path.is_file() and (own := find_own_table(path)):
            require_keys(own, (*COMMANDS, "engine"), path)
            return ProjectFile(path, read_commands(own, path))
    return None


def read_commands(content: Mapping[str, Any], path: Path) -> dict[str, Mapping[str, Any]]:
    """Return the options of each command; ``engine`` above the tables is an option of all commands."""
    shared = {key: content[key] for key in ("engine",) if key in content}
    return {name: {**shared, **require_table(content, name, path)} for name in COMMANDS}


def list_folders(folder: Path) -> Iterator[Path]:
    """Yield ``folder`` and the folders above it, up to the root of a repository."""
    for candidate in (folder, *folder.parents):
        yield candidate
        if (candidate / ".git").exists():
            return


def find_own_table(path: Path) -> Mapping[str, Any]:
    """Return the table ``[tool.zharness]`` of a ``pyproject.toml``, which is empty if it is missing."""
    content = parse_toml(read_text(path), str(path))
    return require_table(require_table(content, "tool", path), "zharness", path)


def read_text(path: Path) -> str:
    """Return the text of a file. Raises UsageError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def require_keys(content: Mapping[str, Any], allowed: tuple[str, ...], path: Path) -> None:
    """Raise UsageError for a key of ``content`` that is not ``allowed``."""
    for key in content:
        if key not in allowed:
            raise UsageError.unknown_name(f"key in {path}:", key, allowed)


def require_table(content: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    """Return the table called ``name``, or an empty table if it is missing. Raises UsageError if it is not a table."""
    table = content.get(name, {})
    if not isinstance(table, Mapping):
        raise UsageError(f"{path}: got {name} = {table!r}; expected a table [{name}] of options")
    return table


def drop_option_tables(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the ``content`` of a file of expected failures, without the tables of options that zharness.toml has."""
    return {key: value for key, value in content.items() if key not in COMMANDS or Path(source).name != FILE_NAME}
