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

from zharness.checks.accumulation import FROZEN
from zharness.checks.bench import Bench, number
from zharness.checks.calls import judge_hook_count, observe_hook_count
from zharness.checks.law import Check
from zharness.checks.optimizer_step import Moment, everyone_agrees, judge_step
from zharness.checks.single_step import SGD, trained_step
from zharness.checks.trial import Trial
from zharness.checks.variations import ADAMW
from zharness.engines.protocol import AccumulationOwner, Engine, Feature, Resources, Traffic
from zharness.errors import EngineContractError
from zharness.parity import Comparison, Part, Tier, between, identical, ranks_agree

T = TypeVar("T")
ACCUMULATIONS = (1, 2, 3)


def told(engine: Engine, what: str, kind: type[T]) -> T:
    """What the engine tells of itself by that name. Raises EngineContractError where it claims to and does not."""
    found = getattr(engine.observe(), what)
    if not isinstance(found, kind):
        raise EngineContractError(f"observe().{what}: {found.reason}; expected {kind.__qualname__}")
    return found


def record_stage(bench: Bench) -> None:
    """The judge is not told the stage, and the formulas depend on it."""
    bench.record("case", {"stage": torch.tensor(bench.config.stage)})


def stage_of(trial: Trial) -> int:
    return int(trial.copies("case")[0]["stage"])


def observe_memory_per_rank(bench: Bench) -> None:
    record_stage(bench)
    engine = bench.engine(optimizer=ADAMW)
    for step in range(2):
        loss = bench.loss(engine, step)
        between_passes = told(engine, "resources", Resources)
        engine.backward(loss)
        engine.backward(bench.loss(engine, 2 + step))  # a second one: what is added up takes no more than one
        before = told(engine, "resources", Resources)
        engine.step()
        engine.zero_grad()
    after = told(engine, "resources", Resources)
    held = {"gradients": before.gradients, "parameters": after.parameters, "optimizer_state": after.optimizer_state}
    held[FORWARDED] = between_passes.parameters
    bench.record("held", {name: number(value) for name, value in held.items()})
    engine.close()


FORWARDED = "parameters behind a forward"


def judge_memory_per_rank(trial: Trial) -> Iterator[Comparison]:
    """Psi, psi and 2 psi, each over N from the stage on that shards it; apart from padding and AdamW's step counts.

    Where parameters are sharded, no more of them than two modules' stays gathered between a forward and its backward.
    """
    stage, shapes = stage_of(trial), {name: p.shape for name, p in trial.baseline.module().named_parameters()}
    sizes = [shape.numel() for shape in shapes.values()]
    shards = [largest_shard(trial, name, shape) for name, shape in shapes.items()]
    for name, copies, shards_from in (("parameters", 1, 3), ("gradients", 1, 2), ("optimizer_state", 2, 1)):
        ranks = trial.world_size if stage >= shards_from else 1
        share = copies * 4 * sum(sizes) / ranks
        padding = copies * 4 * (sum(shards) - sum(sizes) / ranks) if ranks > 1 else 0
        counts = 4 * len(sizes) if name == "optimizer_state" else 0
        for rank, copy in enumerate(trial.copies("held")):
            place = trial.place(name, Part.GATHER, 0, rank)
            at_most = share + padding + counts
            # A last shard may be short by as much as the others are padded.
            least = share - padding * max(1, ranks - 1)
            yield between(place, number(least), copy[name], number(at_most))
            if name == "parameters" and stage >= shards_from:
                used = trial.place(FORWARDED, Part.GATHER, 0, rank)
                yield between(used, number(0), copy[FORWARDED], number(at_most + two_largest(trial)))


def two_largest(trial: Trial) -> float:
    """Bytes of the parameters that the two largest modules own."""
    modules = trial.baseline.module().modules()
    return sum(sorted(4.0 * sum(p.numel() for p in module.parameters(recurse=False)) for module in modules)[-2:])


