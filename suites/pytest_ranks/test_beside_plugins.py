"""Tests on ranks beside plugins that people have: the verdicts, counts and reports of a test without ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from suites.pytest_ranks.beside_plugins import run_beside
from zharness.errors import UsageError
from zharness.pytest_ranks.plugin_support import UNSUPPORTED, refuse_unsupported_plugins

COUNTED = """
from pathlib import Path

def count(name, rank):
    with open(Path(__file__).parent / "notes" / f"{name}.{rank}", "a") as file:
        file.write("x")
        return file.tell()

@pytest.fixture
def number():
    return dist.get_rank() if dist.is_initialized() else 0
"""

RERUN = (
    COUNTED
    + """
@ranks
def test_passes_at_last(number):
    assert count("at_last", number) == 3

@ranks
def test_never_passes(number):
    raise ValueError("planted")

@ranks
@pytest.mark.flaky(reruns=1)
def test_by_marker(number):
    assert count("marker", number) == 2

@ranks
@pytest.mark.flaky(reruns=2, condition=lambda error: isinstance(error, KeyError))
def test_of_another_error(number):
    raise ValueError("not a KeyError")

@ranks
def test_passes():
    pass

@ranks
def test_skips():
    pytest.skip("planted")

@ranks
@pytest.mark.xfail(strict=True)
def test_fails_as_expected():
    assert False

@pytest.fixture
def broken(number):
    assert count("setup", number) == 2
    yield
    assert count("teardown", number) == 2

@ranks
def test_fails_in_setup_and_teardown(broken):
    pass

@ranks
def test_of_subtests(subtests, number):
    for i in range(2):
        with subtests.test(i=i):
            assert i == 0 or count("subtest", number) == 2
"""
)


def test_failures_are_run_again(tmp_path: Path) -> None:
    pytest.importorskip("pytest_rerunfailures", reason="needs pytest-rerunfailures: tox -e plugins")
    beside = run_beside(tmp_path, RERUN, "--reruns=3", plugins=("pytest_rerunfailures",))
    beside.assert_same_verdicts()
    for mode, session in beside.on_ranks.items():
        reports = session.tests["test_passes_at_last[w2]"].reports
        assert [report.outcome for report in reports if report.when == "call"] == ["rerun", "rerun", "passed"], mode


def test_only_errors_that_are_named_are_run_again(tmp_path: Path) -> None:
    pytest.importorskip("pytest_rerunfailures", reason="needs pytest-rerunfailures: tox -e plugins")
    source = """
        class Planted(Exception):
            def __init__(self, one, two):
                super().__init__(f"{one} {two}")

        @ranks
        def test_named():
            raise KeyError("planted")

        @ranks
        def test_other():
            raise ValueError("planted")

        @ranks
        def test_that_cannot_be_pickled():
            raise Planted("one", "two")
    """
    arguments = ("--reruns=1", "--only-rerun=KeyError")
    run_beside(tmp_path, source, *arguments, plugins=("pytest_rerunfailures",)).assert_same_verdicts()


ALLURE = """
@pytest.fixture
def broken():
    raise OSError("planted")

@ranks
def test_passes():
    pass

@ranks
def test_fails():
    assert 1 == 2

@ranks
def test_raises():
    raise RuntimeError("planted")

@ranks
def test_skips():
    pytest.skip("planted")

@ranks
@pytest.mark.xfail(reason="known")
def test_fails_as_expected():
    assert False

@ranks
def test_fails_in_setup(broken):
    pass

@ranks
@pytest.mark.parametrize("value", [1, 2])
def test_parameters(value):
    assert value == 1

def test_without_ranks():
    pass
"""


def test_allure_has_one_result_for_each_test(tmp_path: Path) -> None:
    pytest.importorskip("allure_pytest", reason="needs allure-pytest: tox -e plugins")
    beside = run_beside(tmp_path, ALLURE, "--alluredir=results", plugins=("allure_pytest.plugin",))
    beside.assert_same_verdicts()
    expected = read_allure(tmp_path / "without ranks")
    for mode in beside.on_ranks:
        assert read_allure(tmp_path / mode) == expected, mode


def read_allure(folder: Path) -> list[tuple[str, str]]:
    """Return the name, without world size, and the status of every result that allure wrote."""
    results = [json.loads(file.read_text()) for file in (folder / "results").glob("*-result.json")]
    return sorted((re.sub(r"w2-?|\[\]|\[w2\]", "", result["name"]), result.get("status")) for result in results)


HANG = """
import threading

@ranks
{marker}
def test_hangs(number=0):
    if not dist.is_initialized() or dist.get_rank() == 1:
        threading.Event().wait()
    dist.barrier()

