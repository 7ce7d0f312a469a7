"""The laws of training that are told by varying one thing: the loss's scale, the options, the order of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zharness.engines.protocol import Absent, Engine, Feature, OptimizerSpec, Reduction
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law
from zharness.law_kit.optimizer_step import ClippedSgdStep
from zharness.law_kit.pairwise import build_pairwise_rows
from zharness.law_kit.rank_context import RankContext
from zharness.laws.training_accumulation import ZERO_LR_SGD, judge_clip_factor
from zharness.laws.training_modes import judge_modes, observe_modes
from zharness.laws.training_observer_effect import judge_looked_at, observe_looked_at
from zharness.laws.training_several_backwards import judge_several_backwards, observe_several_backwards
from zharness.laws.training_sgd_step import SGD, eval_mode, judge_sgd_step, observe_sgd_step
from zharness.laws.training_trajectory import compare_forward
from zharness.parity import Comparison, Part, Tier, compare_bitwise, compare_ranks

ObserveFunction = Callable[[RankContext], None]
JudgeFunction = Callable[[JudgeContext], Iterator[Comparison]]

MODELS = ("mlp", "transformer")
LOSS_POWERS = (0, 3, -2)
MOVING_WEIGHTS: Mapping[str, Any] = {
    "weights_stay_integers": False,
    "self_compared_variants": ("",),
}  # weights that move, as the engine's numbers say
ADAMW = OptimizerSpec(name="adamw", args={"lr": 1e-2})
STEPS = 2


def observe_loss_scale_power(ctx: RankContext) -> None:
    engine = ctx.build_engine(optimizer=ZERO_LR_SGD)
    for at, power in enumerate(LOSS_POWERS):
        batch = ctx.batch(0)
        engine.backward(ctx.spec.loss(engine(batch.inputs), batch.target) * 2.0**power)
        ctx.record("grads", engine.full_grads(), at)
        engine.step()
        engine.zero_grad()
    engine.close()


def judge_loss_scale_power(ctx: JudgeContext) -> Iterator[Comparison]:
    yield from ctx.compare_reduced_grads("grads", [ctx.compute_local_grads()], exact=ctx.certify_exactness(range(1)))
    for at, power in enumerate(LOSS_POWERS):
        if (
            not ctx.has_single_reduction_order()
        ):  # DDP packs its buckets anew after the first backward, and so adds otherwise
            yield from ctx.compare_reduced_grads("grads", [ctx.compute_local_grads()], at, scale=2.0**power)
            continue
        for rank, copy in enumerate(ctx.rank_records("grads", at)):
            for name, grad in ctx.rank_records("grads")[0].items():
                yield compare_bitwise(
                    ctx.location(name, Part.REDUCTION, at, rank), grad.double() * 2.0**power, copy[name]
                )


def observe_ranks_agree(ctx: RankContext) -> None:
    engine = ctx.build_engine(optimizer=ADAMW, clip=1.0)
    for step in range(STEPS):
        engine.backward(ctx.loss(engine, step))
        engine.step()
        engine.zero_grad()
        ctx.record("params", engine.full_params(), step)
        ctx.record_optimizer_state("state", engine, step)
        ctx.record("buffers", dict(engine.module.named_buffers()), step)
        ctx.record("facts", collect_engine_numbers(engine), step)
    engine.close()


def collect_engine_numbers(engine: Engine) -> dict[str, Tensor]:
    """The numbers that an engine tells about itself, as far as it tells them."""
    seen = engine.observe()
    told = {"norm": engine.grad_norm(), "loss scale": seen.loss_scale, "skipped steps": seen.skipped_steps}
    return {
        name: torch.tensor(value, dtype=torch.float64)
        for name, value in told.items()
        if value is not None and not isinstance(value, Absent)
    }


def judge_ranks_agree(ctx: JudgeContext) -> Iterator[Comparison]:
    for step in range(STEPS):
        for label in ("params", "state", "buffers", "facts"):
            copies = ctx.rank_records(label, step)
            for name in copies[0]:
                yield compare_bitwise(ctx.location(name, Part.GATHER, step), copies[0][name], copies[0][name])
                yield from compare_ranks(ctx.location(name, Part.GATHER, step), [copy[name] for copy in copies])


def observe_config_invariance(ctx: RankContext) -> None:
    for row, options in enumerate([{}, *build_pairwise_rows(ctx.capabilities.variants)]):
        engine = ctx.build_engine(optimizer=SGD, options=options)
        batch = ctx.batch(0)
        engine.backward(ctx.spec.loss(engine(batch.inputs), batch.target))
        ctx.record("grads", engine.full_grads(), row)
        engine.step()
        ctx.record("params", engine.full_params(), row)
        engine.close()


def judge_config_invariance(ctx: JudgeContext) -> Iterator[Comparison]:
    local = ctx.compute_local_grads()
    for row in (snapshot.step for snapshot in ctx.evidence[0].snapshots if snapshot.label == "grads"):
        yield from ctx.compare_reduced_grads("grads", [local], row, ctx.certify_exactness(range(1)))
        for label, part in (("grads", Part.REDUCTION), ("params", Part.OPTIMIZER)) * ctx.has_single_reduction_order():
            first = ctx.rank_records(label)[0]
            for rank, copy in enumerate(ctx.rank_records(label, row)):
                for name, tensor in first.items():
                    yield compare_bitwise(ctx.location(name, part, row, rank), tensor, copy[name])


def observe_sum_or_mean(ctx: RankContext) -> None:
    for reduction in Reduction:
        engine = ctx.build_engine(reduction=reduction)
        engine.backward(ctx.loss(engine, 0, f"loss-{reduction.value}"))
        ctx.record(f"grads-{reduction.value}", engine.full_grads())
        engine.close()


def judge_sum_or_mean(ctx: JudgeContext) -> Iterator[Comparison]:
    local, exact = ctx.compute_local_grads(), ctx.certify_exactness(range(1))
    yield from ctx.compare_reduced_grads("grads-mean", [local], exact=exact)
    yield from ctx.compare_reduced_grads("grads-sum", [local], exact=exact, scale=ctx.world_size)


WINDOWS = (range(4), range(4, 8))
ABANDONED_STEPS = range(8, 10)
FINAL_WINDOW = range(10, 11)


def observe_no_sync(ctx: RankContext) -> None:
    """Windows of two blocks, two that are given up, a block that raises; what is left behind would show at last."""
    engine = ctx.build_engine(optimizer=ZERO_LR_SGD)
    for at, (first, second, third, last) in enumerate(WINDOWS):
        for block in ((first,), (second, third)):
            with engine.no_sync():
                for step in block:
                    engine.backward(ctx.loss(engine, step) / 4)
        engine.backward(ctx.loss(engine, last) / 4)
        ctx.record("grads", engine.full_grads(), at)
        engine.step()
        engine.zero_grad()
    for step in ABANDONED_STEPS:
        with engine.no_sync():
            engine.backward(ctx.loss(engine, step))
        engine.zero_grad()
    with suppress(InterruptedError), engine.no_sync():
        raise InterruptedError
    engine.backward(ctx.loss(engine, FINAL_WINDOW.start))
    ctx.record("grads", engine.full_grads(), len(WINDOWS))
    engine.close()


def judge_no_sync(ctx: JudgeContext) -> Iterator[Comparison]:
    for at, steps in enumerate((*WINDOWS, FINAL_WINDOW)):
        yield from ctx.compare_reduced_grads(
            "grads", [ctx.compute_local_grads(step) for step in steps], at, ctx.certify_exactness(steps)
        )


CLIP_NORMS = (1e-2, 1e6)


def observe_clip_and_norm(ctx: RankContext) -> None:
    for at, clip in enumerate(CLIP_NORMS):
        engine = ctx.build_engine(optimizer=SGD, clip=clip)
        ctx.record_weights(engine, at, "-before")
        batch = ctx.batch(0)
        engine.backward(ctx.spec.loss(batch.feed(engine), batch.target))
        ctx.record("grads", engine.full_grads(), at)
        engine.step()
        norm = engine.grad_norm()
        ctx.record("norm", {"norm": torch.tensor(torch.nan if norm is None else norm, dtype=torch.float64)}, at)
        ctx.record_weights(engine, at, "-after")
        engine.close()


def judge_clip_and_norm(ctx: JudgeContext) -> Iterator[Comparison]:
    """The norm of the union of all gradients, and w - factor x g, with torch.nn.utils.clip_grad_norm_'s factor."""
    for at, clip in enumerate(CLIP_NORMS):
        grads, before = ctx.rank_records("grads", at)[0], ctx.rank_records("masters-before", at)[0]
        factor = yield from judge_clip_factor(ctx, "norm", at, grads, clip)
        after = ctx.rank_records("masters-after", at)
        for name, weight in before.items():
            step = ClippedSgdStep(weight, grads.get(name, torch.zeros_like(weight)), factor)
            everyone, place = [copy[name] for copy in after], partial(ctx.location, name, Part.OPTIMIZER, at)
            yield from step.compare_in_pieces(ctx, everyone, place(0)) or (
                step.compare_weight(place(rank), copy) for rank, copy in enumerate(everyone)
            )


