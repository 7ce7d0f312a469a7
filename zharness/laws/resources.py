"""The laws of resources: bytes held, sent and gathered, nothing left behind, nothing read before it is written.

Formulas: Rajbhandari et al., "ZeRO", sections 5 and 7. Psi is the bytes of one full set of parameters, N the ranks.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines.protocol import AccumulationOwner, Engine, Feature, Resources, Traffic
from zharness.errors import EngineContractError
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law
from zharness.law_kit.optimizer_step import RecordedStep, compare_ranks_after_step, judge_step
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.resources_hook_count import judge_hook_count, observe_hook_count
from zharness.laws.training_accumulation import ZERO_LR_SGD
from zharness.laws.training_sgd_step import SGD, train_and_record_step
from zharness.laws.training_variations import ADAMW
from zharness.parity import Comparison, Part, Tier, compare_bitwise, compare_ranks, compare_within_range

T = TypeVar("T")
ACCUMULATIONS = (1, 2, 3)


def require_observation(engine: Engine, what: str, kind: type[T]) -> T:
    """What the engine tells of itself by that name. Raises EngineContractError where it claims to and does not."""
    found = getattr(engine.observe(), what)
    if not isinstance(found, kind):
        raise EngineContractError(f"observe().{what}: {found.reason}; expected {kind.__qualname__}")
    return found


def record_stage(ctx: RankContext) -> None:
    """The judge is not told the stage, and the formulas depend on it."""
    ctx.record("case", {"stage": torch.tensor(ctx.config.stage)})


def read_stage(ctx: JudgeContext) -> int:
    return int(ctx.rank_records("case")[0]["stage"])


def observe_memory_per_rank(ctx: RankContext) -> None:
    record_stage(ctx)
    engine = ctx.build_engine(optimizer=ADAMW)
    for step in range(2):
        loss = ctx.loss(engine, step)
        between_passes = require_observation(engine, "resources", Resources)
        engine.backward(loss)
        engine.backward(ctx.loss(engine, 2 + step))  # a second one: what is added up takes no more than one
        before = require_observation(engine, "resources", Resources)
        engine.step()
        engine.zero_grad()
    after = require_observation(engine, "resources", Resources)
    held = {"gradients": before.gradients, "parameters": after.parameters, "optimizer_state": after.optimizer_state}
    held[PARAMETERS_AFTER_FORWARD] = between_passes.parameters
    ctx.record("held", {name: scalar(value) for name, value in held.items()})
    engine.close()


PARAMETERS_AFTER_FORWARD = "parameters behind a forward"


def judge_memory_per_rank(ctx: JudgeContext) -> Iterator[Comparison]:
    """Psi, psi and 2 psi, each over N from the stage on that shards it; apart from padding and AdamW's step counts.

    Where parameters are sharded, no more of them than two modules' stays gathered between a forward and its backward.
    """
    stage, shapes = read_stage(ctx), {name: p.shape for name, p in ctx.baseline.build_module().named_parameters()}
    sizes = [shape.numel() for shape in shapes.values()]
    shards = [largest_shard_numel(ctx, name, shape) for name, shape in shapes.items()]
    for name, copies, shards_from in (("parameters", 1, 3), ("gradients", 1, 2), ("optimizer_state", 2, 1)):
        ranks = ctx.world_size if stage >= shards_from else 1
        share = copies * 4 * sum(sizes) / ranks
        padding = copies * 4 * (sum(shards) - sum(sizes) / ranks) if ranks > 1 else 0
        counts = 4 * len(sizes) if name == "optimizer_state" else 0
        for rank, copy in enumerate(ctx.rank_records("held")):
            place = ctx.location(name, Part.GATHER, 0, rank)
            at_most = share + padding + counts
            # A last shard may be short by as much as the others are padded.
            least = share - padding * max(1, ranks - 1)
            yield compare_within_range(place, scalar(least), copy[name], scalar(at_most))
            if name == "parameters" and stage >= shards_from:
                used = ctx.location(PARAMETERS_AFTER_FORWARD, Part.GATHER, 0, rank)
                yield compare_within_range(
                    used, scalar(0), copy[PARAMETERS_AFTER_FORWARD], scalar(at_most + two_largest_modules_bytes(ctx))
                )


def two_largest_modules_bytes(ctx: JudgeContext) -> float:
    """Bytes of the parameters that the two largest modules own."""
    modules = ctx.baseline.build_module().modules()
    return sum(sorted(4.0 * sum(p.numel() for p in module.parameters(recurse=False)) for module in modules)[-2:])


def largest_shard_numel(ctx: JudgeContext, name: str, shape: torch.Size) -> int:
    """Elements of the largest shard of a parameter, padded: cut evenly, or by rows where the layout says so."""
    even, by_rows = -(-shape.numel() // ctx.world_size), -(-shape[0] // ctx.world_size) * shape[1:].numel()
    declared = (piece.stop - piece.start for piece in ctx.evidence[0].layout.get(name, ()))
    return by_rows if max(declared, default=0) == by_rows else even


def observe_comm_volume(ctx: RankContext) -> None:
    record_stage(ctx)
    for steps in ACCUMULATIONS:
        engine = ctx.build_engine(
            optimizer=ZERO_LR_SGD, accumulation_steps=steps, accumulation_owner=AccumulationOwner.ENGINE
        )
        start = require_observation(engine, "traffic", Traffic).sent
        for micro in range(steps):
            batch = ctx.batch(micro)
            engine.backward(ctx.spec.loss(engine(batch.inputs), batch.target))
            engine.step()
        ctx.record("sent", {"sent": scalar(require_observation(engine, "traffic", Traffic).sent - start)}, steps)
        engine.close()


def judge_comm_volume(ctx: JudgeContext) -> Iterator[Comparison]:
    """Stage 0 and 1: 2 psi; stage 2: (A+1) psi; stage 3: 3A psi, less what backward does not read again."""
    stage, sizes = read_stage(ctx), [p.numel() for p in ctx.baseline.build_module().parameters()]
    ranks = ctx.world_size
    psi = 4.0 * sum(sizes)
    for steps in ACCUMULATIONS:
        passes = {0: 2, 1: 2, 2: steps + 1, 3: 3 * steps}[stage]
        padding = 4 * ranks * len(sizes) * passes
        agreement = (
            2 * (2 * len(sizes) + 8) * (steps + 1)
        )  # one byte per parameter, bucket and loss, reduced, each time
        least = 2 * steps * psi if stage == 3 else passes * psi
        most = passes * psi + padding + agreement
        share = (ranks - 1) / ranks
        for rank, copy in enumerate(ctx.rank_records("sent", steps)):
            place = ctx.location("sent", Part.REDUCTION, steps, rank)
            yield compare_within_range(place, scalar(share * least), copy["sent"], scalar(share * most))


PREFETCH_BUCKET_SIZES = (0, 100)  # elements that stage 3 gathers together


def observe_gathered_bytes(ctx: RankContext) -> None:
    record_stage(ctx)
    for bucket in PREFETCH_BUCKET_SIZES:
        zero = {"zero_optimization": {"stage3_prefetch_bucket_size": bucket}}
        engine = ctx.build_engine(optimizer=ZERO_LR_SGD, options=zero)
        for step in range(2):
            batch = ctx.batch(step)
            engine.backward(ctx.spec.loss(engine(batch.inputs), batch.target))
            engine.step()
            engine.zero_grad()
        found = {
            "rest": require_observation(engine, "gathered_bytes", int),
            "peak": require_observation(engine, "traffic", Traffic).peak_gathered,
        }
        ctx.record("gathered", {name: scalar(value) for name, value in found.items()}, bucket)
        engine.close()


def judge_gathered_bytes(ctx: JudgeContext) -> Iterator[Comparison]:
    """0 between steps; at the peak at most the two largest modules and a bucket, and nothing at all below stage 3."""
    for bucket in PREFETCH_BUCKET_SIZES:
        padded = bucket * ctx.world_size  # each of its parameters may have one element, and a shard on every rank
        most = two_largest_modules_bytes(ctx) + 4 * padded if read_stage(ctx) == 3 else 0
        for rank, copy in enumerate(ctx.rank_records("gathered", bucket)):
            yield compare_bitwise(ctx.location("rest", Part.GATHER, 0, rank), scalar(0), copy["rest"])
            yield compare_within_range(
                ctx.location("peak", Part.GATHER, 0, rank), scalar(0), copy["peak"], scalar(most)
            )


WARMUP_ENGINES, ENGINE_COUNT, STEPS = 2, 4, 3
SETTLING_BARRIERS = 8  # more than a backend has threads


def observe_close(ctx: RankContext) -> None:
    """An engine is trained, closed and forgotten; does anything left hold the model that it was given, or watch it?"""
    model = ctx.spec.model(ctx.seed)
    left, shapes = weakref.ref(model), {name: p.shape for name, p in model.named_parameters()}
    train_and_close(ctx, ctx.build_engine_around(model, optimizer=ADAMW))
    whole = all(type(p) is nn.Parameter and p.shape == shapes[name] for name, p in model.named_parameters())
    ctx.record("whole", {"whole": scalar(whole)})
    if is_true_on_all_ranks(ctx, whole):  # a hook that was left may call its peers, who have to be there then
        ctx.record("params", dict(model.named_parameters()))
        model.zero_grad()
        ctx.loss(model, STEPS).backward()  # type: ignore[no-untyped-call]
        ctx.record("own", {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    del model
    gc.collect()
    ctx.record("left", {"model": scalar(left() is not None)})


def is_true_on_all_ranks(ctx: RankContext, value: bool) -> bool:
    """Whether it is so on every rank. Collective."""
    verdict = torch.tensor(int(value), device=ctx.device)
    dist.all_reduce(verdict, dist.ReduceOp.MIN)
    return bool(verdict)


def judge_close(ctx: JudgeContext) -> Iterator[Comparison]:
    """A model whose weights are whole, alike on all ranks, is a plain one again: its backward is a rank's own."""
    yield from compare_ranks(ctx.location("whole", Part.GATHER), [copy["whole"] for copy in ctx.rank_records("whole")])
    if ctx.has_record("own"):
        copies = ctx.rank_records("params")
        for name in copies[0]:
            yield from compare_ranks(ctx.location(name, Part.GATHER), [copy[name] for copy in copies])
        local = ctx.compute_local_grads(STEPS, copies[0])
        yield from ctx.compare_values("own", [one.grads for one in local])
    for rank, copy in enumerate(ctx.rank_records("left")):
        yield compare_bitwise(ctx.location("model", Part.GATHER, 0, rank), scalar(0), copy["model"])