def largest_shard(trial: Trial, name: str, shape: torch.Size) -> int:
    """Elements of the largest shard of a parameter, padded: cut evenly, or by rows where the layout says so."""
    even, by_rows = -(-shape.numel() // trial.world_size), -(-shape[0] // trial.world_size) * shape[1:].numel()
    declared = (piece.stop - piece.start for piece in trial.evidence[0].layout.get(name, ()))
    return by_rows if max(declared, default=0) == by_rows else even


def observe_comm_volume(bench: Bench) -> None:
    record_stage(bench)
    for steps in ACCUMULATIONS:
        engine = bench.engine(optimizer=FROZEN, accumulation_steps=steps, accumulation_owner=AccumulationOwner.ENGINE)
        start = told(engine, "traffic", Traffic).sent
        for micro in range(steps):
            batch = bench.batch(micro)
            engine.backward(bench.spec.loss(engine(batch.inputs), batch.target))
            engine.step()
        bench.record("sent", {"sent": number(told(engine, "traffic", Traffic).sent - start)}, steps)
        engine.close()


def judge_comm_volume(trial: Trial) -> Iterator[Comparison]:
    """Stage 0 and 1: 2 psi; stage 2: (A+1) psi; stage 3: 3A psi, less what backward does not read again."""
    stage, sizes = stage_of(trial), [p.numel() for p in trial.baseline.module().parameters()]
    ranks = trial.world_size
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
        for rank, copy in enumerate(trial.copies("sent", steps)):
            place = trial.place("sent", Part.REDUCTION, steps, rank)
            yield between(place, number(share * least), copy["sent"], number(share * most))


BUCKETS = (0, 100)  # elements that stage 3 gathers together


def observe_gathered_bytes(bench: Bench) -> None:
    record_stage(bench)
    for bucket in BUCKETS:
        zero = {"zero_optimization": {"stage3_prefetch_bucket_size": bucket}}
        engine = bench.engine(optimizer=FROZEN, options=zero)
        for step in range(2):
            batch = bench.batch(step)
            engine.backward(bench.spec.loss(engine(batch.inputs), batch.target))
            engine.step()
            engine.zero_grad()
        found = {"rest": told(engine, "gathered_bytes", int), "peak": told(engine, "traffic", Traffic).peak_gathered}
        bench.record("gathered", {name: number(value) for name, value in found.items()}, bucket)
        engine.close()


def judge_gathered_bytes(trial: Trial) -> Iterator[Comparison]:
    """0 between steps; at the peak at most the two largest modules and a bucket, and nothing at all below stage 3."""
    for bucket in BUCKETS:
        padded = bucket * trial.world_size  # each of its parameters may have one element, and a shard on every rank
        most = two_largest(trial) + 4 * padded if stage_of(trial) == 3 else 0
        for rank, copy in enumerate(trial.copies("gathered", bucket)):
            yield identical(trial.place("rest", Part.GATHER, 0, rank), number(0), copy["rest"])
            yield between(trial.place("peak", Part.GATHER, 0, rank), number(0), copy["peak"], number(most))


WARM, ENGINES, STEPS = 2, 4, 3
SETTLING = 8  # more than a backend has threads


def observe_close(bench: Bench) -> None:
    """An engine is trained, closed and forgotten; does anything left hold the model that it was given, or watch it?"""
    model = bench.spec.model(bench.seed)
    left, shapes = weakref.ref(model), {name: p.shape for name, p in model.named_parameters()}
    live_once(bench, bench.around(model, optimizer=ADAMW))
    whole = all(type(p) is nn.Parameter and p.shape == shapes[name] for name, p in model.named_parameters())
    bench.record("whole", {"whole": number(whole)})
    if everywhere(bench, whole):  # a hook that was left may call its peers, who have to be there then
        bench.record("params", dict(model.named_parameters()))
        model.zero_grad()
        bench.loss(model, STEPS).backward()  # type: ignore[no-untyped-call]
        bench.record("own", {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    del model
    gc.collect()
    bench.record("left", {"model": number(left() is not None)})


def everywhere(bench: Bench, here: bool) -> bool:
    """Whether it is so on every rank. Collective."""
    verdict = torch.tensor(int(here), device=bench.device)
    dist.all_reduce(verdict, dist.ReduceOp.MIN)
    return bool(verdict)


def judge_close(trial: Trial) -> Iterator[Comparison]:
    """A model whose weights are whole, alike on all ranks, is a plain one again: its backward is a rank's own."""
    yield from ranks_agree(trial.place("whole", Part.GATHER), [copy["whole"] for copy in trial.copies("whole")])
    if trial.recorded("own"):
        copies = trial.copies("params")
        for name in copies[0]:
            yield from ranks_agree(trial.place(name, Part.GATHER), [copy[name] for copy in copies])
        local = trial.locals(STEPS, copies[0])
        yield from trial.same_value("own", [one.grads for one in local])
    for rank, copy in enumerate(trial.copies("left")):
        yield identical(trial.place("model", Part.GATHER, 0, rank), number(0), copy["model"])


def observe_no_leak(bench: Bench) -> None:
    """What this process holds, before and after, each asked twice: one engine trained on, engines closed."""
    engine = bench.engine(optimizer=ADAMW)
    living = [held_after(partial(train_on, bench, engine)) for _ in range(4)]
    engine.close()
    del engine
    closed = [held_after(partial(live, bench, engines)) for engines in (WARM - 1, 1, ENGINES - 1, 1)]
    # Recorded only now: records are tensors themselves.
    for label, found in (("living", living), ("closed", closed)):
        for at, held in enumerate(found):
            bench.record(label, {name: number(value) for name, value in held.items()}, at)


def held_after(work: Callable[[], None]) -> dict[str, int]:
    """What this process holds when ``work`` is done."""
    work()
    return process()


def live(bench: Bench, engines: int) -> None:
    """So many engines built, trained and closed, one after the other."""
    for _ in range(engines):
        live_once(bench, bench.engine(optimizer=ADAMW))


def live_once(bench: Bench, engine: Engine) -> None:
    """Train and close."""
    train_on(bench, engine)
    engine.close()


def train_on(bench: Bench, engine: Engine) -> None:
    """Some steps."""
    for step in range(STEPS):
        batch = bench.batch(step)
        engine.backward(bench.spec.loss(engine(batch.inputs), batch.target))
        engine.step()
        engine.zero_grad()


def process() -> dict[str, int]:
    """Tensors that Python can reach, their bytes, this process's threads and its open files. Collective."""
    for _ in range(SETTLING):
        # A backend's thread lets go of a finished collective's tensors only when the next one is through.
        dist.barrier()
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, Tensor)]
    storages = dict(filter(None, map(storage_of, tensors)))
    found = {"tensors": len(tensors), "bytes": sum(storages.values())}
    for name, folder in (("threads", "/proc/self/task"), ("files", "/proc/self/fd")):
        if os.path.isdir(folder):  # Linux has these
            found[name] = len(os.listdir(folder))
    return found


def storage_of(tensor: Tensor) -> tuple[int, int] | None:
    """Address and bytes; None of a tensor that only stands for others, as a DTensor for its shard, or a sparse one."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except RuntimeError:  # "access the data pointer on an invalid python storage", "storage of SparseTensorImpl"
        return None


def judge_no_leak(trial: Trial) -> Iterator[Comparison]:
    """The least that is held afterwards is no more than the most that was held before: of what is more, nothing.

    A backend's thread may still hold a tensor when it is asked; what engines leave behind grows with each of them. Told
    is the growth alone: what a process holds in all hangs on what it ran before.
    """
    for label in ("living", "closed"):
        asked = [trial.copies(label, at) for at in range(4)]
        for rank, (first, second, third, fourth) in enumerate(zip(*asked, strict=True)):
            for name in first:
                before, after = torch.maximum(first[name], second[name]), torch.minimum(third[name], fourth[name])
                grown = (after - before).clamp(min=0)
                yield identical(trial.place(name, Part.GATHER, 0, rank), torch.zeros_like(grown), grown)


@contextmanager
def poisoned_memory() -> Iterator[None]:
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


def observe_poisoned_memory(bench: Bench) -> None:
    with poisoned_memory():
        engine = bench.engine(optimizer=SGD)
        trained_step(bench, engine)
        engine.close()


def judge_poisoned_memory(trial: Trial) -> Iterator[Comparison]:
    local = trial.locals()
    yield from trial.same_loss(0, local)
    yield from trial.reduced("grads", [local], exact=trial.exact(range(1)))
    yield from judge_step(trial, SGD, trial.copies("grads")[0], Moment(0))
    yield from everyone_agrees(trial, Moment(1))


Judge = Callable[[Trial], Iterator[Comparison]]


def law(name: str, words: str, observe: Callable[[Bench], None], judge: Judge, *needs: Feature, **how: Any) -> Check:
    """A check of this group, in the dtype of which formulas count the bytes; ``how`` are further fields of Check."""
    fields = {"models": ("mlp",), "own_numbers": ("",), "dtypes": ("fp32",), **how}
    return Check(
        f"resources.{name}", words, Tier.EXACT, observe=observe, judge=judge, needs=needs, integral=False, **fields
    )


CHECKS = (
    law(
        "memory_per_rank",
        "parameters, gradients and optimizer state take the bytes that the stage's formula says, on every rank",
        observe_memory_per_rank,
        judge_memory_per_rank,
        Feature.RESOURCES,
    ),
    law(
        "comm_volume",
        "a step of A micro-batches sends 2 psi (stages 0, 1), (A+1) psi (2), at most 3A psi (3), times (N-1)/N",
        observe_comm_volume,
        judge_comm_volume,
        Feature.TRAFFIC,
        Feature.ENGINE_ACCUMULATION,
    ),
    law(
        "gathered_bytes",
        "nothing stays gathered between steps, and never more than the two largest modules and a bucket",
        observe_gathered_bytes,
        judge_gathered_bytes,
        Feature.TRAFFIC,
    ),
    Check(
        name="resources.close",
        law="an engine that is closed and forgotten lets go of the model, and watches it no more",
        tier=Tier.EXACT,
        models=("exact",),  # which an engine with kernels of its own can be asked about too
        observe=observe_close,
        judge=judge_close,
        dtypes=("fp32",),
    ),
    law(
        "no_leak",
        "training on keeps no tensor, thread or open file more, and engines that were closed keep none",
        observe_no_leak,
        judge_no_leak,
        Feature.STEADINESS,
    ),
    law(
        "poisoned_memory",
        "a step in which all fresh memory is NaN is the same step",
        observe_poisoned_memory,
        judge_poisoned_memory,
        Feature.STEADINESS,
        models=("mlp", "conv"),
        own_numbers=(),
    ),
    law(
        "hook_count",
        "a backward makes O(parameters) Python calls, with checkpoints and without, and a later one no more",
        observe_hook_count,
        judge_hook_count,
        Feature.STEADINESS,
    ),
)
