"""Follow the recipes of CONTRIBUTING.md on a copy of the package, with its own blocks and commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from suites.meta.documents import ROOT, Command, code_blocks, parse_commands
from suites.meta.test_house import FLOORS
from suites.warm import programs
from zharness.releases.repros import Repro

PAGE = ROOT / "CONTRIBUTING.md"
EDIT = re.compile(r"# (?P<kind>append to|new file) (?P<path>\S+)\n(?P<code>.*)", re.DOTALL)
# The commands of the recipes, with their documented exit codes. The others are parsed by test_docs.py.
EXECUTED_COMMANDS = {
    "zharness check backward.scaled_loss": 0,
    "zharness mutants drops_the_scale_of_losses --scope targets": 0,
    "zharness check backward.scaled_loss --engine zharness.mutants:drops_the_scale_of_losses": 1,
    "zharness list engines": 0,
    "zharness check training.grads --engine ddp_static": 0,
}


def apply_recipes(copy: Path) -> list[str]:
    """Copy the package to ``copy``, apply every block that edits a file, and return the paths of these files."""
    shutil.copytree(ROOT / "zharness", copy / "zharness", ignore=shutil.ignore_patterns("__pycache__"))
    edited = []
    for match in filter(None, map(EDIT.fullmatch, code_blocks(PAGE, "python"))):
        path = copy / match["path"]
        assert path.exists() == (match["kind"] == "append to"), match["path"]
        with path.open("a", encoding="utf-8") as file:
            file.write(match["code"])
        edited.append(match["path"])
    return edited


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package in which every recipe was followed."""
    copy = tmp_path_factory.mktemp("recipes")
    assert len(apply_recipes(copy)) == 4
    return copy


@pytest.mark.parametrize("line", EXECUTED_COMMANDS)
def test_a_command_of_a_recipe_exits_as_documented(line: str, followed: Path) -> None:
    command = next(found for found in parse_commands(PAGE) if found.line == line)
    done = run_zharness(command, followed)
    assert done.returncode == EXECUTED_COMMANDS[line], done.stdout + done.stderr


def run_zharness(command: Command, copy: Path) -> subprocess.CompletedProcess[str]:
    """Run a zharness command with the package in ``copy``, in a fork of a process that has imported torch."""
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    return programs.run("-m", *command.arguments, folder=copy, environment=environment)


def test_the_table_of_header_keys_has_the_fields_of_a_reproduction() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Add a reproduction")[2].partition("\n## ")[0]
    keys = set(re.findall(r"^\| (\w+) \|", section, re.MULTILINE)) - {"key"}
    assert keys == {field.name for field in fields(Repro)} - {"path", "broken", "needs"}


def test_the_map_of_floors_is_the_one_that_imports_are_checked_against() -> None:
    lines = re.findall(r"^ ?(\d+)  ([a-z_ ]+?)(?:   .*)?$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    floors = {name: int(floor) for floor, names in lines for name in names.split()}
    assert floors == FLOORS


def test_every_file_that_the_page_names_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:zharness|suites|repro|scripts)/[\w/.]+)`", text))
    missing = {name for name in named if not (ROOT / name).exists()}
    assert missing == {"zharness/expected_failures/ENGINE.toml", "zharness/expected_failures/ddp_static.toml"}
