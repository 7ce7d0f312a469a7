"""The commands about releases as a user spells them: what is wrong is said before anything is installed or run."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import pytest
from click.testing import CliRunner, Result

from zharness.cli import cli
from zharness.cli.releases import Axes
from zharness.errors import UsageError
from zharness.releases import index
from zharness.report import live


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZHARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "fork", no_fork)
    monkeypatch.setattr(index, "releases", lambda _: ("0.18.8", "0.19.8"))
    return tmp_path / "cache"


def no_fork() -> NoReturn:
    raise AssertionError("a process was started for a command that is wrong")


def told(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, standalone_mode=False)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("releases", "no engine was named; try: zharness releases deepspeed"),
        ("releases zero9 0.1", "unknown engine 'zero9'"),
        ("releases deepspeed a.b", "not an engine|expected a version such as 0.18.8"),
        ("releases fsdp2 2.4.0", "fsdp2==2.4.0 is not the installed release, .*pip install torch==2.4.0"),
        ("releases deepspeed @nowhere", "expected a source checkout"),
        ("releases --clean deepspeed==0.18.8", "unknown release in the cache 'deepspeed==0.18.8'"),
        (
            "bisect deepspeed training.grads --good 0.19.8 --bad 9.9",
            "unknown release of deepspeed '9.9'; allowed: 0.18.8",
        ),
        ("bisect deepspeed training.grads --good 0.19.8 --bad 0.19.8", "name two releases"),
        ("releases --list --clean", "name one of them"),
        ("releases deepspeed 0.18.8 --check trainning", "unknown check 'trainning'"),
        ("releases deepspeed 0.18.8 --check training --stage 4", "unknown stage '4'"),
        ("compare deepspeed==0.18.8 deepspeed --check trainning", "unknown check 'trainning'"),
        (
            "bisect deepspeed 7913 --good 0.19.8 --bad 0.18.8 --stage 1 --timeout 9",
            "got --stage, --timeout for reproduction 7913",
        ),
        ("bisect deepspeed 12345678 --good 0.19.8 --bad 0.18.8", "unknown reproduction '12345678'"),
        ("compare deepspeed@nowhere deepspeed", "expected a source checkout"),
        ("repro --on deepspeed==0.18.8", "no reproduction was named"),
        ("repro 7352 --on fsdp2", "reproduction 7352 is of deepspeed, not of fsdp2"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(arguments: str, complaint: str, cache: Path) -> None:
    error = told(*arguments.split()).exception
    assert isinstance(error, UsageError), repr(error)
    assert re.search(complaint, str(error)), str(error)
    assert not cache.exists() or not list(cache.rglob("deepspeed*"))


def test_excuses_that_match_nothing_are_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "run_request", lambda *_: ([], ["mine.toml:3: no cell meets the excuse"]))
    axes = Axes((), (2,), ("fp32",), (), 60.0, "pooled", 1, None)
    with ExitStack() as stack:
        measure = axes.measure(stack)
        assert measure(axes.request(())) == measure(axes.request(())) == []
    assert capsys.readouterr().err == "UNMATCHED mine.toml:3: no cell meets the excuse\n"


def test_an_empty_cache_is_listed_as_empty(cache: Path) -> None:
    assert told("releases", "--list").output == f"0 in {cache}, 0.0 MB\n"


def test_a_record_that_is_none_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").write_text("{}\n")
    error = told("releases", "deepspeed", "0.19.8", "--compare-to", str(tmp_path / "old.jsonl")).exception
    assert "old.jsonl, line 1: not a zharness record" in str(error)
