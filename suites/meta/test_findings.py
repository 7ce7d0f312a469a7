"""FINDINGS.md and the excuses tell of the same failures."""

from __future__ import annotations

import re
from pathlib import Path

from zharness.run.excuses import excuses_for

ROOT = Path(__file__).parents[2]
ENGINE = re.compile(r"^## (?P<engine>\w+)$", re.MULTILINE)
ENTRY = re.compile(r"^### (?P<checks>`[^\n]+)$", re.MULTILINE)


def entries() -> dict[str, set[str]]:
    """The checks that FINDINGS.md has an entry for, by engine."""
    parts = ENGINE.split((ROOT / "FINDINGS.md").read_text(encoding="utf-8"))[1:]
    return {
        engine: {check for line in ENTRY.findall(text) for check in re.findall(r"`([^`]+)`", line)}
        for engine, text in zip(parts[::2], parts[1::2], strict=True)
    }


def test_every_excuse_that_is_no_contract_has_its_finding_and_the_reverse() -> None:
    engines = {path.stem for path in (ROOT / "zharness" / "excuses").glob("*.toml")}
    written = entries()
    for engine in sorted(engines | set(written)):
        excused = {excuse.check for excuse in excuses_for(engine) if not excuse.documented}
        assert written.get(engine, set()) == excused, f"FINDINGS.md, section {engine}, beside excuses/{engine}.toml"
