"""The table of plugins: each beside tests on ranks that pass, fail, hang, skip, and fail in set-up and teardown."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from suites.pytest_ranks.beside_plugins import run_beside

LIFE = """
import threading

@pytest.fixture
def broken_setup():
    raise OSError("planted")

@pytest.fixture
def broken_teardown():
    yield
    raise OSError("planted")

@ranks
def test_passes():
    pass

@ranks
@pytest.mark.parametrize("value", [1, 2])
def test_parameters(value):
    assert value == 1

@ranks
def test_skips():
    pytest.skip("planted")

@ranks
@pytest.mark.xfail(reason="known")
def test_fails_as_expected():
    assert False

@ranks
@pytest.mark.rank_timeout(3)
def test_hangs():
    assert dist.is_initialized()
    if dist.get_rank() == 1:
        threading.Event().wait()
    dist.barrier()

@ranks
def test_fails_in_setup(broken_setup):
    pass

@ranks
def test_fails_in_teardown(broken_teardown):
    pass

def test_without_ranks():
    pass
"""

# Modules of plugins, and options that make them act. They have to keep ids, counts and the order of reports.
PLUGINS = [
    pytest.param(("xdist",), ("-n1",), id="xdist"),
    pytest.param(("pytest_forked",), ("--forked",), id="forked"),
    pytest.param(("pytest_timeout",), ("--timeout=60",), id="timeout"),
    pytest.param(("pytest_rerunfailures",), ("--reruns=1",), id="rerunfailures"),
    pytest.param(("pytest_randomly",), (), id="randomly"),
    pytest.param(("random_order.plugin",), ("--random-order",), id="random-order"),
    pytest.param(("pytest_order",), (), id="order"),
    pytest.param(("pytest_cov.plugin",), ("--cov=.",), id="cov"),
    pytest.param(("pytest_metadata.plugin", "pytest_html.plugin"), ("--html=page.html",), id="html"),
    pytest.param(
        ("pytest_metadata.plugin", "pytest_jsonreport.plugin"),
        ("--json-report", "--json-report-file=report.json"),
        id="json-report",
    ),
    pytest.param(("pytest_reportlog.plugin",), ("--report-log=log.jsonl",), id="reportlog"),
    pytest.param(("pytest_instafail",), ("--instafail",), id="instafail"),
    pytest.param(("allure_pytest.plugin",), ("--alluredir=results",), id="allure"),
    pytest.param(("pytest_asyncio.plugin",), (), id="asyncio"),
    pytest.param(("anyio.pytest_plugin",), (), id="anyio"),
    pytest.param(("pytest_mock",), (), id="mock"),
    pytest.param(("teamcity.pytest_plugin",), ("--teamcity",), id="teamcity"),
    pytest.param((), ("--junitxml=report.xml",), id="junitxml"),
]


@pytest.mark.parametrize(("plugins", "options"), PLUGINS)
def test_verdicts_are_those_without_ranks(tmp_path: Path, plugins: tuple[str, ...], options: tuple[str, ...]) -> None:
    for plugin in plugins:
        pytest.importorskip(plugin, reason=f"needs the plugin {plugin}: tox -e plugins")
    beside = run_beside(tmp_path, LIFE, *options, plugins=plugins)
    beside.assert_same_verdicts()
    for mode in beside.on_ranks:
        check_reports(tmp_path / mode, tmp_path / "without ranks")


def check_reports(on_ranks: Path, without: Path) -> None:
    """Assert that a report file on ranks, if a plugin wrote one, has the totals of that without ranks."""
    if (without / "report.json").exists():
        summaries = [json.loads((folder / "report.json").read_text())["summary"] for folder in (on_ranks, without)]
        assert summaries[0] == summaries[1]
    if (without / "report.xml").exists():
        totals = []
        for folder in (on_ranks, without):
            (suite,) = ElementTree.parse(folder / "report.xml").getroot()  # noqa: S314 - pytest wrote it
            totals.append({name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")})
        assert totals[0] == totals[1]
    for name in ("page.html", "log.jsonl"):
        assert (on_ranks / name).exists() == (without / name).exists()
