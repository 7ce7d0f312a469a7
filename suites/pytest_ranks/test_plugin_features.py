"""What plugins offer to a test works on ranks: coroutines, mocks, scenarios; and mpi-pytest's tests run beside."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from suites.attached.launches import run_commands
from suites.pytest_ranks.beside_plugins import HEAD, ON_RANKS, WITHOUT_RANKS, run_beside, start_beside

# How a coroutine ends; the name of the marker of its plugin is left open.
COROUTINES = """
        import asyncio

        @pytest.fixture
        async def broken_setup():
            raise OSError("planted")

        @ranks
        @pytest.mark.MARKER
        async def test_skips():
            pytest.skip("planted")

        @ranks
        @pytest.mark.MARKER
        async def test_fails_in_setup(broken_setup):
            pass

        @ranks
        @pytest.mark.MARKER
        @pytest.mark.rank_timeout(5)
        async def test_hangs():
            assert dist.is_initialized()
            if dist.get_rank() == 1:
                await asyncio.Event().wait()
            dist.barrier()
"""

USED = {
    "pytest_asyncio.plugin": COROUTINES.replace("MARKER", "asyncio")
    .replace("@pytest.fixture", "@pytest_asyncio.fixture")
    .replace("import asyncio", "import asyncio, pytest_asyncio")
    + """
        @ranks
        @pytest.mark.asyncio
        @pytest.mark.parametrize("expected", [2, 3])
        async def test_of_coroutines(expected):
            value = torch.ones(1) * (1 if dist.is_initialized() else 2)
            if dist.is_initialized():
                dist.all_reduce(value)
            assert value.item() == expected
    """,
    "anyio.pytest_plugin": COROUTINES.replace("MARKER", "anyio")
    + """
        import anyio

        @pytest.fixture
        def anyio_backend():
            return "asyncio"

        @ranks
        @pytest.mark.anyio
        @pytest.mark.parametrize("expected", [2, 3])
        async def test_of_coroutines(expected):
            await anyio.sleep(0)
            value = torch.ones(1) * (1 if dist.is_initialized() else 2)
            if dist.is_initialized():
                dist.all_reduce(value)
            assert value.item() == expected
    """,
    "pytest_mock": """
        @ranks
        @pytest.mark.parametrize("expected", [2, 3])
        def test_of_a_mock(mocker, expected):
            mocker.patch("torch.ones", return_value=torch.full((1,), 1.0 if dist.is_initialized() else 2.0))
            value = torch.ones(5)
            if dist.is_initialized():
                dist.all_reduce(value)
            assert value.item() == expected
    """,
}


@pytest.mark.parametrize("plugin", USED)
def test_what_a_plugin_offers_to_a_test_works_on_ranks(tmp_path: Path, plugin: str) -> None:
    pytest.importorskip(plugin, reason=f"needs the plugin {plugin}: tox -e plugins")
    run_beside(tmp_path, USED[plugin], plugins=(plugin,)).assert_same_verdicts()


FEATURE = """
from pathlib import Path
from pytest_bdd import given, parsers, scenario, then

Path(__file__).with_name("it.feature").write_text('''
Feature: sums
  Scenario: right
    Given two terms
    Then the sum is 2
  Scenario: wrong
    Given two terms
    Then the sum is 3
''')

@given("two terms", target_fixture="total")
def total():
    value = torch.ones(1) * (1 if dist.is_initialized() else 2)
    if dist.is_initialized():
        dist.all_reduce(value)
    return value.item()

@then(parsers.parse("the sum is {number:d}"))
def check(total, number):
    assert total == number

@ranks
@scenario("it.feature", "right")
def test_right():
    pass

@ranks
@scenario("it.feature", "wrong")
def test_wrong():
    pass
"""


ENDINGS_OF_SCENARIOS = (
    FEATURE.replace("Then the sum is 3", "Then it ENDING")
    + """
import threading

