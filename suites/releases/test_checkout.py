"""Source checkouts as releases: used in place, named by their commit, never written into."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from zharness.cell import Cell
from zharness.engines import checkouts, registry
from zharness.errors import UsageError, WorldError
from zharness.releases import checkout
from zharness.releases.prepared_release import prepare_release
from zharness.releases.rank_environment import prepare_rank_environment
from zharness.world import RankServer

VERSION_INFO = """
try:
    from .git_version_info_installed import *
except ModuleNotFoundError:
    version = '0.0.0'
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZHARNESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Write a small copy of DeepSpeed's sources as git has them."""
    package = tmp_path / "DeepSpeed" / "deepspeed"
    (package / "ops" / "op_builder").mkdir(parents=True)
    (package / "ops" / "__init__.py").touch()
    (package / "ops" / "op_builder" / "__init__.py").touch()
    (package / "ops" / "op_builder" / "all_ops.py").write_text("ALL_OPS = {}\n")
    (package / "__init__.py").write_text("from .git_version_info import version as __version__\n")
    (package / "git_version_info.py").write_text(VERSION_INFO)
    (tmp_path / "DeepSpeed" / "version.txt").write_text("0.19.9\n")
    return tmp_path / "DeepSpeed"


def committed(folder: Path) -> None:
    git(folder, "init", "--quiet")
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=n", "-c", "user.email=e", "commit", "--quiet", "-m", "m")


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def find_module_file(module: str) -> str | None:
    """Return the file from which a rank imports a module."""
    return importlib.import_module(module).__file__


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if ".git" not in path.parts}


def test_a_checkout_is_imported_from_its_own_files_and_nothing_is_written_there(sources: Path) -> None:
    before = files(sources)
    found = prepare_release(f"deepspeed@{sources}", "deepspeed")
    code = "import deepspeed, os; print(deepspeed.__version__, os.path.realpath(deepspeed.__file__))"
    output = subprocess.run(
        [sys.executable, "-c", code], env=found.environment, check=True, capture_output=True, text=True
    )
    assert output.stdout.split() == ["0.19.9", str(sources / "deepspeed" / "__init__.py")]
    assert files(sources) == before
    assert prepare_rank_environment(f"deepspeed@{sources}").search_path == found.search_path


def test_a_checkout_that_lacks_nothing_is_the_path_itself(sources: Path) -> None:
    (sources / "deepspeed" / "git_version_info_installed.py").write_text("version = '0.19.9+abc'\n")
    assert prepare_release(f"deepspeed@{sources}", "deepspeed").search_path == (str(sources),)


def test_links_follow_what_was_added_and_removed(sources: Path) -> None:
    path, _ = checkout.prepare_checkout(checkouts.read_checkout(sources, "deepspeed"))
    (sources / "deepspeed" / "new.py").touch()
    checkout.prepare_checkout.cache_clear()
    assert checkout.prepare_checkout(checkouts.read_checkout(sources, "deepspeed"))[0] == path
    assert (path / "deepspeed" / "new.py").is_symlink()
    (sources / "deepspeed" / "new.py").unlink()
    checkout.prepare_checkout.cache_clear()
    checkout.prepare_checkout(checkouts.read_checkout(sources, "deepspeed"))
    assert not (path / "deepspeed" / "new.py").is_symlink()


def test_the_version_ends_with_the_commit_and_says_when_files_differ_from_it(sources: Path) -> None:
    committed(sources)
    commit = git(sources, "rev-parse", "--short=12", "HEAD")
    assert registry.resolve_version(f"deepspeed@{sources}") == f"0.19.9+{commit}"
    (sources / "deepspeed" / "__init__.py").write_text("__version__ = '0.19.9'\n")
    checkouts._read_checkout.cache_clear()
    assert registry.resolve_version(f"deepspeed@{sources}") == f"0.19.9+{commit}-dirty"


def test_sources_inside_somebody_elses_repository_have_no_commit(sources: Path) -> None:
    outer = sources.parent
    (outer / ".gitignore").write_text("DeepSpeed/\n")
    committed(outer)
    assert registry.resolve_version(f"deepspeed@{sources}") == "0.19.9"


def test_a_checkout_that_does_not_import_is_told_in_one_sentence(sources: Path) -> None:
    (sources / "deepspeed" / "ops" / "op_builder" / "all_ops.py").write_text("raise ImportError('no such op')\n")
    with pytest.raises(
        UsageError, match=r"deepspeed@.*DeepSpeed cannot be imported with torch .*: ImportError: no such op"
    ):
        prepare_release(f"deepspeed@{sources}", "deepspeed")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("deepspeed@{}", r"expected a source checkout, a folder with deepspeed/__init__\.py;"),
        ("deepspeed@{}/missing", "expected a source checkout"),
        ("fsdp2@{}", r"fsdp2 is part of torch, which is imported already; .*pip install -e"),
        ("deepspeed@a[b]", "got the engine"),
    ],
    ids=["no package", "no folder", "part of torch", "brackets"],
)
def test_what_is_no_checkout_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        registry.find_checkout(text.format(tmp_path))


def test_a_case_names_its_checkout(sources: Path) -> None:
    case = Cell("training.grads", f"deepspeed@{sources}", 3, 2, "fp32", "mlp")
    assert Cell.parse(case.id) == case


def test_an_engine_by_its_factory_has_a_checkout_too(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text('__version__ = "1.2"\n')
    text = f"mine.engine:factory@{tmp_path}"
    assert registry.resolve_version(text) == "1.2"
    assert registry.require(text).target == "mine.engine:factory"
    before = files(tmp_path / "mine")
    with RankServer(prepare_rank_environment(text)) as server:
        (where,) = server.run(find_module_file, "mine").values()
    assert where == str(tmp_path / "mine" / "__init__.py")
    assert files(tmp_path / "mine") == before


def test_a_session_that_has_imported_another_release_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "__init__.py").touch()
    with (
        RankServer(prepare_rank_environment(f"json:loads@{tmp_path}")) as server,
        pytest.raises(
            WorldError, match=r"json .*is already imported by this session.*; run `zharness check`, or import"
        ),
    ):
        server.run(find_module_file, "json")
