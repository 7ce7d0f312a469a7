"""Find the functions of an engine's source that differ from a commit of its repository."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError

from zharness.engines.registry import find_checkout, info, is_part_of_larger_distribution
from zharness.errors import UsageError
from zharness.run.engine_sources import (
    MODULE_LEVEL,
    FunctionLines,
    find_functions_of_lines,
    find_source_roots,
    list_code_lines,
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

    ``path`` is that of the working tree, or that of the commit for a file that was deleted. The range of a side that
    has no lines of the change starts at the line which follows it there.
    """

    path: str
    old_lines: range
    new_lines: range


@dataclass(frozen=True)
class FileChange:
    """A source file on both sides of a change, and the hunks between them, in the order of their lines.

    The text of a side that lacks the file is empty.
    """

    path: str
    old_text: str
    new_text: str
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class ChangedSource:
    """The repository of an engine's source, the commit from which a change starts, and the source files.

    ``modules`` are those that a record of reach measures. ``packages`` are the folders of their top-level packages, and
    the files of modules that are in none. ``files`` has the files of all these, those that a record does not measure
    too, by their path in the repository.
    """

    root: Path
    start: str
    modules: tuple[str, ...]
    packages: tuple[Path, ...]
    files: Mapping[str, Path]

    def has(self, path: str) -> bool:
        """Return whether the file ``path`` of the repository is the engine's source, or was until it was deleted."""
        return path in self.files or (not (self.root / path).exists() and self.had(path))

    def had(self, path: str) -> bool:
        """Return whether the deleted file ``path`` was in one of the packages, or a module of the engine beside one."""
        deleted, names = self.root / path, {f"{name}.py" for name in list_top_level(self.modules)}
        return any(
            deleted.is_relative_to(package) or (deleted.parent == package.parent and deleted.name in names)
            for package in self.packages
        )

    def name_in_record(self, path: str) -> str:
        """Return the name that the source file ``path`` of the repository has in a record."""
        return shorten_path(self.files.get(path, self.root / path), self.modules)

    def is_measured(self, path: str) -> bool:
        """Return whether a record has the functions of the file ``path`` of the repository that a cell reaches."""
        name = self.name_in_record(path)
        modules = (module.replace(".", "/") for module in self.modules)
        return self.has(path) and any(name == f"{each}.py" or name.startswith(f"{each}/") for each in modules)

    def read_both_sides(self, path: str) -> tuple[str, str]:
        """Return the text of the file ``path`` in the commit and in the working tree; '' where there is none."""
        shown = call_git(self.root, "show", f"{self.start}:{path}")
        new_text = self.files[path].read_text("utf-8", errors="replace") if path in self.files else ""
        return "" if shown.returncode else shown.stdout, new_text


def list_top_level(modules: Sequence[str]) -> tuple[str, ...]:
    """Return the top-level packages and modules that ``modules`` are or belong to."""
    return tuple(dict.fromkeys(module.partition(".")[0] for module in modules))


def find_changed_source(engine: str, base: str) -> ChangedSource:
    """Find the source of ``engine`` and the commit at which it left ``base``.

    Raises UsageError if the source is not in a git repository, or if ``base`` is no commit that has a common ancestor
    with HEAD.
    """
    modules = list_source_modules(info(engine))
    checkout = find_checkout(engine)
    packages = (checkout.package,) if checkout is not None else find_source_roots(list_top_level(modules))
    found = (each.rglob("*.py") if each.is_dir() else (each,) for each in packages)
    sources = [path for paths in found for path in paths if path.is_file()]
    if not sources:
        raise UsageError(f"found no source of {engine}; expected an installed package, or a checkout: NAME@PATH")
    root = Path(run_git(sources[0].parent, engine, "rev-parse", "--show-toplevel").strip())
    files = {str(path.resolve().relative_to(root)): path for path in sources if path.resolve().is_relative_to(root)}
    resolved = tuple(package.resolve() for package in packages)
    return ChangedSource(root, find_merge_base(root, engine, base), modules, resolved, files)


def find_unmeasured_files(engine: str, base: str) -> list[str]:
    """Return the files of the repository of an engine's source that it changes since it left ``base``, and that no
    record of reach measures: nothing says which cells read them. Raises UsageError as ``find_changed_source`` does.
    """
    source = find_changed_source(engine, base)
    changed = run_git(source.root, engine, *DIFF, "--name-only", "-z", source.start, "--")
    return [path for path in changed.split("\0") if path and not source.is_measured(path)]


def find_changed_functions(engine: str, base: str, recorded: Set[str] = frozenset()) -> dict[str, str]:
    """Return the functions that the working tree of an engine's source changes since it left ``base``.

    They are named as in a record of reach, and each has the name that counts: of a branch that the change adds, and
    that is not among the names ``recorded``, that of the innermost function or branch around it that ``base`` has. If
    the condition of a branch changes, the branches that it had count too, and those that it has now are among the
    names. Comments do not count, and neither does what ``base`` has changed since then. Lines outside of all functions
    count as a function ``<module>`` of their file, and so do all lines of a file of the engine's packages that no
    record measures, unless the engine is a small part of its distribution. A file that was renamed counts as deleted
    under its old name and as new under the new one. Raises UsageError as ``find_changed_source`` does.
    """
    source = find_changed_source(engine, base)
    changed = dict[str, str]()
    for change in iter_file_changes(source, engine):
        prefix = f"{source.name_in_record(change.path)}:"
        if not source.is_measured(change.path):
            if not is_part_of_larger_distribution(engine) and has_changed_code(change):
                changed[prefix + MODULE_LEVEL] = prefix + MODULE_LEVEL
            continue
        known = {name.removeprefix(prefix) for name in recorded if name.startswith(prefix)}
        names = name_changes(change, known)
        changed |= {prefix + name: prefix + counted for name, counted in names.items()}
    return changed


