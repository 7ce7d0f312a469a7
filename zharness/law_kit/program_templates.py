"""Define the templates from which the programs of the any-order laws are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

from zharness.engines.protocol import Capabilities, Feature
from zharness.law_kit.program_features import ACT_FEATURES, MARK_FEATURES
from zharness.law_kit.program_steps import INTEGERS
from zharness.workload.legal_programs import legal_verbs
from zharness.workload.program_text import parse_verb
from zharness.workload.programs import Mark, Program, Verb

CALLER_ACCUMULATION = Feature.CALLER_ACCUMULATION


@dataclass(frozen=True)
class ProgramTemplate:
    """The phrases (short sequences of verbs) of one law variant's program, and the configuration of its engine.

    If a phrase is known to fail on some engine, a separate variant runs this phrase, so that all other phrases are
    judged completely in every order. ``features`` are the features that the variant requires. ``opening`` and
    ``closing`` are the phrases at the start and the end of the program. ``other_engine_count`` is the number of
    additional engines, in the simplest configuration, that train in turn with the observed engine.
    """

    phrases: tuple[str, ...]
    optimizer: str
    clip: float | None = None
    window: int = 1
    reduction: str = "mean"
    features: tuple[Feature, ...] = ()
    opening: str = ""
    closing: str = "z f b s"
    other_engine_count: int = 0

    def draw_verbs(self, seed: int) -> list[Verb]:
        """Return the verbs of the opening, of all phrases in an order drawn from ``seed``, and of the closing."""
        random = Random(f"{seed} {self.optimizer} {self.phrases}")  # noqa: S311 - an order, no secret
        drawn = random.sample(self.phrases, len(self.phrases))
        return [parse_verb(word) for phrase in (self.opening, *drawn, self.closing) for word in phrase.split()]

    def make_program(self, seed: int, dtype: str, capabilities: Capabilities) -> Program:
        """Return the drawn program without illegal verbs and without verbs and marks that the engine does not claim."""
        claimed_verbs = [
            drop_unclaimed_marks(verb, dtype, capabilities)
            for verb in self.draw_verbs(seed)
            if is_act_claimed(verb, capabilities)
        ]
        return self.make_program_of_verbs(legal_verbs((), claimed_verbs, window=self.window), dtype)

    def make_program_of_verbs(self, verbs: tuple[Verb, ...], dtype: str = "fp32") -> Program:
        """Return the program that runs ``verbs`` in the configuration of this template."""
        return Program((), verbs, 0, 0, dtype, self.optimizer, self.clip, self.window, self.reduction)


def is_act_claimed(verb: Verb, capabilities: Capabilities) -> bool:
    """Return whether the engine claims the kind of call that ``verb`` makes, regardless of the marks of ``verb``."""
    return verb.act not in ACT_FEATURES or capabilities.refusal(ACT_FEATURES[verb.act]) is None


def drop_unclaimed_marks(verb: Verb, dtype: str, capabilities: Capabilities) -> Verb:
    """Return ``verb`` without the marks (options) that the engine does not claim or that ``dtype`` does not allow."""
    refused = {mark for mark, feature in MARK_FEATURES.items() if capabilities.refusal(feature) is not None}
    refused |= {Mark.TENSOR} if dtype == "fp16" else set()
    return replace(verb, marks=tuple(mark for mark in verb.marks if mark not in refused))


MLP_TEMPLATES = {
    "steps": ProgramTemplate(
        ("f:kw z b:scale s", "f:few e b:tensor s", "f v b:unseen s", "f b l s", "f b z", "e", "i", "l", "vg"),
        "adamw",
        clip=0.2,
        features=(Feature.CLIP,),
        opening="f b s",
        other_engine_count=1,
    ),
    "evaluated": ProgramTemplate(("f:kw b e s", "f b l v s"), "sgd"),
    "sums": ProgramTemplate(
        (
            *("f b:unseen f:few b s", "n:few n:scale f b:scale s", "n z v f b s", "f b z idle"),
            *("f:kw b l f b s", "f b xf f b s", "xf"),
        ),
        "nesterov",
        clip=1.0,
        reduction="sum",
        features=(CALLER_ACCUMULATION, Feature.SUM, Feature.CLIP),
    ),
    "graphs": ProgramTemplate(
        (
            *("f f:few b:old b s", "f b:retain b:other s", "f b:retain,tensor z b:other s"),
            "f f f b:old e b:old,other,retain b b:scale s",
        ),
        "sgd",
        features=(Feature.RETAIN_GRAPH, CALLER_ACCUMULATION),
    ),
    "inputs": ProgramTemplate(
        ("g", "t", "f g b s", "f t b:unseen s"),
        "sgd",
        features=(Feature.AUTOGRAD, Feature.TENSOR_BACKWARD, Feature.RETAIN_GRAPH),
        opening="f b s f b s",
    ),
    # DDP rebuilds its buckets in the forward after the first backward.
    "second_forward": ProgramTemplate(("t",), "sgd", features=(Feature.TRANSFORMS,), opening="f b s", closing="f b s"),
    "saved": ProgramTemplate(
        ("f b s save load:old", "f b s save:old edit load:old", "load v", "edit", "f b z"),
        "adam",
        features=(Feature.CHECKPOINT,),
        opening="f b s save",
        closing="f b l s",
    ),
    "saved_first": ProgramTemplate(("f b s", "load"), "adamw", features=(Feature.CHECKPOINT,), opening="save f b s"),
    "windows": ProgramTemplate(
        ("f b:scale s e f:few b:unseen s", "n s f b l s", "load"),
        "nesterov",
        clip=0.1,
        window=2,
        features=(Feature.ENGINE_ACCUMULATION, Feature.CLIP, Feature.CHECKPOINT),
        opening="f b s f b s save",
        closing="v l f b s f b s",
    ),
    "given_up": ProgramTemplate(
        ("f b s z",), "sgd", window=2, features=(Feature.ENGINE_ACCUMULATION,), closing="f b s f b s"
    ),
    "forgotten": ProgramTemplate(
        ("f b z", "f b s f b s"), "sgd", window=2, features=(Feature.ENGINE_ACCUMULATION,), closing="f b s f b s"
    ),
    "two_losses": ProgramTemplate(
        ("f b:retain b:other s f b:retain b:other s",),
        "sgd",
        window=2,
        features=(Feature.ENGINE_ACCUMULATION, Feature.RETAIN_GRAPH),
        closing="",
    ),
    "interrupted": ProgramTemplate(
        ("xb f b s", "f b xb f b s", "n xb"),
        "sgd",
        features=(Feature.AUTOGRAD, CALLER_ACCUMULATION),
        opening="f b s f b s",
    ),
    # FSDP2's stage 3 prefetches weights for a backward, and the next forward uses the prefetched weights even after a
    # load.
    "interrupted_load": ProgramTemplate(
        ("xb load",),
        "sgd",
        features=(Feature.AUTOGRAD, Feature.CHECKPOINT),
        opening="f b s save f b s",
        closing="f b s",
    ),
}

# For the model with unused, frozen and tied parameters, and a part that only every second micro-batch uses.
CHANGING_TEMPLATES = {
    "": ProgramTemplate(
        ("f b s", "f b f b s", "n n f b:unseen s", "f b z", "v", "idle", "edit", "e f b l s"),
        "adamw",
        clip=8.0,
        features=(Feature.NO_GRADIENT, Feature.CLIP, CALLER_ACCUMULATION),
    ),
    "saved": ProgramTemplate(
        ("f b s e save", "load f b s", "edit", "f b l s"),
        "adamw",
        features=(Feature.NO_GRADIENT, Feature.OUTSIDE_FORWARD, Feature.CHECKPOINT),
        opening="f b s save",
    ),
}

# For the exact models that a mesh splits. These templates have no forward without gradients between a backward and a
# step: at FSDP2's stage 2 such a forward keeps old weights, which training.any_order-evaluated shows.
MESH_TEMPLATES = {
    "steps": ProgramTemplate(
        ("v f:few,kw b:unseen s", "f v b:scale,other l s", "f:kw b z", "idle", "e"),
        INTEGERS,
        opening="v f b s",
        closing="v f b s v",
    ),
    "accumulated": ProgramTemplate(
        ("n e n:few f b s", "n v f:few b s", "n z f b s", "load"),
        INTEGERS,
        features=(Feature.NO_SYNC, CALLER_ACCUMULATION),
        opening="f b s save",
        closing="v",
    ),
    "windows": ProgramTemplate(
        ("f v b s e f:few b:unseen,scale s", "n s v f b s", "load v"),
        INTEGERS,
        clip=0.5,
        window=2,
        features=(Feature.ENGINE_ACCUMULATION, Feature.CLIP, Feature.CHECKPOINT),
        opening="v f b s f b s save",
        closing="f b s e f b s v",
    ),
    "saved": ProgramTemplate(
        ("f:few b s v load:old", "edit v", "load v"),
        INTEGERS,
        features=(Feature.CHECKPOINT,),
        opening="v f b s save",
        closing="f b l s v",
    ),
}
# For the model whose parameters are all in the plan of tp: torch cannot clip parameters outside the plan together with
# parameters in the plan.
CLIPPED_TEMPLATES = {
    "": ProgramTemplate(
        ("n e f:few b s", "f b z", "f b v f:few b:unseen s", "load"),
        INTEGERS,
        clip=0.5,
        features=(CALLER_ACCUMULATION, Feature.CLIP),
        opening="f b s save",
        closing="f b s v",
    )
}


def without_other_sizes(templates: Mapping[str, ProgramTemplate]) -> dict[str, ProgramTemplate]:
    """Return ``templates`` without micro-batches of another number of tokens on each rank.

    DeepSpeed's experts hang in such micro-batches (DeepSpeed#6809). On cp a mean over a number of tokens that is no
    power of two is rounded in each part of a sequence.
    """
    return {
        name: replace(
            template, phrases=tuple(phrase.replace(":few,", ":").replace(":few", "") for phrase in template.phrases)
        )
        for name, template in templates.items()
    }


TEMPLATES_BY_MODEL: Mapping[str, Mapping[str, ProgramTemplate]] = {
    "changing": CHANGING_TEMPLATES,
    "mlp": MLP_TEMPLATES,
    "mlp_context": without_other_sizes(MLP_TEMPLATES),
    "mlp_routed": without_other_sizes(MLP_TEMPLATES),
    "stepped_heads": MESH_TEMPLATES,
    "stepped_context": MESH_TEMPLATES,
    "routed": without_other_sizes(MESH_TEMPLATES),
    "stepped_sequence": CLIPPED_TEMPLATES,
}
