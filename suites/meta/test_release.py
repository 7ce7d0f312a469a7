"""What a release promises: files that agree on its version, constraints that work alone, a table of what was tested."""

from __future__ import annotations

import configparser
import re
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts import try_wheel
from scripts.check_release import find_disagreements, find_wrong_files, read_version
from scripts.readme_metadata import SOURCE_VARIABLE, make_absolute
from scripts.try_wheel import WITH_EXTRAS, WITHOUT_EXTRAS, Trial, run_trial
from suites.meta.documents import PAGES, ROOT
from suites.meta.test_workflows import load_workflow
from zharness.cli import cli

COMPATIBILITY = re.compile(r"^\| ([^|]+) \| ([^|]+) \|", re.MULTILINE)
FREE_OF_TORCH = {"torch", "sympy"}  # what constraints-any-torch.txt leaves out


def read_pins(name: str) -> list[str]:
    """Return the lines of a file of constraints that are not comments."""
    return [line for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]


def write_sources(folder: Path, version: str = "1.2.0", cited: str = "1.2.0", changelog: str = "") -> Path:
    """Write the files of a release that name its version."""
    (folder / "zharness").mkdir()
    (folder / "zharness" / "__init__.py").write_text(f'__version__ = "{version}"\n', encoding="utf-8")
    (folder / "CITATION.cff").write_text(f"version: {cited}\n", encoding="utf-8")
    text = changelog or "## 1.2.0 (2026-11-30)\n\n- a line\n\n## 1.1.0 (2026-10-01)\n\n- a line\n"
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n{text}", encoding="utf-8")
    return folder


def test_the_sources_agree_on_their_version() -> None:
    assert list(find_disagreements(ROOT, "")) == []


def test_a_release_whose_files_agree_is_accepted(tmp_path: Path) -> None:
    assert list(find_disagreements(write_sources(tmp_path), "v1.2.0")) == []


@pytest.mark.parametrize(
    ("files", "tag", "said"),
    [
        ({}, "v1.2.1", "the tag is v1.2.1"),
        ({"version": "1.2"}, "", "expected 1.2"),
        ({"cited": "1.1.0"}, "", "CITATION.cff has the version 1.1.0"),
        ({"changelog": "## 1.1.0 (2026-10-01)\n\n- a line\n"}, "", "begins with a section of 1.1.0"),
        ({"changelog": "## 1.2.0 (2026-10-01)\n\n## 1.1.0 (2026-09-01)\n\n- a line\n"}, "", "is empty"),
        ({"changelog": "## 1.2.0 (unreleased)\n\n- a line\n"}, "v1.2.0", "has the date 'unreleased'"),
        ({"changelog": "## 1.2.0 (2026-10-01)\n\n- a\n\n## 1.3.0 (2026-11-01)\n\n- a\n"}, "", "from new to old"),
    ],
)
def test_a_release_whose_files_disagree_is_refused(tmp_path: Path, files: dict[str, str], tag: str, said: str) -> None:
    assert [text for text in find_disagreements(write_sources(tmp_path, **files), tag) if said in text]


def test_built_files_of_another_version_are_refused(tmp_path: Path) -> None:
    dist = write_sources(tmp_path) / "dist"
    dist.mkdir()
    assert [*find_wrong_files(tmp_path, dist)] == [f"{dist} has no files; expected one sdist and one wheel"]
    for name in ("zharness-1.1.0-py3-none-any.whl", "zharness-1.1.0.tar.gz"):
        with zipfile.ZipFile(dist / name, "w") as file:
            file.writestr("zharness-1.1.0.dist-info/METADATA", "Version: 1.1.0\n\ntext\n")
    first = next(find_wrong_files(tmp_path, dist))
    assert first == "zharness-1.1.0-py3-none-any.whl has the version 1.1.0; expected 1.2.0"


