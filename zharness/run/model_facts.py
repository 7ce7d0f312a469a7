"""Measure a user's model before any law runs: whether it can be judged, and the memory and time that it needs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import is_not

import torch
from torch import Tensor, nn

from zharness.cell import Cell
from zharness.engines import Capabilities
from zharness.engines.torch_engine import LOW_PRECISION_DTYPES
from zharness.errors import UsageError
from zharness.law_kit.accumulation import build_configured_engine
from zharness.laws import DTYPES, LAWS, LOSS_SCALES, get_law
from zharness.mesh import DEFAULT_MESH, TENSOR, Mesh
from zharness.parity.baseline import Baseline, LocalResult, is_joined_model, run_backward
from zharness.parity.sample_draws import SharedDrawError
from zharness.parity.sample_runs import SampleRuns
from zharness.run.configuration import load_variant_configuration
from zharness.run.machine_speed import MachineSpeed, measure_machine_speed
from zharness.run.model_memory import GIB, ModelSize, build_within_memory
from zharness.run.observe_and_judge import build_cell_context, raise_as_usage_error
from zharness.run.outcomes import count_cells
from zharness.workload import ModelSpec, model_spec
from zharness.workload.nested_tensors import collect_tensors
from zharness.workload.shipped_plans import describe_unsplit_parts, read_shipped_plan
from zharness.workload.user_model import UserModel, get_user_model, resolve_factory

SEED = 0
PROBED_STEPS, RANDOM_STEPS = 2, 4  # steps in which used parameters are searched; more steps if a forward draws numbers
OTHER_RANKS = (1, 2, 3)  # several ranks, since a small data set may give two ranks the same rows by chance
# The cost of a cell, averaged over the cells that scripts/bench_model.py measures: forward-backward runs of each rank,
# in fp32 or under autocast; how often all bytes of the model are read and written, for weights, gradients and state;
# and seconds that do not depend on the model. The judge repeats the work of every rank.
FORWARD_BACKWARD_RUNS, AUTOCAST_RUNS, MEMORY_PASSES, CELL_OVERHEAD_SECONDS = 3, 1.5, 40, 1.0
NONDETERMINISM_HINT = (
    "likely causes: dropout that draws from its own generator, from numpy or from random, or a batch function that "
    "ignores its generator, such as an iterator over a data loader"
)


@dataclass(frozen=True)
class ModelFacts:
    """The measurements of a user's model.

    ``trained_parameters`` counts elements. ``forward_backward_seconds`` is the time of one forward and backward.
    ``draws_random_numbers`` is true if the forward draws random numbers;
    ``shared_draws`` is then the reason why the numbers cannot be assigned to samples, or empty. ``inapplicable_laws``
    are the names of the laws that test nothing for this model. ``unused_parameters`` are the names of parameters that
    require a gradient and get none from some micro-batch. ``uneven_parameters`` are the unused parameters that get a
    gradient from another micro-batch, so that ranks use different parameters in one step. ``read_buffers`` are the
    names of buffers that a forward writes and the next forward reads, such as those of observers for quantization; a
    batch norm in training mode reads no buffer. ``edited_parameters`` are the names of parameters that a forward writes
    in place, as an embedding with ``max_norm`` does. ``unsplit_parts`` describes the parts of the model that its own
    plan for the axis tp keeps whole on each rank.
    """

    size: ModelSize
    trained_parameters: int
    forward_backward_seconds: float
    machine_speed: MachineSpeed
    draws_random_numbers: bool
    inapplicable_laws: frozenset[str]
    unused_parameters: tuple[str, ...] = ()
    uneven_parameters: tuple[str, ...] = ()
    read_buffers: tuple[str, ...] = ()
    edited_parameters: tuple[str, ...] = ()
    shared_draws: str = ""
    unsplit_parts: str = ""

    def estimate_time(self, cells: int, autocast_cells: int, world_size: int, jobs: int, cores: int) -> float:
        """Estimate the seconds that ``cells`` cells take if ``jobs`` run at a time.

        ``autocast_cells`` of the cells run under autocast.
        """
        runs = self.forward_backward_seconds * (
            FORWARD_BACKWARD_RUNS * (cells - autocast_cells)
            + AUTOCAST_RUNS * self.machine_speed.autocast_slowdown * autocast_cells
        )
        rank_seconds = runs + cells * MEMORY_PASSES * self.machine_speed.seconds_per_byte * self.size.parameter_bytes
        serial_seconds = rank_seconds * max(1.0, world_size / cores) + world_size * rank_seconds
        return cells * CELL_OVERHEAD_SECONDS + max(serial_seconds / jobs, 2 * world_size * rank_seconds / cores)


def measure_model(
    name: str,
    dtype: str,
    engine_variant: str,
    world_size: int = 2,
    ignore_memory_limit: bool = False,
    mesh: Mesh = DEFAULT_MESH,
) -> ModelFacts:
    """Build the model, which ``world_size`` ranks will train, run it in plain PyTorch, and return its facts.

    Call this function in a process of its own. Raises UsageError, with the reason, if the model cannot be judged, is
    too large, or ships no plan that ``mesh`` can have; ``ignore_memory_limit`` allows a model that is too large.
    """
    spec = model_spec(name)
    model = build_within_memory(spec, SEED, dtype, world_size, ignore_memory_limit)
    if TENSOR in mesh.axes:
        read_shipped_plan(name, model, mesh.size(TENSOR))
    refuse_special_norms(name, model)
    require_finite_weights(name, model)
    require_real_parameters(name, model)
    require_matching_dtype(name, model, dtype)
    refuse_sparse_gradients(name, model)
    require_deterministic_factory(get_user_model(name), UserModel(name, resolve_factory(name)))
    require_seeded_batches(spec)
    baseline = Baseline(
        spec, SEED, 1, DTYPES[dtype], LOSS_SCALES[dtype], load_variant_configuration(engine_variant).autocast_dtype
    )
    with raise_as_usage_error(f"plain PyTorch on the model of {name}{describe_conversion(model, dtype)}"):
        first = baseline.run_rank(0, 0)  # not timed: the first run of a process takes longer
        began = time.perf_counter()
        second = baseline.run_rank(0, 0)
        seconds = time.perf_counter() - began
    require_deterministic_results(name, first, second)
    is_random = has_random_forward(baseline, first)
    uses = list_uses(baseline, first, RANDOM_STEPS if is_random else PROBED_STEPS)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    unused = tuple(name for name in trained if not all(name in used for used in uses))
    return ModelFacts(
        size=ModelSize.measure(model, dtype),
        trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        forward_backward_seconds=seconds,
        machine_speed=measure_machine_speed(),
        draws_random_numbers=is_random,
        shared_draws=explain_shared_draws(baseline) if is_random else "",
        read_buffers=find_read_buffers(baseline),
        edited_parameters=find_edited_parameters(baseline),
        unused_parameters=unused,
        unsplit_parts=describe_unsplit_parts(model) if TENSOR in mesh.axes else "",
        uneven_parameters=tuple(name for name in unused if any(name in used for used in uses)),
        inapplicable_laws=frozenset(
            law.name for law in LAWS.values() if law.applies_to_module is not None and not law.applies_to_module(model)
        ),
    )


def list_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the model's state dict, without the objects that ``get_extra_state`` adds to it."""
    return {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}


