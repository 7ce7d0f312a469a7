"""Define a law as data: a function that records tensors on every rank, a judge of these tensors, and requirements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

from torch import nn

from zharness.engines.protocol import CallForm, Feature, OptimizerSpec
from zharness.errors import UsageError
from zharness.law_kit.default_training import TrainingConfig
from zharness.law_kit.dtypes import DTYPES
from zharness.law_kit.given_programs import ProgramForm, split_variant
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law_steps import LawSteps
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.setting import SettingSupport
from zharness.law_kit.training_run import TrainingRun, make_training_run
from zharness.parity import Comparison, Tier


class MeshSupport(Enum):
    """The meshes on which a law is stated."""

    OWN_MODELS = "on the axes cp and ep, stand-ins replace the law's models, and the law does not fit the stand-ins"
    WHOLE_INPUTS = (
        "the law draws numbers or computes a loss for the whole input, and a rank of cp has only a part of it"
    )
    FINITE_EXPERTS = (
        "the baseline runs all experts on every token and multiplies those that the gate did not choose by 0, which "
        "gives NaN for an infinite output, where an engine does not run them; mesh.expert_not_finite judges experts"
    )
    SMALLER_WORLDS = "no smaller world has this mesh, and the law loads what a smaller one saved"
    ANY = "the law is stated for data parallelism and for every mesh"
    ONLY = "the law is about a mesh of several axes"
    SEVERAL_COORDINATES = "the law compares ranks of several data coordinates on a mesh, and here all have one"
    ONE_COORDINATE_BESIDE_TP = (
        "tp adds up sums in parts, and float32 does not hold every sum of the batches of several data coordinates"
    )


class ModelScope(Enum):
    """The models to which a variant of a law applies."""

    WORKLOAD = "models of zharness.workload that the law names"
    ANY = "models of zharness.workload that the law names, and users' models"
    USERS = "users' models alone"


@dataclass(frozen=True)
class Variant:
    """A spelling or setting of a law that makes a cell of its own.

    - ``name`` is the last part of the cell id, which leaves out an empty name.
    - ``features`` are the features that the engine has to claim in addition to the law's features.
    - ``compares_engine_with_itself`` says that the judge compares the engine's numbers only with each other, so that
      the variant also applies to an engine with its own kernels.
    - ``exact_by_sum`` says that the variant is exact if gradients are summed over ranks. If gradients are averaged, the
      variant is exact only at world sizes that are powers of two.
    - ``model_scope`` says to which models the variant applies.
    - ``training_run`` is the training of several steps whose curves a report shows, or None.
    - ``is_step_count`` says that the name is the number of steps of the configured training. Every other positive
      number is then the name of a variant too.
    - ``schedules`` are the pipeline schedules that the engine has to have.
    - ``micro_batches`` is the number of micro-batches of the smallest batch that these schedules run.
    - ``optimizer`` is the optimizer whose arguments the installed torch has to know, or None.
    - ``mesh_dtypes`` are dtypes in which a check of every law on a mesh runs this variant, in addition to the law's
      own ``mesh_dtypes``.
    """

    name: str = ""
    features: tuple[Feature, ...] = ()
    compares_engine_with_itself: bool = False
    exact_by_sum: bool = False
    model_scope: ModelScope = ModelScope.WORKLOAD
    training_run: TrainingRun | None = field(default=None, hash=False)
    is_step_count: bool = False
    schedules: tuple[str, ...] = ()
    micro_batches: int = 1
    optimizer: OptimizerSpec | None = field(default=None, hash=False)
    mesh_dtypes: tuple[str, ...] = ()

    def get_training_run(self, training: TrainingConfig) -> TrainingRun | None:
        """Return the training run whose curves a report shows, or None if the variant has none.

        ``training`` is the training that the user configured; it is used if the name of the variant is a number of
        steps.
        """
        return make_training_run(training, int(self.name)) if self.is_step_count else self.training_run


@dataclass(frozen=True)
class Law:
    """One statement that must hold on every engine.

    - ``name`` is the group and the word after the dot, as in ``training.grads``.
    - ``statement`` says in one line what must hold.
    - ``tier`` says how comparisons on random weights are bounded. The exact model is judged at tier X where exactness
      is certified.
    - ``models`` are the names of the models that the law applies to.
    - ``observe`` runs on every rank with an engine, and records tensors.
    - ``judge`` runs once, in a process that never imported the engine. It yields comparisons in the order in which an
      error would have occurred.
    - ``kept_because`` says why the law is kept although other laws kill the same mutants.
    - ``features`` are the features that the engine has to claim.
    - ``variants`` are the law's variants; each makes cells of its own.
    - ``dtypes`` are the dtypes that the law applies to.
    - ``steps`` are the steps of the short script that ``zharness export`` writes. They are None if only the law's judge
      knows the right numbers.
    - ``weights_stay_integers`` says that the exact model's weights are integers in every step.
    - ``programs`` is the form of the programs that the law runs, or None. The step of a mismatch is then the position
      of a word in a program, not a micro-batch that could be run again.
    - ``is_gradient_law`` says that the law compares every gradient of a user's model. A run without such a law proves
      little about the model.
    - ``sets_autocast`` says that the law runs with and without torch.autocast, so the user's configuration must not
      enable torch.autocast.
    - ``only_own_kernels`` says that the law adds nothing where local gradients come from torch's kernels.
    - ``compares_later_forwards`` says that the law compares a forward that follows other forwards of the same engine.
    - ``is_long`` says that on a user's model a cell of the law takes several times as long as a cell of another law.
    - ``applies_to_module`` returns whether the law tests anything for a user's module. If it is None, the law applies
      to every module.
    - ``covers_triples`` says that a covering array runs the law with each option, world size and dtype together.
    - ``needs_fresh_ranks`` says that the cells of the law run on fresh ranks, for one of two reasons. The law compares
      the state of the process before and after it builds an engine: an engine that an earlier cell built in the same
      process would hide a change that the first engine makes. Or the law leaves process groups that only a part of the
      ranks belong to: torch then gives later groups other names.
    - ``setting_support`` says for which accumulation windows and calls of backward the law is stated.
    - ``mesh_support`` says on which meshes the law is stated.
    - ``judges_split_sums`` says that the judge allows for the rounding of sums that tp adds up in parts, on models with
      random weights in fp32.
    - ``mesh_dtypes`` are the dtypes, besides fp32, in which a check of every law on a mesh runs this law, because ranks
      have fp32 copies of the weights in these dtypes.
    - ``form`` is the form in which the law calls an engine.
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
    programs: ProgramForm | None = None
    is_gradient_law: bool = False
    sets_autocast: bool = False
    only_own_kernels: bool = False
    compares_later_forwards: bool = False
    is_long: bool = False
    applies_to_module: Callable[[nn.Module], bool] | None = None
    covers_triples: bool = False
    needs_fresh_ranks: bool = False
    setting_support: SettingSupport = SettingSupport.OPTIONS_ONLY
    mesh_support: MeshSupport = MeshSupport.ANY
    judges_split_sums: bool = False
    mesh_dtypes: tuple[str, ...] = ()
    form: CallForm = CallForm.FORWARD_AND_BACKWARD

    def get_variant(self, name: str) -> Variant:
        """Return the variant with this name. Raise UsageError if the law has no such variant."""
        for variant in self.variants:
            if variant.name == name:
                return variant
            if self.programs is not None and split_variant(name)[0] == variant.name:
                return replace(variant, name=name)
            if variant.is_step_count and name.isdecimal() and int(name) > 0:
                return replace(variant, name=name)
        raise UsageError.unknown_name(
            f"variant of {self.name}", name, [variant.name or "(none)" for variant in self.variants]
        )

    @property
    def is_calibrated(self) -> bool:
        """Whether the law bounds the gradients of an engine's own kernels by those of torch's kernels."""
        return self.tier is Tier.CALIBRATED

    def required_features(self, variant: str) -> tuple[Feature, ...]:
        """Return all features that a cell of this law variant requires. Raise UsageError for an unknown variant."""
        return self.features + self.get_variant(variant).features

    @property
    def user_model_variants(self) -> tuple[str, ...]:
        """The names of the law variants that apply to a user's model."""
        return tuple(variant.name for variant in self.variants if variant.model_scope is not ModelScope.WORKLOAD)

    @property
    def workload_variants(self) -> tuple[str, ...]:
        """The names of the law variants that apply to the models of ``models``."""
        return tuple(variant.name for variant in self.variants if variant.model_scope is not ModelScope.USERS)