@then("it skips")
def skip():
    pytest.skip("planted")

@then("it hangs")
def hang():
    assert dist.is_initialized()
    if dist.get_rank() == 1:
        threading.Event().wait()
    dist.barrier()

@then("it needs what breaks", target_fixture="used")
def use(broken_setup):
    pass

@pytest.fixture
def broken_setup():
    raise OSError("planted")
"""
)


@pytest.mark.parametrize("ending", ["skips", "hangs", "needs what breaks"])
def test_a_scenario_of_pytest_bdd_ends_as_without_ranks(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("pytest_bdd", reason="needs pytest-bdd: tox -e plugins")
    source = ENDINGS_OF_SCENARIOS.replace("ENDING", ending)
    run_beside(tmp_path, source, "--rank-timeout=5", plugins=("pytest_bdd.plugin",)).assert_same_verdicts()


def test_scenarios_of_pytest_bdd_run_on_ranks(tmp_path: Path) -> None:
    pytest.importorskip("pytest_bdd", reason="needs pytest-bdd: tox -e plugins")
    beside = run_beside(tmp_path, FEATURE, "--cucumberjson=report.json", plugins=("pytest_bdd.plugin",))
    beside.assert_same_verdicts()
    expected = read_steps(tmp_path / WITHOUT_RANKS)
    assert len(expected) == 2
    for mode in beside.on_ranks:
        assert read_steps(tmp_path / mode) == expected, mode


def read_steps(folder: Path) -> list[tuple[str, list[str]]]:
    """Return the name of every scenario in pytest-bdd's report, with the status of each of its steps."""
    (feature,) = json.loads((folder / "report.json").read_text())
    return [
        (scenario["name"], [step["result"]["status"] for step in scenario["steps"]]) for scenario in feature["elements"]
    ]


MPI = """
@pytest.mark.parallel(2)
def test_of_mpi_pytest():
    from mpi4py import MPI
    assert MPI.COMM_WORLD.size == 2

@ranks
def test_on_ranks():
    if dist.is_initialized():
        dist.barrier()
"""


def test_mpi_pytest_runs_its_own_tests_beside_tests_on_ranks(tmp_path: Path) -> None:
    pytest.importorskip("pytest_mpi", reason="needs mpi-pytest: tox -e plugins")
    beside = run_beside(tmp_path / "apart", MPI, plugins=("pytest_mpi.plugin",))
    beside.assert_same_verdicts(in_order=False)  # two processes of mpiexec report one test, each when it is ready
    both = f"import pytest\n@{ON_RANKS}\n@pytest.mark.parallel(2)\ndef test_both():\n    pass\n"
    refused = start_beside(tmp_path / "both", both, plugins=("pytest_mpi.plugin",)).finish()
    assert refused.status == pytest.ExitCode.USAGE_ERROR
    assert "test_both[w2] has the marker world_size and the marker parallel of mpi-pytest" in refused.output


def test_under_mpiexec_tests_on_ranks_are_refused_at_start(tmp_path: Path) -> None:
    pytest.importorskip("pytest_mpi", reason="needs mpi-pytest: tox -e plugins")
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_it.py").write_text(HEAD.format(decorator=ON_RANKS) + MPI + "\ndef test_serial():\n    pass\n")
    plugins = [word for plugin in ("xdist", "zharness.plugin", "pytest_mpi.plugin") for word in ("-p", plugin)]
    command = [str(Path(sys.executable).with_name("mpiexec")), "-n", "2", sys.executable, "-m", "pytest", *plugins]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join(sys.path)}

    def run(*options: str) -> str:
        return run_commands([([*command, *options, "test_it.py"], environment)], tmp_path).output

    refused = run()
    assert "test_on_ranks[w2] runs on ranks, which each of the 2 processes of mpiexec would start for itself" in refused
    assert " passed" not in refused
    assert "1 passed, 2 deselected" in run("-m", "parallel[match]")
