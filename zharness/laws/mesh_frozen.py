"""Define the law mesh.frozen: freezing some weights changes no gradient of the other weights, on every mesh."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from torch import nn

from zharness.engines.protocol import Feature
from zharness.law_kit.frozen_weights import freeze, leave_out_grads
from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.optimizer_step import RecordedStep, compare_ranks_after_step, judge_step
from zharness.law_kit.rank_context import RankContext
from zharness.laws.mesh import MOMENTUM_SGD, mesh_law
from zharness.parity import Comparison
from zharness.parity.baseline import LocalResult
from zharness.parity.certificate import Exactness


def find_matrices(model: nn.Module) -> list[str]:
    """Return the names of all weights except vectors; if these are frozen, only biases train."""
    return [name for name, parameter in model.named_parameters() if parameter.dim() > 1]


def find_every_other_layer(model: nn.Module) -> set[str]:
    """Return the names of the weights of every second layer that has a matrix. All experts of a layer are one layer."""
    layers = list(dict.fromkeys(name.partition(".")[0] for name in find_matrices(model)))
    return {name for name, _ in model.named_parameters() if name.partition(".")[0] in layers[::2]}


PATTERNS: Mapping[str, Callable[[nn.Module], Collection[str]]] = {
    "with frozen matrices": find_matrices,
    "with every other layer frozen": find_every_other_layer,
}


def observe_frozen(ctx: RankContext) -> None:
    """Make a step of a new engine for each pattern of frozen weights, and record gradients, weights and state."""
    for label, find_frozen in PATTERNS.items():
        model = ctx.spec.model(ctx.seed)
        engine = ctx.build_engine_around(freeze(model, find_frozen(model)), optimizer=MOMENTUM_SGD)
        ctx.record_training_state(engine, 0, f"-{label}")
        ctx.train(engine, 0, f"loss-{label}")
        ctx.record(f"grads-{label}", engine.full_grads())
        engine.step()
        engine.zero_grad()
        ctx.record_training_state(engine, 1, f"-{label}")
        engine.close()


def judge_frozen(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare losses, the gradients of trained weights, and the step; a frozen weight must not move."""
    local, exact = ctx.compute_local_grads(step=0), ctx.certify_exactness(range(1))
    model = ctx.baseline.build_module()
    for label, find_frozen in PATTERNS.items():
        for comparison in judge_pattern(ctx, label, find_frozen(model), local, exact):
            wrong = comparison.mismatch
            yield comparison if wrong is None else add_hint(comparison, f"{wrong.hint}; " * bool(wrong.hint) + label)


def judge_pattern(
    ctx: JudgeContext, label: str, frozen: Collection[str], local: Sequence[LocalResult], exact: Exactness
) -> Iterator[Comparison]:
    """Compare losses, gradients and step of the engine whose weights ``frozen`` were frozen."""
    yield from ctx.compare_losses(0, local, f"loss-{label}")
    trained = [leave_out_grads(each, frozen) for each in local]
    yield from ctx.compare_reduced_grads(f"grads-{label}", [trained], exact=exact)
    before = RecordedStep(0, f"masters-{label}", f"state-{label}")
    yield from judge_step(ctx, MOMENTUM_SGD, ctx.rank_records(f"grads-{label}")[0], before)
    yield from compare_ranks_after_step(ctx, RecordedStep(1, f"params-{label}", f"state-{label}"))


LAWS = (
    mesh_law(
        "frozen",
        "on every mesh, frozen weights do not move, and backward passes through them to the weights of earlier layers",
        observe_frozen,
        judge_frozen,
        Feature.PARAMETERS,
        models=("heads", "sequence", "routed", "context"),
        kept_because="the only law with frozen weights of layers split in pairs, of experts and of parts of a sequence",
    ),
)
