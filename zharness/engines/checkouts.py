"""Find source checkouts of engines, written ``NAME@PATH``, and the version strings that identify them."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from zharness.errors import UsageError

_VERSION_LITERAL = re.compile(r"""^__version__ *= *["']([^"']+)["']""", re.MULTILINE)
_NO_VERSION = "0"  # sorts before every release


@dataclass(frozen=True)
class Checkout:
    """A folder that contains the source of the package ``module``.

    ``version`` is the package's version and the git commit, as in ``0.19.9+1a2b3c4d5e6f-dirty`` (a local version of PEP
    440). It has no commit if git does not track the package, and begins with ``0`` if the package has no version.
    """

    path: Path
    module: str
    version: str

    @property
    def package(self) -> Path:
        """The folder of the package's own source files."""
        return self.path / self.module


def read_checkout(path: Path, module: str) -> Checkout:
    """Read the checkout at ``path``, once per process. Raises UsageError if the folder does not contain ``module``."""
    return _read_checkout(path.expanduser().resolve(), module)


@cache
def _read_checkout(path: Path, module: str) -> Checkout:
    if not (path / module / "__init__.py").is_file():
        raise UsageError(
            f"got {str(path)!r}; expected a source checkout, a folder with {module}/__init__.py; "
            f"for a release write NAME==RELEASE"
        )
    version, commit = _read_version(path, module), _describe_commit(path, module)
    # A version may have only one "+", which a local version has already.
    separator = "." if "+" in version else "+"
    return Checkout(path, module, f"{version}{separator}{commit}" if commit else version)


def _read_version(path: Path, module: str) -> str:
    """Return the version in the file ``version.txt``, as DeepSpeed has it, or a literal ``__version__``, or ``0``."""
    version_file = path / "version.txt"
    if version_file.is_file():
        return version_file.read_text(encoding="utf-8", errors="replace").strip() or _NO_VERSION
    match = _VERSION_LITERAL.search((path / module / "__init__.py").read_text(encoding="utf-8", errors="replace"))
    return match[1] if match else _NO_VERSION


def _describe_commit(path: Path, module: str) -> str:
    """Return the git commit, with ``-dirty`` if tracked files differ from it.

    Returns the empty string if git does not track the package.
    """
    tracked = _git(path, "ls-files", "--error-unmatch", f"{module}/__init__.py")
    return _git(path, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") if tracked else ""


def _git(path: Path, *arguments: str) -> str:
    """Run git in ``path`` and return its output, or the empty string if git fails or is not installed."""
    # Without optional locks git does not write its index, so the user's checkout is not changed.
    command = ["git", "--no-optional-locks", "-C", str(path), *arguments]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    except OSError:  # git is not installed
        return ""
    return process.stdout.strip() if process.returncode == 0 else ""
