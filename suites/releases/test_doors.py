"""Commands about releases: wrong arguments are reported before anything is installed or run."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import zharness
from zharness.cli import cli
from zharness.cli.cell_options import CellOptions
from zharness.errors import UsageError
from zharness.mesh import DEFAULT_MESH
from zharness.releases import index, overlay
from zharness.releases.rank_environment import prepare_rank_environment
from zharness.run import check_loop
from zharness.run.pytest_cells import plan_marked_cells

CELL_ON_MESH = "mesh.norm[deepspeed-zero1-w2.tp2-fp32-exact]"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZHARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "fork", no_fork)
    monkeypatch.setattr(index, "list_releases", lambda _: ("0.18.8", "0.19.8"))
    return tmp_path / "cache"


def no_fork() -> NoReturn:
    raise AssertionError("a process was started for a command that is wrong")


def invoke_cli(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, standalone_mode=False)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("releases", "name one, as in `zharness releases deepspeed"),
        ("releases zero9 0.1", "unknown engine 'zero9'"),
        ("releases deepspeed a.b", "got the engine|expected a version such as 0.18.8"),
        ("releases fsdp2 2.4.0", "fsdp2==2.4.0 is not the installed release 2.13.*pip install torch==2.4.0"),
        ("releases deepspeed @nowhere", "expected a source checkout"),
        ("releases --clean deepspeed==0.18.8", "unknown release in the cache 'deepspeed==0.18.8'"),
        (
            "bisect deepspeed training.grads --good 0.19.8 --bad 9.9",
            "unknown release of deepspeed '9.9'; allowed: 0.18.8",
        ),
        ("bisect deepspeed training.grads --good 0.19.8 --bad 0.19.8", "name two different releases"),
        ("releases --list --clean", "got both --list and --clean"),
        ("releases deepspeed 0.18.8 --check trainning", "unknown law 'trainning'"),
        ("releases deepspeed 0.18.8 --check training --stage 4", "unknown stage '4'"),
        ("compare deepspeed==0.18.8 deepspeed --check trainning", "unknown law 'trainning'"),
        (
            "bisect deepspeed 7913 --good 0.19.8 --bad 0.18.8 --stage 1 --timeout 9",
            "got --stage, --timeout with reproduction 7913",
        ),
        ("bisect deepspeed 12345678 --good 0.19.8 --bad 0.18.8", "unknown reproduction '12345678'"),
        ("compare deepspeed@nowhere deepspeed", "expected a source checkout"),
        ("compare deepspeed deepspeed --changed HEAD", "--changed and --reach need each other"),
        (
            "releases deepspeed 0.18.8 --mesh tp3",
            "the mesh tp3 has 3 ranks or a multiple, which the world size 2 is not",
        ),
        ("releases deepspeed 0.18.8 0.19.8 --mesh pp2", "deepspeed==0.19.8 does not claim the axis pp of the mesh"),
        ("releases deepspeed 0.16.4 0.17.0 --mesh tp2", "deepspeed==0.17.0 does not claim the axis tp .*: cp, ep$"),
        ("releases deepspeed 0.18.8 --mesh ep2 --stage 3", "does not claim the axis ep"),
        ("compare fsdp2 fsdp2 --mesh ep2", "fsdp2 does not claim the axis ep"),
        ("compare deepspeed==0.17.0 deepspeed --mesh tp2", "deepspeed==0.17.0 does not claim the axis tp"),
        ("compare deepspeed==0.18.8 deepspeed --mesh tp2 --check training.grads --model conv", "has no plan"),
        ("bisect deepspeed mesh.norm --mesh tp2 --good 0.19.8 --bad 0.16.4", "deepspeed==0.16.4 does not claim .* tp"),
        (
            f"releases deepspeed 0.17.0 --check {CELL_ON_MESH}",
            "deepspeed==0.17.0 does not claim the axis tp of the mesh",
        ),
        (f"compare deepspeed deepspeed --check {CELL_ON_MESH} --mesh tp2", "got --mesh beside the id of a cell"),
        ("repro --on deepspeed==0.18.8", "no reproduction was named"),
        ("repro 7352 --on fsdp2", "reproduction 7352 runs on deepspeed, not on fsdp2"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(arguments: str, complaint: str, cache: Path) -> None:
    error = invoke_cli(*arguments.split()).exception
    assert isinstance(error, UsageError), repr(error)
    assert re.search(complaint, str(error)), str(error)
    assert not cache.exists() or not list(cache.rglob("deepspeed*"))


def test_excuses_that_match_nothing_are_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        check_loop, "run_request", lambda *_: check_loop.RunResult([], ["mine.toml:3: no cell meets the excuse"], [])
    )
    axes = CellOptions((), (2,), DEFAULT_MESH, ("fp32",), (), 60.0, "pooled", 1, None)
    with ExitStack() as stack:
        measure = axes.build_measure(stack)
        assert measure(axes.build_request(())) == measure(axes.build_request(())) == []
    assert capsys.readouterr().err == "UNMATCHED mine.toml:3: no cell meets the excuse\n"


def test_an_empty_cache_is_listed_as_empty(cache: Path) -> None:
    assert invoke_cli("releases", "--list").output == f"0 in {cache}, 0.0 MB\n"


def test_a_record_that_is_none_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").write_text("{}\n")
    error = invoke_cli("releases", "deepspeed", "0.19.8", "--compare-to", str(tmp_path / "old.jsonl")).exception
    assert "old.jsonl, line 1: not a zharness record" in str(error)


RELEASE = "deepspeed==0.18.8"
CELL = f"training.grads[{RELEASE}-zero1-w2-fp32-mlp]"
COMMANDS = (
    ("check", "training.grads", "--engine", RELEASE),
    ("check", CELL),
    ("program", "x(3) linear(2) | f b s", "--engine", RELEASE),
    ("program", "--engine", RELEASE),
    ("model", "suites.model.tiny:perceptron", "--engine", RELEASE),
    ("export", CELL),
    ("shrink", CELL),
    ("repro", "7913", "--engine", RELEASE),
    ("releases", "deepspeed", "0.18.8"),
    ("bisect", "deepspeed", "training.grads", "--good", "0.18.8", "--bad", "0.19.8"),
    ("compare", RELEASE, "deepspeed"),
)


@pytest.fixture
def nothing_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(distribution: str, release: str) -> NoReturn:
        raise UsageError(f"{distribution} {release} cannot be had")

    monkeypatch.setattr(overlay, "ensure_overlay", refuse)


@pytest.mark.usefixtures("nothing_can_be_had")
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_command_that_takes_an_engine_fetches_the_release_that_is_named(arguments: tuple[str, ...]) -> None:
    error = invoke_cli(*arguments).exception
    assert isinstance(error, UsageError), repr(error)
    assert "deepspeed 0.18.8 cannot be had" in str(error)


@pytest.mark.usefixtures("nothing_can_be_had")
def test_so_do_the_functions_of_the_package_and_pytest(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    laws = zharness.check_engine(RELEASE)
    with pytest.raises(UsageError, match="cannot be had"):
        plan_marked_cells(laws.pytestmark, pytestconfig, prepare_rank_environment)  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="cannot be had"):
        zharness.run_laws(RELEASE)
    with pytest.raises(UsageError, match="cannot be had"):
        zharness.verify(nn.Linear(2, 2), torch.zeros(4, 2), lambda output, _: output.sum(), engine=RELEASE)
    monkeypatch.setattr(pytestconfig.option, "zharness_engine", [RELEASE])
    with pytest.raises(UsageError, match="cannot be had"):
        plan_marked_cells([], pytestconfig, prepare_rank_environment)
