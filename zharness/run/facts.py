"""What is to be known of anyone's model before a law is held to it: that it can be judged at all, and what it takes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from zharness.case import Case
from zharness.checks import DTYPES, LOSS_SCALES
from zharness.checks.own_model import can_checkpoint, engine_of
from zharness.engines import Capabilities
from zharness.errors import UsageError
from zharness.parity.baseline import Baseline, Local, differentiated
from zharness.run.cell import bench_of, blamed
from zharness.run.configuration import configured
from zharness.workload import ModelSpec, model_spec
from zharness.workload.foreign import made_anew
from zharness.workload.models import tensors_in

SEED = 0
OTHER_RANKS = (1, 2, 3)  # several: small data may give two ranks the same rows by chance
GIB = 2**30
# Copies of the model that are alive at once, counted from the code. In each rank the factory's, one of the first state,
# and two engines' weights, gradients and two moments; in the judge weights, local gradients and float64 beside what it
# reads. Cells of a GPT-2 of 10 M parameters took less.
IN_A_RANK, IN_THE_JUDGE, IN_ANY_PROCESS = 11, 9, 0.35 * GIB
# What a cell takes, a mean over those that scripts/bench_model.py measures: forwards and backwards of each rank, in
# fp32 or under autocast; how often all bytes of its model pass through a core, for all that is done with weights,
# gradients and state; and seconds whatever the model. The judge does for all ranks what each does for itself.
RUNS, UNDER_AUTOCAST, PASSES, FOR_A_CELL = 3, 1.5, 40, 1.0
PROBE = 1 << 24  # elements of a tensor that is new memory each time, as a model's are
SUSPECTS = (
    "the first suspects are dropout that draws from a generator of its own, or numpy's or random's, and the order of "
    "data: a batch function that ignores the generator that it is given, as an iterator over a loader does"
)


@dataclass(frozen=True)
class Facts:
    """Elements of the model's parameters, and of the trained ones; bytes; seconds of one forward and backward.

    ``pace`` is this machine's. ``draws`` says whether a forward draws random numbers, ``checkpoints`` whether the model
    can recompute activations.
    """

    parameters: int
    trained: int
    size: int
    seconds: float
    pace: Pace
    draws: bool
    checkpoints: bool

    def memory(self, world_size: int, lanes: int = 1) -> float:
        """Bytes that the processes of so many cells at a time take at most, about."""
        ranks = world_size * (IN_A_RANK * self.size + IN_ANY_PROCESS)
        return lanes * (ranks + IN_THE_JUDGE * self.size + IN_ANY_PROCESS)

    def time(self, cells: int, lowered: int, world_size: int, lanes: int, cores: int) -> float:
        """Seconds that so many cells take, ``lanes`` at a time, about; ``lowered`` of them run under autocast."""
        runs = self.seconds * (RUNS * (cells - lowered) + UNDER_AUTOCAST * self.pace.under_autocast * lowered)
        rank = runs + cells * PASSES * self.pace.for_a_byte * self.size
        one_by_one = rank * max(1.0, world_size / cores) + world_size * rank
        return cells * FOR_A_CELL + max(one_by_one / lanes, 2 * world_size * rank / cores)


@dataclass(frozen=True)
class Pace:
    """Seconds for a byte that is read and written, and how many times longer products take in bf16 than in fp32.

    On processors that know no bf16 that is 20 and more.
    """

    for_a_byte: float
    under_autocast: float


def pace() -> Pace:
    """That of this machine; asking takes a part of a second."""
    many, few = torch.ones(PROBE), torch.ones(64, 512)
    layer = nn.Linear(512, 512, bias=False)

    def product(dtype: torch.dtype) -> float:
        model, given = copy.deepcopy(layer).to(dtype), few.to(dtype).requires_grad_()
        return best_of(lambda: model(given).sum().backward())

    return Pace(best_of(lambda: many + many) / many.nbytes, max(1.0, product(torch.bfloat16) / product(torch.float32)))


def best_of(work: Callable[[], object], tries: int = 3) -> float:
    """Seconds of the fastest of several runs: others were interrupted, and the first finds nothing ready."""
    found = []
    for _ in range(tries):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


def examined(name: str, dtype: str, engine_variant: str) -> Facts:
    """In a process of its own: the facts. Raises UsageError for a model that cannot be judged, with the reason."""
    spec = model_spec(name)
    model = spec.model(SEED)
    require_one_model(name, dict(model.state_dict()), dict(made_anew(name, SEED).state_dict()))
    require_one_batch(spec)
    baseline = Baseline(spec, SEED, 1, DTYPES[dtype], LOSS_SCALES[dtype], configured(engine_variant).autocast)
    with blamed(f"plain PyTorch on the model of {name}"):
        baseline.local(0, 0)  # the first run of a process takes longer
        began = time.perf_counter()
        first = baseline.local(0, 0)
        seconds = time.perf_counter() - began
        second = baseline.local(0, 0)
    require_one_result(name, first, second)
    parameters = list(model.parameters())
    return Facts(
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        size=sum(p.numel() * p.element_size() for p in parameters),
        seconds=seconds,
        pace=pace(),
        draws=draws(baseline, first),
        checkpoints=can_checkpoint(model),
    )


def require_one_model(name: str, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    """Raises UsageError where two calls of a factory with one seed give two models."""
    for key, tensor in first.items():
        if key not in second or tensor.shape != second[key].shape or not torch.equal(tensor, second[key]):
            raise UsageError(
                f"the factory {name} returned two models that differ in {key!r}, with torch's generator at one seed: "
                "its weights depend on numbers of another source, such as numpy's generator or a set's order; draw "
                "them with torch, or seed that source in the factory"
            )


def require_one_batch(spec: ModelSpec) -> None:
    """Raises UsageError where one generator's seed gives two micro-batches, or all seeds give the same one."""
    drawn = [tensors_in(spec.micro_batch(SEED, rank, 0).inputs) for rank in (0, 0, *OTHER_RANKS)]
    if not all(map(torch.equal, drawn[0], drawn[1])):
        raise UsageError(
            f"the batch function of {spec.name} returned two micro-batches that differ, from generators at one seed: "
            f"ranks and the baseline would train different data; {SUSPECTS}"
        )
    # torch.equal is false where shapes differ, as those of batches of other lengths do.
    if all(torch.equal(*pair) for other in drawn[2:] for pair in zip(drawn[0], other, strict=True)):
        raise UsageError(
            f"the batch function of {spec.name} returned the same micro-batch from generators at other seeds: where "
            "all ranks train the same data their gradients are equal, and an engine that never reduces them passes; "
            "draw the batch from the generator, as in torch.randn(4, 16, generator=generator), or choose rows of your "
            "data by torch.randint(len(data), (4,), generator=generator)"
        )


