"""Excuses of a user's own, narrowed by every axis, and those that match nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zharness import engines
from zharness.cell import Cell
from zharness.engines import Capabilities
from zharness.errors import UsageError
from zharness.laws import DTYPES
from zharness.run import Request, plan
from zharness.run.expected_failures import (
    ExpectedFailure,
    expected_failures_for,
    find_expected_failure,
    read_expected_failures,
)
from zharness.run.unmatched_failures import describe_unmatched_failures

ENTRY = """
[[excuse]]
check = "training.grads"
upstream = "ours#1"
reason = "because"
verdict = "fail"
signatures = ["reduction"]
"""
CASE = Cell("training.grads", "my.engine:factory", 0, 2, "fp32", "mlp")


def claims(engine: str, stage: int) -> Capabilities:
    found = engines.capabilities(engine, stage)
    assert found is not None
    return found


def own(folder: Path, text: str) -> tuple[ExpectedFailure, ...]:
    path = folder / "ours.toml"
    path.write_text(text)
    return read_expected_failures([path])


def test_a_user_s_file_names_engine_and_releases_once_and_each_entry_has_its_line(tmp_path: Path) -> None:
    head = 'engine = "my.engine:factory"\n'
    first, second = own(tmp_path, head + ENTRY + 'world_sizes = [4]\ndtypes = ["bf16"]\n' + ENTRY + "stages = [0]\n")
    assert first.location.endswith("ours.toml:3")
    assert second.location.endswith("ours.toml:12")
    assert not first.covers_cell(CASE, "(no release)")
    assert first.covers_cell(replace(CASE, world_size=4, dtype="bf16"), "(no release)")
    assert find_expected_failure(CASE, "(no release)", (first, second)) is second
    assert not replace(second, engine_variants=("tiny",)).covers_cell(CASE, "1.0")
    assert not replace(second, releases="<2").covers_cell(CASE, "(no release)"), "what has no release is not in a range"


def test_an_entry_of_several_engines_is_an_excuse_of_each(tmp_path: Path) -> None:
    both = own(tmp_path, 'engine = ["ddp", "zero1"]\n' + ENTRY)
    assert [excuse.engine for excuse in both] == ["ddp", "zero1"]
    assert len({excuse.location for excuse in both}) == 1
    shared = {excuse.location for excuse in expected_failures_for("ddp")}
    assert shared < {excuse.location for excuse in expected_failures_for("zero1")}, "the backwards of zero1 are DDP's"


def test_a_user_s_own_excuse_comes_before_the_shipped_one(tmp_path: Path) -> None:
    (mine,) = own(tmp_path, 'engine = "fsdp2"\n' + ENTRY)
    assert expected_failures_for("fsdp2", (mine,))[0] is mine
    assert mine not in expected_failures_for("ddp", (mine,))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (ENTRY, r"ours.toml:2: the excuse lacks 'engine'"),
        ('engine = "ddp"\n' + ENTRY.replace("reason", "raeson"), r"unknown key of the excuse at .*:3: 'raeson'"),
        ('engine = "ddp"\n' + ENTRY.replace('"training.grads"', '"trainig"'), r":3: unknown law 'trainig'"),
        ('engine = "ddp"\n' + ENTRY.replace('"fail"', '"flaky"'), r"unknown verdict .*'flaky'; allowed: fail, crash"),
        ('engine = "ddp"\n' + ENTRY + 'stages = ["3"]', r":3: got stages = \['3'\]; expected a list of int"),
        ('engine = "ddp"\n' + ENTRY + 'releases = "new"', r":3: Invalid specifier: 'new'"),
        ('engin = "ddp"\n' + ENTRY, r"unknown key in .*'engin'"),
        ("engine =", r"ours.toml is no TOML"),
    ],
)
def test_an_entry_that_cannot_be_used_is_refused_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        own(tmp_path, text)


def test_a_cause_that_says_little_is_excused_with_its_details_alone(tmp_path: Path) -> None:
    (bare,) = own(tmp_path, 'engine = "ddp"\n' + ENTRY)
    (precise,) = own(tmp_path, 'engine = "ddp"\n' + ENTRY + 'details = ["in reduce", "in gather"]\n')
    cause = f"rank 0: {bare.signatures[0]}"
    assert bare.matches_failure(cause, "")
    assert precise.matches_failure(cause, "line 7, in gather")
    assert not precise.matches_failure(cause, "line 7, in forward")
    assert not precise.matches_failure("another cause", "line 7, in gather")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read excuses from"):
        read_expected_failures([tmp_path / "none.toml"])


def test_an_excuse_that_matches_nothing_is_told_by_a_run_that_would_have_met_it(tmp_path: Path) -> None:
    head = 'engine = "ddp"\n'
    (needed,) = own(tmp_path, head + ENTRY)
    (idle,) = own(tmp_path, head + ENTRY + 'models = ["gpt"]\n')
    (elsewhere,) = own(tmp_path, head + ENTRY + 'releases = "<0.1"\nmodels = ["gpt"]\n')
    whole = plan(Request(engines=("ddp",)), claims)
    assert not describe_unmatched_failures(whole, claims, (needed, elsewhere))
    (words,) = describe_unmatched_failures(whole, claims, (idle,))
    assert words.startswith(f"{idle.location}: no cell of ddp")
    assert "delete it" in words
    shadowed = replace(needed, place="ours.toml:99")
    (words,) = describe_unmatched_failures(whole, claims, (needed, shadowed))
    assert words.startswith("ours.toml:99")
    narrow = plan(Request(("training.trajectory",), ("ddp",)), claims)
    assert not describe_unmatched_failures(narrow, claims, (needed, shadowed)), "a run without its cells cannot know"


def test_an_excuse_that_another_release_of_the_same_run_meets_is_not_idle(tmp_path: Path) -> None:
    (needed,) = own(tmp_path, 'engine = "ddp"\n' + ENTRY)
    refused = [replace(cell, unsupported="not on this one") for cell in plan(Request(engines=("ddp",)), claims)]
    other = [replace(cell, case=replace(cell.cell, engine="ddp==2.13.0")) for cell in refused]
    met = plan(Request(engines=("ddp",)), claims)
    told = describe_unmatched_failures([*other, *met], claims, (needed,))
    assert not [words for words in told if words.startswith(needed.location)]


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2", "ddp", "zero1", "reference"])
def test_every_shipped_excuse_meets_a_planned_cell(engine: str) -> None:
    assert not describe_unmatched_failures(plan(Request(engines=(engine,), dtypes=tuple(DTYPES)), claims), claims)
