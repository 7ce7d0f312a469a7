"""Define the law values.not_finite: a step whose gradients are infinite or NaN, and the training after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum

import torch
from torch import Tensor

from zharness.engines.protocol import Engine, Feature
from zharness.law_kit.clipping import compute_clip_factor
from zharness.law_kit.hints import hint_became_nan
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, MeshSupport, Variant
from zharness.law_kit.optimizers import UNIT_LR_SGD
from zharness.law_kit.rank_actions import shared_folder
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.law_kit.scenarios import Participant, make_engine_participant
from zharness.law_kit.training_run import total_norm
from zharness.law_kit.window_judge import PlainRanks, judge_windows, sum_terms
from zharness.law_kit.window_scenarios import WindowScenario, scale_losses, train_windows
from zharness.laws.circumstances.common import sum_loss, train_whole_model
from zharness.laws.circumstances.values import CLIP, NOT_FINITE
from zharness.parity import Comparison, Part, Tier, compare_bitwise, compare_ranks
from zharness.parity.certificate import is_power_of_two

ONE_INF = "one_inf"
CLIPPED = "_clipped"  # the end of the names of law variants that clip


VALUE_FEATURES: Mapping[str, tuple[Feature, ...]] = {
    **dict.fromkeys(NOT_FINITE, ()),
    ONE_INF: (Feature.OUTSIDE_FORWARD,),
}


class Outcome(IntEnum):
    """What an engine did in a step whose gradients were not finite."""

    APPLIED = 0
    SKIPPED = 1
    RAISED = 2


def make_bad_scenario(variant: str) -> WindowScenario:
    """Return the scenario of one micro-batch whose loss, on rank 0, is infinite or NaN."""
    name = variant.removesuffix(CLIPPED)
    if name == ONE_INF:
        return WindowScenario(train_with_one_infinite_gradient, windows=1)
    value = NOT_FINITE[name]

    def train(participant: Participant, window: int, micro: int) -> None:
        """Train one micro-batch whose loss is multiplied by the value on rank 0."""
        batch = participant.get_batch(window)
        factor = value if participant.rank == 0 else 1.0
        participant.backward(factor * sum_loss(participant.call(batch.inputs), batch.target))

    return WindowScenario(train, windows=1)


def train_with_one_infinite_gradient(participant: Participant, window: int, micro: int) -> None:
    """Train one micro-batch whose gradient is infinite on rank 0 in one parameter of one element, and finite elsewhere.

    Every gradient is finite or infinite, so the norm is infinite and not NaN.
    """
    batch = participant.get_batch(window)
    loss = sum_loss(participant.call(batch.inputs), batch.target)
    participant.backward(loss + (torch.inf if participant.rank == 0 else 1.0) * participant.module.offset.sum())


def make_ordinary_scenario(variant: str) -> WindowScenario:
    """Return the scenario of the training that follows."""
    return WindowScenario(train_whole_model, windows=1, clip=CLIP if variant.endswith(CLIPPED) else None)


def observe_not_finite(ctx: RankContext) -> None:
    """Make a step with gradients that are not finite, load the weights from before it, and make an ordinary step."""
    bad, ordinary = make_bad_scenario(ctx.variant), make_ordinary_scenario(ctx.variant)
    ctx.record("setting", {"exact": scalar(is_power_of_two(ctx.data_size) or not ctx.capabilities.scaled_sum)})
    engine = ctx.build_engine(optimizer=UNIT_LR_SGD, clip=ordinary.clip)
    with shared_folder() as folder:
        engine.save(folder)
        ctx.record("initial", engine.full_params())
        bad.train(scale_losses(make_engine_participant(ctx, engine, None), bad, ctx.data_size), 0, 0)
        outcome = step_and_classify(engine)
        norm = engine.grad_norm() if ordinary.clip is not None and outcome is Outcome.APPLIED else None
        ctx.record("outcome", {"outcome": scalar(outcome)} | ({} if norm is None else {"norm": scalar(norm)}))
        ctx.record("stepped", engine.full_params())
        engine.zero_grad()
        engine.load(folder)
    train_windows(ctx, engine, ordinary)
    engine.close()


def step_and_classify(engine: Engine) -> Outcome:
    """Make a step, and return whether the engine applied it, counted it as skipped, or raised FloatingPointError.

    Every rank calls ``engine.observe()`` after the step, even if the step raised on this rank alone, because the call
    may be a collective.
    """
    before, outcome = engine.observe().skipped_steps, Outcome.APPLIED
    try:
        engine.step()
    except FloatingPointError:
        outcome = Outcome.RAISED
    is_skipped = engine.observe().skipped_steps != before
    return Outcome.SKIPPED if is_skipped and outcome is Outcome.APPLIED else outcome


def judge_not_finite(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the weights after the step with torch.optim's, or with those before the step if the engine refused it.

    All ranks must have the same outcome. A norm that the engine reports for the step must not be finite. The ordinary
    step that follows is plain PyTorch's.
    """
    outcomes = [record["outcome"] for record in ctx.rank_records("outcome")]
    yield from compare_ranks(ctx.location("outcome", Part.OPTIMIZER), outcomes)
    initial, clip = ctx.rank_records("initial")[0], make_ordinary_scenario(ctx.variant).clip
    applied = compute_stepped_weights(ctx, initial, clip)
    for rank, (record, weights) in enumerate(
        zip(ctx.rank_records("outcome"), ctx.rank_records("stepped"), strict=True)
    ):
        expected = applied if record["outcome"] == Outcome.APPLIED else initial
        for name, weight in expected.items():
            comparison = compare_bitwise(ctx.location(name, Part.OPTIMIZER, 0, rank), weight, weights[name])
            yield hint_became_nan(comparison)
        if "norm" in record:
            place = ctx.location("finiteness of norm", Part.REDUCTION, 0, rank)
            yield compare_bitwise(place, scalar(False), record["norm"].isfinite().double())
    yield from judge_windows(ctx, make_ordinary_scenario(ctx.variant))


def compute_stepped_weights(ctx: JudgeContext, initial: Mapping[str, Tensor], clip: float | None) -> dict[str, Tensor]:
    """Return the weights after SGD with a learning rate of 1 subtracted the mean gradients, clipped as torch clips."""
    result = PlainRanks(ctx, make_bad_scenario(ctx.variant), ctx.dtype).run_window(0, initial)
    names = {name for grads in result.grads[0] for name in grads}
    means = {name: sum_terms(name, result) / ctx.data_size for name in names}
    factor = torch.ones(()) if clip is None else compute_clip_factor(clip, total_norm(means))
    return {
        name: weight.double() - means[name] * factor if name in means else weight for name, weight in initial.items()
    }


LAWS = (
    Law(
        name="values.not_finite",
        statement="a step applies infinite or NaN gradients as torch.optim does, or refuses; the next step is right",
        tier=Tier.EXACT,
        models=("experts",),
        observe=observe_not_finite,
        judge=judge_not_finite,
        features=(Feature.PARAMETERS, Feature.CHECKPOINT),
        variants=tuple(
            Variant(f"{name}{suffix}", (*features, *((Feature.CLIP,) if suffix else ())))
            for name, features in VALUE_FEATURES.items()
            for suffix in ("", CLIPPED)
        ),
        dtypes=("fp32",),
        mesh_support=MeshSupport.FINITE_EXPERTS,
        kept_because="the only steps whose gradients are not finite in fp32",
    ),
)
