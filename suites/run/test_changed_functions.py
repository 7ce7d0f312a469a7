"""The functions and branches of an engine's source that a change touches."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from suites.warm import programs
from zharness.engines.registry import is_part_of_larger_distribution
from zharness.errors import UsageError
from zharness.run.changed_functions import (
    find_changed_functions,
    find_kept_condition_lines,
    find_merge_base,
    find_unmeasured_files,
    name_functions,
    name_known_functions,
    parse_diff,
    parse_functions,
    read_changed_lines,
)
from zharness.run.engine_sources import MODULE_LEVEL, find_functions_of_lines, list_functions

SOURCE = """\
LIMIT = 3


class Engine:
    @property
    def norm(
        self,
    ):
        def inner():
            return 1

        return inner()

    def step(self):
        return LIMIT
"""


DIFF = """\
--- a/p/a.py
+++ b/p/a.py
@@ -3 +3,2 @@ def f
-x
+y
+z
@@ -9,2 +10,0 @@
-a
-b
--- a/p/b.py
+++ /dev/null
@@ -1 +0,0 @@
-c
--- /dev/null
+++ b/p/c.py
@@ -0,0 +1 @@
+d
"""


AUTHOR = ("-c", "user.name=a", "-c", "user.email=a@b")


def test_a_line_belongs_to_the_innermost_function() -> None:
    functions = list_functions(SOURCE)
    assert [function.name for function in functions] == ["Engine.norm", "Engine.norm.inner", "Engine.step"]
    assert find_functions_of_lines(functions, {1, 4}, with_signatures=True) == {MODULE_LEVEL}
    assert find_functions_of_lines(functions, {5, 7}, with_signatures=True) == {"Engine.norm"}
    assert find_functions_of_lines(functions, {7}, with_signatures=False) == {MODULE_LEVEL}  # runs while it is imported
    assert find_functions_of_lines(functions, {10, 15}, with_signatures=False) == {"Engine.norm.inner", "Engine.step"}
    assert name_functions(functions, {14, 15}) == {"Engine.step"}
    with pytest.raises(UsageError, match=r"engine\.py, which the change touches, is not valid Python"):
        parse_functions("def", "engine.py")


BRANCHES = """\
def step(self):
    if self.clip:
        for weight in self.weights:
            weight.clip()
    elif self.log:
        print()
    try:
        close()
    except OSError:
        pass
"""


def test_a_line_of_a_branch_belongs_to_the_condition_under_which_it_runs() -> None:
    found = {
        line: find_functions_of_lines(list_functions(BRANCHES), {line}, with_signatures=True)
        for line in (2, 4, 6, 8, 10)
    }
    assert found == {
        2: {"step"},
        4: {"step > if self.clip > for weight in self.weights"},
        6: {"step > else of if self.clip > if self.log"},
        8: {"step"},
        10: {"step > except OSError"},
    }


def test_a_changed_condition_changes_its_branches() -> None:
    functions = list_functions(BRANCHES)
    clip, log = "step > if self.clip", "step > else of if self.clip > if self.log"
    loop = f"{clip} > for weight in self.weights"
    assert name_functions(functions, {2}) == {"step", clip, "step > else of if self.clip"}
    assert name_functions(functions, {3}) == {clip, loop}
    assert name_functions(functions, {5}) == {"step > else of if self.clip", log}
    assert name_functions(functions, {9}) == {"step", "step > except OSError"}


def test_a_branch_that_a_change_adds_counts_as_what_is_around_it() -> None:
    functions = list_functions(BRANCHES)
    clip, loop = "step > if self.clip", "step > if self.clip > for weight in self.weights"
    assert name_known_functions(functions, {4}, {"step", clip}) == {loop: clip}
    assert name_known_functions(functions, {4}, {"step"}) == {loop: "step"}
    assert name_known_functions(functions, {4}, {"step", loop}) == {loop: loop}
    assert name_known_functions(functions, {4}, set()) == {loop: loop}


def test_a_change_that_adds_a_branch_is_reached_by_the_cells_of_its_function(tmp_path: Path) -> None:
    (tmp_path / "toys").mkdir()
    engine = tmp_path / "toys" / "engine.py"
    (tmp_path / "toys" / "__init__.py").write_text("", encoding="utf-8")
    engine.write_text("def step(extra):\n    return 1\n", encoding="utf-8")
    commit_all(tmp_path)
    engine.write_text("def step(extra):\n    if extra:\n        return 2\n    return 1\n", encoding="utf-8")
    call = "find_changed_functions('toys.engine:make', 'HEAD').values()"
    found = programs.run("-c", f"from zharness.run.changed_functions import *; print(*{call})", folder=tmp_path)
    assert found.stdout.split() == ["toys/engine.py:step", "toys/engine.py:step"], found.stderr


CONDITION = """\
def run(a, offload_optimizer):
    if (
        a
        # why
    ):
        return 1
    else:
        return 2
    return 3