def require_deterministic_factory(first: UserModel, second: UserModel) -> None:
    """Raise UsageError if two calls of a factory with one seed return different weights, or share a random tensor."""
    models = first.get_parts(SEED).model, second.get_parts(SEED).model
    if (shared := find_shared_tensor(*models)) and not has_same_draws(first, second):
        raise UsageError(
            f"got the same tensor {shared!r} from two calls of the factory {first.name}, which drew random numbers in "
            "the first call alone, so that weights depend on the seed of that call; expected a new model in each call"
        )
    state = list_state(models[1])
    for key, tensor in list_state(models[0]).items():
        if key not in state or not has_same_numbers(tensor, state[key]):
            raise UsageError(
                f"the factory {first.name} returned two models that differ in {key!r}, with the same seed of "
                "torch's generator: its weights depend on another source, such as numpy's generator or the order of a "
                "set; draw them with torch, or seed that source in the factory"
            )


def find_shared_tensor(first: nn.Module, second: nn.Module) -> str:
    """Return the name of a parameter or buffer of ``second`` that is one of ``first``, or ''."""
    known = {id(tensor) for tensor in (*first.parameters(), *first.buffers())}
    named = (*second.named_parameters(), *second.named_buffers())
    return next((name for name, tensor in named if id(tensor) in known), "")


