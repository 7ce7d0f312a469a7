"""Find the expected failure or the reproduction that already records the cause of an alarm."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from zharness.engines import Capabilities
from zharness.engines.registry import split_release
from zharness.hunt.causes import normalize
from zharness.hunt.space import window_name
from zharness.hunt.symptoms import find_symptom
from zharness.law_kit.setting import SEPARATOR, Setting, split_settings
from zharness.mesh import DEFAULT_MESH
from zharness.releases.repros import ReproVerdict, load_catalogue
from zharness.run.expected_failures import NUMBER, ExpectedFailure, has_signature, leaves_a_value_open
from zharness.run.program_runner import ProgramOutcome, program_options
from zharness.run.record import Verdict
from zharness.run.shipped_failures import expected_failures_for
from zharness.workload.programs import BACKWARD_ACTS, Act, LayerKind, Mark, Program

_COMMON_WORDS = re.compile(r"^[a-z ]+:|\b(expected|got|step|rank|nan|inf)\b")  # words of every mismatch
# A program needs one of these names to show a failure of a law of this group; other groups need no special name.
NEEDED_NAMES: Mapping[str, frozenset[Act | LayerKind | Mark]] = {
    "torch_func": frozenset((Act.TRANSFORM,)),
    "checkpointing": frozenset((LayerKind.CHECKPOINT, LayerKind.REENTRANT)),
    "state": frozenset((Act.SAVE, Act.LOAD)),
    "idle": frozenset((LayerKind.SOMETIMES, LayerKind.UNUSED, Act.IDLE)),
    "resources": frozenset(),  # memory and traffic, which no program compares
}
SECOND_BACKWARD_GROUPS = ("double_backward", "window")  # groups of laws with several backwards before a step
MIN_SIGNATURE_LETTERS = 8  # a shorter signature, such as KeyError: 0, does not identify a cause


def find_known(
    engine: str, version: str, program: Program, outcome: ProgramOutcome, claims: Capabilities, needed: tuple[str, ...]
) -> str:
    """Return the place where the failure of ``program`` is recorded, or '' if it is new.

    ``program`` is shrunk, so its failure needs each of its options, except ``needed``, which every program of its stage
    has. An entry that names none of these options is about another cause.
    """
    options = tuple(name for name in program.options if name not in needed)
    for entry in expected_failures_for(engine):
        is_covered = covers_program(entry, program, options, version) and any(
            can_show_law(program, law) for law in entry.laws
        )
        if is_covered and is_recorded_cause(entry, outcome):
            return f"{entry.upstream}; {', '.join(entry.laws)} in {entry.location}"
    repros = load_catalogue()
    symptom = find_symptom(split_release(engine)[0], program, list_names(program), outcome)
    for repro in repros:
        is_affected = repro.expected_verdict(version) is ReproVerdict.REPRODUCED
        if symptom is not None and repro.id == symptom.repro and is_affected:
            return f"{repro.reported}; repro/{repro.path.name}"
    keys = {*options, *iter_leaf_keys(program_options(program, claims))} if options else set()
    for repro in repros:
        is_same = normalize(repro.signature) in normalize(outcome.cause) and has_text(repro.signature)
        is_affected = repro.expected_verdict(version) is ReproVerdict.REPRODUCED
        is_alike = repro.engine == split_release(engine)[0] and can_show_law(program, repro.law)
        if is_alike and is_same and is_affected:
            text = repro.path.read_text(encoding="utf-8")
            if not options or any(key in text for key in keys):
                return f"{repro.reported}; repro/{repro.path.name}"
    return ""


def can_show_law(program: Program, law: str) -> bool:
    """Return whether the failure of ``program`` may break ``law``, a law or a pattern, because it has the needed verbs.

    ``program`` is shrunk, so its failure needs everything that the program has.
    """
    group = law.partition(".")[0]
    if group in SECOND_BACKWARD_GROUPS:
        backward_count = sum(verb.act in (*BACKWARD_ACTS, Act.INPUT_GRAD, Act.TRANSFORM) for verb in program.verbs)
        return backward_count > 1 or program.window > 1 or Mark.RETAIN in list_names(program)
    return group not in NEEDED_NAMES or not NEEDED_NAMES[group].isdisjoint(list_names(program))


def list_names(program: Program) -> set[Act | LayerKind | Mark]:
    """Return the verbs, marks and layers of ``program``."""
    layers = {layer.kind for layer in program.walk()}
    return {*layers, *(verb.act for verb in program.verbs), *(mark for verb in program.verbs for mark in verb.marks)}


def explain_changed_numbers(program: Program, outcome: ProgramOutcome, claims: Capabilities) -> str:
    """Return the reason why a wrong number may be no bug: the program needs an option that may change numbers; else ''.

    No option excuses an exception of a rank, such as that of a missing gradient.
    """
    reasons = {name: claims.engine_options[name].changes_numbers for name in program.options}
    found = [f"to be judged by a person, as {name} may change numbers: {why}" for name, why in reasons.items() if why]
    is_number = outcome.verdict is Verdict.FAIL and "raised: " not in outcome.cause
    return found[0] if found and is_number else ""


def covers_program(entry: ExpectedFailure, program: Program, options: tuple[str, ...], version: str) -> bool:
    """Return whether ``entry`` covers the setting of ``program``, regardless of the entry's laws."""
    narrowed = (
        (entry.stages, program.stage),
        (entry.world_sizes, program.world_size),
        (entry.dtypes, program.dtype),
    )
    has_mesh = any(map(program.mesh.has_axes, entry.meshes or (DEFAULT_MESH.label,)))
    is_covered = has_mesh and all(not allowed or value in allowed for allowed, value in narrowed)
    named = {*split_settings(entry.engine_variants)}
    names_setting = bool(named & {*options}) if options else not named or names_window(entry, program)
    return is_covered and names_setting and entry.applies_to_version(version)