FORWARD_MODES: dict[str, Callable[[Engine], AbstractContextManager[object]]] = {
    "eval": eval_mode,
    "no_grad": lambda _: torch.no_grad(),
    "inference": lambda _: torch.inference_mode(),
}


def observe_forward_alone(ctx: RankContext) -> None:
    """A forward without backward before each backward, and before a step: weights move, which no certificate is of."""
    engine = ctx.build_engine(optimizer=SGD)
    for step in range(STEPS):
        ctx.record("params", engine.full_params(), step)
        with FORWARD_MODES[ctx.variant](engine):
            ctx.loss(engine, 10 + step)
        gathered = engine.observe().gathered_bytes
        if not isinstance(gathered, Absent):
            ctx.record("left", {"gathered": torch.tensor(gathered)}, step)
        engine.backward(ctx.loss(engine, step))
        ctx.record("grads", engine.full_grads(), step)
        with FORWARD_MODES[ctx.variant](engine):
            ctx.loss(engine, 20 + step)
        engine.step()
        engine.zero_grad()
    engine.close()


def judge_forward_alone(ctx: JudgeContext) -> Iterator[Comparison]:
    for step in range(STEPS):
        params = ctx.rank_records("params", step)[0]
        for at in (10 + step, 20 + step):
            yield from compare_forward(ctx, step, ctx.compute_local_grads(at, params), at)
        if ctx.has_record("left"):
            for rank, copy in enumerate(ctx.rank_records("left", step)):
                yield compare_bitwise(
                    ctx.location("gathered", Part.GATHER, step, rank), torch.tensor(0), copy["gathered"]
                )
        local = ctx.compute_local_grads(step, params)
        yield from ctx.compare_losses(step, local)
        yield from ctx.compare_reduced_grads("grads", [local], step)


