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

# These options fix the prefixes and the quotes of paths, which a user's configuration of git may change.
DIFF = (
    *("-c", "core.quotePath=false", "diff", "--unified=0", "--no-color", "--no-ext-diff", "--no-textconv"),
    *("--no-renames", "--src-prefix=a/", "--dst-prefix=b/"),
)
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True)
class Hunk:
    """The lines of one change in a file: the lines of the commit, and the lines of the working tree.

    ``path`` is the path in the working tree, or the path in the commit for a deleted file. If the change has no lines
    on one side, the empty range of that side starts at the line that follows the change there.
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

    ``modules`` are the modules that a record of reach measures. ``packages`` are the folders of their top-level
    packages, and the files of modules that are in no package. ``files`` maps paths in the repository to all files of
    ``packages``, including files that a record does not measure.
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
        """Return whether the deleted file ``path`` was in one of the packages, or was a module outside of a package."""
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
        """Return the text of the file ``path`` in the commit and in the working tree; '' on a side that lacks it."""
        shown = call_git(self.root, "show", f"{self.start}:{path}")
        new_text = self.files[path].read_text("utf-8", errors="replace") if path in self.files else ""
        return "" if shown.returncode else shown.stdout, new_text


def list_top_level(modules: Sequence[str]) -> tuple[str, ...]:
    """Return the top-level packages and modules to which ``modules`` belong."""
    return tuple(dict.fromkeys(module.partition(".")[0] for module in modules))


def find_changed_source(engine: str, base: str) -> ChangedSource:
    """Find the source of ``engine``, and the merge base of its HEAD and ``base``.

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
    """Return the files that changed in an engine's repository since its merge base, and that no record measures.

    Nothing says which cells read these files. Raises UsageError as ``find_changed_source`` does.
    """
    source = find_changed_source(engine, base)
    changed = run_git(source.root, engine, *DIFF, "--name-only", "-z", source.start, "--")
    return [path for path in changed.split("\0") if path and not source.is_measured(path)]


def find_changed_functions(engine: str, base: str, recorded: Set[str] = frozenset()) -> dict[str, str]:
    """Return the functions and branches that changed in the working tree of an engine since its merge base.

    The merge base is that of HEAD and ``base``: later commits of ``base`` do not count, and neither do comments. The
    keys are named as in a record of reach. Each value is the name to look up in a record: if the change adds a branch
    that is not in ``recorded``, that is the innermost function or branch around it that the merge base or the record
    has. If the condition of a branch changes, the old and the new branches are among the keys. Lines outside of all
    functions count as a function ``<module>`` of their file. So do all lines of a file of the engine's packages that no
    record measures, unless the engine is a small part of its distribution. A renamed file counts as deleted under its
    old name and as new under its new name. Raises UsageError as ``find_changed_source`` does.
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
    """Return the old and the new lines of each change in the files that a record of reach measures.

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
    """Map the functions and branches of one file that ``change`` touches to the names to look up in a record.

    ``recorded`` are the names that a record has of the file. Raises UsageError if a side is not valid Python.
    """
    old, new = parse_functions(change.old_text, change.path), parse_functions(change.new_text, change.path)
    old_lines, new_lines = list_changed_lines(change)
    kept_lines = find_kept_condition_lines(new, new_lines, change.hunks)
    old_names = name_functions(old, old_lines) | name_branches(old, kept_lines)
    known = recorded | {function.name for function in old}
    return {name: name for name in old_names} | name_known_functions(new, new_lines, known)


def list_changed_lines(change: FileChange) -> tuple[set[int], set[int]]:
    """Return the changed lines in the commit and in the working tree, without comments.

    Raises SyntaxError or TokenError if a side is not valid Python.
    """
    old_lines = list_code_lines(change.old_text) & {line for hunk in change.hunks for line in hunk.old_lines}
    new_lines = list_code_lines(change.new_text) & {line for hunk in change.hunks for line in hunk.new_lines}
    return old_lines, new_lines


def has_changed_code(change: FileChange) -> bool:
    """Return whether ``change`` touches more than comments; True for a file, such as a template, that is not Python."""
    try:
        return any(list_changed_lines(change))
    except (SyntaxError, TokenError):
        return True


def find_merge_base(root: Path, engine: str, base: str) -> str:
    """Return the merge base of HEAD and ``base``. Raises UsageError if they have no common ancestor."""
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
            path = line.removeprefix("--- a/")  # /dev/null for a new file; the next line has its path
        elif line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/")
        elif path and (match := _HUNK.match(line)):
            old, old_count, new, new_count = (int(text) if text is not None else 1 for text in match.groups())
            old, new = old + (not old_count), new + (not new_count)  # git names the line before an empty range
            yield Hunk(path, range(old, old + old_count), range(new, new + new_count))


def find_old_line(line: int, hunks: Sequence[Hunk]) -> int | None:
    """Return the number that ``line`` of the working tree has in the commit, or None if the line is new."""
    moved = 0
    for hunk in hunks:
        if line in hunk.new_lines:
            return None
        if line >= hunk.new_lines.stop:
            moved += len(hunk.new_lines) - len(hunk.old_lines)
    return line - moved


def find_kept_condition_lines(functions: Sequence[FunctionLines], lines: Set[int], hunks: Sequence[Hunk]) -> set[int]:
    """Return the old numbers of the unchanged lines in those conditions of ``functions`` that contain new ``lines``."""
    changed = [each.condition_lines for each in functions if not lines.isdisjoint(each.condition_lines)]
    old_lines = (find_old_line(line, hunks) for condition in changed for line in condition)
    return {line for line in old_lines if line is not None}


def name_functions(functions: Sequence[FunctionLines], lines: Set[int]) -> set[str]:
    """Return the functions, with their signatures, and the branches that contain ``lines``.

    A branch also counts if its condition contains one of ``lines``.
    """
    within = find_functions_of_lines(list(functions), set(lines), with_signatures=True)
    return within | name_branches(functions, lines)


def name_branches(functions: Sequence[FunctionLines], lines: Set[int]) -> set[str]:
    """Return the branches whose conditions contain one of ``lines``."""
    return {each.name for each in functions if not lines.isdisjoint(each.condition_lines)}


def name_known_functions(functions: Sequence[FunctionLines], lines: Set[int], known: Set[str]) -> dict[str, str]:
    """Map the functions and branches that contain ``lines``, also in their conditions, to known names.

    The known name is that of the function or branch itself if it is in ``known``, else that of the innermost one around
    it that is in ``known``. If there is none, as for a new function, it is the name itself.
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
