"""Tests on ranks beside plugins, with one mechanism switched off: each mechanism is what keeps the verdict right."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from suites.compat.session_runs import SessionRun, run
from suites.compat.shared_memory import SOURCE as SHARED_MEMORY
from suites.compat.shared_memory import build_variables, find_missing_needs, leave_lock_of_killed_build
from suites.pytest_ranks import switched_off
from suites.pytest_ranks.beside_plugins import HEAD, ON_RANKS
from suites.world.faults.sessions import Session, SessionResult


def run_without(mechanism: str, folder: Path, source: str, *arguments: str, plugins: tuple[str, ...]) -> SessionResult:
    """Run a session without one mechanism of the fixture layer, and with no plugin but ``plugins``."""
    for name in plugins:
        pytest.importorskip(name, reason=f"needs the plugin {name}: tox -e plugins")
    loaded = (switched_off.__name__, "zharness.plugin", *plugins)
    options = (*(option for name in loaded for option in ("-p", name)), "-p", "no:cacheprovider", "--tb=short")
    variables = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", switched_off.VARIABLE: mechanism}
    files = {"test_it.py": HEAD.format(decorator=ON_RANKS) + dedent(source)}
    return Session(folder, files, *options, *arguments, variables=variables).finish()


def test_later_subtests_fail(tmp_path: Path) -> None:
    source = """
        @ranks
        def test_it(subtests):
            for i in range(3):
                with subtests.test(i=i):
                    assert i != 1
    """
    built_in = () if pytest.version_tuple >= (9,) else ("pytest_subtests",)
    session = run_without("subtests", tmp_path, source, plugins=built_in)
    failed = [report for report in session.tests["test_it[w2]"].reports if report.outcome == "failed"]
    assert len(failed) > 2, f"more than the subtest and the test: {session.output}"


def test_an_example_that_one_rank_leaves_hangs(tmp_path: Path) -> None:
    source = """
        from hypothesis import given, settings, strategies

        @ranks
        @pytest.mark.rank_timeout(8)
        @settings(max_examples=10)
        @given(n=strategies.integers(0, 9))
        def test_it(rank, n):
            if rank == 1:
                assert n < 7
            dist.barrier()
    """
    session = run_without("hypothesis", tmp_path, source, plugins=("_hypothesis_pytestplugin",))
    (failed,) = (report for report in session.tests["test_it[w2]"].reports if report.outcome == "failed")
    assert "did not finish in time" in failed.headline, failed.headline
    assert "Falsifying example" not in session.output


def test_failures_run_once(tmp_path: Path) -> None:
    source = """
        from pathlib import Path

        @ranks
        def test_it(shared_tmp_path, rank):
            with Path(__file__).with_name(f"runs{rank}").open("a") as file:
                file.write("x")
                assert file.tell() == 2
    """
    session = run_without("rerunfailures", tmp_path, source, "--reruns=3", plugins=("pytest_rerunfailures",))
    assert session.verdicts() == {"test_it[w2]": "call failed"}, session.output


def test_every_rank_reports_to_allure(tmp_path: Path) -> None:
    source = """
        @ranks
        def test_it():
            pass
    """
    session = run_without("reporting", tmp_path, source, "--alluredir=results", plugins=("allure_pytest.plugin",))
    assert session.verdicts() == {"test_it[w2]": "passed"}, session.output
    assert len([*(tmp_path / "results").glob("*-result.json")]) > 1


def test_an_attachment_for_allure_fails_the_test(tmp_path: Path) -> None:
    source = """
        import allure

        @ranks
        def test_it():
            allure.attach("loss 0.5", name="loss")
    """
    session = run_without("allure", tmp_path, source, "--alluredir=results", plugins=("allure_pytest.plugin",))
    assert session.verdicts() == {"test_it[w2]": "call failed"}, session.output
    assert "KeyError: None" in session.output


def test_pytest_timeout_ends_the_test_without_ranks_and_stacks(tmp_path: Path) -> None:
    source = """
        import threading

        @ranks
        @pytest.mark.timeout(3)
        def test_it(rank):
            if rank == 1:
                threading.Event().wait()
            dist.barrier()
    """
    session = run_without("timeout", tmp_path, source, "--timeout-method=signal", plugins=("pytest_timeout",))
    assert session.verdicts() != {"test_it[w2]": "passed"}
    assert "rank 1 did not finish in time" not in session.output
    assert "stack of rank 1" not in session.output


def test_benchmarks_are_missing_from_the_table(tmp_path: Path) -> None:
    source = """
        @ranks
        @pytest.mark.rank_timeout(20)
        def test_it(benchmark):
            benchmark.pedantic(lambda: dist.all_reduce(torch.ones(1)), rounds=3)
    """
    arguments = ("--benchmark-json=table.json",)
    session = run_without("benchmark", tmp_path, source, *arguments, plugins=("pytest_benchmark.plugin",))
    assert session.verdicts() == {"test_it[w2]": "passed"}, session.output
    table = tmp_path / "table.json"
    assert not table.exists() or "test_it" not in table.read_text()


def test_ddp_dies_where_collectives_are_compared(tmp_path: Path) -> None:
    source = """
        @ranks
        def test_it():
            torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    """
    assert "SIGSEGV" in run_without("ddp", tmp_path, source, plugins=()).output


def test_ids_of_deepspeeds_classes_name_their_one_world_size(tmp_path: Path) -> None:
    source = """
        from zharness.compat.deepspeed import DistributedTest

        class TestIt(DistributedTest):
            world_size = 1

            @pytest.mark.parametrize("number", [0])
            def test(self, number):
                pass
    """
    assert list(run_without("ids", tmp_path, source, plugins=()).tests) == ["test[w1-0]"]


def run_on_shared_memory_without(mechanism: str, folder: Path, built: Path) -> SessionRun:
    """Run the tests of DeepSpeed's shared-memory operator without one mechanism; neither compiles anything."""
    variables = build_variables(built) | {switched_off.VARIABLE: mechanism}
    return run(folder, SHARED_MEMORY, "-p", switched_off.__name__, conftest="", **variables)


@pytest.mark.skipif(any(find_missing_needs()), reason=f"needs {', '.join(find_missing_needs())}")
def test_inference_all_reduce_avoids_the_operator_of_deepspeed(tmp_path: Path) -> None:
    session = run_on_shared_memory_without("shared memory", tmp_path / "session", tmp_path / "built")
    assert {result.verdict for result in session.tests.values()} == {"failed"}, session.output
    assert all("c10d::allreduce_" in result.text for result in session.tests.values()), session.output


@pytest.mark.skipif(any(find_missing_needs()), reason=f"needs {', '.join(find_missing_needs())}")
def test_a_build_waits_for_the_lock_of_a_killed_one(tmp_path: Path) -> None:
    lock = leave_lock_of_killed_build(tmp_path / "built")
    session = run_on_shared_memory_without("stale lock", tmp_path / "session", tmp_path / "built")
    assert "passed" not in {result.verdict for result in session.tests.values()}, session.output
    assert f"waits forever for {lock}" in session.output
