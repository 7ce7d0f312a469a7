"""FINDINGS.md and the expected failures describe the same failures, and a signature names one failure only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from zharness.laws import LAWS
from zharness.parity import Part
from zharness.releases import repros
from zharness.run.expected_failures import NUMBER, ExpectedFailure, leaves_a_value_open
from zharness.run.shipped_failures import expected_failures_for
from zharness.workload import MODELS

ROOT = Path(__file__).parents[2]
ENGINE = re.compile(r"^## (?P<engine>\w+)$", re.MULTILINE)
ENTRY = re.compile(r"^### (?P<head>`[^\n]+)$", re.MULTILINE)
REPRO = re.compile(r"`zharness repro ([\w-]+(?: [\w-]+)*?)(?: --on [^`]+)?`")
STAGES = re.compile(r"stages? (\d)(?: (to|and) (\d))?")
ENGINES = sorted(path.stem for path in (ROOT / "zharness" / "expected_failures").glob("*.toml"))
# Its entry for FSDP1 is of weights of two steps that are used together; no hint names that.
WITHOUT_A_HINT = {"training.forward_alone"}
ALL = -1  # the stage of a finding, or of an expected failure, that names no stage

# Signatures that match any failure of a kind: a part of the step, an exception type, a signal, a number.
ANY_FAILURE = re.compile(
    r"(raised: )?(\w*Error|\w*Exception|NoneType|(expected|got) -?\d*)(: ?)?"
    r"(\d+|list index out of range|\(no message\))?"
    r"|(ended by a signal: )?SIG[A-Z]+(, before its function had returned, in )?|Connection (closed|reset) by peer"
    r"|(it is )?x the right (gradient|value)"
)


# What a law counts on every rank, not a tensor of the engine: a mismatch of it is one failure.
COUNTS = {"model", "tensors", "refused"}
# Entries, by file and law, whose signature names a place or a number of elements, because their failure has no hint.
# Add none; give the failure a hint in its judge, and delete its line here.
WITHOUT_A_CAUSE = {
    "deepspeed_options": {
        "access.*",  # another parameter's elements, which differ with the order of the group's parameters
        "parameters.late_submodule",  # one part of a gradient is too large, which its one backward adds as a whole
        "torch_func.identities",  # jacrev, which the law calls once; its numbers are like no known ones
        "training.any_order",  # of 228 elements: the cause is unknown; and graphs, of which a CPU buffer keeps some
    },
    "deepspeed_releases": {"state.several_saves"},  # weights after a step whose forward used older ones
    "megatron_fsdp": {
        "checkpointing.two_regions",  # as fsdp2's
        "access.write_param",  # a write races with a gather, so that the loss differs from run to run
        "precision.weights_of_two_dtypes",  # all weights of a unit are wrong, and the judge has only the loss
    },
    "fsdp2": {"checkpointing.two_regions"},  # one region's gradient: the judge has only the sum of both
    "fsdp2_options": {
        "access.write_param",  # old are weights of the root and those that share one, and the judge has only the loss
        "training.any_order",  # vectors_ignored: the matrices are old, and the vectors those of the checkpoint
    },
}
# Signatures of deepspeed_options that leave a value or a factor open, which differs with the seed, as no hint names
# their cause. Each has the step's part and the tensor, and its entry the models and the variants of the cells.
# Add none; give the failure a hint in its judge, and delete its line here.
ONE_ELEMENT = (
    f"[0] (owned by rank 0, element 0; seen on rank 0) expected {NUMBER}, got {NUMBER} (bound 0, {NUMBER} ULP apart, "
    "1 of 1 elements wrong); "
)
OPEN_SIGNATURES = {
    # a weight of one element: what the buffer has of other backwards, or a whole momentum beside half of a gradient
    f"optimizer: offset{ONE_ELEMENT}the step used {NUMBER} x the right gradient",
    # a weight of one element: what a region that is run again left, or one of two regions, of which the judge has a sum
    f"reduction: factor{ONE_ELEMENT}it is {NUMBER} x the right gradient",
    # a weight with a momentum, which a right step moves too
    f"optimizer: experts.1.weight[{NUMBER}, {NUMBER}] (owned by rank {NUMBER}, element {NUMBER}; seen on rank 0) "
    f"expected {NUMBER}, got {NUMBER} (bound 0",
    # a step whose forward used some weights from before a load
    f"step 2, forward: loss (whole on every rank; seen on rank 0) expected {NUMBER}, got {NUMBER} (bound 0",
    f"step 3, gather: offset[0] (owned by rank 0, element 0; seen on rank 0) expected {NUMBER}, got {NUMBER} (bound 0",
}
KNOWN_TENSORS = {"loss", "input"} | {name for spec in MODELS.values() for name, _ in spec.model(0).named_parameters()}


def findings_by_engine() -> dict[str, set[tuple[str, int]]]:
    """Return law and stage of every finding in FINDINGS.md, by engine."""
    parts = ENGINE.split((ROOT / "FINDINGS.md").read_text(encoding="utf-8"))[1:]
    return {
        engine: {pair for head in ENTRY.findall(text) for pair in parse_heading(head)}
        for engine, text in zip(parts[::2], parts[1::2], strict=True)
    }


def finding_texts() -> list[str]:
    """Return the text of every finding in FINDINGS.md. The first line is the heading."""
    return re.split(r"^### ", (ROOT / "FINDINGS.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]


def parse_heading(head: str) -> Iterator[tuple[str, int]]:
    """Yield each law of a heading with each of its stages ("stage 3", "stages 1 and 2", "stages 0 to 2")."""
    for part in head.split(";"):
        named = STAGES.search(part)
        first, word, last = named.groups() if named else (ALL, None, None)
        stages = range(int(first), int(last if word else first) + 1)
        for check in re.findall(r"`([^`]+)`", part):
            yield from ((check, stage) for stage in stages)


def laws_and_stages(excuses: Iterable[ExpectedFailure]) -> set[tuple[str, int]]:
    """Return law and stage of every expected failure that is not a contract."""
    return {(excuse.check, stage) for excuse in excuses if not excuse.documented for stage in excuse.stages or (ALL,)}


def is_broad(signature: str) -> bool:
    """Whether a signature matches every wrong number of a part or of a tensor, or every exception of a type.

    A judge stops at the first mismatch, so a bug in every gradient is reported for one parameter of each model.
    One that leaves a value or a factor open is broad, whatever its place; an index or a shape may be open.
    """
    if is_generic_hint(signature) or leaves_a_value_open(signature):
        return True
    signature = signature.replace(NUMBER, "7")
    stripped = re.sub(r"\s*\bexpected\s*$", "", re.sub(r"\s*\([^()]*\)?", "", signature).rstrip())
    bare = re.sub(r"\[[\d, ]*\]?$", "", re.sub(r"^(step \d+, )?", "", stripped).rstrip()).rstrip()
    part, separator, name = bare.partition(": ")
    is_part = part.rstrip(":") in {part.value for part in Part}
    of_a_part = is_part and (not separator or bool(re.fullmatch(r"[\w.]*", name) and name not in COUNTS))
    of_a_tensor = bare in KNOWN_TENSORS or (
        bare != stripped and bare not in COUNTS and bool(re.fullmatch(r"[\w.]+", bare))
    )
    return of_a_part or of_a_tensor or any(ANY_FAILURE.fullmatch(text) for text in (signature, stripped))


def is_generic_hint(signature: str) -> bool:
    """Return whether a signature is a part of a hint that says nothing about the cause."""
    digits = re.sub(r"\d+", "7", signature)
    return digits in "only 7 of 7 elements are wrong"


@pytest.mark.parametrize("engine", sorted({*ENGINES, *findings_by_engine()}))
def test_expected_failures_and_findings_match(engine: str) -> None:
    # A failure that two engines share is in one section of FINDINGS.md, and in the file of the same engine.
    own = [excuse for excuse in expected_failures_for(engine) if f"/{engine}.toml" in excuse.location]
    written, known = findings_by_engine().get(engine, set()), laws_and_stages(own)
    assert written == known, (
        f"FINDINGS.md, section {engine}, differs from expected_failures/{engine}.toml: {written ^ known}"
    )


@pytest.mark.parametrize("engine", sorted(name.removesuffix("_releases") for name in ENGINES if "_releases" in name))
def test_each_expected_failure_of_a_release_is_among_the_findings(engine: str) -> None:
    # By its laws and its report in one line, or by its laws and releases if no report is known.
    text = (ROOT / "FINDINGS.md").read_text(encoding="utf-8")
    missing = [
        excuse.location
        for excuse in expected_failures_for(engine)
        if "_releases.toml" in excuse.location and not is_among_findings(excuse, text)
    ]
    assert not missing, f"write a finding, a line with the laws, and with the report or the releases: {missing}"


def is_among_findings(excuse: ExpectedFailure, text: str) -> bool:
    """Return whether one line of a text names all laws of an entry, and its report or, without one, its releases.

    A report is a repository and a number: ``owner/name#1``. A line of the law ``*`` begins with ``| all |``.
    """
    laws = ["^\\| all \\|" if law == "*" else re.escape(f"`{law}`") for law in excuse.laws]
    reported = re.escape(excuse.upstream) + r"\b" if "#" in excuse.upstream else re.escape(f"`{excuse.releases}`")
    return any(all(re.search(part, line) for part in (*laws, reported)) for line in text.splitlines())


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("| `a.b`, `c.d` | owner/name#12 |", True),
        ("| `a.b`, `c.d` | owner/other#12 |", False),
        ("| `a.b`, `c.d` | #12 |", False),
        ("| `a.b`, `c.d` | owner/name#123 |", False),
        ("| `a.b` | owner/name#12 |", False),
        ("| `a.b`, `c.d` | `<2` |\n| all | owner/name#12 |", False),
    ],
)
def test_a_report_counts_only_with_its_repository_and_beside_all_laws(line: str, found: bool) -> None:
    excuse = ExpectedFailure("engine", "a.b", "owner/name#12", "", "fail", (), releases="<2", further_laws=("c.d",))
    assert is_among_findings(excuse, line) is found


@pytest.mark.parametrize("text", finding_texts(), ids=lambda text: text.partition("\n")[0])
def test_every_finding_names_the_scripts_that_show_it(text: str) -> None:
    named = " ".join(REPRO.findall(text)).split()
    assert named, "write a script into repro/, and `zharness repro ID` into the line Again of the finding"
    assert all(repros.find_repros(identifier) for identifier in named)


def test_every_script_names_an_existing_law() -> None:
    assert {repro.law for repro in repros.load_catalogue()} <= set(LAWS)


def is_of_few_cells(signature: str, excuse: ExpectedFailure) -> bool:
    """Return whether a signature may leave a number open because its entry names the models and variants."""
    return signature in OPEN_SIGNATURES and bool(excuse.models) and bool(excuse.variants)


def test_an_open_signature_is_of_named_cells_and_each_is_needed() -> None:
    entries = expected_failures_for("deepspeed")
    assert {text for entry in entries for text in entry.signatures if is_of_few_cells(text, entry)} == OPEN_SIGNATURES


@pytest.mark.parametrize("engine", ENGINES)
def test_no_signature_matches_every_failure_of_a_part(engine: str) -> None:
    broad = {
        excuse.location: message
        for excuse in expected_failures_for(engine)
        if not excuse.details
        and excuse.check not in WITHOUT_A_HINT
        and excuse.check not in WITHOUT_A_CAUSE.get(Path(excuse.location.partition(":")[0]).stem, ())
        and (message := [text for text in excuse.signatures if is_broad(text) and not is_of_few_cells(text, excuse)])
    }
    assert not broad, (
        f"name what is wrong (the hint after the numbers, the details of a crash), not where it is: {broad}"
    )


@pytest.mark.parametrize(
    "signature",
    [
        *("reduction: ", "step 0, optimizer: ", "reduction: first.weight", "local gradient: input", "forward: loss"),
        *("reduction: head", "first.weight[", "KeyError", "NoneType", "SIGABRT", "expected 1", "got -1"),
        *("raised: KeyError: ", "KeyError: 0", "AssertionError: (no message)", "x the right gradient"),
        "ended by a signal: SIGABRT, before its function had returned, in ",
        "reduction: norm (whole on every rank; seen on rank 0) expected ",
        "forward: loss (whole on every rank; seen on rank 0)",
        "step 1, optimizer: offset[0] (whole on every rank; seen on rank 0) expected ",
        *(
            "it is {number} x the right gradient",
            "expected 0, got {number} (bound 0",
            "first.weight[{number}, {number}]",
        ),
        "forward: loss (whole on every rank; seen on rank 0) expected {number}, got {number} (bound 0",
        "optimizer: offset[0] expected 1, got 2; the step used {number} x the right gradient",
        *("penalty[", "penalty[3, 0]", "of 228 elements are wrong", "only 3 of 4 elements are wrong"),
    ],
)
def test_a_broad_signature_is_refused(signature: str) -> None:
    assert is_broad(signature)


def test_a_signature_may_leave_a_shape_open() -> None:
    assert not is_broad("KeyError: the shape [{number}, {number}] is not that of the checkpoint")
