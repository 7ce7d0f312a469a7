"""Define the law mesh.wire: messages along each axis have the policy's dtype and the formula's element count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from zharness.engines.protocol import Feature, OptimizerSpec
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, MeshSupport, Variant
from zharness.law_kit.observed_collectives import (
    ACTIVATIONS,
    GRADIENTS,
    WEIGHTS,
    CollectiveObserver,
    Sent,
    measure_parameters,
)
from zharness.law_kit.other_norms import is_of_expert
from zharness.law_kit.rank_actions import eval_mode
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.wire import (
    NOTHING,
    Channel,
    Range,
    judge_dtypes,
    judge_elements,
    measure_activations,
    record_sent,
)
from zharness.mesh import CONTEXT, DATA_SHARD, EXPERT, REPLICATE, TENSOR
from zharness.parity import Comparison, Tier

SHARED_INPUT = ("query", "key", "value")  # an engine may send the shared input, and its gradient, once for all three
# The learning rate is 0, so that the gate chooses the same expert for a token in every step.
STANDING = OptimizerSpec("sgd", {"lr": 0.0})
STEPS = range(2)
PADDED_HINT = "copies that no rank splits add up padding, too: less than a row for each parameter"
EVALUATED = STEPS.stop  # the number of the evaluation's micro-batch


def is_activation(tensor: Tensor) -> bool:
    """Return whether a tensor is an activation of the models of this law, whose parameters have fewer dimensions."""
    return tensor.dim() > 2


def observe_wire(ctx: RankContext) -> None:
    """Make two steps and an evaluation, and record how many elements this rank sent in each kind of message."""
    engine = ctx.build_engine(optimizer=STANDING)
    for step in STEPS:
        with CollectiveObserver(ctx, is_activation) as observer:
            ctx.train(engine, step)
            engine.step()
        record_sent(ctx, observer, step)
        engine.zero_grad()
    with CollectiveObserver(ctx, is_activation) as observer, eval_mode(engine), torch.no_grad():
        ctx.loss(engine, EVALUATED)
    record_sent(ctx, observer, EVALUATED)
    engine.close()


def judge_wire(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the dtype of every message with the policy's, and the elements along each axis with the formula.

    Gradients have the reduce dtype, or on cp the dtype that the engine claims. Weights and activations have the cell's
    dtype. The parameters on each rank of tp have P elements. Their gradients are reduced once over the shards, P
    elements plus padding, and once over the copies, as many elements as a shard has. Weights are all-gathered at most
    twice. Along tp, only partial gradients are reduced, once: the gradients of layers that run on a part of the
    sequence. The shards are the ranks of dp_shard and cp together, because each rank of cp has a part of every
    gradient. Along tp, activations are sent once in each direction for each layer of the plan. ``range_of_exchanges``
    gives the activations along cp, and ``range_of_routed_tokens`` those along ep. Ranks along ep are also ranks along
    dp_shard, and the gradients of their experts are reduced along dp_shard alone. Nothing else is sent, and nothing
    along two other axes at once.
    """
    for step in (*STEPS, EVALUATED):
        for rank, record in enumerate(ctx.rank_records("sent", step)):
            sent = {Sent.parse(name): elements for name, elements in record.items()}
            yield from judge_dtypes(ctx, rank, sent, step)
            yield from judge_elements(ctx, rank, sent, list_ranges(ctx, rank, step), step, partial(hint_padding, ctx))


def hint_padding(ctx: JudgeContext, channel: Channel, count: int) -> str:
    """Return a hint if padding each parameter by a row explains the number of gradient elements reduced over copies."""
    shape = ctx.mesh.shape(ctx.world_size)
    params = {name: param.shape for name, param in ctx.baseline.build_module().named_parameters()}
    sizes = measure_parameters(params, ctx.baseline.spec.tp_plan, shape[TENSOR], shards=2)
    is_padded = sizes.local < count <= sizes.local + sizes.padding
    return PADDED_HINT if channel == Channel(GRADIENTS, REPLICATE) and shape[DATA_SHARD] == 1 and is_padded else ""