def variation_law(name: str, statement: str, observe: ObserveFunction, judge: JudgeFunction, **law_fields: Any) -> Law:
    """A check of this group; ``how`` are further fields of Check."""
    fields = {
        "tier": Tier.STAGED,
        "models": MODELS[:1],
        **law_fields,
        "needs": (Feature.VARIATIONS, *law_fields.get("needs", ())),
    }
    return Law(name=f"training.{name}", statement=statement, observe=observe, judge=judge, **fields)


LAWS = (
    variation_law(
        "loss_scale_power",
        "a loss times a power of two gives gradients times that power, bitwise",
        observe_loss_scale_power,
        judge_loss_scale_power,
        tier=Tier.EXACT,
        models=MODELS,
        dtypes=("fp32", "bf16"),  # in fp16 a gradient divided by four may underflow, and then loses bits
    ),
    variation_law(
        "sgd_step",
        "SGD at a rate of 1 moves every weight by its reduced gradient, where layout() says, no generator, no switch",
        observe_sgd_step,
        judge_sgd_step,
        models=MODELS,
        **MOVING_WEIGHTS,
        user_model_variants=("",),
    ),
    variation_law(
        "looked_at",
        "an engine that is asked for all that it shows, at every turn and twice, trains as one that nobody looks at",
        observe_looked_at,
        judge_looked_at,
        tier=Tier.EXACT,
        **MOVING_WEIGHTS,
    ),
    variation_law(
        "modes",
        "dropout, batch norm and evaluation are vanilla's, on the caller's generator and in the caller's mode",
        observe_modes,
        judge_modes,
        models=("stateful",),
        weights_stay_integers=False,
        dtypes=("fp32",),  # running statistics stay fp32, which a batch norm of lower weights may refuse
    ),
    variation_law(
        "ranks_agree",
        "weights, buffers, optimizer state, norm, loss scale and skipped steps are equal on all ranks after every step",
        observe_ranks_agree,
        judge_ranks_agree,
        tier=Tier.EXACT,
        needs=(Feature.CLIP,),
        **MOVING_WEIGHTS,
        user_model_variants=("",),
    ),
    variation_law(
        "config_invariance",
        "the engine's variants, any two of them together where they can be, change no number",
        observe_config_invariance,
        judge_config_invariance,
        needs=(Feature.VARIANTS,),
        models=("mlp", "exact"),
    ),
    variation_law(
        "sum_or_mean",
        "gradients are reduced by the mean over ranks or by the sum, as asked",
        observe_sum_or_mean,
        judge_sum_or_mean,
        models=("mlp", "exact", "transformer"),
        needs=(Feature.SUM,),
    ),
    variation_law(
        "no_sync",
        "backwards inside no_sync count with the first one outside, and are forgotten with it",
        observe_no_sync,
        judge_no_sync,
        models=("mlp", "exact"),
        needs=(Feature.NO_SYNC,),
    ),
    variation_law(
        "several_backwards",
        "several forwards, losses and backwards before one step accumulate, at accumulation 1 too",
        observe_several_backwards,
        judge_several_backwards,
        needs=(Feature.RETAIN_GRAPH,),
        variants=(("", ()), *((name, (Feature.ENGINE_ACCUMULATION,)) for name in ("window", "given_up"))),
    ),
    variation_law(
        "clip_and_norm",
        "the reported norm is that of all gradients together, and the step is made with the gradients clipped by it",
        observe_clip_and_norm,
        judge_clip_and_norm,
        models=MODELS,
        needs=(Feature.CLIP,),
        **MOVING_WEIGHTS,
        user_model_variants=("",),
    ),
    variation_law(
        "forward_alone",
        "a forward without backward leaves nothing behind: in eval mode, under no_grad, in inference mode",
        observe_forward_alone,
        judge_forward_alone,
        variants=tuple((name, ()) for name in FORWARD_MODES),
        user_model_variants=("no_grad",),
    ),
)
