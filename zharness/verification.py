"""``zharness.verify``: a model that lives in this process, held to the laws from a script or a test."""

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
from zharness.releases.rank_environment import get_release_environment
from zharness.report.failures import render_failures, render_summary
from zharness.report.matrix import render_matrix
from zharness.run import Record, Verdict, configuration
from zharness.run.check_loop import RunOptions
from zharness.run.model_check import ModelCheckRequest, check_model
from zharness.run.record import open_record_file
from zharness.run.uncompared_gradients import explain_uncompared_gradients
from zharness.workload import user_model
from zharness.workload.models import SAMPLES, collect_tensors, map_tensors
from zharness.world import Isolation, is_rank


@dataclass(frozen=True)
class Verification:
    """What became of every law, in the order of the matrix.

    True where all of them hold, and gradients were compared at every stage.
    """

    records: tuple[Record, ...]
    seconds: float

    def __bool__(self) -> bool:
        return not self.first_divergence

    @property
    def first_divergence(self) -> str:
        """The first law that does not hold, and in words where its first wrong number is, with the module.

        Where all hold and the result is false all the same, why. Empty for a result that is true.
        """
        wrong = (r for r in self.records if not r.is_expected or r.verdict is Verdict.ERROR)
        first = next(wrong, None)
        return (
            explain_uncompared_gradients(self.records)
            if first is None
            else f"{first.cell.id}: {first.stale_reason or first.cause}"
        )

    def table(self) -> str:
        """Laws x stages, what did not pass, and how many cells there were."""
        parts = [render_matrix(self.records), render_failures(self.records), render_summary(self.records, self.seconds)]
        parts.append(explain_uncompared_gradients(self.records))
        return "\n\n".join(part for part in parts if part)

    def save(self, path: str | Path) -> None:
        """Write the records as JSON lines, which `zharness report` reads. Raises UsageError."""
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
    timeout: float = 300.0,
    jobs: int = 0,
) -> Verification:
    """Hold ``engine`` to every law that is stated for any model, on yours.

    ``model`` is a module, a function that builds one, or the path of such a function, ``package.module:factory``. A
    function may be a closure, and may return what `zharness model` takes: (model, batch, loss). ``batch`` is
    ``batch(generator)``, which draws a tensor, a tuple or a dict of tensors with a row for each sample, or such a batch
    itself, of whose rows every rank and step draws its own. ``loss(output, batch)`` is a scalar; without one the model
    returns its loss, alone or as ``output.loss``. ``config`` is DeepSpeed's JSON, as a dictionary or a path.
    ``engine`` may name a release (``deepspeed==0.18.8``) or a checkout. ``timeout`` is in seconds for the ranks of one
    law, ``jobs`` how many laws run at a time, 0: as many as fit.

    Ranks are forks of this process: call it before CUDA is initialised. Raises UsageError before anything long starts:
    for a model that cannot be judged, does not fit, or draws numbers that torch.manual_seed does not set, and for a
    configuration that the engine refuses.
    """
    if is_rank():
        raise UsageError("verify() starts ranks of its own; call it outside of a test that is one of several ranks")
    began = time.monotonic()
    options = RunOptions(timeout=timeout, jobs=jobs, isolation=Isolation.POOLED)
    name = register_model(model, batch, loss)
    file = ""
    try:
        file = resolve_config_name(config)
        asked = ModelCheckRequest(name, file, engine, stages, world_size, dtype, steps)
        records = check_model(asked, options, lambda: None, get_release_environment)
    finally:
        user_model.unregister_factory(name)
        configuration.unregister_config(file)
    return Verification(tuple(records), time.monotonic() - began)


def register_model(model: Any, batch: Any, loss: Any) -> str:
    """The name under which ranks find the model.

    It follows from the class alone, so that a call draws the same data whatever the process called before.
    """
    if isinstance(model, str) and batch is None and loss is None:
        return model
    factory = user_model.resolve_factory(model) if isinstance(model, str) else model
    if not callable(factory):
        raise UsageError(
            f"verify() got {user_model.describe_value(model)}; expected a module, a function that builds one or its path"
        )
    title = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "model")
    first = f"{user_model.IN_PROCESS_PACKAGE}:{title if title.isidentifier() else 'model'}"
    # Another thread's call may be using the name.
    name = next(
        each
        for each in chain((first,), (f"{first}_{n}" for n in count(2)))
        if not user_model.is_registered_factory(each)
    )
    draw = batch if batch is None or callable(batch) else make_batch_function(batch)

    def complete() -> Any:
        made = model if isinstance(model, nn.Module) else factory()
        return made if draw is None and loss is None else (made, draw, loss)

    user_model.register_factory(name, complete)
    return name


def make_batch_function(batch: Any) -> Callable[[torch.Generator], Any]:
    """Micro-batches of rows drawn from ``batch``. Raises UsageError where it has fewer than two."""
    rows = {len(tensor) if tensor.dim() else 0 for tensor in collect_tensors(batch)}
    if len(rows) != 1 or min(rows) < 2:
        raise UsageError(
            f"verify() got the batch {user_model.describe_value(batch)}; expected tensors with as many rows, at least two, of "
            "which ranks and steps draw their own, or a function batch(generator)"
        )

    def draw(generator: torch.Generator) -> Any:
        chosen = torch.randint(min(rows), (SAMPLES,), generator=generator)
        return map_tensors(batch, lambda tensor: tensor[chosen])

    return draw


def config_fingerprint(config: Mapping[str, Any]) -> str:
    """Eight digits that follow from what ``config`` says: calls at a time in one process do not share a name."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:8]


def resolve_config_name(config: Mapping[str, Any] | str | Path | None) -> str:
    """The name of a configuration in a case."""
    if config is None:
        return ""
    if not isinstance(config, Mapping):
        return str(config)
    name = f"{user_model.IN_PROCESS_PACKAGE}:{config_fingerprint(config)}{configuration.SUFFIX}"
    configuration.register_config(name, config)
    return name
