"""The HTML page, one file that contains all records, runs only its own scripts and fetches nothing; entry points."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import re
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from suites.report import browsers
from zharness import engines
from zharness.cell import Cell
from zharness.errors import UsageError
from zharness.parity import Part
from zharness.report.page import read_asset, render_page, write_page
from zharness.report.page.columns import OUTCOME_GLYPHS, OUTCOME_MEANINGS, STEP_PARTS
from zharness.run import Record, Verdict

CELL = Cell("training.grads", "reference", 3, 2, "fp32", "mlp")
ROOT = Path(__file__).parents[2]
VENDORED = {
    "d3.min.js": "f2094bbf6141b359722c4fe454eb6c4b0f0e42cc10cc7af921fc158fceb86539",
    "plot.umd.min.js": "4358086467740777dd788d6b27a95cebdbaefdd50c730a3060117073bd7134cb",
}


def read_payload(text: str) -> dict[str, Any]:
    """What the page's script reads."""
    (data,) = re.findall(r'<script type="text/plain" id="data">([^<]*)</script>', text)
    payload: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(data)))
    return payload


def test_the_page_contains_every_cell_and_escapes_the_text_of_records(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script>"
    failed = Record(CELL, 0, Verdict.FAIL, hostile, "2.13.0", cause=hostile, ratio=float("inf"), tier="S")
    write_page([failed, replace(failed, verdict=Verdict.PASS)], 1.0, tmp_path / "page.html", skipped=[hostile])
    text = (tmp_path / "page.html").read_text()
    assert "<script>alert" not in text
    found = read_payload(text)
    assert found["records"]["size"] == 2
    assert found["records"]["texts"]["id"]["values"] == [CELL.id]
    assert found["records"]["texts"]["cause"]["values"] == [hostile]
    assert found["records"]["numbers"]["ratio"] == ["inf", "inf"]
    assert found["skipped"] == [hostile]
    assert not list(tmp_path.glob("*.partial"))


def test_the_page_fetches_nothing_and_allows_only_its_own_scripts() -> None:
    text = render_page([Record(CELL, 0, Verdict.PASS, "1.0", "2.13.0")], 1.0)
    assert re.findall(r"""<(?:script|link|img|iframe|style)\b[^>]*\b(?:src|href)=["']?([^"'>]*)""", text) == ["data:,"]
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert "default-src &#39;none&#39;" in policy
    assert "unsafe" not in policy
    for script in re.findall(r"<script>(.*?)</script>", text, re.DOTALL):
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy


@pytest.mark.parametrize("name", VENDORED)
def test_the_vendored_libraries_are_unchanged_and_have_their_licence(name: str) -> None:
    assert hashlib.sha256(read_asset(f"vendor/{name}").encode()).hexdigest() == VENDORED[name]
    assert "Permission to use, copy, modify" in read_asset(f"vendor/{name.split('.')[0]}.LICENSE")


def test_every_part_of_a_step_is_listed_and_every_outcome_has_its_own_letter() -> None:
    assert {part.value for part in Part} < set(STEP_PARTS)
    assert OUTCOME_GLYPHS.keys() == OUTCOME_MEANINGS.keys()
    assert len(set(OUTCOME_GLYPHS.values())) == len(OUTCOME_GLYPHS)


def test_a_page_that_cannot_be_written_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"cannot write '/no/such/place/page.html'"):
        write_page([], 1.0, Path("/no/such/place/page.html"))


def test_without_a_browser_the_tests_name_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert browsers.missing().endswith("on Debian: apt-get install chromium")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert browsers.missing().endswith('pip install "zharness[test]"')
    for spelled, demanded in (("true", True), ("", False)):
        monkeypatch.setenv("CI", spelled)
        assert browsers.must_be_there() is demanded


def test_an_engine_of_another_package_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "mine-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[zharness.engines]\nmine = zharness.engines.plain:factory\n")
    assert "mine" not in engines.registered_engines()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert engines.registered_engines()["mine"].target == "zharness.engines.plain:factory"
    assert engines.info("mine").version() == "1.0"


@pytest.mark.parametrize("name", ["plain", "reference", "ddp", "fsdp2", "deepspeed"])
def test_every_built_in_engine_has_a_factory(name: str) -> None:
    assert callable(engines.get(name))
    assert engines.capabilities(name, 0) is not None
