"""FINDINGS.md and the excuses tell of the same failures, and an excuse says which failure it excuses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from zharness.laws import LAWS
from zharness.parity import Part
from zharness.releases import repros
from zharness.run.expected_failures import ExpectedFailure, expected_failures_for
from zharness.workload import MODELS

ROOT = Path(__file__).parents[2]
ENGINE = re.compile(r"^## (?P<engine>\w+)$", re.MULTILINE)
ENTRY = re.compile(r"^### (?P<head>`[^\n]+)$", re.MULTILINE)
REPRO = re.compile(r"`zharness repro ((?:[\w-]+ ?)+?)(?: --on [^`]+)?`")
STAGES = re.compile(r"stages? (\d)(?: (to|and) (\d))?")
ENGINES = sorted(path.stem for path in (ROOT / "zharness" / "excuses").glob("*.toml"))
ALL = -1  # the stage of an entry, or of an excuse, that names none

# What any failure of some kind says: a part, a name of an exception or a signal, a number.
ANY_FAILURE = re.compile(
    r"(raised: )?(\w*Error|\w*Exception|NoneType|(expected|got) -?\d*)(: ?)?"
    r"(\d+|list index out of range|\(no message\))?"
    r"|(ended by a signal: )?SIG[A-Z]+(, before its function had returned, in )?|Connection (closed|reset) by peer"
    r"|(it is )?x the right (gradient|value)"
)


def entries() -> dict[str, set[tuple[str, int]]]:
    """Check and stage of every entry of FINDINGS.md, by engine."""
    parts = ENGINE.split((ROOT / "FINDINGS.md").read_text(encoding="utf-8"))[1:]
    return {
        engine: {pair for head in ENTRY.findall(text) for pair in told(head)}
        for engine, text in zip(parts[::2], parts[1::2], strict=True)
    }


def texts() -> list[str]:
    """Every entry of FINDINGS.md, those that no check asks for too; its heading is the first line."""
    return re.split(r"^### ", (ROOT / "FINDINGS.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]


def told(head: str) -> Iterator[tuple[str, int]]:
    """Each check of a heading with each of its stages: "stage 3", "stages 1 and 2", "stages 0 to 2"; parts by ";"."""
    for part in head.split(";"):
        named = STAGES.search(part)
        first, word, last = named.groups() if named else (ALL, None, None)
        stages = range(int(first), int(last if word else first) + 1)
        for check in re.findall(r"`([^`]+)`", part):
            yield from ((check, stage) for stage in stages)


def excused(excuses: Iterable[ExpectedFailure]) -> set[tuple[str, int]]:
    """Check and stage of every excuse that is no contract."""
    return {(excuse.check, stage) for excuse in excuses if not excuse.documented for stage in excuse.stages or (ALL,)}


def is_broad(signature: str) -> bool:
    """Whether any wrong number of some part, or of the first parameter, or any exception of some kind, says this.

    A judge stops at the first mismatch, so what breaks every gradient is told of the model's first parameter.
    """
    models = [[name for name, _ in spec.model(0).named_parameters()] for spec in MODELS.values()]
    known = {"loss", "input", *(name for names in models for name in names)}
    bare = re.sub(r"^(step \d+, )?", "", signature).rstrip("[ ")
    part, _, name = bare.partition(": ") if ": " in bare else (bare.rstrip(":"), "", "")
    of_a_part = part in {part.value for part in Part} and any(other.startswith(name) for other in known)
    first = bare in {"loss", "input", *(names[0] for names in models)}
    return of_a_part or first or bool(ANY_FAILURE.fullmatch(signature))


@pytest.mark.parametrize("engine", sorted({*ENGINES, *entries()}))
def test_every_excuse_that_is_no_contract_has_its_finding_and_the_reverse(engine: str) -> None:
    # What an engine shares with another stands in the other's section, as it does in the other's file.
    own = [excuse for excuse in expected_failures_for(engine) if f"/{engine}.toml" in excuse.location]
    written, known = entries().get(engine, set()), excused(own)
    assert written == known, f"FINDINGS.md, section {engine}, beside excuses/{engine}.toml: {written ^ known}"


@pytest.mark.parametrize("text", texts(), ids=lambda text: text.partition("\n")[0])
def test_every_finding_names_the_scripts_that_show_it(text: str) -> None:
    named = " ".join(REPRO.findall(text)).split()
    assert named, "write a script into repro/, and `zharness repro ID` into the entry's line Again"
    assert all(repros.find_repros(identifier) for identifier in named)


def test_every_script_names_a_law_that_there_is() -> None:
    assert {repro.law for repro in repros.load_catalogue()} <= set(LAWS)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_signature_excuses_whatever_goes_wrong_in_a_part(engine: str) -> None:
    broad = {
        excuse.location: words
        for excuse in expected_failures_for(engine)
        if not excuse.details and (words := list(filter(is_broad, excuse.signatures)))
    }
    assert not broad, f"say what is wrong (the hint behind the numbers, details of a crash), not where: {broad}"


@pytest.mark.parametrize(
    "signature",
    [
        *("reduction: ", "step 0, optimizer: ", "reduction: first.weight", "local gradient: input", "forward: loss"),
        *("reduction: head", "first.weight[", "KeyError", "NoneType", "SIGABRT", "expected 1", "got -1"),
        *("raised: KeyError: ", "KeyError: 0", "AssertionError: (no message)", "x the right gradient"),
        "ended by a signal: SIGABRT, before its function had returned, in ",
    ],
)
def test_such_signatures_are_refused(signature: str) -> None:
    assert is_broad(signature)