def has_same_draws(first: UserModel, second: UserModel) -> bool:
    """Return whether the factory drew the same number of random numbers for both models.

    If no call draws the weights, as for a module that is passed to ``verify``, the weights are the same for each seed.
    """
    return torch.equal(first.generator_state, second.generator_state)


def has_same_numbers(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same shape and numbers, where NaN equals NaN."""
    return first.shape == second.shape and bool(((first == second) | ((first != first) & (second != second))).all())


def refuse_special_norms(name: str, model: nn.Module) -> None:
    """Raise UsageError for a SyncBatchNorm that was not replaced by a SyncBatchNorm that runs on a CPU."""
    norms = [key for key, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if norms:
        raise UsageError(
            f"the model of {name} has a SyncBatchNorm ({norms[0] or 'the model itself'}) of a process group, or of a "
            "class of its own, which torch runs on GPUs only; expected torch.nn.SyncBatchNorm over all ranks, or "
            "BatchNorm"
        )


def require_finite_weights(name: str, model: nn.Module) -> None:
    """Raise UsageError if a parameter of the model contains NaN or infinity, as uninitialized memory may."""
    for key, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UsageError(
                f"the parameter {key!r} of the model of {name} is on the device meta, without values; expected a model "
                "on the CPU: build it without torch.device('meta'), or load its weights in the factory"
            )
        if not bool(parameter.isfinite().all()):
            raise UsageError(
                f"the parameter {key!r} of the model of {name} contains NaN or infinity; expected finite weights"
            )


def require_real_parameters(name: str, model: nn.Module) -> None:
    """Raise UsageError for a trained complex parameter, since gradients are compared as real numbers."""
    for key, parameter in model.named_parameters():
        if parameter.is_complex() and parameter.requires_grad:
            raise UsageError(
                f"the parameter {key!r} of the model of {name} is {parameter.dtype}, which ZeRO and FSDP do not shard; "
                "keep torch.view_as_real(weight) as the parameter, and use torch.view_as_complex(weight) in the forward"
            )


def require_matching_dtype(name: str, model: nn.Module, dtype: str) -> None:
    """Raise UsageError if every trained parameter has a low-precision dtype other than that of the cells."""
    found = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    wanted = [text for text, low in LOW_PRECISION_DTYPES.items() if found == {low}]
    if wanted and dtype != wanted[0]:
        raise UsageError(
            f"the trained parameters of {name} are {wanted[0]}, but they would be trained in {dtype}; give --dtype "
            f"{wanted[0]}, under which engines keep fp32 master weights, or return the model in fp32"
        )


def describe_conversion(model: nn.Module, dtype: str) -> str:
    """Describe a low-precision parameter beside fp32 parameters that cells convert to ``dtype``, or return ''."""
    low = [key for key, p in model.named_parameters() if p.requires_grad and p.dtype in LOW_PRECISION_DTYPES.values()]
    if dtype != "fp32" or not low:
        return ""
    return (
        f" (whose parameter {low[0]!r} is not fp32, as others are, although every parameter is trained in fp32: cast "
        "its inputs to its own dtype, as in x.to(self.layer.weight.dtype), not to a fixed one, or freeze it)"
    )


def refuse_sparse_gradients(name: str, model: nn.Module) -> None:
    """Raise UsageError for an embedding with sparse gradients, because laws train with AdamW, which refuses them."""
    sparse = [
        key
        for key, module in model.named_modules()
        if getattr(module, "sparse", False) is True and any(p.requires_grad for p in module.parameters(recurse=False))
    ]
    if sparse:
        raise UsageError(
            f"the module {sparse[0] or 'itself'!r} of the model of {name} has sparse gradients, which torch's AdamW "
            "refuses, so laws cannot train with it; build it with sparse=False, which gives the same numbers"
        )


def require_seeded_batches(spec: ModelSpec) -> None:
    """Raise UsageError if one seed gives two different micro-batches, or if all seeds give the same micro-batch."""
    drawn = [collect_tensors(spec.micro_batch(SEED, rank, 0).inputs) for rank in (0, 0, *OTHER_RANKS)]
    if not all(map(torch.equal, drawn[0], drawn[1])):
        raise UsageError(
            f"the batch function of {spec.name} returned two different micro-batches from generators with the "
            f"same seed: ranks and the baseline would train different data; {NONDETERMINISM_HINT}"
        )
    # torch.equal is also false for different shapes, so batches of different lengths count as different.
    if all(torch.equal(*pair) for other in drawn[2:] for pair in zip(drawn[0], other, strict=True)):
        raise UsageError(
            f"the batch function of {spec.name} returned the same micro-batch from generators with different seeds: if "
            "all ranks train the same data, their gradients are equal, and an engine that never reduces them passes; "
            "draw the batch from the generator, as in torch.randn(4, 16, generator=generator), or choose rows of your "
            "data by torch.randint(len(data), (4,), generator=generator)"
        )


def require_deterministic_results(name: str, first: LocalResult, second: LocalResult) -> None:
    """Raise UsageError if two runs of plain PyTorch differ, or if the loss of the first run is not finite."""
    if not bool(first.loss.isfinite()):
        raise UsageError(f"the loss of {name} is {float(first.loss)} on its first micro-batch; expected a finite loss")
    wrong = next((key for key, grad in first.grads.items() if not tensors_equal(grad, second.grads.get(key))), None)
    if tensors_equal(first.loss, second.loss) and wrong is None:
        return
    difference = f"the gradient of {wrong!r}" if tensors_equal(first.loss, second.loss) else "the loss"
    raise UsageError(
        f"two runs of plain PyTorch on the model of {name} differ in {difference}, with the same weights, micro-batch "
        f"and seed of torch's generator, so no engine can be compared with them; {NONDETERMINISM_HINT}"
    )


def tensors_equal(first: Tensor, other: Tensor | None) -> bool:
    """Return whether two tensors are bitwise equal. The result is False if ``other`` is None."""
    return other is not None and torch.equal(first, other)


def has_random_forward(baseline: Baseline, first: LocalResult) -> bool:
    """Return whether a forward under another seed gives another loss or gradient."""
    model, batch = baseline.build_module(), baseline.batch(0, 0)
    other = replace(batch, seed=(batch.seed or 0) + 1)
    result = run_backward(model, baseline.objective(baseline.compute_output(model, other), other), baseline.loss_scale)
    return not tensors_equal(first.loss, result.loss) or any(
        not tensors_equal(grad, result.grads.get(name)) for name, grad in first.grads.items()
    )


def explain_shared_draws(baseline: Baseline) -> str:
    """Return the reason why the random numbers of a forward cannot be assigned to samples, or '' if they can."""
    if is_joined_model(baseline.spec, baseline.seed):
        return "the ranks of a SyncBatchNorm draw them beside each other"
    try:
        runs = SampleRuns.record(baseline, 0, 0)
        # Run half of the samples, not one, which a batch norm refuses: half of them also shows a wrong number of rows.
        runs.compute_grads(torch.arange(max(1, runs.batch.num_samples // 2)))
    except SharedDrawError as error:
        return str(error)
    return ""


def find_read_buffers(baseline: Baseline) -> tuple[str, ...]:
    """Return the names of the buffers that a forward writes, if other values of these buffers change a forward's loss.

    A forward may write a buffer without changing its numbers: the power iteration of spectral norm does so once it has
    converged, until the weights change. So a write is detected by the buffer's version, not by its numbers.
    """
    model = baseline.build_module()
    batch = baseline.batch(0, 0)
    before = {name: (buffer, buffer._version) for name, buffer in model.named_buffers()}

    def compute_loss(module: nn.Module) -> Tensor:
        """Return the loss of the micro-batch."""
        return baseline.objective(baseline.compute_output(module, batch), batch).detach()

    loss = compute_loss(model)
    after = {name: (buffer, buffer._version) for name, buffer in model.named_buffers()}
    # Tensors are compared by identity, because a forward may replace a buffer by another tensor.
    written = [name for name in after if name not in before or any(map(is_not, after[name], before[name]))]
    other = baseline.build_module()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, buffer in other.named_buffers():
            if name in written:
                change_buffer(buffer, generator)
    return () if not written or tensors_equal(loss, compute_loss(other)) else tuple(written)


def find_edited_parameters(baseline: Baseline) -> tuple[str, ...]:
    """Return the names of the parameters that a forward writes in place."""
    model, batch = baseline.build_module(), baseline.batch(0, 0)
    before = {name: parameter._version for name, parameter in model.named_parameters()}
    baseline.compute_output(model, batch)
    return tuple(name for name, parameter in model.named_parameters() if parameter._version != before[name])


def change_buffer(buffer: Tensor, generator: torch.Generator) -> None:
    """Add a random number of its own magnitude to each number of a buffer, or 1 to each integer; keep bools."""
    if buffer.is_floating_point() and buffer.numel():
        buffer += torch.rand(buffer.shape, generator=generator).to(buffer) * (buffer.abs() + buffer.abs().mean())
    elif buffer.dtype is not torch.bool and not buffer.is_complex():
        buffer += 1


def list_uses(baseline: Baseline, first: LocalResult, steps: int) -> list[set[str]]:
    """Return the names of the parameters that get a gradient from each micro-batch of ranks 0 and 1 in ``steps`` steps.

    ``first`` is the result of rank 0 on its first micro-batch. A branch that depends on the data, or on random numbers,
    uses different parameters for different micro-batches.
    """
    others = [(rank, step) for step in range(steps) for rank in (0, 1)][1:]
    return [set(first.grads), *(set(baseline.run_rank(rank, step).grads) for rank, step in others)]


def build_and_close_engine(cell: Cell, salt: int, capabilities: Capabilities) -> None:
    """Build the engine around the user's model with its configuration, and close the engine, on every rank.

    Raises UsageError for any exception of the engine, so that the user sees the message before any law runs.
    """
    ctx = build_cell_context(cell, salt, capabilities, {})
    with raise_as_usage_error(f"{cell.engine_label} at stage {cell.stage}, built around {cell.model}"):
        build_configured_engine(ctx).close()


def describe_model_run(facts: ModelFacts, cells: Sequence[Cell], world_size: int, jobs: int, cores: int) -> str:
    """Describe the run in one line: the model's size, the number of cells, the estimated time and memory."""
    millions = f"{facts.size.parameters / 1e6:.3g} M parameters ({facts.trained_parameters / 1e6:.3g} M trained)"
    autocast_cells = sum(get_law(cell.law).sets_autocast for cell in cells)
    seconds = facts.estimate_time(len(cells), autocast_cells, world_size, jobs, cores)
    duration = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return (
        f"{cells[0].model}: {millions}, {facts.forward_backward_seconds:.2g} s for one forward and backward; "
        f"{count_cells(len(cells))}, about {duration} "
        f"and at most {facts.size.estimate_memory(world_size, jobs) / GIB:.1f} GiB"
    )