def require_one_result(name: str, first: Local, second: Local) -> None:
    """Raises UsageError where two runs of plain PyTorch differ, or are not finite."""
    if not bool(first.loss.isfinite()):
        raise UsageError(f"the loss of {name} is {float(first.loss)} on its first micro-batch; expected a finite one")
    wrong = next((key for key, grad in first.grads.items() if not same(grad, second.grads.get(key))), None)
    if same(first.loss, second.loss) and wrong is None:
        return
    what = f"the gradient of {wrong!r}" if same(first.loss, second.loss) else "the loss"
    raise UsageError(
        f"two runs of plain PyTorch on the model of {name} differ in {what}, from the same weights, micro-batch and "
        f"seed of torch's generator, so nothing can be held against them; {SUSPECTS}"
    )


def same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.equal(one, other)


def draws(baseline: Baseline, first: Local) -> bool:
    """Whether another seed of the forward gives another loss or gradient."""
    model, batch = baseline.module(), baseline.batch(0, 0)
    other = replace(batch, seed=(batch.seed or 0) + 1)
    found = differentiated(model, baseline.objective(baseline.output(model, other), other), baseline.loss_scale)
    return not same(first.loss, found.loss) or any(not same(g, found.grads.get(k)) for k, g in first.grads.items())


def tried_out(case: Case, salt: int, capabilities: Capabilities) -> None:
    """In every rank: the engine in the user's configuration, built around the user's model.

    Whatever it raises is the user's to hear before anything long starts.
    """
    bench = bench_of(case, salt, capabilities, {})
    with blamed(f"{case.subject} at stage {case.stage}, built around {case.model}"):
        engine_of(bench).close()


def too_large(facts: Facts, world_size: int, free: float) -> str:
    """Why a model does not fit into ``free`` bytes; the empty string where it does."""
    needed = facts.memory(world_size)
    if needed <= free:
        return ""
    return (
        f"a model of {facts.size / GIB:.1f} GiB takes about {needed / GIB:.1f} GiB with {world_size} ranks, and "
        f"{free / GIB:.1f} GiB are free; take fewer ranks, fewer layers of it, or a machine with more memory"
    )


def words(facts: Facts, cases: Sequence[Case], world_size: int, lanes: int, cores: int) -> str:
    """What is going to be run, and about what it takes."""
    millions = f"{facts.parameters / 1e6:.3g} M parameters ({facts.trained / 1e6:.3g} M trained)"
    lowered = sum(case.check.startswith("precision.autocast") for case in cases)
    seconds = facts.time(len(cases), lowered, world_size, lanes, cores)
    span = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return (
        f"{cases[0].model}: {millions}, {facts.seconds:.2g} s for one forward and backward; {len(cases)} cells, "
        f"about {span} and at most {facts.memory(world_size, lanes) / GIB:.1f} GiB"
    )
