"""The table of plugins: each beside tests on ranks that pass, fail, hang, skip, and fail in set-up and teardown."""

from __future__ import annotations

import html
import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

from suites.pytest_ranks.beside_plugins import WITHOUT_RANKS, run_beside

LIFE = """
import threading

def hang():
    assert dist.is_initialized()
    if dist.get_rank() == 1:
        threading.Event().wait()
    dist.barrier()

@pytest.fixture
def broken_setup():
    raise OSError("planted")

@pytest.fixture
def broken_teardown():
    yield
    raise OSError("planted")

@pytest.fixture
def skipping_setup():
    pytest.skip("planted")

@pytest.fixture
def hanging_setup():
    hang()

@pytest.fixture
def hanging_teardown():
    yield
    hang()

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
    hang()

@ranks
def test_fails_in_setup(broken_setup):
    pass

@ranks
def test_fails_in_teardown(broken_teardown):
    pass

@ranks
def test_skips_in_setup(skipping_setup):
    pass

@ranks
@pytest.mark.rank_timeout(3)
def test_hangs_in_setup(hanging_setup):
    pass

@ranks
@pytest.mark.rank_timeout(3)
def test_hangs_in_teardown(hanging_teardown):
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
    pytest.param(("pytest_cov.plugin",), ("--cov=.",), id="cov", marks=pytest.mark.exhaustive),
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
    pytest.param(("anyio.pytest_plugin",), (), id="anyio", marks=pytest.mark.exhaustive),
    pytest.param(("pytest_mock",), (), id="mock"),
    pytest.param(("teamcity.pytest_plugin",), ("--teamcity",), id="teamcity"),
    pytest.param(("pytest_repeat",), ("--count=2",), id="repeat"),
    pytest.param(("pytest_sugar",), ("--force-sugar",), id="sugar"),
    pytest.param(("pytest_benchmark.plugin",), (), id="benchmark"),
    pytest.param(("pytest_bdd.plugin",), ("--gherkin-terminal-reporter",), id="bdd"),
    pytest.param(("pytest_mpi.plugin",), (), id="mpi-pytest"),
    pytest.param((), ("--junitxml=report.xml",), id="junitxml", marks=pytest.mark.exhaustive),
    pytest.param((), ("--doctest-modules",), id="doctest", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("plugins", "options"), PLUGINS)
def test_verdicts_are_those_without_ranks(tmp_path: Path, plugins: tuple[str, ...], options: tuple[str, ...]) -> None:
    for plugin in plugins:
        pytest.importorskip(plugin, reason=f"needs the plugin {plugin}: tox -e plugins")
    beside = run_beside(tmp_path, LIFE, *options, plugins=plugins)
    beside.assert_same_verdicts()
    for mode in beside.on_ranks:
        check_reports(tmp_path / mode, tmp_path / WITHOUT_RANKS)


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
    for name, read in (("page.html", read_page), ("log.jsonl", read_log)):
        if (without / name).exists():
            assert read(on_ranks / name) == read(without / name)


def read_page(page: Path) -> list[tuple[str, list[str]]]:
    """Return the id without world size and the results of every test in a page of pytest-html."""
    (blob,) = re.findall(r'data-jsonblob="([^"]*)"', page.read_text())
    tests = json.loads(html.unescape(blob))["tests"]
    return [(strip_world_size(name), [row["result"] for row in rows]) for name, rows in tests.items()]


def read_log(log: Path) -> list[tuple[str, str, str]]:
    """Return the id without world size, the phase and the outcome of every report in a file of pytest-reportlog."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    reports = [record for record in records if record["$report_type"] == "TestReport"]
    return [(strip_world_size(report["nodeid"]), report["when"], report["outcome"]) for report in reports]


def strip_world_size(name: str) -> str:
    """Return an id without the part that says how many ranks there are."""
    return re.sub(r"w2-|\[w2\]|\(w2\)", "", name)