def read_changed_lines(engine: str, base: str) -> str:
    """Return the changed lines of the files that ``find_changed_functions`` names functions of, both old and new ones.

    Comments are left out. Raises UsageError as ``find_changed_source`` does, and SyntaxError or TokenError if a file is
    not valid Python.
    """
    source = find_changed_source(engine, base)
    found = list[str]()
    for change in iter_file_changes(source, engine):
        if source.is_measured(change.path):
            sides = zip((change.old_text, change.new_text), list_changed_lines(change), strict=True)
            found += [text.splitlines()[line - 1] for text, lines in sides for line in sorted(lines)]
    return "\n".join(found)


def iter_file_changes(source: ChangedSource, engine: str) -> Iterator[FileChange]:
    """Yield the Python files of ``source`` that differ from the commit at which it starts."""
    hunks_by_path = dict[str, list[Hunk]]()
    for hunk in parse_diff(run_git(source.root, engine, *DIFF, source.start, "--", "*.py")):
        hunks_by_path.setdefault(hunk.path, []).append(hunk)
    for path, hunks in hunks_by_path.items():
        if source.has(path):
            yield FileChange(path, *source.read_both_sides(path), tuple(hunks))


def name_changes(change: FileChange, recorded: Set[str]) -> dict[str, str]:
    """Return the functions and branches of one file that ``change`` touches, each with the name that counts.

    ``recorded`` are the names that a record has of the file. Raises UsageError if a side is not valid Python.
    """
    old, new = parse_functions(change.old_text, change.path), parse_functions(change.new_text, change.path)
    old_lines, new_lines = list_changed_lines(change)
    kept_lines = find_kept_condition_lines(new, new_lines, change.hunks)
    old_names = name_functions(old, old_lines) | name_branches(old, kept_lines)
    known = recorded | {function.name for function in old}
    return {name: name for name in old_names} | name_known_functions(new, new_lines, known)


def list_changed_lines(change: FileChange) -> tuple[set[int], set[int]]:
    """Return the lines of ``change`` on the side of the commit, and on that of the working tree, without comments.

    Raises SyntaxError or TokenError if a side is not valid Python.
    """
    old_lines = list_code_lines(change.old_text) & {line for hunk in change.hunks for line in hunk.old_lines}
    new_lines = list_code_lines(change.new_text) & {line for hunk in change.hunks for line in hunk.new_lines}
    return old_lines, new_lines


def has_changed_code(change: FileChange) -> bool:
    """Return whether ``change`` touches more than comments; a file that is not valid Python may be a template."""
    try:
        return any(list_changed_lines(change))
    except (SyntaxError, TokenError):
        return True


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
            old, new = old + (not old_count), new + (not new_count)  # git names the line before an empty range
            yield Hunk(path, range(old, old + old_count), range(new, new + new_count))


def find_old_line(line: int, hunks: Sequence[Hunk]) -> int | None:
    """Return where the commit has the ``line`` of the working tree, or None if it is new."""
    moved = 0
    for hunk in hunks:
        if line in hunk.new_lines:
            return None
        if line >= hunk.new_lines.stop:
            moved += len(hunk.new_lines) - len(hunk.old_lines)
    return line - moved


def find_kept_condition_lines(functions: Sequence[FunctionLines], lines: Set[int], hunks: Sequence[Hunk]) -> set[int]:
    """Return where the commit has the other lines of those conditions of ``functions`` that have new ``lines``."""
    changed = [each.condition_lines for each in functions if not lines.isdisjoint(each.condition_lines)]
    old_lines = (find_old_line(line, hunks) for condition in changed for line in condition)
    return {line for line in old_lines if line is not None}


def name_functions(functions: Sequence[FunctionLines], lines: Set[int]) -> set[str]:
    """Return those of ``functions`` that have ``lines``, their signatures included, and whose conditions do."""
    within = find_functions_of_lines(list(functions), set(lines), with_signatures=True)
    return within | name_branches(functions, lines)


def name_branches(functions: Sequence[FunctionLines], lines: Set[int]) -> set[str]:
    """Return the branches whose conditions have ``lines``."""
    return {each.name for each in functions if not lines.isdisjoint(each.condition_lines)}


def name_known_functions(functions: Sequence[FunctionLines], lines: Set[int], known: Set[str]) -> dict[str, str]:
    """Return the functions and branches that have ``lines``, and the branches whose conditions do.

    Each has the innermost one of ``known`` that it is or that is around it. One that none of ``known`` is around, such
    as a new function, has its own name.
    """
    names = dict[str, str]()
    for line in lines:
        around = [each.name for each in functions if each.first_line <= line <= each.last_line]
        touched = {around[-1] if around else MODULE_LEVEL} | name_branches(functions, {line})
        for name in touched:
            names[name] = next((each for each in (name, *reversed(around)) if each in known), name)
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
