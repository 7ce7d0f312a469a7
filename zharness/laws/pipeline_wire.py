"""Define the law pipeline.wire: what stages and replicas send has the dtype of the policy, and as many elements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from zharness.engines.protocol import Feature
from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.observed_collectives import (
    ACTIVATIONS,
    GRADIENTS,
    WEIGHTS,
    CollectiveObserver,
    Sent,
    flatten,
    measure_parameters,
)
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.mesh_wire import ACTIVATION_DIMS, STANDING, judge_dtypes, record_sent
from zharness.laws.pipeline import (
    DEFAULT_SHAPE,
    MICRO_BATCHES,
    SCHEDULES,
    pipeline_law,
    select_schedule,
    train_batch,
)
from zharness.laws.pipeline_replicas import find_stages, get_stage
from zharness.mesh import DATA_SHARD, PIPELINE, TENSOR
from zharness.parity import Comparison, Part, Tier, compare_bitwise, compare_within_range

FIRST = "first"  # the variant that observes the first batch, in which a schedule may run a stage to learn shapes
OBSERVED = 1  # the number of the batch that is observed


def observe_wire(ctx: RankContext) -> None:
    """Run a batch and a step, and record how many elements this rank sent, by kind of message; others come before."""
    options = select_schedule(ctx.variant) if ctx.variant != FIRST else {}
    engine = ctx.build_engine(optimizer=STANDING, options=options)
    if ctx.variant != FIRST:
        train_batch(ctx, engine, 0, DEFAULT_SHAPE)
        engine.step()
        engine.zero_grad()
    with CollectiveObserver(ctx, ACTIVATION_DIMS) as observer:
        train_batch(ctx, engine, OBSERVED, DEFAULT_SHAPE)
        engine.step()
    record_sent(ctx, observer, OBSERVED)
    engine.close()


def judge_wire(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare what each rank sends along pp and along the data with the formulas, and its dtype with the policy's.

    Where a module and the next one of the plan are on two ranks, the outputs of each micro-batch are sent once, and
    their gradients come back once, both in the dtype of the cell. Beside them no rank sends as many elements along pp
    as the outputs of one module have. The gradients of a stage are reduced once over the data, in the reduce dtype, and
    its weights are gathered at most twice for each micro-batch. What ranks of tp send is not judged here.
    """
    modules = measure_modules(ctx)
    expected, least = list_stage_messages(ctx, modules), min(module.outputs for module in modules)
    for rank, record in enumerate(ctx.rank_records("sent", OBSERVED)):
        messages = {Sent.parse(name): elements for name, elements in record.items()}
        yield from judge_stage_messages(ctx, rank, messages, expected[get_stage(ctx, rank)], least)
        yield from judge_data_messages(ctx, rank, messages, modules)


@dataclass(frozen=True)
class MeasuredModule:
    """A module of the plan: the coordinate on pp of its parameters, and the elements of these and of its outputs.

    The outputs are those of one micro-batch.
    """

    name: str
    stage: int
    parameters: int
    outputs: int


def judge_stage_messages(
    ctx: JudgeContext, rank: int, messages: Mapping[Sent, Tensor], expected: Mapping[int, int], least_outputs: int
) -> Iterator[Comparison]:
    """Compare what a rank sends to each other stage, and that what else it sends along pp is less than any outputs."""
    on_pp = {message: elements for message, elements in messages.items() if PIPELINE in message.axes.split(",")}
    to_stages = {m: elements for m, elements in on_pp.items() if m.axes == PIPELINE and m.content == ACTIVATIONS}
    yield from judge_dtypes(ctx, rank, to_stages, OBSERVED)
    counts: Counter[int] = Counter()
    for message, elements in to_stages.items():
        counts[int(message.receiver)] += int(elements)
    for stage in sorted({*expected, *counts}):
        place = ctx.location(f"elements of activations to pp {stage}", Part.REDUCTION, OBSERVED, rank)
        yield compare_bitwise(place, scalar(expected.get(stage, 0)), scalar(counts[stage]))
    others = sum(float(elements) for message, elements in on_pp.items() if message not in to_stages)
    place = ctx.location("elements of other messages along pp", Part.REDUCTION, OBSERVED, rank)
    yield compare_within_range(place, scalar(0), scalar(others), scalar(least_outputs - 1))


