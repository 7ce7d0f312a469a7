"""Decide which programs of whole batches are legal, and make programs smaller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from zharness.engines.protocol import Feature
from zharness.errors import UsageError
from zharness.law_kit.given_programs import ProgramCell, ProgramForm
from zharness.laws.pipeline_programs import (
    BATCHES,
    FEATURES,
    TEMPLATES,
    Call,
    CallKind,
    Template,
    find_frozen,
    parse_call,
)
from zharness.parity.certificate import is_power_of_two
from zharness.workload.legal_programs import remove_runs
from zharness.workload.programs import join_words

FREEZES = (CallKind.FREEZE, CallKind.THAW)
LOADS = (CallKind.LOAD, CallKind.LOAD_OLD)


def parse_calls(program_text: str) -> tuple[Call, ...]:
    """Return the calls of a program. Raises UsageError for a word that is not a call."""
    try:
        return tuple(map(parse_call, program_text.split()))
    except (KeyError, ValueError):
        names = ", ".join(kind.name.lower() for kind in CallKind)
        raise UsageError(f"got the program {program_text!r}; expected calls like train:4 or step, of {names}") from None


def may_freeze(before: Sequence[Call], call: Call) -> bool:
    """Return whether ``call`` freezes a weight while no weight is frozen, or unfreezes the frozen weight."""
    frozen = find_frozen(before)
    return frozen is None if call.kind is CallKind.FREEZE else frozen is not None and frozen.number == call.number


def is_legal(template: Template, before: Sequence[Call], call: Call) -> bool:
    """Return whether ``call`` may follow the calls ``before`` in a program of ``template``."""
    ends = [at for at, each in enumerate(before) if each.kind in (CallKind.STEP, CallKind.ZERO_GRAD)]
    pending = [each.number for each in before[ends[-1] + 1 if ends else 0 :] if each.kind in BATCHES]
    if call.kind in BATCHES:
        is_size = call.number in template.sizes and (call.kind is not CallKind.UNSEEN or is_power_of_two(call.number))
        return is_size and (not pending or (Feature.BATCHES_PER_STEP in template.features and call.number in pending))
    if call.kind in (CallKind.STEP, CallKind.ZERO_GRAD):
        return bool(pending)
    if call.kind in FREEZES and not may_freeze(before, call):
        return False
    if call.kind in LOADS and not any(each.kind is CallKind.SAVE for each in before):
        return False
    may_save = call.kind is CallKind.SAVE and Feature.BATCHES_PER_STEP in template.features
    return call.kind is CallKind.LOOK or may_save or not pending


def make_calls_legal(cell: ProgramCell, program_text: str) -> str:
    """Return the program without calls that are illegal after the earlier calls, or that the engine does not claim."""
    legal = list[Call]()
    for call in parse_calls(program_text):
        is_claimed = call.kind not in FEATURES or cell.claims.refusal(FEATURES[call.kind]) is None
        if is_claimed and is_legal(TEMPLATES[cell.variant], legal, call):
            legal.append(call)
    return join_words(legal)


def cut_calls(cell: ProgramCell, program_text: str) -> Iterator[str]:
    """Yield smaller programs: without some calls, or with one batch ordinary or with the fewest micro-batches."""
    calls, fewest = parse_calls(program_text), min(TEMPLATES[cell.variant].sizes)
    yield from map(join_words, remove_runs(calls))
    for index, call in enumerate(calls):
        if call.kind in BATCHES:
            for simpler in (replace(call, kind=CallKind.TRAIN), replace(call, number=fewest)):
                yield join_words([*calls[:index], simpler, *calls[index + 1 :]])


def draw_calls(cell: ProgramCell) -> str:
    """Return the program that is drawn with the seed of a cell."""
    return join_words(TEMPLATES[cell.variant].draw_calls(cell.seed, cell.claims))


CALL_PROGRAMS = ProgramForm(draw_calls, make_calls_legal, cut_calls)
