"""A law as data: what to observe on every rank, and how to judge it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from zharness.engines.protocol import Feature
from zharness.errors import UsageError
from zharness.law_kit.default_training import TrainingConfig
from zharness.law_kit.dtypes import DTYPES
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law_steps import LawSteps
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.training_run import TrainingRun, make_training_run
from zharness.parity import Comparison, Tier


@dataclass(frozen=True)
class Variant:
    """A spelling or setting of a law that makes a cell of its own; the empty name is left out of the cell id.

    ``features``: what the engine has to claim beyond the law's own features.
    ``compares_engine_with_itself``: the judge compares the engine's numbers with each other alone, so that an engine
    with its own kernels can be judged.
    ``exact_by_sum``: the variant is exact if gradients are summed over ranks; if they are averaged, it is exact only at
    world sizes that are powers of two.
    ``applies_to_user_models``: the variant applies to a user's model as well as to the models of the law.
    ``training_run``: the training of several steps whose curves a report shows.
    ``is_step_count``: the name is the number of steps of the configured training; any other positive number names a
    variant too.
    """

    name: str = ""
    features: tuple[Feature, ...] = ()
    compares_engine_with_itself: bool = False
    exact_by_sum: bool = False
    applies_to_user_models: bool = False
    training_run: TrainingRun | None = field(default=None, hash=False)
    is_step_count: bool = False

    def get_training_run(self, training: TrainingConfig) -> TrainingRun | None:
        """Return the training whose curves a report shows; ``training`` is the configured one."""
        return make_training_run(training, int(self.name)) if self.is_step_count else self.training_run


@dataclass(frozen=True)
class Law:
    """One statement that must hold on every engine.

    ``observe`` runs on every rank with an engine. ``judge`` runs once, in a process that never imported the engine, and
    yields comparisons in the order in which an error would have entered.

    ``tier``: how comparisons on random weights are bounded; the exact model is judged at tier X where it is certified.
    ``models``: the workload's models that the law applies to. ``features``: what the engine has to claim.
    ``kept_because``: why the law is kept although other laws kill the same mutants.
    ``dtypes``: the dtypes that the law applies to. ``steps``: the steps that an exported short script makes; None if
    only the law's own judge can decide what is right. ``weights_stay_integers``: the exact model's weights are integers
    in every step. ``steps_are_verbs``: a mismatch's step is the position of a verb in a program, not a micro-batch that
    could be run again.
    """

    name: str
    statement: str
    tier: Tier
    models: tuple[str, ...]
    observe: Callable[[RankContext], None]
    judge: Callable[[JudgeContext], Iterator[Comparison]]
    kept_because: str = ""
    features: tuple[Feature, ...] = ()
    variants: tuple[Variant, ...] = (Variant(),)
    dtypes: tuple[str, ...] = tuple(DTYPES)
    steps: LawSteps | None = None
    weights_stay_integers: bool = True
    steps_are_verbs: bool = False

    def get_variant(self, name: str) -> Variant:
        """Return the variant of that name. Raises UsageError when there is none."""
        for variant in self.variants:
            if variant.name == name:
                return variant
            if variant.is_step_count and name.isdecimal() and int(name) > 0:
                return replace(variant, name=name)
        raise UsageError.unknown_name(
            f"variant of {self.name}", name, [variant.name or "(none)" for variant in self.variants]
        )

    def required_features(self, variant: str) -> tuple[Feature, ...]:
        """Return all features that a cell of ``variant`` requires. Raises UsageError for an unknown variant."""
        return self.features + self.get_variant(variant).features

    @property
    def user_model_variants(self) -> tuple[str, ...]:
        """The names of the variants that apply to a user's model."""
        return tuple(variant.name for variant in self.variants if variant.applies_to_user_models)
