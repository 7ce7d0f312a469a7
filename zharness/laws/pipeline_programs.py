"""Define programs of calls of an engine that runs whole batches, and the templates from which they are drawn.

``train:3 step save edit:1 scaled:2 step load`` trains a batch of three micro-batches, makes a step, saves, edits the
second parameter, trains a batch of two micro-batches with twice the loss, makes a step, and loads the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from random import Random
from typing import Any

import torch
from torch import nn

from zharness.engines.protocol import Capabilities, Feature, OptimizerSpec
from zharness.law_kit.optimizers import ADAMW
from zharness.laws.pipeline import CLIP, MICRO_BATCHES
from zharness.laws.pipeline_steps import HALVING, fit_schedule
from zharness.parity.certificate import is_power_of_two
from zharness.workload import ModelSpec
from zharness.workload.exact_chain import BLOCKS


class CallKind(Enum):
    """The kinds of calls. Values are short names, which phrases use; the text of a program uses the member's name.

    A batch adds its gradients to the gradients since the last step or zero_grad.
    """

    TRAIN = "t"  # train:n trains a batch of n micro-batches, and reads the gradients
    SCALED = "x"  # scaled:n does the same with twice the loss, by another loss function
    FAINT = "y"  # faint:n trains with a loss so small that the norm is below the clipping norm
    UNSEEN = "u"  # unseen:n trains a batch, and does not read the gradients
    STEP = "s"  # step and zero_grad
    ZERO_GRAD = "z"  # discards the gradients
    LOOK = "l"  # reads weights, state and gradients again
    EDIT = "e"  # edit:p halves the parameter number p in place, on every rank
    FREEZE = "f"  # freeze:w freezes the weight number w
    THAW = "h"  # thaw:w unfreezes the weight number w
    SAVE = "save"
    LOAD = "load"  # loads the last checkpoint
    LOAD_OLD = "old"  # loads the first checkpoint


BATCHES = (CallKind.TRAIN, CallKind.SCALED, CallKind.FAINT, CallKind.UNSEEN)
OF_A_WEIGHT = (CallKind.EDIT, CallKind.FREEZE, CallKind.THAW)
FEATURES: Mapping[CallKind, Feature] = {
    CallKind.EDIT: Feature.IN_PLACE_EDITS,
    CallKind.FREEZE: Feature.UNFREEZING,
    CallKind.THAW: Feature.UNFREEZING,
    **dict.fromkeys((CallKind.SAVE, CallKind.LOAD, CallKind.LOAD_OLD), Feature.CHECKPOINT),
}


@dataclass(frozen=True)
class Call:
    """A call of a program; ``number`` is a batch's number of micro-batches, the number of a parameter, or 0."""

    kind: CallKind
    number: int = 0

    def __str__(self) -> str:
        name = self.kind.name.lower()
        return f"{name}:{self.number}" if self.kind in (*BATCHES, *OF_A_WEIGHT) else name


def parse_call(word: str) -> Call:
    """Return the call that ``word`` describes."""
    name, _, number = word.partition(":")
    return Call(CallKind[name.upper()], int(number or 0))


SMALL_STEPS = replace(HALVING, args={**HALVING.args, "lr": 2.0**-6})  # weights stay finite over many steps
NESTEROV_STEPS = replace(SMALL_STEPS, args={**SMALL_STEPS.args, "nesterov": True})
GROUPED_ADAMW = replace(ADAMW, args={**ADAMW.args, "amsgrad": True})
ANY = ("t s", "x s", "u s", "t z t s", "u z x s", "t l s", "l t s", "e t s", "t s save t s load t s", "old t s")
SINGLE_SIZES = (1,)


@dataclass(frozen=True)
class Template:
    """The phrases and settings from which the programs of a variant are drawn.

    A program consists of ``opening``, ``drawn`` phrases in random order, and ``closing``. ``phrases`` are sequences of
    calls that are legal in any order. ``sizes`` are the allowed numbers of micro-batches in a batch. ``schedule`` is
    the schedule, or '' for the engine's default.
    """

    phrases: tuple[str, ...] = ANY
    schedule: str = ""
    sizes: tuple[int, ...] = SINGLE_SIZES
    optimizer: OptimizerSpec = SMALL_STEPS
    clip: float | None = None
    features: tuple[Feature, ...] = ()
    opening: str = "t s save"
    closing: str = "t s"
    drawn: int = 8

    def draw_calls(self, seed: int, claims: Capabilities) -> tuple[Call, ...]:
        """Return the calls of the program that ``seed`` draws, without the calls that the engine does not claim."""
        random = Random(f"{seed} {self.schedule} {self.phrases}")  # noqa: S311 - draws an order, not a secret
        phrases = (self.opening, *random.sample(self.phrases, min(self.drawn, len(self.phrases))), self.closing)
        frozen = random.randrange(BLOCKS)  # one weight for all calls, so that a frozen weight is unfrozen again
        calls = [self.number_call(CallKind(word), frozen, random) for phrase in phrases for word in phrase.split()]
        # The first batch has the most micro-batches whose mean is exact. With two micro-batches, 1F1B would run both
        # forwards first, as GPipe does, after which stages in DDP crash.
        exact = [size for size in self.sizes if is_power_of_two(size) and size <= MICRO_BATCHES]
        calls[0] = replace(calls[0], number=max(exact))
        return tuple(call for call in calls if call.kind not in FEATURES or claims.refusal(FEATURES[call.kind]) is None)

    def number_call(self, kind: CallKind, frozen: int, random: Random) -> Call:
        """Return a call with a number of micro-batches or of a parameter; ``frozen`` is the weight to freeze."""
        if kind in BATCHES:
            # Gradients that are not read have to be predicted, also their rounding, which depends on the division.
            sizes = [size for size in self.sizes if kind is not CallKind.UNSEEN or is_power_of_two(size)]
            return Call(kind, random.choice(sizes))
        if kind is CallKind.EDIT:
            return Call(kind, random.randrange(2 * BLOCKS))
        return Call(kind, frozen if kind in OF_A_WEIGHT else 0)

    def select_optimizer(self, claims: Capabilities) -> OptimizerSpec:
        """Return the optimizer, at a constant rate if the engine has no learning-rate schedule."""
        return fit_schedule(self.optimizer, claims)


