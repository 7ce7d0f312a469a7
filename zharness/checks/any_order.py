"""The law of any order: whatever legal calls a caller makes, each does what plain PyTorch's does.

Other laws are orders of calls that somebody thought of. Here a caller plays a long program (``zharness.workload``) of
phrases in an order that is drawn from the case's seed, on one engine, and every verb is judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random

import torch

from zharness.checks.bench import Bench
from zharness.checks.law import Check
from zharness.checks.program import ACTS, MARKS, observe_program
from zharness.checks.program_judge import judge_program
from zharness.checks.switches import left_alone, switches
from zharness.checks.trial import Trial
from zharness.engines.protocol import Capabilities, Feature
from zharness.parity import Comparison, Tier
from zharness.workload.legal import legal_verbs
from zharness.workload.program_text import parse_verb
from zharness.workload.programs import Mark, Program, Verb, words

BEGINS = "f b s"  # where one of them saves before its first step, FSDP2 is known to go wrong (FINDINGS.md)
ENDS = "z f b s"


@dataclass(frozen=True)
class Repertoire:
    """What a caller of one variant says, and to an engine of which configuration; ``needs`` as in Check.

    ``others`` are further engines in the process, of the plainest configuration, that train in turn with this one.
    """

    phrases: tuple[str, ...]
    optimizer: str
    clip: float | None = None
    window: int = 1
    reduction: str = "mean"
    needs: tuple[Feature, ...] = ()
    begins: str = BEGINS
    others: int = 0

    def program(self, seed: int, dtype: str, claims: Capabilities) -> Program:
        """All phrases in an order of ``seed``; without the verbs and marks that the engine does not claim."""
        random = Random(f"{seed} {self.optimizer} {self.phrases}")  # noqa: S311 - an order, no secret
        drawn = random.sample(self.phrases, len(self.phrases))
        spoken = (parse_verb(word) for phrase in (self.begins, *drawn, ENDS) for word in phrase.split())
        wishes = [possible(verb, dtype, claims) for verb in spoken if claimed(verb, claims)]
        asked = legal_verbs((), wishes, window=self.window)
        return Program((), asked, 0, 0, dtype, self.optimizer, self.clip, self.window, self.reduction)


def claimed(verb: Verb, claims: Capabilities) -> bool:
    """Whether the engine claims what the act of ``verb`` takes, its marks left aside."""
    return verb.act not in ACTS or claims.refusal(ACTS[verb.act]) is None


def possible(verb: Verb, dtype: str, claims: Capabilities) -> Verb:
    """``verb`` without the marks that the engine does not claim, or that mean something else in ``dtype``."""
    refused = {mark for mark, feature in MARKS.items() if claims.refusal(feature) is not None}
    refused |= {Mark.TENSOR} if dtype == "fp16" else set()
    return replace(verb, marks=tuple(mark for mark in verb.marks if mark not in refused))


REPERTOIRES = {
    "steps": Repertoire(
        (
            *("f b s", "f:kw b:scale s", "f:few b:tensor s", "f b:unseen s", "f z b s", "f b z"),
            *("e", "v", "vg", "l", "f e b s", "f v b:unseen s", "f b v l s", "f:kw b e s"),
        ),
        "adamw",
        clip=0.6,
        needs=(Feature.CLIP,),
        others=1,
    ),
    "sums": Repertoire(
        (
            *("f b f:few b s", "n f b s", "n:few n:scale f b:scale s", "f b z", "n z f b s", "f b z idle", "l", "xf"),
            *("f b e f b:unseen s", "f:kw b l f b l s", "n v f b s", "n l f b:unseen s", "vg f b s", "f b xf f b s"),
        ),
        "nesterov",
        clip=1.2,
        reduction="sum",
        needs=(Feature.CALLER_ACCUMULATION, Feature.SUM, Feature.CLIP),
    ),
    "graphs": Repertoire(
        (
            *("f f b:old b s", "f b:retain b:other s", "f b:retain,tensor z b:other s", "f f:few b b:tensor s", "g"),
            *("t", "f g b s", "f t b:unseen s", "f b:retain e b:scale s", "f f f b:old b:old,other,retain b:old b s"),
        ),
        "sgd",
        needs=(Feature.RETAIN_GRAPH, Feature.AUTOGRAD, Feature.TENSOR_BACKWARD, Feature.CALLER_ACCUMULATION),
    ),
    "saved": Repertoire(
        (
            *("save f b s load", "load v f b s", "edit", "f b s edit v f b s", "f b z", "f b l s"),
            *("save f b s f b s load:old l f b s", "save edit load f b s", "save f b s save:old edit load:old"),
        ),
        "adam",
        needs=(Feature.CHECKPOINT,),
    ),
    "windows": Repertoire(
        (
            *("f b s f b s", "f b:scale s e f:few b s", "f b s z f b s f b s", "f b s v f b:unseen s", "l", "f b l s"),
            *("f b:retain b:other s f b s", "f b s f b s save", "load", "n s f b s", "f b z"),
        ),
        "adamw",
        clip=0.4,
        window=2,
        needs=(Feature.ENGINE_ACCUMULATION, Feature.CLIP, Feature.CHECKPOINT),
    ),
    "interrupted": Repertoire(
        ("xb", "xf f b s", "xb f b s", "f xf b s", "i", "f i b s", "f b:unseen xf s", "f b xb f b s", "n xb f b s"),
        "adamw",
        needs=(Feature.AUTOGRAD, Feature.CHECKPOINT),
        begins="save f b s f b s load",
    ),
}
# Of a model with a part that is used in every second micro-batch, one that never is, a frozen and a tied one.
BRANCHES = {
    "": Repertoire(
        (
            *("f b s", "f b s", "e f b s", "f b f b s", "n f b s", "n n f b:unseen s", "f b z", "v", "idle", "edit"),
            *("l", "f b l s", "v f b s", "e edit f b s"),
        ),
        "adamw",
        clip=8.0,
        needs=(Feature.NO_GRADIENT, Feature.CLIP),
    ),
    "saved": Repertoire(
        ("f b s e save f b s", "load f b s", "f b s", "e f b s", "edit", "save e f b s f b s load", "f b l s"),
        "adam",
        needs=(Feature.NO_GRADIENT, Feature.OUTSIDE_FORWARD, Feature.CHECKPOINT),
    ),
}
BY_MODEL = {"changing": BRANCHES, "mlp": REPERTOIRES}


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
    program = Program(
        (), verbs, optimizer=wanted.optimizer, clip=wanted.clip, window=wanted.window, reduction=wanted.reduction
    )
    for comparison in judge_program(trial, program):
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
        variants=variants_of(BRANCHES),
        dtypes=("fp32",),  # the model mixes dtypes of its own: its frozen layer stays in fp32, whatever the others are
    ),
)
