"""The plugin's options beside a project that has options of the same names."""

from __future__ import annotations

from pathlib import Path

import pytest

from suites.world.faults.sessions import Session
from zharness.pytest_ranks.options import OPTIONS

CONFTEST = """
def pytest_addoption(parser):
    for name in ("engine", "stage", "isolation"):
        parser.addoption(f"--{name}", default="mine", dest=name)
"""
SOURCE = """
import pytest

def test_the_projects_options(pytestconfig):
    assert pytestconfig.getoption("--engine") == "steam"
    assert pytestconfig.getoption("--stage") == "mine"

@pytest.mark.world_size(2)
def test_on_ranks(pytestconfig, rank):
    assert pytestconfig.getoption("--zharness-isolation") == "pooled"
    assert pytestconfig.getoption("--isolation") == "mine"
"""
SHORT = """
import pytest

@pytest.mark.world_size(1)
def test_on_ranks(pytestconfig):
    assert pytestconfig.getoption("--isolation") == pytestconfig.getoption("--zharness-isolation") == "pooled"
    assert pytestconfig.getoption("--rank-timeout") == 30
"""
COLOR = """
def pytest_addoption(parser):
    parser.addoption("--color-of", default="red")
    parser.addoption("--shuffle", action="store_true", dest="mixed")
"""
BLUE = """
def test_color(pytestconfig):
    assert pytestconfig.getoption("--color-of") == "blue"
"""
PLUGINS = ("-p", "no:cacheprovider", "-p", "no:randomly", "--color=no")


def test_options_of_a_conftest_with_the_same_names_win(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    files = {"inner/conftest.py": CONFTEST, "inner/test_it.py": SOURCE}
    arguments = ("inner/test_it.py", "--engine", "steam", "--zharness-isolation=pooled")
    done = Session(tmp_path, files, *PLUGINS, *arguments).finish()
    assert done.status == 0, done.output


def test_options_of_another_plugin_with_the_same_names_win(tmp_path: Path) -> None:
    files = {"other.py": CONFTEST, "test_it.py": SOURCE}
    arguments = ("-p", "other", "--engine=steam", "--zharness-isolation", "pooled")
    done = Session(tmp_path, files, *PLUGINS, *arguments).finish()
    assert done.status == 0, done.output


@pytest.mark.parametrize("variables", [{}, {"PYTEST_ADDOPTS": "--isolation pooled"}])
def test_short_names_work_where_they_are_free(tmp_path: Path, variables: dict[str, str]) -> None:
    arguments = ("--rank-timeout", "30", *(() if variables else ("--isolation", "pooled")))
    done = Session(tmp_path, {"test_it.py": SHORT}, *PLUGINS, *arguments, variables=variables).finish()
    assert done.status == 0, done.output


@pytest.mark.parametrize("chosen", [("--engine", "reference"), ("--isolation", "pooled"), ("--engine=reference",)])
def test_the_options_of_a_conftest_in_testpaths_are_known_beside_a_short_name(
    tmp_path: Path, chosen: tuple[str, ...]
) -> None:
    (tmp_path / "checks").mkdir()
    files = {"checks/conftest.py": COLOR, "checks/test_it.py": BLUE}
    session = Session(tmp_path, files, *PLUGINS, *chosen, "--color-of=blue", settings="\ntestpaths = checks\n")
    done = session.finish()
    assert done.status == 0, done.output


def test_a_folder_with_the_name_of_a_value_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    files = {"reference/conftest.py": "raise RuntimeError('imported')", "test_it.py": "def test_it():\n    pass\n"}
    done = Session(tmp_path, files, *PLUGINS, "--engine", "reference", "test_it.py").finish()
    assert done.status == 0, done.output


def test_a_path_after_a_flag_of_its_conftest_stays_a_path(tmp_path: Path) -> None:
    (tmp_path / "checks").mkdir()
    files = {"checks/conftest.py": COLOR, "checks/test_it.py": BLUE}
    done = Session(tmp_path, files, *PLUGINS, "--color-of=blue", "--shuffle", "checks").finish()
    assert done.status == 0, done.output


def test_every_option_and_its_attribute_have_the_prefix() -> None:
    for option in OPTIONS:
        assert option.prefixed_name.startswith("--zharness-")
        assert option.dest.startswith("zharness_")
