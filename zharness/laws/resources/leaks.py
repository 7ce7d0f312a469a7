"""Laws of what an engine leaves behind: a closed engine, and a training that goes on."""

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
from zharness.laws.resources.common import resource_law
from zharness.parity import Comparison, Part, Tier, compare_bitwise, compare_ranks

WARMUP_ENGINES, ENGINE_COUNT, STEPS = 2, 4, 3

SETTLING_BARRIERS = 8  # more than a backend has threads


def observe_close(ctx: RankContext) -> None:
    """An engine is trained, closed and forgotten; does anything left hold the model that it was given, or watch it?"""
    model = ctx.spec.model(ctx.seed)
    left, shapes = weakref.ref(model), {name: p.shape for name, p in model.named_parameters()}
    train_and_close(ctx, ctx.build_engine_around(model, optimizer=PLAIN_ADAMW))
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
    engine = ctx.build_engine(optimizer=PLAIN_ADAMW)
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
        train_and_close(ctx, ctx.build_engine(optimizer=PLAIN_ADAMW))


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


LAWS = (
    Law(
        name="resources.close",
        statement="an engine that is closed and deleted releases the model and leaves no hook on it",
        tier=Tier.EXACT,
        models=("exact",),  # which an engine with kernels of its own can be asked about too
        observe=observe_close,
        judge=judge_close,
        dtypes=("fp32",),
        kept_because="the only law that uses a model after its engine",
    ),
    resource_law(
        "no_leak",
        "further training keeps no more tensors, threads or open files, and closed engines keep none",
        observe_no_leak,
        judge_no_leak,
        Feature.STEADINESS,
        kept_because="the only law that counts threads, files, and tensors that no record names",
    ),
)