def observe_no_leak(ctx: RankContext) -> None:
    """What this process holds, before and after, each asked twice: one engine trained on, engines closed."""
    engine = ctx.build_engine(optimizer=ADAMW)
    living = [measure_after(partial(train_steps, ctx, engine)) for _ in range(4)]
    engine.close()
    del engine
    closed = [
        measure_after(partial(train_and_close_engines, ctx, engines))
        for engines in (WARMUP_ENGINES - 1, 1, ENGINE_COUNT - 1, 1)
    ]
    # Recorded only now: records are tensors themselves.
    for label, found in (("living", living), ("closed", closed)):
        for at, held in enumerate(found):
            ctx.record(label, {name: scalar(value) for name, value in held.items()}, at)


def measure_after(action: Callable[[], None]) -> dict[str, int]:
    """What this process holds when ``work`` is done."""
    action()
    return measure_process()


def train_and_close_engines(ctx: RankContext, count: int) -> None:
    """So many engines built, trained and closed, one after the other."""
    for _ in range(count):
        train_and_close(ctx, ctx.build_engine(optimizer=ADAMW))


def train_and_close(ctx: RankContext, engine: Engine) -> None:
    """Train and close."""
    train_steps(ctx, engine)
    engine.close()


def train_steps(ctx: RankContext, engine: Engine) -> None:
    """Some steps."""
    for step in range(STEPS):
        batch = ctx.batch(step)
        engine.backward(ctx.spec.loss(engine(batch.inputs), batch.target))
        engine.step()
        engine.zero_grad()


