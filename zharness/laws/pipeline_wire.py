"""Define the law pipeline.wire: messages of stages and replicas have the policy's dtype and the right element count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from zharness.engines.protocol import Feature, WeightGathers
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.observed_collectives import (
    ACTIVATIONS,
    BROADCASTS,
    GRADIENTS,
    WEIGHTS,
    AxisSizes,
    CollectiveObserver,
    Sent,
    flatten,
    measure_parameters,
)
from zharness.law_kit.other_norms import list_owned_spans
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.law_kit.stage_owners import find_stages, get_stage
from zharness.law_kit.wire import (
    NOTHING,
    Activations,
    Channel,
    Range,
    judge_dtypes,
    judge_elements,
    measure_activations,
    record_sent,
)
from zharness.laws.mesh_wire import STANDING
from zharness.laws.pipeline import (
    DEFAULT_SHAPE,
    MICRO_BATCHES,
    SCHEDULES,
    pipeline_law,
    select_schedule,
    train_batch,
)
from zharness.mesh import DATA_SHARD, PIPELINE, REPLICATE, TENSOR
from zharness.parity import Comparison, Tier

FIRST = "first"  # the variant that observes the first batch, in which a schedule may run a stage to infer shapes
OBSERVED = 1  # the number of the batch that is observed
DIRECTIONS = FORWARDS, BACKWARDS = "forwards", "backwards"
GRADIENTS_OVER_DATA = Channel(GRADIENTS, DATA_SHARD)
WEIGHTS_OVER_DATA = Channel(WEIGHTS, DATA_SHARD)


def observe_wire(ctx: RankContext) -> None:
    """Run a batch and a step after a first batch, if any, and record the number of sent elements by kind of message."""
    options = select_schedule(ctx.variant) if ctx.variant != FIRST else {}
    model, calls = ctx.spec.model(ctx.seed), {direction: Counter[str]() for direction in DIRECTIONS}
    for name in ctx.spec.pp_plan:
        model.get_submodule(name).register_forward_hook(partial(count_call, calls, name))
    engine = ctx.build_engine_around(model, optimizer=STANDING, options=options)
    if ctx.variant != FIRST:
        train_batch(ctx, engine, 0, DEFAULT_SHAPE)
        engine.step()
        engine.zero_grad()
    for counts in calls.values():
        counts.clear()
    with CollectiveObserver(ctx, partial(has_samples, len(ctx.batch(0).inputs))) as observer:
        train_batch(ctx, engine, OBSERVED, DEFAULT_SHAPE)
        engine.step()
    record_sent(ctx, observer, OBSERVED)
    for direction, counts in calls.items():
        ctx.record(direction, {name: scalar(counts[name]) for name in ctx.spec.pp_plan}, OBSERVED)
    engine.close()


def count_call(
    calls: Mapping[str, Counter[str]], name: str, _module: nn.Module, _inputs: Any, output: Tensor | Sequence[Tensor]
) -> None:
    """Count a forward of the module ``name``, and count the backwards that reach the module's first output."""
    calls[FORWARDS][name] += 1
    first, *_ = flatten(output)
    if first.requires_grad:
        first.register_hook(lambda _grad: calls[BACKWARDS].update([name]))  # type: ignore[no-untyped-call]


def has_samples(samples: int, tensor: Tensor) -> bool:
    """Return whether a tensor is an activation: unlike parameters, it has one row for each sample of a micro-batch."""
    return tensor.dim() > 1 and len(tensor) == samples


