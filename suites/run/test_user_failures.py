"""Files of expected failures whose engine is built around another one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from suites.run.failure_files import ENTRY, load_entries
from suites.run.test_expected_failures import claims
from zharness.cell import Cell
from zharness.errors import MissingEngine, UsageError
from zharness.law_kit.setting import Setting, split_settings
from zharness.run import Request, plan, shipped_failures
from zharness.run.matching_failures import find_expected_failure
from zharness.run.shipped_failures import load_shipped_failures
from zharness.run.unmatched_failures import describe_unmatched_failures


def test_an_engine_by_path_has_the_failures_of_the_engine_around_which_it_is_built(tmp_path: Path) -> None:
    entries = load_entries(tmp_path, 'engine = "mine:engine"\naround = "torch_pp"\n' + ENTRY)
    cell = Cell.parse("pipeline.windows[mine:engine-zero0-w2.pp2-fp32-chain-accumulated]")
    found = find_expected_failure(cell, "(no release)", entries)
    assert entries[0].upstream == "ours#1"
    assert found is not None
    assert found.location.startswith("zharness/expected_failures/torch_pp.toml")
    assert not any(Setting.parse(name).options for entry in entries for name in entry.engine_variants)
    assert find_expected_failure(cell, "(no release)", entries[:1]) is None


def test_an_engine_built_around_another_has_the_failures_of_the_options_that_both_have() -> None:
    inherited = [entry for entry in load_shipped_failures("fabric_fsdp2") if entry.location.count("/fsdp2")]
    names = {name for entry in inherited for name in split_settings(entry.engine_variants)}
    assert "one_group" in names
    assert "root_kept_after_forward" not in names


def test_the_failures_of_a_release_are_read_where_the_engine_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(engine: str, stage: int) -> None:
        raise MissingEngine(f"{engine} is not installed")

    monkeypatch.setattr(shipped_failures, "capabilities", refuse)
    entries = [*shipped_failures.load_failures_around("fsdp2", "fabric_fsdp2")]
    assert entries
    assert not any(Setting.parse(name).options for entry in entries for name in entry.engine_variants)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('dtypes = ["float16"]', "unknown dtype 'float16'"),
        ("world_sizes = [0]", "world size"),
        ('engine_variants = ["static_graph", "nope"]', "'nope'"),
        ('law = "mesh.training"', "--mesh"),
    ],
)
def test_an_entry_that_no_cell_can_match_is_refused_before_the_run(tmp_path: Path, keys: str, message: str) -> None:
    entry = ENTRY.replace('law = "training.grads"', keys) if keys.startswith("law") else ENTRY + keys
    entries = load_entries(tmp_path, f'engine = "ddp"\n{entry}\n')
    cells = plan(Request(("training.trajectory",), ("ddp",)), claims)
    with pytest.raises(UsageError, match=message):
        describe_unmatched_failures(cells, claims, entries)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('engine = "mine:engine"\naround = "torch_pipe"', "did you mean 'torch_pp'"),
        ('around = "torch_pp"', "expected the path of a factory"),
        ('engine = "ddp"\naround = "torch_pp"', "expected the path of a factory"),
    ],
)
def test_a_wrong_engine_around_which_another_is_built_is_refused(tmp_path: Path, keys: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_entries(tmp_path, keys + "\n")


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("tp.pp", "got the mesh 'tp.pp'; write 'pp.tp', as in a cell's id"),
        ("pp2,tp2", "got the mesh 'pp2,tp2'; write 'pp2.tp2', as in a cell's id"),
        ("dp_replicate", "got the mesh 'dp_replicate'; write 'rep', as in a cell's id"),
        ("tp02", "got the mesh 'tp02'; write 'tp2', as in a cell's id"),
        ("tq2", "unknown axis of the mesh 'tq'"),
    ],
)
def test_a_mesh_that_matches_no_cell_is_refused(tmp_path: Path, mesh: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as raised:
        load_entries(tmp_path, f'engine = "ddp"\n{ENTRY}meshes = ["{mesh}"]\n')
    assert "ours.toml:3: " in str(raised.value)


def test_a_mesh_as_in_a_label_may_leave_sizes_open(tmp_path: Path) -> None:
    meshes = ("", "pp", "pp.tp2", "rep2.tp", "cp2", "ep4")
    (entry,) = load_entries(tmp_path, f'engine = "ddp"\n{ENTRY}meshes = {list(meshes)}\n')
    assert entry.meshes == meshes
