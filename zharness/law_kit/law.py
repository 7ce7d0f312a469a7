"""A law as data: what to observe on every rank, and how to judge it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from zharness.engines.protocol import Feature
from zharness.errors import UsageError
from zharness.law_kit.dtypes import DTYPES
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.training_run import TrainingRun
from zharness.parity import Comparison, Tier


@dataclass(frozen=True)
class Law:
    """One law.

    ``observe`` runs on every rank with an engine; ``judge`` runs once, in a process that never saw the engine, and
    yields comparisons in the order in which an error would have entered. ``tier`` is the one that applies to random
    weights; the exact model is judged by X where its certificate holds. ``needs`` are features that an engine has to
    claim; ``integral`` says that weights stay the exact model's integers throughout; ``variants`` are the spellings
    or settings that make a cell of their own, each with what it needs on top; ``own_numbers`` are those of them that
    hold the engine against its own numbers alone, whatever its kernels; ``dtypes`` those that it is stated for.
    ``courses`` are the trainings of those variants that are one, to show how it went.
    ``summed`` are the variants that are exact by the sum over ranks, and by the mean only over a power of two of them.
    ``any_model`` are the variants that are stated for anyone's model, beside those of ``models``; ``counted`` says that
    a variant is a number of steps of the training as configured, and any other number is one as well. ``by_verb``: the
    step of a mismatch is a verb's place in a program, and no micro-batch that could be run again on its own.
    """

    name: str
    statement: str
    tier: Tier
    models: tuple[str, ...]
    observe: Callable[[RankContext], None]
    judge: Callable[[JudgeContext], Iterator[Comparison]]
    needs: tuple[Feature, ...] = ()
    weights_stay_integers: bool = True
    variants: tuple[tuple[str, tuple[Feature, ...]], ...] = (("", ()),)
    self_compared_variants: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = tuple(DTYPES)
    training_runs: Mapping[str, TrainingRun] = field(default_factory=dict, hash=False)
    exact_by_sum_variants: tuple[str, ...] = ()
    user_model_variants: tuple[str, ...] = ()
    accepts_step_count: bool = False
    steps_are_verbs: bool = False

    def compares_engine_with_itself(self, variant: str) -> bool:
        """Whether cells of ``variant`` hold the engine against its own numbers alone."""
        return variant in self.self_compared_variants or (self.accepts_step_count and bool(self.self_compared_variants))

    def applies_to_user_models(self, variant: str) -> bool:
        """Whether ``variant`` is stated for anyone's model."""
        return variant in self.user_model_variants or (self.accepts_step_count and variant.isdecimal())

    def required_features(self, variant: str) -> tuple[Feature, ...]:
        """Everything that a cell of ``variant`` asks of an engine. Raises UsageError for an unknown variant."""
        for name, extra in self.variants:
            if name == variant or (self.accepts_step_count and variant.isdecimal() and int(variant) > 0):
                return self.needs + extra
        raise UsageError.unknown_name(
            f"variant of {self.name}", variant, [name or "(none)" for name, _ in self.variants]
        )
