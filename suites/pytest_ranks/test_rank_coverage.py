"""Coverage on ranks: combined with that of pytest, without leftover files and without warnings."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

from suites import inner
from suites.pytest_ranks.sessions import PYTEST, run_forked, run_subprocess

pytest.importorskip("pytest_cov")

LIBRARY = """
    def both(rank):
        if rank == 0:
            number = "zero"
        else:
            number = "one"
        return number

    def in_a_fixture():
        return "rank 1 only"

    def in_pytest():
        return "no rank"

    def failing():
        raise AssertionError

    def unused():
        return "never"
"""
TESTS = """
    import os
    import signal

    import pytest

    from measured import library

    @pytest.fixture(scope="module")
    def fixture(rank):
        yield
        if rank == 1:
            library.in_a_fixture()

    @pytest.mark.world_size(2)
    def test_both(rank, fixture):
        library.both(rank)

    def test_in_pytest():
        library.in_pytest()

    @pytest.mark.world_size(2)
    def test_failing(rank, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        if rank == 1:
            library.failing()
"""


@dataclass(frozen=True)
class CoverageResult:
    """The output of a pytest session under coverage and the directory with its data files."""

    text: str
    directory: Path

    @property
    def missing(self) -> list[str]:
        """The source lines of the library that were not run, and missing branches as ``3->5``."""
        found = re.search(r"library\.py .*%(.*)$", self.text, re.MULTILINE)
        assert found, self.text
        lines = (self.directory / "measured" / "library.py").read_text(encoding="utf-8").splitlines()
        entries = found[1].replace(",", " ").split()
        return [lines[int(entry) - 1].strip() if entry.isdigit() else entry for entry in entries]

    @property
    def files(self) -> list[str]:
        """The coverage data files below the directory."""
        return sorted(str(path.relative_to(self.directory)) for path in self.directory.rglob(".cov*"))


Session = Callable[..., CoverageResult]


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """A function that runs pytest under coverage."""

    def run(*args: str, tests: str = TESTS, command: tuple[str, ...] = PYTEST) -> CoverageResult:
        (tmp_path / "pytest.ini").write_text(inner.settings(tests), encoding="utf-8")
        (tmp_path / "measured").mkdir()
        (tmp_path / "measured" / "__init__.py").touch()
        (tmp_path / "measured" / "library.py").write_text(dedent(LIBRARY), encoding="utf-8")
        (tmp_path / "test_it.py").write_text(dedent(tests), encoding="utf-8")
        options = ("-p", "no:cacheprovider", "--color=no", f"--rootdir={tmp_path}", "--basetemp=tmp", "test_it.py")
        arguments = [*options, *args]
        # ``coverage run`` needs a new process; pytest-cov can start in a process that has imported torch already.
        under = (
            run_subprocess(tmp_path, arguments, {}, command)
            if command != PYTEST
            else run_forked(tmp_path, arguments, "")
        )
        text = under.text
        assert "Warning" not in text, text
        return CoverageResult(text, tmp_path)

    return run


WITH_COVERAGE = ("--cov=measured", "--cov-report=term-missing")


@pytest.mark.parametrize("isolation", ["fresh", "pooled"])
def test_lines_of_each_rank_are_measured_also_after_a_failure(session: Session, isolation: str) -> None:
    result = session(*WITH_COVERAGE, "--cov-branch", f"--isolation={isolation}")
    assert " 1 failed, 2 passed in " in result.text
    assert result.missing == ['return "never"']
    assert result.files == [".coverage"]


def test_ranks_of_xdist_workers_follow_the_coverage_configuration(session: Session, tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "coverage.ini").write_text(
        "[run]\nbranch = true\ndata_file = data/.covered\n[report]\nexclude_also = def unused\n", encoding="utf-8"
    )
    result = session(*WITH_COVERAGE, "-n2", "--cov-config=coverage.ini")
    assert " 1 failed, 2 passed in " in result.text
    assert result.missing == []
    assert "Branch" in result.text
    assert result.files == ["data/.covered"]


def test_contexts_and_no_cover_of_pytest_cov_work_on_ranks(session: Session) -> None:
    tests = """
        import coverage
        import pytest

        from measured import library

        @pytest.mark.world_size(2)
        def test_not_measured(rank, no_cover):
            library.in_pytest()

        @pytest.mark.world_size(2)
        def test_both(rank):
            library.both(rank)
    """
    result = session(*WITH_COVERAGE, "--cov-context=test", "--isolation=pooled", tests=tests)
    assert " 2 passed in " in result.text
    assert 'return "no rank"' in result.missing
    assert 'number = "one"' not in result.missing
    assert b"test_it.py::test_both[w2]|run" in (result.directory / ".coverage").read_bytes()


def test_a_killed_rank_loses_its_measurement_and_leaves_no_file(session: Session) -> None:
    tests = TESTS + "        os.kill(os.getpid(), signal.SIGKILL)\n"
    result = session(*WITH_COVERAGE, tests=tests.replace("        library.failing()\n", ""))
    assert "SIGKILL" in result.text
    assert "raise AssertionError" in result.missing
    assert 'number = "one"' not in result.missing
    assert result.files == [".coverage"]


@pytest.mark.parametrize(("option", "files"), [("--branch", 1), ("--parallel-mode", 5)])
def test_under_coverage_run_ranks_write_files_only_in_parallel_mode(session: Session, option: str, files: int) -> None:
    result = session(command=("coverage", "run", option, "-m", "pytest"))
    assert " 1 failed, 2 passed in " in result.text
    assert len(result.files) == files, result.files
