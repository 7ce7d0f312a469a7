"""The plugin's names beside those of the plugins that people install most (``plugin_names.toml``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.plugin_names import KINDS, ask_pytest, subtract
from suites.world.faults.sessions import Session
from zharness.pytest_ranks.options import OPTIONS
from zharness.toml_text import parse_toml

NAMES = Path(__file__).parent / "plugin_names.toml"
MOST_USED = 100
YIELDING = {"--" + name for option in OPTIONS for name in option.names} | {"device"}  # to any plugin that has the name
OTHER = """
import pytest

@pytest.fixture(scope="session")
def device():
    return "of another plugin"
"""
SOURCE = """
import pytest

def test_device(device):
    assert device == "of another plugin"

@pytest.mark.world_size(2)
def test_device_of_a_rank(device, rank_device):
    assert device == "of another plugin"
    assert rank_device.type == "cpu"
"""
ALONE = """
import pytest

@pytest.mark.world_size(1)
def test_device(device, rank_device):
    assert device is rank_device
"""
PLUGINS = ("-p", "no:cacheprovider", "-p", "no:randomly", "--color=no")


def test_no_name_is_one_of_another_plugin(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n", encoding="utf-8")
    variables = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    alone, both = (ask_pytest(tmp_path, *named, variables=variables) for named in ((), ("-p", "zharness.plugin")))
    ours = subtract(both, alone)
    assert {"--zharness-engine", "--rank-timeout"} <= set(ours["options"])
    assert {"cells", "world_size"} <= set(ours["markers"])
    assert {"record", "rank_device"} <= set(ours["fixtures"])
    plugins = parse_toml(NAMES.read_text(encoding="utf-8"), NAMES.name)["plugins"]
    answers = {name: answer for name, answer in plugins.items() if "failed" not in answer}
    assert len(answers) >= MOST_USED
    common = {
        (plugin, name)
        for plugin, answer in answers.items()
        for kind in KINDS
        for name in set(answer.get(kind, ())) & set(ours.get(kind, ()))
    }
    assert {name for _, name in common} <= YIELDING
    assert common == {("pytest-playwright", "device")}, "the sessions below try this name"


@pytest.mark.parametrize("first", ["other", "zharness"])
def test_the_fixture_of_another_plugin_wins(tmp_path: Path, first: str) -> None:
    files = {"other.py": OTHER, "test_it.py": SOURCE}
    if first == "other":  # with -p; zharness is found by its entry point after that
        named = ("-p", "other")
    else:
        named, files["conftest.py"] = (), 'pytest_plugins = ["other"]\n'
    done = Session(tmp_path, files, *PLUGINS, *named, "test_it.py").finish()
    assert done.status == 0, done.output


def test_without_another_plugin_the_device_is_that_of_the_rank(tmp_path: Path) -> None:
    done = Session(tmp_path, {"test_it.py": ALONE}, *PLUGINS, "test_it.py").finish()
    assert done.status == 0, done.output