def judge_data_messages(
    ctx: JudgeContext, rank: int, messages: Mapping[Sent, Tensor], modules: Sequence[MeasuredModule]
) -> Iterator[Comparison]:
    """Compare what a rank sends along the data with the gradients of its stage, and with the weights."""
    on_data = {message: elements for message, elements in messages.items() if message.axes == DATA_SHARD}
    yield from judge_dtypes(ctx, rank, on_data, OBSERVED)
    for content, (least, most) in list_data_ranges(ctx, get_stage(ctx, rank)).items():
        elements = sum(float(n) for message, n in on_data.items() if message.content == content)
        place = ctx.location(f"elements of {content} along {DATA_SHARD}", Part.REDUCTION, OBSERVED, rank)
        comparison = compare_within_range(place, scalar(least), scalar(elements), scalar(most))
        hint = describe_one_module(modules, get_stage(ctx, rank), elements) if elements < most else ""
        hint = "each gradient is reduced twice" if 2 * least <= elements <= 2 * most and content == GRADIENTS else hint
        yield add_hint(comparison, hint) if hint else comparison


def describe_one_module(modules: Sequence[MeasuredModule], stage: int, elements: float) -> str:
    """Return which module of ``stage`` has so many elements of parameters, where the stage has several; '' if none."""
    own = [module for module in modules if module.stage == stage]
    names = [module.name for module in own if module.parameters == elements] if len(own) > 1 else []
    return f"as many as one module of the stage has, such as {names[0]}" if names else ""


def list_data_ranges(ctx: JudgeContext, stage: int) -> dict[str, tuple[float, float]]:
    """Return the least and the largest number of elements that a rank of ``stage`` may send along the data."""
    shape = ctx.mesh.shape(ctx.world_size)
    shards = shape[DATA_SHARD]
    own = {
        name: param.shape
        for name, param in ctx.baseline.build_module().named_parameters()
        if stage in find_stages(ctx, name, param.numel())
    }
    sizes = measure_parameters(own, ctx.baseline.spec.tp_plan, shape[TENSOR], shards)
    padded_elements = sizes.local + sizes.padding
    ranges: dict[str, tuple[float, float]] = {
        GRADIENTS: (sizes.local, padded_elements),
        WEIGHTS: (0, 2 * MICRO_BATCHES * padded_elements / shards),
        ACTIVATIONS: (0, 0),
    }
    return ranges if shards > 1 else dict.fromkeys(ranges, (0, 0))


def list_stage_messages(ctx: JudgeContext, modules: Sequence[MeasuredModule]) -> Mapping[int, Counter[int]]:
    """Return, for each coordinate on pp, the elements that its ranks send to each other one in a batch."""
    messages: dict[int, Counter[int]] = {stage: Counter() for stage in range(ctx.mesh.size(PIPELINE))}
    for module, following in pairwise(modules):
        if module.stage != following.stage:
            messages[module.stage][following.stage] += MICRO_BATCHES * module.outputs
            messages[following.stage][module.stage] += MICRO_BATCHES * module.outputs
    return messages


def measure_modules(ctx: JudgeContext) -> list[MeasuredModule]:
    """Return the modules of the plan, in their order, measured in a forward of the plain model."""
    model = ctx.baseline.build_module()
    outputs: dict[str, int] = {}

    def count(name: str, _module: nn.Module, _inputs: Any, output: Tensor | Sequence[Tensor]) -> None:
        """Count the outputs of one module."""
        outputs[name] = sum(tensor.numel() for tensor in flatten(output))

    for name in ctx.baseline.spec.pp_plan:
        model.get_submodule(name).register_forward_hook(partial(count, name))
    ctx.baseline.batch(0, 0).feed(model)
    return [measure_module(ctx, model, name, outputs[name]) for name in ctx.baseline.spec.pp_plan]


def measure_module(ctx: JudgeContext, model: nn.Module, name: str, outputs: int) -> MeasuredModule:
    """Return the module ``name``, all of whose parameters are on one coordinate of pp."""
    sizes = {f"{name}.{each}": param.numel() for each, param in model.get_submodule(name).named_parameters()}
    (stage,) = set.intersection(*(find_stages(ctx, each, elements) for each, elements in sizes.items()))
    return MeasuredModule(name, stage, sum(sizes.values()), outputs)


_LAW = pipeline_law(
    "wire",
    "each border of two stages is crossed once forward and once back, and gradients are reduced once over the data",
    observe_wire,
    judge_wire,
    (
        *(
            Variant(name, schedules=(name,), micro_batches=MICRO_BATCHES, compares_engine_with_itself=True)
            for name in SCHEDULES
        ),
        Variant(FIRST, compares_engine_with_itself=True),
    ),
    Feature.VISIBLE_COLLECTIVES,
    models=("chain", "skips"),
    kept_because="the only law of dtypes and elements that stages send",
)

LAWS = (replace(_LAW, tier=Tier.EXACT, dtypes=("fp32", "bf16"), weights_stay_integers=False),)
