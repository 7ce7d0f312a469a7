"""A hunt measures the engine's branches on the ranks, merges them across resumes, and draws by them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from suites.hunt.test_hunt import PASS, FakeRunner, make_space
from zharness.engines.registry import BUILT_IN, info
from zharness.errors import UsageError
from zharness.hunt.command import HuntOptions, run_hunt
from zharness.hunt.draw import PARENT_PERIOD, PairCoverage
from zharness.hunt.engine_coverage import EngineCoverage
from zharness.hunt.hunter import Hunter, HuntLimits
from zharness.hunt.log import HuntLog
from zharness.hunt.space import Space, list_setting_values
from zharness.hunt.unreached import SourceFunction, describe_unreached, sort_functions
from zharness.run.engine_sources import find_source_files, list_source_modules
from zharness.workload.programs import Program
from zharness.world.server import RankEnvironment

coverage = pytest.importorskip("coverage")

SETTING = ("option", "overlap_comm")


def make_function(file: str, name: str, statements: int, missing: int, branches: int = 0) -> SourceFunction:
    return SourceFunction(file, name, 7, statements, missing, tuple((7, number) for number in range(branches)))


def draw(space: Space, path: Path, draws: int) -> list[Program]:
    """Run draws of which those with SETTING reach new arcs; return the programs that were run."""
    runner = FakeRunner(lambda _: False)
    with HuntLog(path, {"seed": 0}) as log:
        hunter = Hunter(
            space,
            runner,  # type: ignore[arg-type]
            log,
            PairCoverage(space.list_claimed_pairs()),
            lambda _program, _outcome: "",
            lambda _group: ("", ""),
            lambda _state: None,
            lambda: int(SETTING in list_setting_values(runner.programs[-1])),
        )
        hunter.hunt(0, HuntLimits(None, draws))
    return runner.programs


def test_settings_that_reached_new_arcs_are_drawn_again(tmp_path: Path) -> None:
    space = make_space()
    programs = draw(space, tmp_path / "whole.jsonl", 60)
    first = next(number for number, program in enumerate(programs, start=1) if SETTING in list_setting_values(program))
    repeated = [
        program for number, program in enumerate(programs, start=1) if number > first and number % PARENT_PERIOD == 0
    ]
    assert repeated
    assert all(SETTING in list_setting_values(program) for program in repeated)
    parts = [*draw(space, tmp_path / "parts.jsonl", 31), *draw(space, tmp_path / "parts.jsonl", 60)]
    assert parts == programs, "a hunt that resumes draws by what was reached before"
    assert PASS.verdict.value in (tmp_path / "parts.jsonl").read_text()


def test_arcs_of_ranks_are_merged_across_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def hunt(draws: int) -> str:
        """Hunt until the draw number ``draws``, and return what was printed."""
        options = HuntOptions(
            HuntLimits(None, draws),
            stages=(0,),
            world_sizes=(1,),
            dtypes=("fp32",),
            output=tmp_path,
            measures_engine=True,
        )
        run_hunt("ddp", options, lambda _: RankEnvironment(), None)
        return capsys.readouterr().out

    assert "functions entered" in hunt(1)
    sessions = sorted((tmp_path / "coverage").glob("session.*"))
    assert len(sessions) == 1
    printed = hunt(2)
    reached = EngineCoverage(tmp_path / "coverage")
    assert not reached.collect(), "files of ranks were collected"
    unfinished = tmp_path / "coverage" / "run.1.written-halfway"
    unfinished.write_text("SQLite")
    assert not reached.collect()
    assert not unfinished.exists()
    combined = coverage.CoverageData(str(tmp_path / "coverage" / "combined"))
    combined.read()
    assert {Path(file).name for file in combined.measured_files()} == {"distributed.py"}
    alone = coverage.CoverageData(str(sessions[0]))
    alone.read()
    (file,) = combined.measured_files()
    assert set(alone.arcs(file)) <= set(combined.arcs(file))
    assert "distributed.py DistributedDataParallel.__init__: " in printed, "a function with branches not taken"
    assert "DistributedDataParallel.__setstate__, " in printed, "a function that no program calls"
    assert "DistributedDataParallel.forward, " not in printed
    unreached = (tmp_path / "unreached.txt").read_text()
    assert "DistributedDataParallel.register_comm_hook" in unreached


def test_large_functions_of_reached_files_come_first() -> None:
    functions = [
        make_function("a.py", "entered", 9, 3, branches=1),
        make_function("a.py", "many_branches", 9, 3, branches=4),
        make_function("a.py", "large", 9, 9),
        make_function("a.py", "small", 2, 2),
        make_function("a.py", "whole", 2, 0),
        make_function("b.py", "unknown", 90, 90),
    ]
    assert [each.name for each in sort_functions(functions)] == [
        "large",
        "small",
        "unknown",
        "many_branches",
        "entered",
    ]
    described = describe_unreached(functions, limit=1)
    assert "3 of 6 functions entered, 14 of 121 of their statements reached" in described
    assert "files never entered: 1: b.py" in described
    assert "functions never entered, most promising first (1 of 2):\n   a.py:7 large, 9 statements" in described
    assert "   a.py many_branches: 7->0, 7->1, 7->2 and 1 more" in described


@pytest.mark.parametrize("engine", [name for name in BUILT_IN if name not in ("plain", "deepspeed")])
def test_the_sources_of_each_engine_exist(engine: str) -> None:
    assert info(engine).sources
    for module in info(engine).sources:
        assert find_source_files((module,)), module


def test_finding_sources_imports_nothing() -> None:
    before = set(sys.modules)
    find_source_files(tuple(name for engine in BUILT_IN for name in info(engine).sources))
    assert not {name for name in sys.modules.keys() - before if not name.startswith("importlib")}


def test_an_engine_without_sources_has_its_package() -> None:
    assert list_source_modules(info("zharness.mutants:never_reduces")) == ("zharness",)
    assert not find_source_files(("no_such_package.engine",))


def test_a_missing_coverage_is_said_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "coverage", None)
    with pytest.raises(UsageError, match=r"--coverage needs coverage\.py; pip install 'zharness\[coverage\]'"):
        EngineCoverage(tmp_path)