# Zero-bubble schedules need one micro-batch per stage, and each of two ranks has two stages; 1F1B needs one per rank.
SIZES: Mapping[str, tuple[int, ...]] = {
    "gpipe": (1, 2, 3, 4, 8),
    "1f1b": (2, 3, 4, 5, 8),
    "interleaved": (2, 3, 4, 6),
    "zero_bubble": (4, 6),
    "zbv": (4, 5, 6),
    "dualpipev": (4, 5, 6),
}
ACCUMULATED = (
    "t t s",
    "t t t s",
    "t z t t s",
    "t l t s",
    "u u s",
    "t s save t t s load t s",
    "old t t s",
    "e t t s",
    "t save t s",
)
FROZEN = ("f t s h", "t s f t s t s h", "t z t s", "f t s save h t s", "f t s u s h", "x s")
# The second-last step of clipped programs has a norm below the limit, so clipping must not change its gradients.
SMALL_NORM = "y s t s"
CLIPPED: Mapping[str, Any] = {"clip": CLIP, "features": (Feature.CLIP,), "closing": SMALL_NORM}
# torch builds a new schedule for a new loss, so the loss's first batch is the first batch of a schedule.
SUMS_OF_LOSSES = Template(ACCUMULATED, features=(Feature.BATCHES_PER_STEP,), opening="t x s save", drawn=3)
TEMPLATES: Mapping[str, Template] = {
    "single": Template(optimizer=NESTEROV_STEPS),
    "adamw": Template(optimizer=GROUPED_ADAMW, features=(Feature.PARAM_GROUPS,)),
    "clipped": Template(**CLIPPED),
    "clipped_1f1b": Template(schedule="1f1b", sizes=SIZES["1f1b"], **CLIPPED),
    "accumulated_singles": Template(ACCUMULATED, features=(Feature.BATCHES_PER_STEP,)),
    "accumulated_losses": SUMS_OF_LOSSES,
    "accumulated_losses_clipped": replace(SUMS_OF_LOSSES, features=(Feature.BATCHES_PER_STEP, Feature.CLIP), clip=CLIP),
    "frozen": Template(FROZEN, features=(Feature.UNFREEZING,)),
    "frozen_clipped": Template(
        FROZEN, features=(Feature.UNFREEZING, Feature.CLIP), clip=CLIP, closing=SMALL_NORM, drawn=3
    ),
    **{name: Template(schedule=name, sizes=sizes) for name, sizes in SIZES.items()},
    # pipeline.clip covers one step of other schedules.
    "interleaved_clipped": Template(schedule="interleaved", sizes=SIZES["interleaved"], **CLIPPED),
    "zero_bubble_clipped": Template(schedule="zero_bubble", sizes=SIZES["zero_bubble"], **CLIPPED),
}


def find_frozen(calls: Sequence[Call]) -> Call | None:
    """Return the call that froze the weight that is still frozen after ``calls``, or None."""
    last = next((call for call in reversed(calls) if call.kind in (CallKind.FREEZE, CallKind.THAW)), None)
    return last if last is not None and last.kind is CallKind.FREEZE else None


def select_parameter(spec: ModelSpec, seed: int, call: Call) -> str:
    """Return the name of a call's parameter: any parameter for an edit, else a weight; numbers wrap around."""
    names = [name for name, _ in spec.model(seed).named_parameters()]
    if call.kind is not CallKind.EDIT:
        names = [name for name in names if name.endswith("weight")]
    return names[call.number % len(names)]


def find_shared_weights(spec: ModelSpec, seed: int) -> frozenset[str]:
    """Return the names of weights with several uses, whose gradients are sums that depend on the order of the uses."""
    model, uses = spec.model(seed), Counter[nn.Parameter]()

    def count(module: nn.Module, _inputs: Any, _output: Any) -> None:
        uses.update(module.parameters(recurse=False))

    for module in model.modules():
        module.register_forward_hook(count)
    with torch.no_grad():
        spec.micro_batch(seed, 0, 0).feed(model)
    return frozenset(name for name, parameter in model.named_parameters() if uses[parameter] > 1)
