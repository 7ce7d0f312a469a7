"""The law of any order: whatever legal calls a caller makes, each does what plain PyTorch's does.

Other laws are orders of calls that somebody thought of. Here a caller plays a long program (``zharness.workload``) of
phrases in an order that is drawn from the case's seed, on one engine, and every verb is judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from zharness.checks.bench import Bench
from zharness.checks.law import Check
from zharness.checks.program import observe_program
from zharness.checks.program_judge import judge_program
from zharness.checks.repertoires import BRANCHES, BY_MODEL, REPERTOIRES, Repertoire
from zharness.checks.switches import left_alone, switches
from zharness.checks.trial import Trial
from zharness.engines.protocol import Feature
from zharness.parity import Comparison, Tier
from zharness.workload.program_text import parse_verb
from zharness.workload.programs import Verb, words


def observe_any_order(bench: Bench) -> None:
    """The program, on ranks whose generators differ; what was played is recorded beside what was seen."""
    wanted = BY_MODEL[bench.spec.name][bench.variant]
    program = wanted.program(bench.seed, bench.config.dtype, bench.capabilities)
    bench.record("verbs", {"text": torch.tensor([*words(program.verbs).encode()], dtype=torch.uint8)})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(bench.rank)
        bench.record("switches", switches(), 0)
        observe_program(bench, program, wanted.others)
        bench.record("switches", switches(), 1)


def judge_any_order(trial: Trial) -> Iterator[Comparison]:
    """Verb by verb, and what a caller has switched for the process at the end."""
    wanted = BY_MODEL[trial.baseline.spec.name][trial.variant]
    text = bytes(trial.copies("verbs")[0]["text"].tolist()).decode()
    verbs = tuple(parse_verb(word) for word in text.split())
    for comparison in judge_program(trial, wanted.saying(verbs)):
        yield said(comparison, verbs)
    yield from left_alone(trial, "switches", range(2))


def said(comparison: Comparison, verbs: tuple[Verb, ...]) -> Comparison:
    """``comparison`` with the verbs up to the one that went wrong, where it did."""
    wrong = comparison.mismatch
    if wrong is None or not wrong.step:
        return comparison
    hint = f"{wrong.hint}; " * bool(wrong.hint) + f"at the end of {words(verbs[: wrong.step])!r}"
    return replace(comparison, mismatch=replace(wrong, hint=hint))


def variants_of(repertoires: Mapping[str, Repertoire]) -> tuple[tuple[str, tuple[Feature, ...]], ...]:
    """The variants of a check, each with what it needs."""
    return tuple((name, repertoire.needs) for name, repertoire in repertoires.items())


CHECKS = (
    Check(
        name="training.any_order",
        law="in whatever legal order a caller calls, each call does what plain PyTorch's does",
        tier=Tier.STAGED,
        models=("mlp",),
        observe=observe_any_order,
        judge=judge_any_order,
        needs=(Feature.PARAM_GROUPS, Feature.SCHEDULE),
        integral=False,
        by_verb=True,
        variants=variants_of(REPERTOIRES),
    ),
    Check(
        name="parameters.any_order",
        law="the same of a model with tied, frozen, idle and now and then unused parameters",
        tier=Tier.STAGED,
        models=("changing",),
        observe=observe_any_order,
        judge=judge_any_order,
        needs=(Feature.PARAMETERS, Feature.PARAM_GROUPS, Feature.SCHEDULE),
        integral=False,
        by_verb=True,
        variants=variants_of(BRANCHES),
        dtypes=("fp32",),  # the model mixes dtypes of its own: its frozen layer stays in fp32, whatever the others are
    ),
)