"""


@pytest.mark.parametrize(
    ("found", "replacement"),
    [("        a\n", "        a\n        and offload_optimizer\n"), ("# why", "and offload_optimizer")],
    ids=["inserted", "in place of a comment"],
)
def test_a_line_that_is_new_in_a_condition_changes_its_branches(tmp_path: Path, found: str, replacement: str) -> None:
    (tmp_path / "toys").mkdir()
    (tmp_path / "toys" / "__init__.py").write_text("", encoding="utf-8")
    engine = tmp_path / "toys" / "engine.py"
    engine.write_text(CONDITION, encoding="utf-8")
    commit_all(tmp_path)
    engine.write_text(f"import os\n\n{CONDITION.replace(found, replacement)}", encoding="utf-8")
    call = "find_changed_functions('toys.engine:make', 'HEAD').items()"
    shown = programs.run("-c", f"from zharness.run.changed_functions import *; print(sorted({call}))", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    run = "toys/engine.py:run"
    old, new = "if a", "if a and offload_optimizer"
    own = ("toys/engine.py:<module>", run, f"{run} > {old}", f"{run} > else of {old}")
    added = {f"{run} > {new}": run, f"{run} > else of {new}": run}
    assert shown.stdout.strip() == repr(sorted(({name: name for name in own} | added).items()))


def test_a_condition_that_is_new_changes_no_other_branch() -> None:
    new = BRANCHES.replace("    try:", "    if self.sync:\n        sync()\n    try:")
    (hunk,) = parse_diff("--- a/e.py\n+++ b/e.py\n@@ -6,0 +7,2 @@\n")
    lines = find_kept_condition_lines(list_functions(new), {7, 8}, [hunk])
    assert lines == set()
    assert name_known_functions(list_functions(new), {7, 8}, {"step"}) == {
        "step": "step",
        "step > if self.sync": "step",
    }


def test_a_diff_has_the_lines_of_both_sides() -> None:
    hunks = [(hunk.path, list(hunk.old_lines), list(hunk.new_lines)) for hunk in parse_diff(DIFF)]
    assert hunks == [("p/a.py", [3], [3, 4]), ("p/a.py", [9, 10], []), ("p/b.py", [1], []), ("p/c.py", [], [1])]


def commit_all(folder: Path) -> None:
    """Commit all files of ``folder``, which becomes a repository with the branch main if it is none."""
    for command in (("init", "-q", "-b", "main"), ("add", "."), (*AUTHOR, "commit", "-qm", "a")):
        run_git(folder, *command)


def run_git(folder: Path, *arguments: str) -> None:
    """Run git in ``folder``."""
    subprocess.run(["git", *arguments], cwd=folder, check=True)  # noqa: S607


def find_changes(folder: Path, base: str = "HEAD") -> set[str]:
    """Return the functions of the package ``toys`` in ``folder`` that it changes since it left ``base``."""
    call = f"find_changed_functions('toys.engine:make', '{base}')"
    found = programs.run("-c", f"from zharness.run.changed_functions import *; print(*{call})", folder=folder)
    assert found.returncode == 0, found.stderr
    return set(found.stdout.split())


def test_what_others_have_changed_on_the_base_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "toys").mkdir()
    files = {name: tmp_path / "toys" / f"{name}.py" for name in ("__init__", "engine", "theirs")}
    for name, path in files.items():
        path.write_text(f"def {name}():\n    return 1\n", encoding="utf-8")
    commit_all(tmp_path)
    run_git(tmp_path, "switch", "-qc", "mine")
    files["engine"].write_text("def engine():\n    return 2\n", encoding="utf-8")
    commit_all(tmp_path)
    run_git(tmp_path, "switch", "-q", "main")
    files["theirs"].write_text("def theirs():\n    return 2\n", encoding="utf-8")
    commit_all(tmp_path)
    run_git(tmp_path, "switch", "-q", "mine")
    assert find_changes(tmp_path, "main") == {"toys/engine.py:engine"}
    run_git(tmp_path, "switch", "-q", "--orphan", "alone")
    files["engine"].parent.mkdir(exist_ok=True)
    files["engine"].write_text("", encoding="utf-8")
    commit_all(tmp_path)
    with pytest.raises(UsageError, match=r"HEAD of .* and main have no common ancestor; fetch the history between"):
        find_merge_base(tmp_path, "toys.engine:make", "main")


def test_a_comment_is_no_change(tmp_path: Path) -> None:
    (tmp_path / "toys").mkdir()
    (tmp_path / "toys" / "__init__.py").write_text("", encoding="utf-8")
    engine = tmp_path / "toys" / "engine.py"
    engine.write_text('def a():\n    # old\n\n    return 1\n\n\ndef b():\n    """x"""\n', encoding="utf-8")
    commit_all(tmp_path)
    engine.write_text(
        'def a():\n    # new\n    return 1\n\n\ndef b():\n    """\n    # text\n    """\n', encoding="utf-8"
    )
    assert find_changes(tmp_path) == {"toys/engine.py:b"}


