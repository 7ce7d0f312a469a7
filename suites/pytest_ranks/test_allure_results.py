"""Allure's result of a test on ranks has what the test told allure: steps, attachments, labels, title, parameters."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from suites.attached.launches import run_one_agent
from suites.pytest_ranks.beside_plugins import HEAD, ON_RANKS, run_beside, start_beside

pytest.importorskip("allure_pytest", reason="needs allure-pytest: tox -e plugins")

TOLD_ALLURE = """
import allure

@ranks
def test_steps():
    with allure.step("train"):
        with allure.step("backward"):
            allure.attach("loss 0.5", name="loss", attachment_type=allure.attachment_type.TEXT)
        allure.attach("note", name="in train")
    allure.attach(b"bytes", name="state", extension="bin")

@ranks
def test_dynamic():
    allure.dynamic.title("A title")
    allure.dynamic.description("What it is about")
    allure.dynamic.feature("sharding")
    allure.dynamic.link("https://example.org", name="page")
    allure.dynamic.parameter("stage", 3)

@ranks
def test_fails_in_a_step():
    with allure.step("step"), allure.step("inner"):
        raise ValueError("planted")

@ranks
def test_fails_after_a_step():
    with allure.step("before"):
        pass
    assert False

@ranks
def test_says_nothing():
    pass
"""


def test_allure_has_the_steps_and_attachments_of_a_test_on_ranks(tmp_path: Path) -> None:
    beside = run_beside(tmp_path, TOLD_ALLURE, "--alluredir=results", plugins=("allure_pytest.plugin",))
    beside.assert_same_verdicts()
    expected = read_told(tmp_path / "without ranks")
    assert expected["test_steps"]["steps"][-1][2] == [("backward", "passed", [], [("loss", b"loss 0.5")])]
    for mode in beside.on_ranks:
        assert read_told(tmp_path / mode) == expected, mode


def read_told(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what each test told allure: title, description, labels, links, parameters, steps and attachments."""
    told: dict[str, dict[str, Any]] = {}
    for file in (folder / "results").glob("*-result.json"):
        result = json.loads(file.read_text())
        told[result["fullName"].rpartition("#")[2]] = {
            "name": result["name"].replace("[w2]", ""),
            "description": result.get("description"),
            "labels": [label["value"] for label in result["labels"] if label["name"] == "feature"],
            "links": result.get("links"),
            "parameters": [item["name"] for item in result.get("parameters", []) if item["name"] != "_world"],
            **dict(zip(("steps", "attachments"), list_told(folder, result), strict=True)),
        }
    return told


def list_told(folder: Path, result: Any) -> tuple[list[Any], list[Any]]:
    """Return name, status, steps and attachments of each step of a result, and its attachments with their content."""
    steps = [(step["name"], step["status"], *list_told(folder, step)) for step in result.get("steps", [])]
    attachments = result.get("attachments", [])
    return steps, [(item["name"], (folder / "results" / item["source"]).read_bytes()) for item in attachments]


def test_allure_has_the_steps_of_fixtures_on_ranks_in_the_result_of_the_test(tmp_path: Path) -> None:
    source = """
        import allure

        @pytest.fixture(scope="module")
        def wide():
            allure.attach("kept", name="of the fixture")
            yield
            allure.attach("of no test", name="of its teardown")

        @pytest.fixture
        def prepared(wide):
            with allure.step("prepare"):
                pass
            yield
            with allure.step("clean up"):
                pass

        @ranks
        def test_it(prepared):
            with allure.step("train"):
                pass
    """
    beside = run_beside(tmp_path, source, "--alluredir=results", plugins=("allure_pytest.plugin",))
    beside.assert_same_verdicts()
    for mode in beside.on_ranks:
        (told,) = read_told(tmp_path / mode).values()
        assert [name for name, *_ in told["steps"]] == ["prepare", "train", "clean up"], mode
        assert told["attachments"][0] == ("of the fixture", b"kept"), mode


def test_allure_names_the_rank_of_other_steps_than_those_of_rank_0(tmp_path: Path) -> None:
    source = """
        import allure

        @ranks
        def test_it():
            with allure.step("same"):
                allure.attach(str(dist.get_rank() // 2), name="part")
            if dist.get_rank() == 1:
                allure.attach("of rank 1", name="more")

        @ranks
        def test_title_on_one_rank():
            if dist.get_rank() == 1:
                allure.dynamic.title("not shown")
    """
    session = start_beside(
        tmp_path,
        HEAD.format(decorator="pytest.mark.world_size(3)") + dedent(source),
        "--alluredir=results",
        plugins=("allure_pytest.plugin",),
    ).finish()
    assert session.status == 0, session.output
    told = read_told(tmp_path)
    assert (told["test_title_on_one_rank"]["name"], told["test_title_on_one_rank"]["steps"]) == (
        "test_title_on_one_rank[w3]",
        [],
    )
    assert told["test_it"]["steps"] == [
        ("same", "passed", [], [("part", b"0")]),
        ("rank 1", "passed", [("same", "passed", [], [("part", b"0")])], [("more", b"of rank 1")]),
        ("rank 2", "passed", [("same", "passed", [], [("part", b"1")])], []),
    ]
    assert len(list((tmp_path / "results").glob("*-attachment*"))) == 4


def test_allure_has_what_a_test_told_it_under_torchrun(tmp_path: Path) -> None:
    source = """
        import allure

        @ranks
        def test_attaches():
            allure.attach(str(dist.get_rank()), name="rank")

        @ranks
        def test_says_nothing():
            pass
    """
    (tmp_path / "test_it.py").write_text(HEAD.format(decorator=ON_RANKS) + dedent(source), encoding="utf-8")
    options = ("-p", "zharness.plugin", "-p", "allure_pytest.plugin", "--alluredir=results", "-p", "no:cacheprovider")
    launch = run_one_agent(2, "pytest", *options, "test_it.py", cwd=tmp_path, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert launch.statuses == (0,), launch.output
    told = read_told(tmp_path)
    assert told.keys() == {"test_attaches", "test_says_nothing"}
    assert told["test_attaches"]["attachments"] == [("rank", b"0")]
    assert told["test_attaches"]["steps"] == [("rank 1", "passed", [], [("rank", b"1")])]
    assert told["test_says_nothing"]["attachments"] == told["test_says_nothing"]["steps"] == []
