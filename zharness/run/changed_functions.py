"""Find the functions of an engine's source that differ from a commit of its repository."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from zharness.engines.registry import find_checkout, info
from zharness.errors import UsageError
from zharness.run.engine_sources import (
    MODULE_LEVEL,
    FunctionLines,
    find_functions_of_lines,
    find_source_files,
    list_functions,
    list_source_modules,
)
from zharness.run.reach import shorten_path

# The prefixes and the quotes of paths are options of git that a user may have set otherwise.
DIFF = (
    *("-c", "core.quotePath=false", "diff", "--unified=0", "--no-color", "--no-ext-diff", "--no-textconv"),
    *("--no-renames", "--src-prefix=a/", "--dst-prefix=b/"),
)
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True)
class Hunk:
    """The lines of one change in a file: those that the commit has, and those that the working tree has.

    ``path`` is that of the working tree, or that of the commit for a file that was deleted.
    """

    path: str
    old_lines: range
    new_lines: range


def find_changed_functions(engine: str, base: str, recorded: Set[str] = frozenset()) -> dict[str, str]:
    """Return the functions that the working tree of an engine's source changes since it left ``base``.

    They are named as in a record of reach, and each has the name that counts: of a branch that the change adds, and
    that is not among the names ``recorded``, that of the innermost function or branch around it that ``base`` has.
    What ``base`` has changed since then does not count. Lines outside of all functions count as a function ``<module>``
    of their file. A file that was renamed counts as deleted under its old name and as new under the new one. Raises
    UsageError if the source is not in a git repository, or if ``base`` is no commit that has a common ancestor with
    HEAD.
    """
    modules = list_source_modules(info(engine))
    checkout = find_checkout(engine)
    if checkout is not None:
        sources = list(checkout.package.rglob("*.py"))
    else:
        sources = [Path(path) for path in find_source_files(modules)]
    if not sources:
        raise UsageError(f"found no source of {engine}; expected an installed package, or a checkout: NAME@PATH")
    root = Path(run_git(sources[0].parent, engine, "rev-parse", "--show-toplevel").strip())
    start = find_merge_base(root, engine, base)
    diff = run_git(root, engine, *DIFF, start, "--", "*.py")
    by_path = {str(path.resolve().relative_to(root)): path for path in sources if path.resolve().is_relative_to(root)}
    folders = {str(Path(path).parent) for path in by_path}
    changed = dict[str, str]()
    for hunk in parse_diff(diff):
        was_deleted = not (root / hunk.path).exists() and is_below(hunk.path, folders)
        if hunk.path in by_path or was_deleted:
            path = by_path.get(hunk.path, root / hunk.path)
            shown = call_git(root, "show", f"{start}:{hunk.path}")
            old = "" if shown.returncode else shown.stdout  # a new file has no old source
            new = path.read_text("utf-8") if hunk.new_lines else ""
            prefix = f"{shorten_path(path, modules)}:"
            known = {name.removeprefix(prefix) for name in recorded if name.startswith(prefix)}
            known |= {function.name for function in parse_functions(old, hunk.path)}
            names = {name: name for name in name_functions(old, hunk.old_lines, hunk.path)}
            names |= name_known_functions(parse_functions(new, hunk.path), hunk.new_lines, known)
            changed |= {prefix + name: prefix + counted for name, counted in names.items()}
    return changed


def find_merge_base(root: Path, engine: str, base: str) -> str:
    """Return the commit at which HEAD left ``base``. Raises UsageError if they have no common ancestor."""
    commit = call_git(root, "rev-parse", "--verify", "--end-of-options", f"{base}^{{commit}}")
    if commit.returncode:
        raise UsageError(
            f"--changed: got {base!r}; expected a commit of the repository {root}, which has the source of {engine}"
        )
    found = call_git(root, "merge-base", "HEAD", commit.stdout.strip())
    if found.returncode:
        raise UsageError(
            f"HEAD of {root} and {base} have no common ancestor; fetch the history between them, such as "
            "`git fetch --unshallow`, or fetch-depth: 0 of actions/checkout"
        )
    return found.stdout.strip()


def is_below(path: str, folders: Set[str]) -> bool:
    """Return whether ``path`` is in one of ``folders`` or below it."""
    return any(str(parent) in folders for parent in Path(path).parents)


def parse_diff(diff: str) -> Iterator[Hunk]:
    """Yield the hunks of a diff that has no context lines, and the prefixes a/ and b/."""
    path = ""
    for line in diff.splitlines():
        if line.startswith("--- "):
            path = line.removeprefix("--- a/")  # of a new file, whose path follows, it is /dev/null
        elif line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/")
        elif path and (match := _HUNK.match(line)):
            old, old_count, new, new_count = (int(text) if text is not None else 1 for text in match.groups())
            yield Hunk(path, range(old, old + old_count), range(new, new + new_count))


def name_functions(source: str, lines: range, path: str) -> set[str]:
    """Return the functions of the ``source`` of the file ``path`` that have ``lines``, their signatures included."""
    return find_functions_of_lines(parse_functions(source, path), set(lines), with_signatures=True)


def name_known_functions(functions: Sequence[FunctionLines], lines: range, known: Set[str]) -> dict[str, str]:
    """Return the functions and branches that have ``lines``, each with the innermost one of ``known`` around it.

    One that none of ``known`` is around, such as a new function, has its own name.
    """
    names = dict[str, str]()
    for line in lines:
        around = [each.name for each in functions if each.first_line <= line <= each.last_line]
        innermost = around[-1] if around else MODULE_LEVEL
        names[innermost] = next((name for name in reversed(around) if name in known), innermost)
    return names


def parse_functions(source: str, path: str) -> list[FunctionLines]:
    """Return the functions and branches of the ``source`` of the file ``path``. Raises UsageError."""
    try:
        return list_functions(source)
    except SyntaxError as error:
        raise UsageError(f"{path}, which the change touches, is not valid Python: {error}") from error


def call_git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git in ``folder``. Raises UsageError if there is no git."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        # A repository may have files in any encoding.
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=False, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise UsageError(f"--changed needs git: {error}") from error


def run_git(folder: Path, engine: str, *arguments: str) -> str:
    """Return the output of git in ``folder``. Raises UsageError if git fails."""
    done = call_git(folder, *arguments)
    if done.returncode:
        raise UsageError(
            f"--changed compares the source of {engine} with a commit, and git says: {done.stderr.strip()}; expected "
            "source in a git repository, such as --engine NAME@CHECKOUT --changed main"
        )
    return done.stdout