@ranks
def test_after():
    pass
"""


@pytest.mark.parametrize("method", ["signal", "thread"])
@pytest.mark.parametrize(
    ("marker", "option"),
    [
        ("@pytest.mark.timeout(3)", "--timeout=100"),
        ("", "--timeout=3"),
        ("@pytest.mark.timeout(3, func_only=True)", ""),
    ],
    ids=["marker", "option", "function"],
)
def test_the_limit_of_pytest_timeout_is_that_of_the_ranks(
    tmp_path: Path, method: str, marker: str, option: str
) -> None:
    pytest.importorskip("pytest_timeout", reason="needs pytest-timeout: tox -e plugins")
    arguments = (f"--timeout-method={method}", *([option] if option else []))
    source = HANG.format(marker=marker)
    beside = run_beside(tmp_path, source, *arguments, plugins=("pytest_timeout",), without="def test_none(): pass")
    for mode, session in beside.on_ranks.items():
        assert session.verdicts() == {"test_hangs[w2]": "call failed", "test_after[w2]": "passed"}, session.output
        (failed,) = (report for report in session.tests["test_hangs[w2]"].reports if report.outcome == "failed")
        assert failed.headline.startswith("rank 1 did not finish in time, in call: still running after 3 s"), mode
        assert "stack of rank 1" in failed.text, mode
        assert "Timeout >" not in session.output, mode


UNLIMITED = """
import time

@ranks
@pytest.mark.timeout(0)
def test_takes_long():
    time.sleep(3)
    if dist.is_initialized():
        dist.barrier()

@ranks
@pytest.mark.timeout(0)
def test_fails():
    assert not dist.is_initialized() or dist.get_rank() == 1
    assert dist.is_initialized()
"""


def test_the_marker_of_pytest_timeout_can_set_no_limit(tmp_path: Path) -> None:
    pytest.importorskip("pytest_timeout", reason="needs pytest-timeout: tox -e plugins")
    # The limit of ranks is an option of this package, and that of a test without ranks one of pytest-timeout.
    arguments = ("--timeout=1", "--rank-timeout=1")
    run_beside(tmp_path, UNLIMITED, *arguments, plugins=("pytest_timeout",)).assert_same_verdicts()


BENCHMARK = """
import threading, time

@ranks
def test_calibrated(benchmark):
    def step():
        if dist.is_initialized():
            dist.all_reduce(torch.ones(1))
    benchmark(step)

@ranks
def test_pedantic(benchmark):
    benchmark.pedantic(lambda: dist.is_initialized() and dist.barrier(), rounds=3, iterations=2)

@ranks
def test_slower_on_one_rank(benchmark):
    is_slow = dist.is_initialized() and dist.get_rank() == 1
    benchmark.pedantic(time.sleep, args=(0.02 if is_slow else 0.0,), rounds=2)
    if dist.is_initialized():
        assert benchmark.stats.stats.min >= 0.02

@ranks
def test_fails(benchmark):
    benchmark(lambda: 1 / 0)

@ranks
@pytest.mark.rank_timeout(5)
def test_hangs(benchmark):
    def step():
        assert dist.is_initialized()
        if dist.get_rank() == 1:
            threading.Event().wait()
    benchmark.pedantic(step, rounds=2)
"""


def test_a_benchmark_is_calibrated_alike_on_all_ranks_and_in_the_table(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark", reason="needs pytest-benchmark: tox -e plugins")
    arguments = ("--benchmark-json=table.json", "--benchmark-max-time=0.1")
    beside = run_beside(tmp_path, BENCHMARK, *arguments, plugins=("pytest_benchmark.plugin",))
    beside.assert_same_verdicts()
    for mode in beside.on_ranks:
        table = json.loads((tmp_path / mode / "table.json").read_text())["benchmarks"]
        assert sorted(row["name"] for row in table) == [
            "test_calibrated[w2]",
            "test_pedantic[w2]",
            "test_slower_on_one_rank[w2]",
        ], mode
        assert all(row["extra_info"] == {"ranks": 2} for row in table), mode


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_plugin_that_runs_tests_itself_is_refused_in_one_sentence(pytestconfig: pytest.Config, name: str) -> None:
    plugin = object()
    pytestconfig.pluginmanager.register(plugin, name)
    try:
        with pytest.raises(UsageError, match=rf"tests on ranks cannot run beside the plugin \w.* with -p no:{name}"):
            refuse_unsupported_plugins(pytestconfig, [])
    finally:
        pytestconfig.pluginmanager.unregister(plugin)