def judge_wire(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the dtype of every message with the policy's, and the elements along each axis with the formula.

    If a module and the next module of the plan are on two ranks, the outputs of each micro-batch are sent once, and
    their gradients are sent back once, both in the dtype of the cell. The gradients of a stage are reduced once over
    the data shards, in the reduce dtype, and once over the copies, as many elements as a shard has. The weights of a
    stage are all-gathered along the shards only if ``layout()`` says that no rank holds all of them, as often as the
    engine claims. Along tp, the layers of a stage send activations in each forward and backward. The last stage may
    send the losses to all other stages. Nothing else is sent: nothing along two axes at once, and no broadcast of
    weights, which DDP does only at construction. The models have no buffers, which DDP would broadcast in a forward.
    """
    modules = measure_modules(ctx)
    for rank, record in enumerate(ctx.rank_records("sent", OBSERVED)):
        judged = leave_out_losses(ctx, rank, {Sent.parse(name): elements for name, elements in record.items()}, modules)
        yield from judge_dtypes(ctx, rank, judged, OBSERVED)
        ranges = list_ranges(ctx, rank, modules)
        explain = partial(explain_elements, ctx, modules, get_stage(ctx, rank), ranges)
        yield from judge_elements(ctx, rank, judged, ranges, OBSERVED, explain)


def leave_out_losses(
    ctx: JudgeContext, rank: int, messages: Mapping[Sent, Tensor], modules: Sequence[MeasuredModule]
) -> Mapping[Sent, Tensor]:
    """Return the messages of a rank without those in which the last stage may send losses to all stages.

    Messages of losses have together at most as many elements as the batch has micro-batches. They may have another
    dtype than the cell, and other values than losses of micro-batches: DeepSpeed sends a replica's mean loss, and the
    mean loss of all replicas.
    """
    copied = [sent for sent in messages if sent.content in (WEIGHTS, BROADCASTS) and sent.axes == PIPELINE]
    is_last = get_stage(ctx, rank) == modules[-1].stage
    if not is_last or sum(int(messages[sent]) for sent in copied) > MICRO_BATCHES:
        return messages
    return {sent: elements for sent, elements in messages.items() if sent not in copied}


@dataclass(frozen=True)
class MeasuredModule:
    """A module of the plan, its coordinate on pp, and the numbers of elements of its parameters and messages.

    ``parameters`` is the number of parameter elements on a rank of tp. ``outputs`` is the number of elements that the
    module sends to the next stage for one micro-batch, and ``split`` the numbers that it sends along tp.
    """

    name: str
    stage: int
    parameters: int
    outputs: int
    split: Activations


def explain_elements(
    ctx: JudgeContext,
    modules: Sequence[MeasuredModule],
    stage: int,
    ranges: Mapping[Channel, Range],
    channel: Channel,
    elements: float,
) -> str:
    """Return a likely cause if a rank of ``stage`` sent a wrong number of elements to data-parallel ranks, or ''."""
    least, most = ranges[channel]
    if channel == WEIGHTS_OVER_DATA and elements > most > 0:
        return f"the engine claims that it gathers weights {ctx.claims.gathers.value}"
    if channel != GRADIENTS_OVER_DATA or most == 0:
        return ""
    if 2 * least <= elements <= 2 * most:
        return "each gradient is reduced twice"
    return describe_one_module(modules, stage, elements) if elements < most else ""


def describe_one_module(modules: Sequence[MeasuredModule], stage: int, elements: float) -> str:
    """Name a module of ``stage`` with this many parameter elements; return '' if none, or if the stage has just one."""
    own = [module for module in modules if module.stage == stage]
    names = [module.name for module in own if module.parameters == elements] if len(own) > 1 else []
    return f"as many as one module of the stage has, such as {names[0]}" if names else ""


def list_ranges(ctx: JudgeContext, rank: int, modules: Sequence[MeasuredModule]) -> dict[Channel, Range]:
    """Return the smallest and largest number of elements that a rank may send, by channel."""
    stage = get_stage(ctx, rank)
    to_stages = {
        Channel(ACTIVATIONS, PIPELINE, str(other)): (elements, elements)
        for other, elements in list_stage_messages(stage, modules).items()
    }
    own = [module for module in modules if module.stage == stage]
    forwards, backwards = ([count_calls(ctx, rank, module, direction) for module in own] for direction in DIRECTIONS)
    along_tensor = sum(
        forward * module.split.forward + backward * module.split.backward
        for module, forward, backward in zip(own, forwards, backwards, strict=True)
    )
    # The forward that infers shapes all-gathers weights in any case.
    is_once = ctx.claims.gathers is WeightGathers.ONCE
    gathers = 1 + max(forwards) - MICRO_BATCHES if is_once else max(forwards) + max(backwards)
    split = {Channel(ACTIVATIONS, TENSOR): (along_tensor, along_tensor)}
    return to_stages | split | list_data_ranges(ctx, rank, gathers)


def count_calls(ctx: JudgeContext, rank: int, module: MeasuredModule, direction: str) -> int:
    """Return the right number of forwards or backwards of a module on ``rank``: one for each micro-batch.

    In the first batch there may be one more, which infers shapes; the first stage runs no backward for it.
    """
    observed = int(ctx.rank_records(direction, OBSERVED)[rank][module.name])
    return min(max(observed, MICRO_BATCHES), MICRO_BATCHES + int(ctx.variant == FIRST))


def list_data_ranges(ctx: JudgeContext, rank: int, gathers: int) -> dict[Channel, Range]:
    """Return the smallest and largest number of elements that a rank may send along the data-parallel axes.

    The rank all-gathers weights at most ``gathers`` times.
    """
    stage, shape = get_stage(ctx, rank), ctx.mesh.shape(ctx.world_size)
    shards, copies = shape[DATA_SHARD], shape[REPLICATE]
    own = {
        name: param.shape
        for name, param in ctx.baseline.build_module().named_parameters()
        if stage in find_stages(ctx, name, param.numel())
    }
    sizes = measure_parameters(own, ctx.baseline.spec.tp_plan, ctx.mesh.size(TENSOR), shards)
    owned = sum(stop - start for name in own for start, stop in list_owned_spans(ctx, rank, name, own[name].numel()))
    are_sharded, reduced = owned < sizes.local, (sizes.local, sizes.local + sizes.padding)
    if copies > 1 and shards > 1 and not are_sharded:  # data-parallel ranks with all weights form one group
        return {Channel(GRADIENTS, f"{REPLICATE},{DATA_SHARD}"): reduced}
    return {
        GRADIENTS_OVER_DATA: reduced if shards > 1 else NOTHING,
        Channel(GRADIENTS, REPLICATE): (reduced[0] / shards, reduced[1] / shards) if copies > 1 else NOTHING,
        WEIGHTS_OVER_DATA: range_of_gathers(sizes, shards, gathers) if are_sharded else NOTHING,
    }


def range_of_gathers(sizes: AxisSizes, shards: int, most: int) -> Range:
    """Return the numbers of weight elements that a rank with one shard sends in one and in ``most`` all-gathers."""
    return (sizes.local - sizes.padding) / shards, most * (sizes.local + sizes.padding) / shards


def list_stage_messages(stage: int, modules: Sequence[MeasuredModule]) -> Counter[int]:
    """Return the number of elements that a rank of ``stage`` sends to each other coordinate on pp in a batch."""
    elements: Counter[int] = Counter()
    for module, following in pairwise(modules):
        if module.stage != following.stage and stage in (module.stage, following.stage):
            other = following.stage if stage == module.stage else module.stage
            elements[other] += MICRO_BATCHES * module.outputs
    return elements


def measure_modules(ctx: JudgeContext) -> list[MeasuredModule]:
    """Return the modules of the plan in order, with element counts measured in a forward of the plain model."""
    model, spec = ctx.baseline.build_module(), ctx.baseline.spec
    outputs: dict[str, int] = {}

    def count(name: str, _module: nn.Module, _inputs: Any, output: Tensor | Sequence[Tensor]) -> None:
        """Count the outputs of one module."""
        outputs[name] = sum(tensor.numel() for tensor in flatten(output))

    for name in spec.pp_plan:
        model.get_submodule(name).register_forward_hook(partial(count, name))
    batch = ctx.baseline.batch(0, 0)
    batch.feed(model)
    split = measure_activations(ctx.baseline.build_module(), batch, spec.tp_plan, ctx.mesh.size(TENSOR))
    return [measure_module(ctx, model, name, outputs[name], split) for name in spec.pp_plan]


def measure_module(
    ctx: JudgeContext, model: nn.Module, name: str, outputs: int, split: Mapping[str, Activations]
) -> MeasuredModule:
    """Measure the module ``name``; all parameters of the module are on one coordinate of pp."""
    shapes = {f"{name}.{each}": param.shape for each, param in model.get_submodule(name).named_parameters()}
    (stage,) = set.intersection(*(find_stages(ctx, each, shape.numel()) for each, shape in shapes.items()))
    own = measure_parameters(shapes, ctx.baseline.spec.tp_plan, ctx.mesh.size(TENSOR), shards=1).local
    layers = (elements for layer, elements in split.items() if f"{layer}.".startswith(f"{name}."))
    along_tensor = sum(layers, Activations())
    return MeasuredModule(name, stage, own, outputs, along_tensor)


_LAW = pipeline_law(
    "wire",
    "each micro-batch crosses each stage border once per direction, gradients are reduced once, nothing else is sent",
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
    kept_because="the only law of the dtypes and element counts of stages' messages",
)

LAWS = (replace(_LAW, tier=Tier.EXACT, dtypes=("fp32", "bf16"), weights_stay_integers=False),)