def names_window(entry: ExpectedFailure, program: Program) -> bool:
    """Return whether ``entry`` names the window of ``program``, alone or together with options of ``program``."""
    return any(
        window_name(program) in setting.split(SEPARATOR)
        and {*program.options}.issuperset(Setting.parse(setting).options)
        for setting in entry.engine_variants
    )


def is_recorded_cause(entry: ExpectedFailure, outcome: ProgramOutcome) -> bool:
    """Return whether ``outcome`` has the verdict of ``entry``, and one of its signatures in the cause.

    Numbers may differ in the message of an exception, but not in the hint of a wrong number, such as a factor. So a
    signature of a wrong number that leaves a value or a factor open does not count: it matches only cells of one law.
    If the entry has details, one of them has to occur in the reports of the ranks; a signature may then be short.
    """
    if entry.verdict != outcome.verdict.value:
        return False
    if entry.details and not any(text in outcome.details for text in entry.details):
        return False
    is_crash = outcome.verdict is Verdict.CRASH
    return any(
        (has_text(signature) or bool(entry.details))
        and (
            normalize(signature.replace(NUMBER, "0")) in normalize(outcome.cause)
            if is_crash
            else has_signature(outcome.cause, signature)
        )
        for signature in entry.signatures
        # A signature with a number of wrong elements belongs to one model.
        if is_crash or not (signature.startswith("only ") or leaves_a_value_open(signature))
    )


def has_text(signature: str) -> bool:
    """Return whether ``signature`` has enough letters to identify a cause, without the words of every mismatch."""
    return (
        sum(character.isalpha() for character in _COMMON_WORDS.sub("", signature.replace(NUMBER, "")))
        > MIN_SIGNATURE_LETTERS
    )


def iter_leaf_keys(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the innermost keys of nested options."""
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from iter_leaf_keys(value)
        else:
            yield key
