"""Define the laws of the group ``mesh``: training on several axes of parallelism gives plain PyTorch's numbers.

The models are exact, so every split of a matrix product, of heads and of a sequence gives the same bits. Two meshes
with equally many micro-batches in a step compute the same numbers: a step on tp2 equals a step on tp1, because both
equal plain PyTorch's step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from zharness.engines.protocol import Engine, Feature, OptimizerSpec
from zharness.engines.tensor_access import require_shard_access
from zharness.law_kit.clipped_step import bound_clipped_parts, compute_first_absolute_grads, judge_clipped_step
from zharness.law_kit.clipping import judge_clip_factor
from zharness.law_kit.given_programs import ProgramForm
from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, MeshSupport, Variant
from zharness.law_kit.optimizer_step import RecordedStep, compare_ranks_after_step, judge_step
from zharness.law_kit.other_norms import Spans, list_owned_spans
from zharness.law_kit.owners import count_owners, judge_owners
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.law_kit.record_comparisons import compare_initial_weights
from zharness.law_kit.split_sums import compare_split_grads
from zharness.laws.training.common import JudgeFunction, ObserveFunction
from zharness.laws.training.grads import judge_one_hot_rank, observe_one_hot_rank
from zharness.laws.training.reduction import judge_no_sync, observe_no_sync
from zharness.parity import Comparison, Part, Tier, compare_bitwise
from zharness.parity.baseline import LocalResult
from zharness.parity.compare import check_names

MODELS = ("exact", "heads", "sequence", "routed")
# Layers that are split by columns and then by rows, without an all-gather in between, and experts.
SPLIT_IN_PAIRS = ("heads", "routed")
MOMENTUM_SGD = OptimizerSpec(name="sgd", args={"lr": 1.0, "momentum": 0.5})
CLIP = 1.0  # below every gradient norm of these models, so that it clips
ABOVE_THE_NORM, ABOVE = "limit_above_the_norm", 2.0**30


def observe_step(ctx: RankContext, clip: float | None = None, model: nn.Module | None = None) -> None:
    """Make one step, and record losses, gradients, the norm, and weights and optimizer state before and after.

    The default of ``model`` is the cell's model.
    """
    model = ctx.spec.model(ctx.seed) if model is None else model
    engine = ctx.build_engine_around(model, optimizer=MOMENTUM_SGD, clip=clip)
    ctx.record_training_state(engine, 0)
    ctx.train(engine, step=0)
    ctx.record("grads", engine.full_grads())
    engine.step()
    norm = engine.grad_norm()
    ctx.record("norm", {} if norm is None else {"norm": scalar(norm)})
    engine.zero_grad()
    ctx.record_training_state(engine, 1)
    engine.close()


def judge_training(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare initial weights, losses and gradients bitwise, and weights and state after the step by SGD's formula."""
    yield from compare_initial_weights(ctx)
    local = ctx.compute_local_grads(step=0)
    yield from ctx.compare_losses(0, local)
    for comparison in ctx.compare_reduced_grads("grads", [local], exact=ctx.certify_exactness(range(1))):
        yield hint_missing_sum(ctx, comparison, local)
    yield from judge_step(ctx, MOMENTUM_SGD, ctx.rank_records("grads")[0], RecordedStep(0, "masters"))
    yield from compare_ranks_after_step(ctx, RecordedStep(1))


def hint_missing_sum(ctx: JudgeContext, comparison: Comparison, local: Sequence[LocalResult]) -> Comparison:
    """Add a hint to a mismatch of a gradient if the sum of the ranks' gradients along an axis is the right gradient."""
    mismatch = comparison.mismatch
    if mismatch is None:
        return comparison
    name = mismatch.parameter
    grads = [record[name] for record in ctx.rank_records("grads")]
    right = torch.stack([result.grads[name] for result in local]).mean(dim=0)
    for axis in ctx.mesh.axes:
        first = ctx.mesh.rank_at_start(axis, mismatch.seen_on, ctx.world_size)
        along = [rank for rank in range(len(grads)) if ctx.mesh.rank_at_start(axis, rank, ctx.world_size) == first]
        if torch.equal(torch.stack([grads[rank] for rank in along]).sum(dim=0), right):
            return add_hint(comparison, f"the gradients of {name} on the ranks along {axis} add up to the right one")
    return comparison


def observe_norm(ctx: RankContext) -> None:
    """Make one step with clipping."""
    observe_step(ctx, get_limit(ctx.variant))


def get_limit(variant: str) -> float:
    """Return the norm to which a variant of ``mesh.norm`` clips."""
    return ABOVE if variant == ABOVE_THE_NORM else CLIP


