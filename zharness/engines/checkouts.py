"""Source checkouts as releases: what ``NAME@PATH`` is a checkout of, and how its state is called."""

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
    """A folder that holds the package ``module``.

    ``version`` is its own version with the commit behind it, as in ``0.19.9+1a2b3c4d5e6f-dirty`` (PEP 440 calls that a
    local version); without the commit where git knows none, ``0`` where the package tells no version.
    """

    path: Path
    module: str
    version: str

    @property
    def package(self) -> Path:
        """The folder of the package itself."""
        return self.path / self.module


def read_checkout(path: Path, module: str) -> Checkout:
    """The checkout at ``path``, as it was when this process asked first. Raises UsageError where there is none."""
    return _read_checkout(path.expanduser().resolve(), module)


@cache
def _read_checkout(path: Path, module: str) -> Checkout:
    if not (path / module / "__init__.py").is_file():
        raise UsageError(
            f"got {str(path)!r}; expected a source checkout, a folder with {module}/__init__.py in it; "
            f"for a release write NAME==RELEASE"
        )
    version, commit = _read_version(path, module), _describe_commit(path, module)
    # A version that names its build has its "+" already.
    joint = "." if "+" in version else "+"
    return Checkout(path, module, f"{version}{joint}{commit}" if commit else version)


def _read_version(path: Path, module: str) -> str:
    """What the sources say: DeepSpeed's ``version.txt``, else a literal ``__version__``."""
    told = path / "version.txt"
    if told.is_file():
        return told.read_text(encoding="utf-8", errors="replace").strip() or _NO_VERSION
    found = _VERSION_LITERAL.search((path / module / "__init__.py").read_text(encoding="utf-8", errors="replace"))
    return found[1] if found else _NO_VERSION


def _describe_commit(path: Path, module: str) -> str:
    """The commit, with ``-dirty`` where tracked files differ from it; empty where git does not track the package."""
    tracked = _git(path, "ls-files", "--error-unmatch", f"{module}/__init__.py")
    return _git(path, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") if tracked else ""


def _git(path: Path, *arguments: str) -> str:
    # Optional locks are for what writes the index: nothing is written into somebody's checkout.
    command = ["git", "--no-optional-locks", "-C", str(path), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    except OSError:  # no git here
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
