"""``zharness.verify``: check a model of this process against the laws, from a script or a test."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zharness.errors import UsageError
from zharness.mesh import Mesh
from zharness.releases.rank_environment import prepare_rank_environment
from zharness.report.failures import render_failures, render_summary
from zharness.report.matrix import render_matrix
from zharness.run import Record, Verdict, configuration
from zharness.run.arguments import require_at_least, require_integers, require_names, require_tuples
from zharness.run.check_loop import RunOptions
from zharness.run.model_check import ModelCheckRequest, check_model
from zharness.run.record import open_record_file
from zharness.run.uncompared_gradients import explain_uncompared_gradients
from zharness.workload import user_model
from zharness.workload.models import SAMPLES
from zharness.workload.nested_tensors import collect_tensors, map_tensors
from zharness.workload.transformers_batches import find_draw
from zharness.world import Isolation, is_rank


@dataclass(frozen=True)
class Verification:
    """The records of all laws, in the order of the matrix.

    ``bool(verification)`` is true if every law holds, and gradients were compared at every stage or laws were chosen.
    """

    records: tuple[Record, ...]
    seconds: float
    chosen_laws: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.first_divergence

    @property
    def first_divergence(self) -> str:
        """Return the first cell whose law does not hold, with the cause: the first wrong number and its module.

        If all laws hold but gradients were not compared at every stage, return the reason. If the verification is true,
        return the empty string.
        """
        failures = (record for record in self.records if not record.is_expected or record.verdict is Verdict.ERROR)
        first = next(failures, None)
        return (
            explain_uncompared_gradients(self.records, self.chosen_laws)
            if first is None
            else f"{first.cell.id}: {first.stale_reason or first.cause}"
        )

    def table(self) -> str:
        """Return the matrix of laws x stages, the failures and the number of cells as text."""
        parts = [render_matrix(self.records), render_failures(self.records), render_summary(self.records, self.seconds)]
        parts.append(explain_uncompared_gradients(self.records, self.chosen_laws))
        return "\n\n".join(part for part in parts if part)

    def save(self, path: str | Path) -> None:
        """Write the records as JSON lines, which `zharness report` reads. Raises UsageError if writing fails."""
        with open_record_file(Path(path)) as file:
            for record in self.records:
                file.add(record)


def verify(
    model: nn.Module | Callable[[], Any] | str,
    batch: Any = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    *,
    engine: str = "reference",
    config: Mapping[str, Any] | str | Path | None = None,
    stages: tuple[int, ...] = (),
    world_size: int = 2,
    dtype: str = "",
    steps: int = 3,
    only: tuple[str, ...] = (),
    timeout: float = 300.0,
    jobs: int = 0,
    ignore_memory_limit: bool = False,
    mesh: str = "",
) -> Verification:
    """Check ``engine`` on your model against every law that applies to any model.

    ``model`` is a module, a function that builds one, or the path of such a function, ``package.module:factory``. A
    function may be a closure, and may return (model, batch, loss) instead, as for `zharness model`.

    ``batch`` is a function ``batch(generator)`` that draws a tensor, a tuple or a dict of tensors with a row for each
    sample. ``batch`` may also be one such tensor, tuple or dict, from which every rank draws rows at every step.
    ``loss(output, batch)`` returns a scalar; without ``loss``, the model has to return its loss, alone or as
    ``output.loss``.

    ``config`` is DeepSpeed's JSON, as a dictionary or a path. ``engine`` may name a release (``deepspeed==0.18.8``) or
    a checkout. ``steps`` is the number of optimizer steps of the law model.configured. ``only`` are names or patterns
    of laws, if not all of them are to run. ``timeout`` is the time limit for the ranks of one law, in seconds. ``jobs``
    is the number of laws that run at the same time; 0 selects as many as fit into memory. ``ignore_memory_limit`` runs
    a model that seems too large. ``mesh`` has the axes of parallelism beside data parallelism, as the option ``--mesh``
    of `zharness model` takes them (``"tp2"``).

    Ranks are forks of this process: call this function before CUDA is initialised. Raises UsageError, before any law
    runs, for a model that cannot be judged, does not fit into memory, or draws numbers that torch.manual_seed does not
    determine, and for a configuration or a mesh that the engine refuses.
    """
    if is_rank():
        raise UsageError("verify() starts its own ranks, so call it in a script or in a test without ranks")
    require_names(engine=engine, mesh=mesh)
    require_tuples(int, stages=stages)
    require_integers(world_size=world_size, steps=steps, jobs=jobs)
    require_tuples(str, only=only)
    require_at_least(1, steps=steps, timeout=timeout)
    require_at_least(0, jobs=jobs)
    axes_of_mesh = Mesh.parse(mesh)
    began = time.monotonic()
    options = RunOptions(timeout=timeout, jobs=jobs, isolation=Isolation.POOLED)
    name = register_model(model, batch, loss)
    config_name = ""
    try:
        config_name = resolve_config_name(config)
        check_request = ModelCheckRequest(
            name, config_name, engine, stages, world_size, dtype, steps, only, ignore_memory_limit, axes_of_mesh
        )
        records = check_model(check_request, options, lambda: None, prepare_rank_environment)
    finally:
        user_model.unregister_factory(name)
        configuration.unregister_config(config_name)
    return Verification(tuple(records), time.monotonic() - began, only)


def register_model(model: Any, batch: Any, loss: Any) -> str:
    """Register the model, and return the name by which ranks find it.

    The name depends only on the class of the model, so that earlier calls in this process do not change the data that
    a call draws. Raises UsageError for an object that is not a model.
    """
    if isinstance(model, str) and batch is None and loss is None:
        return model
    factory = user_model.resolve_factory(model) if isinstance(model, str) else model
    if isinstance(factory, type) and issubclass(factory, nn.Module):
        raise UsageError(
            f"verify() got the class {factory.__name__}; expected a module, or a function that builds one, such as "
            f"lambda: {factory.__name__}(...)"
        )
    if isinstance(model, nn.Module) and batch is None and find_draw(model, SAMPLES) is None:
        raise UsageError(
            f"verify() got a {type(model).__name__} without a batch; expected its inputs as batch=..., a tensor, a "
            "tuple or a dict of tensors, or a function batch(generator)"
        )
    if not callable(factory):
        raise UsageError(
            f"verify() got {user_model.describe_value(model)}; expected a module, a function that builds one, or the "
            "path of such a function"
        )
    title = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "model")
    first_name = f"{user_model.IN_PROCESS_PACKAGE}:{title if title.isidentifier() else 'model'}"
    # A concurrent call in another thread may use the name.
    name = next(
        candidate
        for candidate in chain((first_name,), (f"{first_name}_{n}" for n in count(2)))
        if not user_model.is_registered_factory(candidate)
    )
    draw = batch if batch is None or callable(batch) else make_batch_function(batch)

    def complete() -> Any:
        """Return the model, with the functions ``batch`` and ``loss`` if the caller of ``verify`` gave them."""
        built = model if isinstance(model, nn.Module) else factory()
        return built if draw is None and loss is None else (built, draw, loss)

    user_model.register_factory(name, complete)
    return name


def make_batch_function(batch: Any) -> Callable[[torch.Generator], Any]:
    """Return a function that draws micro-batches from the rows of ``batch``.

    Raises UsageError for fewer than two rows.
    """
    rows = {len(tensor) if tensor.dim() else 0 for tensor in collect_tensors(batch)}
    if len(rows) != 1 or min(rows) < 2:
        raise UsageError(
            f"verify() got the batch {user_model.describe_value(batch)}; expected a function "
            "batch(generator), or tensors that all have the same number of rows, at least two; every rank draws its "
            "micro-batches from these rows"
        )

    def draw(generator: torch.Generator) -> Any:
        """Draw SAMPLES rows; the same row numbers are drawn from each tensor of the batch."""
        indices = torch.randint(min(rows), (SAMPLES,), generator=generator)
        return map_tensors(batch, lambda tensor: tensor[indices])

    return draw


def config_fingerprint(config: Mapping[str, Any]) -> str:
    """Return eight hex digits of a hash of ``config``, so that concurrent calls do not share a name."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:8]


def resolve_config_name(config: Mapping[str, Any] | str | Path | None) -> str:
    """Return the name that a configuration has in cell ids; register a dictionary under that name."""
    if config is None:
        return ""
    if isinstance(config, (str, Path)):
        return str(config)
    if not isinstance(config, Mapping):
        raise UsageError(f"verify() got config={config!r}; expected a dictionary, or the path of a JSON file")
    name = f"{user_model.IN_PROCESS_PACKAGE}:{config_fingerprint(config)}{configuration.SUFFIX}"
    configuration.register_config(name, config)
    return name
