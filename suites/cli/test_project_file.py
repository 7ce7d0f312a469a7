"""A repository's zharness.toml: `zharness init` writes it, commands take its options, and mistakes in it are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from suites.warm import programs
from zharness.cell import Cell
from zharness.errors import UsageError
from zharness.project_file import find_project_file
from zharness.report.first_project_file import find_signature, write_project_file
from zharness.run.record import Record, Verdict
from zharness.run.record_reader import load_records
from zharness.run.user_failures import read_expected_failures

BROKEN = "zharness.mutants:never_reduces"
MODEL = """
import torch
from torch import nn

def factory():
    return nn.Linear(8, 4), lambda generator: (torch.randn(4, 8, generator=generator),), loss

def loss(output, batch):
    return output.square().mean()
"""
LAWS = ("training.grads", "training.one_hot_rank", "--depth", "1")


def test_init_makes_a_red_run_green_until_something_changes(tmp_path: Path) -> None:
    red = programs.run(
        *("-m", "zharness", "check", *LAWS, "--engine", BROKEN, "--stage", "0", "--jsonl", "red.jsonl"), folder=tmp_path
    )
    assert red.returncode == 1, red.stdout + red.stderr
    written = programs.run("-m", "zharness", "init", "red.jsonl", folder=tmp_path)
    assert written.returncode == 0, written.stderr
    assert "wrote " in written.stdout
    below = tmp_path / "folder" / "below"
    below.mkdir(parents=True)
    green = programs.run("-m", "zharness", "check", *LAWS, folder=below)
    assert green.returncode == 0, green.stdout + green.stderr
    assert f"options from {tmp_path / 'zharness.toml'}: engine = '{BROKEN}', stage = [0], laws = '1.0'" in green.stderr
    sound = programs.run("-m", "zharness", "check", *LAWS, "--engine", "zharness.mutants:no_such_mutant", folder=below)
    assert sound.returncode == 2  # an option of the command line replaces the file's
    again = programs.run("-m", "zharness", "init", "red.jsonl", folder=tmp_path)
    assert again.returncode == 2
    assert "exists; delete it" in again.stderr
    for record in load_records([tmp_path / "red.jsonl"]).records:
        assert find_signature(record) in record.cause or not record.verdict.is_broken


def test_the_expected_failures_are_also_those_of_models(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(MODEL, encoding="utf-8")
    entry = ('law = "training.*"', "user_models = true", 'upstream = "#1"', 'reason = "r"', 'verdict = "fail"')
    tables = (f'engine = "{BROKEN}"', "[[expected_failure]]", *entry, 'signatures = ["step 0, reduction"]')
    (tmp_path / "zharness.toml").write_text("\n".join(tables), encoding="utf-8")
    options = ("--engine", BROKEN, "--only", "training.grads")
    found = programs.run("-m", "zharness", "model", "my_model:factory", *options, folder=tmp_path)
    assert "1 excused" in found.stdout, found.stdout + found.stderr


def test_a_depth_of_the_file_is_named_if_a_mesh_refuses_it(tmp_path: Path) -> None:
    (tmp_path / "zharness.toml").write_text("[check]\ndepth = 2\n", encoding="utf-8")
    for option, value in (("--mesh", "tp2"), ("--variant", "static_graph")):
        refused = programs.run("-m", "zharness", "check", "--engine", "ddp", option, value, folder=tmp_path)
        assert refused.returncode == 2, refused.stdout
        sentence = f"{tmp_path / 'zharness.toml'} sets depth = 2, but {option} {value} needs depth 1; add --depth 1\n"
        assert refused.stderr.endswith(sentence)


def test_a_model_is_checked_with_a_version_of_the_law_set(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(MODEL, encoding="utf-8")
    check = ("-m", "zharness", "model", "my_model:factory", "--stage", "0", "--only", "training.grads", "--laws")
    assert programs.run(*check, "1.0", folder=tmp_path).returncode == 0
    refused = programs.run(*check, "0.1", folder=tmp_path)
    assert refused.returncode == 2
    assert "unknown version of the law set '0.1'; allowed: " in refused.stderr


def make_record(text: str, verdict: Verdict = Verdict.CRASH) -> Record:
    cause = "" if verdict is Verdict.PASS else "rank 0 raised: KeyError: the shard is lost"
    return Record(Cell.parse(text), 0, verdict, "", "", cause=cause)


def test_an_entry_covers_no_cell_that_passes(tmp_path: Path) -> None:
    failed = ("zero2-w2-fp32-mlp", "zero3-w2-fp32-gated", "zero3-w2-bf16-mlp")
    passed = ("zero1-w2-fp32-mlp", "zero2-w2-fp32-gated", "zero3-w2-fp32-mlp")
    records = [make_record(f"training.grads[ddp-{text}]") for text in failed]
    records += [make_record(f"training.grads[ddp-{text}]", Verdict.PASS) for text in passed]
    write_project_file(records, tmp_path)
    entries = read_expected_failures([tmp_path / "zharness.toml"])
    for record in records:
        is_covered = any(entry.covers_cell(record.cell, "1.0") for entry in entries)
        assert is_covered is (record.verdict is Verdict.CRASH), record.cell.id


def test_the_options_are_those_of_the_records(tmp_path: Path) -> None:
    records = [make_record("mesh.replicas[fsdp2-zero3-w4.rep2.tp2-bf16-exact]")]
    write_project_file(records, tmp_path)
    found = find_project_file(tmp_path)
    assert found is not None
    options = {
        "engine": "fsdp2",
        "stage": [3],
        "world-size": [4],
        "mesh": ["rep2", "tp2"],
        "dtype": ["bf16"],
        "laws": "1.0",
    }
    assert found.commands["check"] == options
    (entry,) = read_expected_failures([tmp_path / "zharness.toml"])
    assert entry.covers_cell(records[0].cell, "1.0")
    with pytest.raises(UsageError, match="got records of 2 meshes"):
        write_project_file([*records, make_record("training.grads[fsdp2-zero3-w2-fp32-mlp]")], tmp_path / "other")


def test_a_project_file_is_found_up_to_the_root_of_the_repository(tmp_path: Path) -> None:
    (tmp_path / "zharness.toml").write_text('engine = "ddp"\n[check]\nstage = [0]\n', encoding="utf-8")
    inner = tmp_path / "repository" / "folder"
    inner.mkdir(parents=True)
    found = find_project_file(inner)
    assert found is not None
    assert found.commands["check"] == {"engine": "ddp", "stage": [0]}
    (tmp_path / "repository" / ".git").mkdir()
    assert find_project_file(inner) is None


def test_pyproject_may_have_the_options(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.zharness.check]\nengine = ["ddp"]\n', encoding="utf-8")
    found = find_project_file(tmp_path)
    assert found is not None
    assert found.commands["check"] == {"engine": ["ddp"]}
    assert not found.expected_failures
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n', encoding="utf-8")
    assert find_project_file(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("engin = 'ddp'\n", "unknown key in .*zharness.toml: 'engin'; did you mean 'engine'"),
        ("check = 3\n", r"got check = 3; expected a table \[check\] of options"),
        ("[check\n", "zharness.toml is not valid TOML"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "zharness.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=complaint):
        find_project_file(tmp_path)


@pytest.mark.parametrize("text", ["tool = 3\n", "[tool]\nzharness = 'x'\n"])
def test_a_pyproject_without_tables_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"pyproject.toml: got (tool|zharness) = .*; expected a table"):
        find_project_file(tmp_path)


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("stages = [0]", "unknown option of [check] in "),
        ("probe-withheld = 3", "got probe-withheld = 3; expected true or false"),
        ("stage = { first = 1 }", "expected a number, a text or a list of these"),
        ('laws = "0.1"', "unknown version of the law set '0.1'; allowed: "),
    ],
)
def test_an_option_that_the_command_does_not_have_is_refused(tmp_path: Path, option: str, complaint: str) -> None:
    (tmp_path / "zharness.toml").write_text(f"[check]\n{option}\n", encoding="utf-8")
    refused = programs.run("-m", "zharness", "check", "training.grads", folder=tmp_path)
    assert refused.returncode == 2, refused.stdout
    assert complaint in refused.stderr
    assert "Traceback" not in refused.stderr