def measure_process() -> dict[str, int]:
    """Tensors that Python can reach, their bytes, this process's threads and its open files. Collective."""
    for _ in range(SETTLING_BARRIERS):
        # A backend's thread lets go of a finished collective's tensors only when the next one is through.
        dist.barrier()
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, Tensor)]
    storages = dict(filter(None, map(get_storage, tensors)))
    found = {"tensors": len(tensors), "bytes": sum(storages.values())}
    for name, folder in (("threads", "/proc/self/task"), ("files", "/proc/self/fd")):
        if os.path.isdir(folder):  # Linux has these
            found[name] = len(os.listdir(folder))
    return found


def get_storage(tensor: Tensor) -> tuple[int, int] | None:
    """Address and bytes; None of a tensor that only stands for others, as a DTensor for its shard, or a sparse one."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except RuntimeError:  # "access the data pointer on an invalid python storage", "storage of SparseTensorImpl"
        return None


def judge_no_leak(ctx: JudgeContext) -> Iterator[Comparison]:
    """The least that is held afterwards is no more than the most that was held before: of what is more, nothing.

    A backend's thread may still hold a tensor when it is asked; what engines leave behind grows with each of them. Told
    is the growth alone: what a process holds in all hangs on what it ran before.
    """
    for label in ("living", "closed"):
        asked = [ctx.rank_records(label, at) for at in range(4)]
        for rank, (first, second, third, fourth) in enumerate(zip(*asked, strict=True)):
            for name in first:
                before, after = torch.maximum(first[name], second[name]), torch.minimum(third[name], fourth[name])
                grown = (after - before).clamp(min=0)
                yield compare_bitwise(ctx.location(name, Part.GATHER, 0, rank), torch.zeros_like(grown), grown)


@contextmanager
def poison_fresh_memory() -> Iterator[None]:
    """Fresh memory is NaN: torch fills it when it is asked for deterministic algorithms."""
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)
        settings.fill_uninitialized_memory = fill


def observe_poisoned_memory(ctx: RankContext) -> None:
    with poison_fresh_memory():
        engine = ctx.build_engine(optimizer=SGD)
        train_and_record_step(ctx, engine)
        engine.close()


def judge_poisoned_memory(ctx: JudgeContext) -> Iterator[Comparison]:
    local = ctx.compute_local_grads()
    yield from ctx.compare_losses(0, local)
    yield from ctx.compare_reduced_grads("grads", [local], exact=ctx.certify_exactness(range(1)))
    yield from judge_step(ctx, SGD, ctx.rank_records("grads")[0], RecordedStep(0))
    yield from compare_ranks_after_step(ctx, RecordedStep(1))


JudgeFunction = Callable[[JudgeContext], Iterator[Comparison]]


def resource_law(
    name: str,
    statement: str,
    observe: Callable[[RankContext], None],
    judge: JudgeFunction,
    *needs: Feature,
    **law_fields: Any,
) -> Law:
    """A check of this group, in the dtype of which formulas count the bytes; ``how`` are further fields of Check."""
    fields = {"models": ("mlp",), "self_compared_variants": ("",), "dtypes": ("fp32",), **law_fields}
    return Law(
        f"resources.{name}",
        statement,
        Tier.EXACT,
        observe=observe,
        judge=judge,
        needs=needs,
        weights_stay_integers=False,
        **fields,
    )


LAWS = (
    resource_law(
        "memory_per_rank",
        "parameters, gradients and optimizer state take the bytes that the stage's formula says, on every rank",
        observe_memory_per_rank,
        judge_memory_per_rank,
        Feature.RESOURCES,
    ),
    resource_law(
        "comm_volume",
        "a step of A micro-batches sends 2 psi (stages 0, 1), (A+1) psi (2), at most 3A psi (3), times (N-1)/N",
        observe_comm_volume,
        judge_comm_volume,
        Feature.TRAFFIC,
        Feature.ENGINE_ACCUMULATION,
    ),
    resource_law(
        "gathered_bytes",
        "nothing stays gathered between steps, and never more than the two largest modules and a bucket",
        observe_gathered_bytes,
        judge_gathered_bytes,
        Feature.TRAFFIC,
    ),
    Law(
        name="resources.close",
        statement="an engine that is closed and forgotten lets go of the model, and watches it no more",
        tier=Tier.EXACT,
        models=("exact",),  # which an engine with kernels of its own can be asked about too
        observe=observe_close,
        judge=judge_close,
        dtypes=("fp32",),
    ),
    resource_law(
        "no_leak",
        "training on keeps no tensor, thread or open file more, and engines that were closed keep none",
        observe_no_leak,
        judge_no_leak,
        Feature.STEADINESS,
    ),
    resource_law(
        "poisoned_memory",
        "a step in which all fresh memory is NaN is the same step",
        observe_poisoned_memory,
        judge_poisoned_memory,
        Feature.STEADINESS,
        models=("mlp", "conv"),
        self_compared_variants=(),
    ),
    resource_law(
        "hook_count",
        "a backward makes O(parameters) Python calls, with checkpoints and without, and a later one no more",
        observe_hook_count,
        judge_hook_count,
        Feature.STEADINESS,
    ),
)
