"""The page and the entry points: what the terminal shows is in the file, and a package's engine is found by name."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from zharness import engines
from zharness.case import Case
from zharness.errors import UsageError
from zharness.report.page import write_page
from zharness.run import Record, Verdict

CASE = Case("training.grads", "reference", 3, 2, "fp32", "mlp")


def test_the_page_holds_every_cell_escaped_and_needs_no_network(tmp_path: Path) -> None:
    failed = Record(CASE, 0, Verdict.FAIL, "1.0", "2.13.0", cause="<script>alert(1)</script>", ratio=2.5, tier="S")
    write_page([failed], 1.0, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert CASE.id in text
    assert "<script" not in text
    assert "http" not in text
    assert not list(tmp_path.glob("*.partial"))


def test_a_page_that_cannot_be_written_is_one_clear_sentence() -> None:
    with pytest.raises(UsageError, match=r"cannot write '/no/such/place/page.html'"):
        write_page([], 1.0, Path("/no/such/place/page.html"))


def test_an_engine_of_another_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("mine", "zharness.engines.plain:factory", "zharness.engines")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point] if group == point.group else [])
    assert engines.registered()["mine"].target == point.value
    assert engines.info("mine").name == "mine"


@pytest.mark.parametrize("name", ["plain", "reference", "ddp", "fsdp2", "deepspeed"])
def test_every_built_in_engine_hands_out_its_factory(name: str) -> None:
    assert callable(engines.get(name))
    assert engines.capabilities(name, 0) is not None
