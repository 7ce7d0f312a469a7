"""What is to be known of anyone's model before a law is held to it: that it can be judged at all, and what it takes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from zharness.cell import Cell
from zharness.engines import Capabilities
from zharness.errors import UsageError
from zharness.laws import DTYPES, LOSS_SCALES
from zharness.laws.model import build_configured_engine, can_checkpoint
from zharness.parity.baseline import Baseline, LocalResult, run_backward
from zharness.run.configuration import configuration_for
from zharness.run.observe_and_judge import build_cell_context, raise_as_usage_error
from zharness.workload import ModelSpec, model_spec
from zharness.workload.models import collect_tensors
from zharness.workload.user_model import build_fresh_model

SEED = 0
OTHER_RANKS = (1, 2, 3)  # several: small data may give two ranks the same rows by chance
GIB = 2**30
# Copies of the model that are alive at once, counted from the code. In each rank the factory's, one of the first state,
# and two engines' weights, gradients and two moments; in the judge weights, local gradients and float64 beside what it
# reads. Cells of a GPT-2 of 10 M parameters took less.
RANK_MODEL_COPIES, JUDGE_MODEL_COPIES, PROCESS_BYTES = 11, 9, 0.35 * GIB
# What a cell takes, a mean over those that scripts/bench_model.py measures: forwards and backwards of each rank, in
# fp32 or under autocast; how often all bytes of its model pass through a core, for all that is done with weights,
# gradients and state; and seconds whatever the model. The judge does for all ranks what each does for itself.
FORWARD_BACKWARD_RUNS, AUTOCAST_RUNS, MEMORY_PASSES, CELL_OVERHEAD_SECONDS = 3, 1.5, 40, 1.0
PROBE_ELEMENTS = 1 << 24  # elements of a tensor that is new memory each time, as a model's are
NONDETERMINISM_HINT = (
    "the first suspects are dropout that draws from a generator of its own, or numpy's or random's, and the order of "
    "data: a batch function that ignores the generator that it is given, as an iterator over a loader does"
)


@dataclass(frozen=True)
class ModelFacts:
    """Elements of the model's parameters, and of the trained ones; bytes; seconds of one forward and backward.

    ``pace`` is this machine's. ``draws`` says whether a forward draws random numbers, ``checkpoints`` whether the model
    can recompute activations.
    """

    parameters: int
    trained_parameters: int
    parameter_bytes: int
    forward_backward_seconds: float
    machine_speed: MachineSpeed
    draws_random_numbers: bool
    supports_checkpointing: bool

    def estimate_memory(self, world_size: int, jobs: int = 1) -> float:
        """Bytes that the processes of so many cells at a time take at most, about."""
        ranks = world_size * (RANK_MODEL_COPIES * self.parameter_bytes + PROCESS_BYTES)
        return jobs * (ranks + JUDGE_MODEL_COPIES * self.parameter_bytes + PROCESS_BYTES)

    def estimate_time(self, cells: int, autocast_cells: int, world_size: int, jobs: int, cores: int) -> float:
        """Seconds that so many cells take, ``lanes`` at a time, about; ``lowered`` of them run under autocast."""
        runs = self.forward_backward_seconds * (
            FORWARD_BACKWARD_RUNS * (cells - autocast_cells)
            + AUTOCAST_RUNS * self.machine_speed.autocast_slowdown * autocast_cells
        )
        rank = runs + cells * MEMORY_PASSES * self.machine_speed.seconds_per_byte * self.parameter_bytes
        one_by_one = rank * max(1.0, world_size / cores) + world_size * rank
        return cells * CELL_OVERHEAD_SECONDS + max(one_by_one / jobs, 2 * world_size * rank / cores)


@dataclass(frozen=True)
class MachineSpeed:
    """Seconds for a byte that is read and written, and how many times longer products take in bf16 than in fp32.

    On processors that know no bf16 that is 20 and more.
    """

    seconds_per_byte: float
    autocast_slowdown: float


def measure_machine_speed() -> MachineSpeed:
    """That of this machine; asking takes a part of a second."""
    many, few = torch.ones(PROBE_ELEMENTS), torch.ones(64, 512)
    layer = nn.Linear(512, 512, bias=False)

    def product(dtype: torch.dtype) -> float:
        model, given = copy.deepcopy(layer).to(dtype), few.to(dtype).requires_grad_()
        return time_fastest_run(lambda: model(given).sum().backward())

    return MachineSpeed(
        time_fastest_run(lambda: many + many) / many.nbytes, max(1.0, product(torch.bfloat16) / product(torch.float32))
    )


def time_fastest_run(function: Callable[[], object], tries: int = 3) -> float:
    """Seconds of the fastest of several runs: others were interrupted, and the first finds nothing ready."""
    found = []
    for _ in range(tries):
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return min(found)


def measure_model(name: str, dtype: str, engine_variant: str) -> ModelFacts:
    """In a process of its own: the facts. Raises UsageError for a model that cannot be judged, with the reason."""
    spec = model_spec(name)
    model = spec.model(SEED)
    require_deterministic_factory(name, dict(model.state_dict()), dict(build_fresh_model(name, SEED).state_dict()))
    require_seeded_batches(spec)
    baseline = Baseline(
        spec, SEED, 1, DTYPES[dtype], LOSS_SCALES[dtype], configuration_for(engine_variant).autocast_dtype
    )
    with raise_as_usage_error(f"plain PyTorch on the model of {name}"):
        baseline.run_rank(0, 0)  # the first run of a process takes longer
        began = time.perf_counter()
        first = baseline.run_rank(0, 0)
        seconds = time.perf_counter() - began
        second = baseline.run_rank(0, 0)
    require_deterministic_results(name, first, second)
    parameters = list(model.parameters())
    return ModelFacts(
        parameters=sum(p.numel() for p in parameters),
        trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        forward_backward_seconds=seconds,
        machine_speed=measure_machine_speed(),
        draws_random_numbers=has_random_forward(baseline, first),
        supports_checkpointing=can_checkpoint(model),
    )


def require_deterministic_factory(name: str, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    """Raises UsageError where two calls of a factory with one seed give two models."""
    for key, tensor in first.items():
        if key not in second or tensor.shape != second[key].shape or not torch.equal(tensor, second[key]):
            raise UsageError(
                f"the factory {name} returned two models that differ in {key!r}, with torch's generator at one seed: "
                "its weights depend on numbers of another source, such as numpy's generator or a set's order; draw "
                "them with torch, or seed that source in the factory"
            )


def require_seeded_batches(spec: ModelSpec) -> None:
    """Raises UsageError where one generator's seed gives two micro-batches, or all seeds give the same one."""
    drawn = [collect_tensors(spec.micro_batch(SEED, rank, 0).inputs) for rank in (0, 0, *OTHER_RANKS)]
    if not all(map(torch.equal, drawn[0], drawn[1])):
        raise UsageError(
            f"the batch function of {spec.name} returned two micro-batches that differ, from generators at one seed: "
            f"ranks and the baseline would train different data; {NONDETERMINISM_HINT}"
        )
    # torch.equal is false where shapes differ, as those of batches of other lengths do.
    if all(torch.equal(*pair) for other in drawn[2:] for pair in zip(drawn[0], other, strict=True)):
        raise UsageError(
            f"the batch function of {spec.name} returned the same micro-batch from generators at other seeds: where "
            "all ranks train the same data their gradients are equal, and an engine that never reduces them passes; "
            "draw the batch from the generator, as in torch.randn(4, 16, generator=generator), or choose rows of your "
            "data by torch.randint(len(data), (4,), generator=generator)"
        )