def list_ranges(ctx: JudgeContext, rank: int, step: int) -> dict[Channel, Range]:
    """Return the ranges of element counts that a rank may send, by channel; an evaluation sends no gradients."""
    shape, experts = ctx.mesh.shape(ctx.world_size), ctx.mesh.size(EXPERT)
    shards, copies = shape[DATA_SHARD] * shape[CONTEXT], shape[REPLICATE]
    sizes_of = {DATA_SHARD: shape[DATA_SHARD], CONTEXT: shape[CONTEXT], EXPERT: experts}
    over_shards = ",".join(axis for axis, size in sizes_of.items() if size > 1) or DATA_SHARD
    params = {name: p.shape for name, p in ctx.baseline.build_module().named_parameters()}
    own = {name: shape for name, shape in params.items() if experts > 1 and is_of_expert(ctx, name)}
    shared = {name: shape for name, shape in params.items() if name not in own}
    sizes = measure_parameters(shared, ctx.baseline.spec.tp_plan, shape[TENSOR], shards)
    padded = sizes.local + sizes.padding
    ranges: dict[tuple[str, str], Range] = {
        (GRADIENTS, TENSOR): (sizes.partial, sizes.partial),
        (GRADIENTS, over_shards): (sizes.local, padded) if shards > 1 else NOTHING,
        (GRADIENTS, REPLICATE): (sizes.local / shards, padded / shards) if copies > 1 else NOTHING,
        (WEIGHTS, over_shards): (0, 2 * padded / shards) if shards > 1 else NOTHING,
        (WEIGHTS, TENSOR): NOTHING,
        (ACTIVATIONS, TENSOR): range_of_activations(ctx),
        (ACTIVATIONS, CONTEXT): range_of_exchanges(ctx),
    }
    if experts > 1:
        ranges |= list_ranges_of_experts(own, experts, shards // experts)
        least, most = range_of_routed_tokens(ctx, rank, step)
        # A forward alone sends half of the elements; a backward sends the other half.
        ranges[ACTIVATIONS, over_shards] = (least, most / 2 if step == EVALUATED else most)
    if step == EVALUATED:
        ranges = {pair: (0, 0 if pair[0] == GRADIENTS else most) for pair, (_, most) in ranges.items()}
    return {Channel(*pair): allowed for pair, allowed in ranges.items()}


def list_ranges_of_experts(params: Mapping[str, Sequence[int]], size: int, shards: int) -> dict[tuple[str, str], Range]:
    """Return the ranges of element counts for gradients and weights of experts, of which a rank holds 1 / ``size``.

    ``shards`` ranks, which differ along dp_shard alone, hold the same experts.
    """
    found = measure_parameters(params, {}, 1, shards)
    least, most = found.local / size, (found.local + found.padding) / size
    return {
        (GRADIENTS, DATA_SHARD): (least, most) if shards > 1 else NOTHING,
        (WEIGHTS, DATA_SHARD): (0, 2 * most / shards) if shards > 1 else NOTHING,
    }


def range_of_activations(ctx: JudgeContext) -> Range:
    """Return the least and the largest number of elements of activations that a rank of tp may send."""
    baseline = ctx.baseline
    plan, tensor_size = baseline.spec.tp_plan, ctx.mesh.size(TENSOR)
    sent = measure_activations(baseline.build_module(), baseline.batch(0, 0), plan, tensor_size)
    total = sum(each.total for each in sent.values())
    return total - sum(sent[module].total for module in SHARED_INPUT[1:] if module in sent), total


def range_of_exchanges(ctx: JudgeContext) -> Range:
    """Return the least and the largest number of elements of activations that a rank of cp may send.

    Attention exchanges parts of the sequence for heads, and back: its inputs, its output and their gradients are each
    sent once. The model's output may also be gathered, to compute a loss over the whole sequence.
    """
    size, elements = ctx.mesh.size(CONTEXT), 0
    if size == 1:
        return NOTHING
    model = ctx.baseline.build_module()

    def count(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Add the elements of one attention."""
        nonlocal elements
        elements += sum(each.numel() for each in (*inputs, output))

    for name in ctx.baseline.spec.cp_plan:
        model.get_submodule(name).register_forward_hook(count)
    output = ctx.baseline.batch(0, 0).feed(model)
    return 2 * elements / size, (2 * elements + output.numel()) / size


def range_of_routed_tokens(ctx: JudgeContext, rank: int, step: int) -> Range:
    """Return the least and the largest number of elements of tokens that a rank of ep may send.

    Each token is sent to its expert and back, and so are the gradients. At most, every expert gets as many rows as the
    fullest expert gets from any rank of the group.
    """
    size, place = ctx.mesh.size(EXPERT), ctx.mesh.data_coordinate(rank, ctx.world_size)
    tokens: Counter[str] = Counter()  # elements of this rank's tokens, by layer
    rows: Counter[str] = Counter()  # elements of one row for every expert, times the fullest expert's rows

    def count(name: str, _gate: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> None:
        """Count the tokens of one layer on one rank."""
        fullest = int(logits.flatten(0, -2).argmax(dim=-1).bincount().max())
        tokens[name] = inputs[0].numel()
        rows[name] = max(rows[name], fullest * logits.shape[-1] * inputs[0].shape[-1])

    for neighbour in range(place - place % size, place - place % size + size):
        model = ctx.baseline.build_module()
        for name in ctx.baseline.spec.ep_plan:
            model.get_submodule(f"{name}.gate").register_forward_hook(partial(count, name))
        ctx.baseline.batch(neighbour, step).feed(model)
    return 4 * tokens.total(), 4 * rows.total()


LAWS = (
    Law(
        name="mesh.wire",
        statement="messages along each axis have the policy's dtype, and gradients are reduced once along each axis",
        tier=Tier.EXACT,
        models=("heads", "sequence", "context", "routed"),
        observe=observe_wire,
        judge=judge_wire,
        features=(Feature.VISIBLE_COLLECTIVES,),
        weights_stay_integers=False,
        variants=(Variant(compares_engine_with_itself=True),),
        dtypes=("fp32", "bf16"),
        mesh_support=MeshSupport.ONLY,
        kept_because="the only law of the dtypes and element counts of messages, by axis",
    ),
)