def test_deleted_and_renamed_files_and_the_users_settings_of_git(tmp_path: Path) -> None:
    (tmp_path / "toys").mkdir()
    for name in ("__init__", "engine", "deleted", "renamed"):
        (tmp_path / "toys" / f"{name}.py").write_text(f"def {name}():\n    return 1\n", encoding="utf-8")
    (tmp_path / "notes.py").write_bytes("# \N{LATIN SMALL LETTER E WITH ACUTE}\n".encode("latin-1"))
    commit_all(tmp_path)
    run_git(tmp_path, "config", "diff.mnemonicPrefix", "true")
    assert find_changes(tmp_path) == set()
    (tmp_path / "notes.py").write_bytes("# \N{LATIN SMALL LETTER O WITH ACUTE}\n".encode("latin-1"))
    (tmp_path / "toys" / "engine.py").write_text("def engine():\n    return 2\n", encoding="utf-8")
    (tmp_path / "toys" / "deleted.py").unlink()
    run_git(tmp_path, "mv", "toys/renamed.py", "toys/new.py")
    files = ("engine.py:engine", "deleted.py:deleted", "renamed.py:renamed", "new.py:renamed")
    assert find_changes(tmp_path) == {f"toys/{name}" for name in files}


def test_files_that_no_record_measures_are_named_and_run_every_cell(tmp_path: Path) -> None:
    """The engine deepspeed measures some modules of its package; a package of that name has the files."""
    files = ("deepspeed/__init__.py", "deepspeed/runtime/__init__.py", "deepspeed/runtime/engine.py")
    for name in (*files, "deepspeed/ops.py", "csrc/adam.cpp", "tests/test_a.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("def run():\n    return 1\n", encoding="utf-8")
    commit_all(tmp_path)
    for name in ("deepspeed/runtime/engine.py", "deepspeed/ops.py", "csrc/adam.cpp", "tests/test_a.py"):
        (tmp_path / name).write_text("def run():\n    return 2\n", encoding="utf-8")
    engine = f"deepspeed@{tmp_path}"
    assert find_unmeasured_files(engine, "HEAD") == ["csrc/adam.cpp", "deepspeed/ops.py", "tests/test_a.py"]
    assert set(find_changed_functions(engine, "HEAD")) == {
        "deepspeed/runtime/engine.py:run",
        f"deepspeed/ops.py:{MODULE_LEVEL}",
    }


def find_changed(folder: Path, engine: str, before: str = "pass") -> dict[str, str]:
    """Return what ``find_changed_functions`` returns for ``engine`` since HEAD in a process of ``folder``.

    ``before`` is code that runs before it.
    """
    code = f"import json; {before}; print(json.dumps(find_changed_functions({engine!r}, 'HEAD')))"
    shown = programs.run("-c", f"from zharness.run.changed_functions import *; {code}", folder=folder)
    assert shown.returncode == 0, shown.stderr
    found: dict[str, str] = json.loads(shown.stdout)
    return found


def write_files(folder: Path, names: tuple[str, ...]) -> None:
    """Write files with one function each, and commit them."""
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text("# c\ndef run():\n    return 1\n", encoding="utf-8")
    commit_all(folder)


def test_a_deleted_file_beside_the_only_module_of_an_engine_is_none_of_its_source(tmp_path: Path) -> None:
    repository = tmp_path / "my_engine"  # its folder may have the name of the module
    deleted = ("setup.py", "tests/test_a.py", "notes/my_engine.py")
    write_files(repository, ("my_engine.py", *deleted))
    for name in deleted:
        (repository / name).unlink()
    assert find_changed(repository, "my_engine:Engine") == {}


def test_a_deleted_folder_of_the_engines_package_counts(tmp_path: Path) -> None:
    deleted = ("toys/old/a.py", "other/toys/b.py")
    write_files(tmp_path, ("toys/__init__.py", "toys/engine.py", *deleted))
    for name in deleted:
        (tmp_path / name).unlink()
        (tmp_path / name).parent.rmdir()
    assert find_changed(tmp_path, "toys.engine:make") == {"toys/old/a.py:run": "toys/old/a.py:run"}


@pytest.mark.parametrize("is_checkout", [False, True])
def test_code_that_no_record_measures_runs_every_cell_and_a_comment_does_not(tmp_path: Path, is_checkout: bool) -> None:
    package = tmp_path / "deepspeed"
    names = ("__init__.py", "runtime/__init__.py", "runtime/engine.py", "ops.py", "noted.py", "template.py", "gone.py")
    write_files(package, names)
    (package / "noted.py").write_text("# d\ndef run():\n    return 1\n", encoding="utf-8")
    (package / "ops.py").write_text("# d\ndef run():\n    return 2\n", encoding="utf-8")
    (package / "template.py").write_text("def <name>(): '''\n", encoding="utf-8")
    (package / "gone.py").unlink()
    found = find_changed(tmp_path, f"deepspeed@{tmp_path}" if is_checkout else "deepspeed")
    assert set(found) == {f"deepspeed/{name}.py:{MODULE_LEVEL}" for name in ("ops", "template", "gone")}


def test_code_of_a_larger_distribution_that_no_record_measures_runs_no_cell(tmp_path: Path) -> None:
    assert is_part_of_larger_distribution("fsdp2")
    assert not is_part_of_larger_distribution("deepspeed")
    write_files(tmp_path / "deepspeed", ("__init__.py", "runtime/engine.py", "ops.py"))
    for name in ("runtime/engine.py", "ops.py"):
        (tmp_path / "deepspeed" / name).write_text("def run():\n    return 2\n", encoding="utf-8")
    as_torch = "from zharness.engines import registry; registry.ALREADY_IMPORTED = ('deepspeed',)"
    assert set(find_changed(tmp_path, "deepspeed", as_torch)) == {"deepspeed/runtime/engine.py:run"}


def test_changed_lines_are_the_old_and_the_new_ones_without_comments(tmp_path: Path) -> None:
    write_files(tmp_path / "deepspeed", ("__init__.py", "runtime/engine.py", "ops.py"))
    for name in ("runtime/engine.py", "ops.py"):
        (tmp_path / "deepspeed" / name).write_text("# d\ndef run():\n    return bf16\n", encoding="utf-8")
    assert read_changed_lines(f"deepspeed@{tmp_path}", "HEAD") == "    return 1\n    return bf16"