def require_deterministic_results(name: str, first: LocalResult, second: LocalResult) -> None:
    """Raises UsageError where two runs of plain PyTorch differ, or are not finite."""
    if not bool(first.loss.isfinite()):
        raise UsageError(f"the loss of {name} is {float(first.loss)} on its first micro-batch; expected a finite one")
    wrong = next((key for key, grad in first.grads.items() if not tensors_equal(grad, second.grads.get(key))), None)
    if tensors_equal(first.loss, second.loss) and wrong is None:
        return
    what = f"the gradient of {wrong!r}" if tensors_equal(first.loss, second.loss) else "the loss"
    raise UsageError(
        f"two runs of plain PyTorch on the model of {name} differ in {what}, from the same weights, micro-batch and "
        f"seed of torch's generator, so nothing can be held against them; {NONDETERMINISM_HINT}"
    )


def tensors_equal(first: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.equal(first, other)


def has_random_forward(baseline: Baseline, first: LocalResult) -> bool:
    """Whether another seed of the forward gives another loss or gradient."""
    model, batch = baseline.build_module(), baseline.batch(0, 0)
    other = replace(batch, seed=(batch.seed or 0) + 1)
    found = run_backward(model, baseline.objective(baseline.compute_output(model, other), other), baseline.loss_scale)
    return not tensors_equal(first.loss, found.loss) or any(
        not tensors_equal(g, found.grads.get(k)) for k, g in first.grads.items()
    )


def build_and_close_engine(cell: Cell, salt: int, capabilities: Capabilities) -> None:
    """In every rank: the engine in the user's configuration, built around the user's model.

    Whatever it raises is the user's to hear before anything long starts.
    """
    bench = build_cell_context(cell, salt, capabilities, {})
    with raise_as_usage_error(f"{cell.engine_label} at stage {cell.stage}, built around {cell.model}"):
        build_configured_engine(bench).close()


def explain_too_large(facts: ModelFacts, world_size: int, free_bytes: float) -> str:
    """Why a model does not fit into ``free`` bytes; the empty string where it does."""
    needed = facts.estimate_memory(world_size)
    if needed <= free_bytes:
        return ""
    return (
        f"a model of {facts.parameter_bytes / GIB:.1f} GiB takes about {needed / GIB:.1f} GiB with {world_size} ranks, and "
        f"{free_bytes / GIB:.1f} GiB are free; take fewer ranks, fewer layers of it, or a machine with more memory"
    )


def describe_model_run(facts: ModelFacts, cells: Sequence[Cell], world_size: int, jobs: int, cores: int) -> str:
    """What is going to be run, and about what it takes."""
    millions = f"{facts.parameters / 1e6:.3g} M parameters ({facts.trained_parameters / 1e6:.3g} M trained)"
    lowered = sum(case.law.startswith("precision.autocast") for case in cells)
    seconds = facts.estimate_time(len(cells), lowered, world_size, jobs, cores)
    span = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return (
        f"{cells[0].model}: {millions}, {facts.forward_backward_seconds:.2g} s for one forward and backward; {len(cells)} cells, "
        f"about {span} and at most {facts.estimate_memory(world_size, jobs) / GIB:.1f} GiB"
    )