def judge_norm(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare every rank's norm with the float64 norm of the full gradient, and the step with SGD's clipped step."""
    reported = scalar("norm" in ctx.rank_records("norm")[0])
    yield add_hint(
        compare_bitwise(ctx.location("norm", Part.REDUCTION), scalar(1), reported), "the engine reports none"
    )
    grads = ctx.rank_records("grads")[0]
    factor = yield from judge_clip_factor(ctx, "norm", 0, grads, get_limit(ctx.variant))
    errors = bound_clipped_parts(ctx, partial(compute_first_absolute_grads, ctx))
    yield from judge_step(ctx, MOMENTUM_SGD, grads, RecordedStep(0, "masters"), factor, errors)
    yield from compare_ranks_after_step(ctx, RecordedStep(1))


def judge_clip(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the step with SGD's step on clipped gradients, whose norm counts each logical element once."""
    yield from judge_clipped_step(ctx, MOMENTUM_SGD, CLIP, "masters")


def observe_bias_norm(ctx: RankContext) -> None:
    """Make one step with clipping of a model that trains only the biases of the layers that tp splits.

    Every rank of tp holds the whole bias of a row-wise layer. The share of such biases in the sum of squares of all
    gradients depends on the batch. In ``mesh.clip`` on ``heads`` their share is 1e-6 with 2 ranks: counting them twice
    changes the norm by only a twentieth of its bound. With 4 ranks it is 3e-4, and the change is 14 times the bound. If
    only biases are trained, as here, their share is 1e-3 with 2 ranks and 1e-1 with 4: hundreds of times the bound.
    """
    model = ctx.spec.model(ctx.seed).requires_grad_(False)
    for name in ctx.spec.tp_plan or ():
        for label, param in model.get_submodule(name).named_parameters():
            param.requires_grad_(label == "bias")
    observe_step(ctx, CLIP, model)


def observe_replicas(ctx: RankContext) -> None:
    """Make one step, and record gradients after backward, and weights and optimizer state after the step.

    This rank records full tensors, which may be all-gathered, and also its shards, if the engine lets callers read
    shards.
    """
    engine = ctx.build_engine(optimizer=MOMENTUM_SGD)
    ctx.record("stage", {"stage": scalar(ctx.config.stage)})
    ctx.train(engine, step=0)
    record_replicas(ctx, engine, "gradients", engine.full_grads())
    engine.step()
    engine.zero_grad()
    record_replicas(ctx, engine, "weights", engine.full_params())
    ctx.record_optimizer_state("state", engine, 0)
    engine.close()


def record_replicas(ctx: RankContext, engine: Engine, label: str, full: Mapping[str, Tensor]) -> None:
    """Record full tensors, and this rank's shards if the engine lets callers read shards."""
    ctx.record(f"full {label}", full)
    if ctx.capabilities.refusal(Feature.SHARD_ACCESS) is None:
        shards = require_shard_access(engine)
        read = shards.read_grad_shard if label == "gradients" else shards.read_param_shard
        ctx.record(label, {name: read(name) for name in full})


def judge_replicas(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare replicas of tensors along each axis, and each shard with the elements that ``layout()`` assigns to it."""
    stage = int(ctx.rank_records("stage")[0]["stage"])
    for label, part in (("gradients", Part.REDUCTION), ("weights", Part.OPTIMIZER)):
        for name, tensor in ctx.rank_records(f"full {label}")[0].items():
            owned = [list_owned_spans(ctx, rank, name, tensor.numel()) for rank in range(ctx.world_size)]
            yield from judge_owners(ctx, name, tensor.numel(), owned, count_owners(ctx, stage, name, tensor.shape))
            yield from compare_whole_tensors(ctx, f"full {label}", name, part)
            if ctx.has_record(label):
                shards = [record[name] for record in ctx.rank_records(label)]
                yield from compare_replicas(ctx, name, part, owned, shards)
                yield from compare_shards(ctx, f"full {label}", name, owned, shards)
    states = ctx.rank_records("state")
    for state in states[1:]:
        check_names("full_optimizer_state", states[0], state)
    for name in states[0]:
        yield from compare_whole_tensors(ctx, "state", name, Part.OPTIMIZER)


def compare_whole_tensors(ctx: JudgeContext, label: str, name: str, part: Part) -> Iterator[Comparison]:
    """Compare each rank's full tensor with the full tensor of the rank at coordinate 0, along each axis.

    Most engines all-gather full tensors. DeepSpeed below stage 3 does not gather tensors that tp does not split: a rank
    reports its own copy of the weight, and the gradient that is summed over its own data.
    """
    tensors = [record[name] for record in ctx.rank_records(label)]
    whole: Sequence[Spans] = [((0, tensors[0].numel()),)] * ctx.world_size
    yield from compare_replicas(ctx, name, part, whole, tensors)


def compare_shards(
    ctx: JudgeContext, label: str, name: str, owned: Sequence[Spans], shards: Sequence[Tensor]
) -> Iterator[Comparison]:
    """Compare each rank's shard with the elements of its full tensor that the rank owns."""
    for rank, shard in enumerate(shards):
        flat = ctx.rank_records(label)[rank][name].flatten()
        elements = torch.cat([flat.new_empty(0), *(flat[start:stop] for start, stop in owned[rank])])
        place = ctx.location(name, Part.GATHER, 0, rank)
        count, longest = scalar(shard.numel()), elements.numel() + ctx.world_size - 1  # with padding
        yield compare_bitwise(place, count.clamp(elements.numel(), longest), count)
        if elements.numel() <= shard.numel():
            yield compare_bitwise(place, elements, shard[: elements.numel()])


def compare_replicas(
    ctx: JudgeContext, name: str, part: Part, owned: Sequence[Spans], shards: Sequence[Tensor]
) -> Iterator[Comparison]:
    """Compare each rank's shard with that of the first rank along an axis that owns the same elements."""
    for axis, size in ctx.mesh.shape(ctx.world_size).items():
        for rank in range(ctx.world_size) if size > 1 else ():
            first = find_replica(ctx, axis, rank, owned)
            if first != rank and owned[rank]:
                place = ctx.location(name, part, 0, rank)
                hint = f"along {axis} it differs from its replica on rank {first}"
                yield add_hint(compare_bitwise(place, shards[first], shards[rank]), hint)


def find_replica(ctx: JudgeContext, axis: str, rank: int, owned: Sequence[Spans]) -> int:
    """Return the first rank along ``axis`` that owns the same elements as ``rank``; this may be ``rank`` itself."""
    starts = [ctx.mesh.rank_at_start(axis, each, ctx.world_size) for each in range(ctx.world_size)]
    return next(other for other, start in enumerate(starts) if start == starts[rank] and owned[other] == owned[rank])


def observe_mean_gradient(ctx: RankContext) -> None:
    """Run one backward, and record the reduced gradients."""
    engine = ctx.build_engine()
    ctx.train(engine, step=0)
    ctx.record("grads", engine.full_grads())
    engine.close()


def judge_mean_gradient(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the gradients of rank 0 by tier C with the float64 mean, and those of all ranks with each other."""
    yield from compare_split_grads(ctx, "grads")


def mesh_law(
    name: str,
    statement: str,
    observe: ObserveFunction,
    judge: JudgeFunction,
    *features: Feature,
    kept_because: str,
    models: tuple[str, ...] = MODELS,
    variants: tuple[Variant, ...] = (Variant(),),
    tier: Tier = Tier.STAGED,
    programs: ProgramForm | None = None,
) -> Law:
    """Build a law of the group ``mesh``; its models are exact, unless ``tier`` is the tier of random weights."""
    return Law(
        name=f"mesh.{name}",
        statement=statement,
        tier=tier,
        models=models,
        observe=observe,
        judge=judge,
        features=features,
        variants=variants,
        dtypes=("fp32",),
        programs=programs,
        mesh_support=MeshSupport.ONLY,
        kept_because=kept_because,
    )


LAWS = (
    mesh_law(
        "training",
        "on every mesh, the full gradient, weight and optimizer state of every parameter are plain PyTorch's",
        observe_step,
        judge_training,
        kept_because="the shortest law of a mesh: read it first in a report",
        models=(*MODELS, "mixing"),
    ),
    mesh_law(
        "one_hot",
        "if only one data coordinate has a non-zero loss, the gradients on all ranks come from this coordinate alone",
        observe_one_hot_rank,
        judge_one_hot_rank,
        kept_because="names the data coordinate whose gradient is lost, or counted once for each rank of tp",
    ),
    mesh_law(
        "no_sync",
        "no_sync postpones only the data-parallel reduction: layers that are split still exchange their partial sums",
        observe_no_sync,
        judge_no_sync,
        Feature.NO_SYNC,
        models=(*SPLIT_IN_PAIRS, "sequence"),
        kept_because="the only windows with layers split in pairs, parts of a sequence, or experts on several ranks",
    ),
    mesh_law(
        "replicas",
        "replicas along an axis are bitwise equal after backward and step, and shards hold what layout() says",
        observe_replicas,
        judge_replicas,
        kept_because="names the axis along which replicas differ; all-gathered tensors may hide the difference",
    ),
    mesh_law(
        "norm",
        "the norm that clips gradients counts each element of the full gradient once, even if replicated or split",
        observe_norm,
        judge_norm,
        Feature.CLIP,
        variants=(Variant(), Variant(ABOVE_THE_NORM)),
        kept_because="the only law of a norm over replicated and split gradients",
    ),
    mesh_law(
        "clip",
        "gradients are clipped by the norm of all gradients, each element once, also if the engine reports no norm",
        observe_norm,
        judge_clip,
        Feature.CLIP,
        kept_because="the only law of clipping on a mesh for engines that report no norm, which mesh.norm requires",
    ),
    mesh_law(
        "clip_biases",
        "the norm that clips counts each bias of a split layer once, also a bias that every rank holds",
        observe_bias_norm,
        judge_clip,
        Feature.CLIP,
        kept_because="the only norm of biases alone: in other norms, a bias counted twice may look like rounding",
        models=("heads", "sequence"),
    ),
    mesh_law(
        "mean_gradient",
        "on random weights, the mean gradient of one backward is as close to float64 as that of torch's kernels",
        observe_mean_gradient,
        judge_mean_gradient,
        kept_because="the cheapest law of random weights: it runs one backward for any number of ranks",
        models=("mlp", "transformer"),
        tier=Tier.CALIBRATED,
    ),
)