MODES = """
import threading

@pytest.fixture
def broken_setup():
    raise OSError("planted")

@ranks
@pytest.mark.parametrize("value", [1, 2])
def test_parameters(value):
    assert value == 1

@ranks
@pytest.mark.xdist_group("one")
def test_skips():
    pytest.skip("planted")

@ranks
@pytest.mark.xdist_group("one")
def test_fails_in_setup(broken_setup):
    pass

@pytest.fixture
def broken_teardown():
    yield
    raise OSError("planted")

@ranks
def test_fails_in_teardown(broken_teardown):
    pass

@ranks
@pytest.mark.rank_timeout(3)
def test_hangs():
    assert dist.is_initialized()
    if dist.get_rank() == 1:
        threading.Event().wait()
    dist.barrier()

class TestScope:
    @ranks
    def test_meets(self):
        if dist.is_initialized():
            dist.barrier()

    def test_without_ranks(self):
        pass
"""


@pytest.mark.skipif("TOX_ENV_NAME" not in os.environ, reason="every mode of xdist takes long: tox -e plugins")
@pytest.mark.parametrize("mode", ["each", "load", "loadscope", "loadfile", "loadgroup", "worksteal"])
def test_verdicts_are_those_without_ranks_in_every_mode_of_xdist(tmp_path: Path, mode: str) -> None:
    beside = run_beside(tmp_path, MODES, "-n2", f"--dist={mode}", plugins=("xdist",))
    beside.assert_same_verdicts(in_order=False)


DOCTEST = """
def double(number):
    '''Double a number.

    >>> double(2)
    4
    >>> double(3)
    5
    '''
    return 2 * number

@ranks
def test_double():
    assert double(1) == 2
"""


def test_doctests_beside_tests_on_ranks_are_unchanged(tmp_path: Path) -> None:
    run_beside(tmp_path, DOCTEST, "--doctest-modules").assert_same_verdicts()


def test_pycharm_hears_one_result_of_each_test(tmp_path: Path) -> None:
    pytest.importorskip("teamcity", reason="needs teamcity-messages: tox -e plugins")
    beside = run_beside(tmp_path, LIFE, "--teamcity", plugins=("teamcity.pytest_plugin",))
    expected, *on_ranks = (
        re.findall(r"##teamcity\[(test(?:Started|Failed|Ignored|Finished)) .*?name='(.*?)'", strip_world_size(output))
        for output in (beside.by_mode[WITHOUT_RANKS].output, *(run.output for run in beside.on_ranks.values()))
    )
    assert expected.count(expected[0]) == 1
    assert on_ranks == [expected, expected]


EDITOR = "suites.pytest_ranks.editor_plugin"


@pytest.mark.exhaustive
def test_an_editor_hears_one_verdict_of_each_test(tmp_path: Path) -> None:
    beside = run_beside(tmp_path, LIFE, plugins=(EDITOR,))
    beside.assert_same_verdicts()
    expected = (tmp_path / WITHOUT_RANKS / "heard.txt").read_text()
    for mode in beside.on_ranks:
        heard = (tmp_path / mode / "heard.txt").read_text()
        assert strip_world_size(heard) == expected, mode


@pytest.mark.skipif(find_spec("vscode_pytest") is None, reason="PYTHONPATH lacks python_files of VS Code's extension")
def test_vs_code_is_sent_one_result_of_each_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_RUN_PIPE", "sent.txt")
    beside = run_beside(tmp_path, LIFE, plugins=("vscode_pytest",))
    beside.assert_same_verdicts()
    expected = read_sent_results(tmp_path / WITHOUT_RANKS)
    assert len(expected) == 12
    for mode in beside.on_ranks:
        assert read_sent_results(tmp_path / mode) == expected, mode


def read_sent_results(folder: Path) -> list[tuple[str, str]]:
    """Return the id, without file and world size, and the outcome of every result that VS Code's plugin sent."""
    sent = (folder / "sent.txt").read_bytes().decode()
    messages = re.findall(r"\r\n\r\n(\{.*?\})(?=content-length|$)", sent, re.DOTALL)
    results = [json.loads(message)["params"].get("result") or {} for message in messages]
    return [
        (strip_world_size(test.partition("::")[2]), outcome["outcome"])
        for result in results
        for test, outcome in result.items()
    ]