def test_constraints_work_alone_beside_a_wheel() -> None:
    whole = read_pins("constraints.txt")
    assert not [line for line in whole if line.startswith("-")]
    assert read_pins("constraints-any-torch.txt") == [
        line for line in whole if Requirement(line).name not in FREE_OF_TORCH
    ]


def test_the_commands_that_are_tried_from_the_wheel_exist() -> None:
    names = {trial.line.split()[1] for trial in (*WITHOUT_EXTRAS, *WITH_EXTRAS) if trial.line.startswith("zharness ")}
    assert names - {"--version"} <= set(cli.commands)
    assert {"check", "repro", "mutants", "report", "site", "init", "export"} <= names


def test_a_trial_has_no_constraint_of_the_caller_and_a_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("PIP_CONSTRAINT", "constraints.txt")
    assert run_trial(Trial('test -z "$PIP_CONSTRAINT"', ""), tmp_path, tmp_path) == []
    monkeypatch.setattr(try_wheel, "TIME_LIMIT", 0)
    assert run_trial(Trial("tail -f /dev/null", ""), tmp_path, tmp_path) == ["it took longer than 0 s"]


def test_the_table_of_compatibility_has_what_the_workflows_test() -> None:
    page = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8").partition("## Compatibility")[2]
    rows = {name.strip(): re.findall(r"\d[\d.]*", releases) for name, releases in COMPATIBILITY.findall(page)}
    tox = configparser.RawConfigParser()
    tox.read(ROOT / "tox.ini")
    pins = {
        Requirement(line).name: next(iter(Requirement(line).specifier)).version for line in read_pins("constraints.txt")
    }
    assert rows["Python"] == load_workflow("test.yml")["jobs"]["suites"]["strategy"]["matrix"]["python"]
    (environment,) = (name for name in tox.sections() if name.startswith("testenv:torch{"))
    torch = re.findall(r"torch==(\d+\.\d+)", tox[environment]["deps"])
    assert [release.rpartition(".")[0] for release in rows["torch"]][: len(torch)] == torch
    (cell,) = re.findall(r"^\| torch \| ([^|]+) \|", page, re.MULTILINE)
    runs = (ROOT / "docs" / "reproductions.md").read_text(encoding="utf-8").partition("### Releases of torch")[2]
    measured = re.findall(r"^\| (\d+\.\d+\.\d+)", runs.partition("\n### ")[0], re.MULTILINE)
    assert re.findall(r"(\d[\d.]*)(?=,|$)", cell.strip()) == measured, "a release without a row there is `(not run)`"
    assert rows["DeepSpeed"] == load_workflow("site.yml")["jobs"]["deepspeed"]["strategy"]["matrix"]["release"]
    assert rows["pytest"] == ["8.2", "8.4", "9.0", "9.1", "9.2"]
    for name in ("accelerate", "transformers"):
        assert rows[name] == [pins[name]]
    assert rows["Lightning Fabric"] == [pins["lightning-fabric"]]
    assert rows["Megatron-FSDP"] == [pins["megatron-fsdp"]]
    assert read_version(ROOT) in page


def test_the_readme_of_a_release_has_no_link_that_an_index_breaks() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    source = "https://github.com/owner/zharness/blob/v1.0.0"
    absolute = make_absolute(text, source)
    assert f"[docs/ranks.md]({source}/docs/ranks.md)" in absolute
    assert f"({source.replace('/blob/', '/raw/')}/docs/report.png)" in absolute
    links = re.findall(r"\]\(([^)\s]+)\)", make_absolute(text, ""))
    assert [*links, *re.findall(r"\]\(([^)\s]+)\)", absolute)]
    assert not [link for link in links if "://" not in link and not link.startswith("#")]
    assert not [link for link in re.findall(r"\]\(([^)\s]+)\)", absolute) if "://" not in link and link[0] != "#"]
    assert "```console\n$ zharness" in absolute
    variables = load_workflow("release.yml")["jobs"]["build"]["env"]
    assert variables[SOURCE_VARIABLE].endswith("/blob/${{ github.ref_name }}")
