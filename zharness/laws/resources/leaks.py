"""Define laws that find leaks: a closed engine leaves no hook or object, and longer training adds no object."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines.protocol import Engine, Feature
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law
from zharness.law_kit.optimizers import PLAIN_ADAMW
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.law_kit.record_comparisons import compare_record_of_ranks
from zharness.laws.resources.common import resource_law
from zharness.parity import Comparison, Part, Tier, compare_bitwise, compare_ranks

WARMUP_ENGINES, ENGINE_COUNT, STEPS = 2, 4, 3

SETTLING_BARRIERS = 8  # more barriers than a backend has threads


def observe_close(ctx: RankContext) -> None:
    """Train, close and delete an engine, and record whether its model is unsharded, can train alone, and is freed."""
    model = ctx.spec.model(ctx.seed)
    left, shapes = weakref.ref(model), {name: p.shape for name, p in model.named_parameters()}
    train_and_close(ctx, ctx.build_engine_around(model, optimizer=PLAIN_ADAMW))
    whole = all(type(p) is nn.Parameter and p.shape == shapes[name] for name, p in model.named_parameters())
    ctx.record("whole", {"whole": scalar(whole)})
    if is_true_on_all_ranks(ctx, whole):  # on all ranks or on no rank, because a leftover hook may run a collective
        ctx.record("params", dict(model.named_parameters()))
        model.zero_grad()
        ctx.loss(model, STEPS).backward()  # type: ignore[no-untyped-call]
        ctx.record("own", {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    del model
    gc.collect()
    ctx.record("left", {"model": scalar(left() is not None)})


def is_true_on_all_ranks(ctx: RankContext, value: bool) -> bool:
    """Return whether ``value`` is true on every rank. Every rank has to call this function."""
    flag = torch.tensor(int(value), device=ctx.device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def judge_close(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that the model is freed, and that its backward after the engine is closed equals plain PyTorch's."""
    yield from compare_ranks(
        ctx.location("whole", Part.GATHER), [record["whole"] for record in ctx.rank_records("whole")]
    )
    if ctx.has_record("own"):
        yield from compare_record_of_ranks(ctx, "params", 0, 0)
        local = ctx.compute_local_grads(STEPS, ctx.rank_records("params")[0])
        yield from ctx.compare_values("own", [result.grads for result in local])
    for rank, record in enumerate(ctx.rank_records("left")):
        yield compare_bitwise(ctx.location("model", Part.GATHER, 0, rank), scalar(0), record["model"])


def observe_no_leak(ctx: RankContext) -> None:
    """Count tensors, threads and files four times while one engine trains, and four times while engines are closed."""
    engine = ctx.build_engine(optimizer=PLAIN_ADAMW)
    living = [measure_after(partial(train_steps, ctx, engine)) for _ in range(4)]
    engine.close()
    del engine
    closed = [
        measure_after(partial(train_and_close_engines, ctx, engines))
        for engines in (WARMUP_ENGINES - 1, 1, ENGINE_COUNT - 1, 1)
    ]
    # The counts are recorded only here, because records are tensors too.
    for label, counts_of_steps in (("living", living), ("closed", closed)):
        for at, counts in enumerate(counts_of_steps):
            ctx.record(label, {name: scalar(value) for name, value in counts.items()}, at)


def measure_after(action: Callable[[], None]) -> dict[str, int]:
    """Run ``action``, and return the counts of ``measure_process`` after it."""
    action()
    return measure_process()


def train_and_close_engines(ctx: RankContext, count: int) -> None:
    """Build, train and close ``count`` engines, one after another."""
    for _ in range(count):
        train_and_close(ctx, ctx.build_engine(optimizer=PLAIN_ADAMW))


def train_and_close(ctx: RankContext, engine: Engine) -> None:
    """Train several steps with ``engine``, and close it."""
    train_steps(ctx, engine)
    engine.close()


def train_steps(ctx: RankContext, engine: Engine) -> None:
    """Train ``STEPS`` optimizer steps with ``engine``."""
    for step in range(STEPS):
        batch = ctx.batch(step)
        engine.backward(ctx.spec.loss(engine(batch.inputs), batch.target))
        engine.step()
        engine.zero_grad()


def measure_process() -> dict[str, int]:
    """Count the tensors that Python can reach, their bytes, and this process's threads and open files.

    Every rank has to call this function.
    """
    for _ in range(SETTLING_BARRIERS):
        # A backend's thread frees a finished collective's tensors only after the next collective.
        dist.barrier()
    gc.collect()
    tensors = [candidate for candidate in gc.get_objects() if isinstance(candidate, Tensor)]
    storages = dict(filter(None, map(get_storage, tensors)))
    counts = {"tensors": len(tensors), "bytes": sum(storages.values())}
    for name, folder in (("threads", "/proc/self/task"), ("files", "/proc/self/fd")):
        if os.path.isdir(folder):  # on Linux
            counts[name] = len(os.listdir(folder))
    return counts


def get_storage(tensor: Tensor) -> tuple[int, int] | None:
    """Return the address and size of a tensor's storage, or None for DTensors and sparse tensors, which have none."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except RuntimeError:  # "access the data pointer on an invalid python storage", "storage of SparseTensorImpl"
        return None


def judge_no_leak(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that the smaller of the last two counts does not exceed the larger of the first two.

    A single count may include a tensor that a backend's thread is about to free, while a leak grows with every engine.
    The counts are compared only with each other, because they depend on what the process ran before.
    """
    for label in ("living", "closed"):
        records = [ctx.rank_records(label, at) for at in range(4)]
        for rank, (first, second, third, fourth) in enumerate(zip(*records, strict=True)):
            for name in first:
                before, after = torch.maximum(first[name], second[name]), torch.minimum(third[name], fourth[name])
                grown = (after - before).clamp(min=0)
                yield compare_bitwise(ctx.location(name, Part.GATHER, 0, rank), torch.zeros_like(grown), grown)


LAWS = (
    Law(
        name="resources.close",
        statement="an engine that is closed and deleted releases the model and leaves no hook on it",
        tier=Tier.EXACT,
        models=("exact",),  # an engine with its own kernels can be judged too
        observe=observe_close,
        judge=judge_close,
        dtypes=("fp32",),
        kept_because="the only law that uses a model after its engine is closed",
    ),
    resource_law(
        "no_leak",
        "longer training keeps no further tensors, threads or open files, and closed engines keep none",
        observe_no_leak,
        judge_no_leak,
        Feature.STEADINESS,
        kept_because="the only law that counts threads, open files, and tensors that are not recorded",
    ),
)
