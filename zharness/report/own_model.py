"""Anyone's model held to every law that is stated for it: the command, and the library call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import click

from zharness.case import Case
from zharness.checks import check_named
from zharness.errors import UsageError
from zharness.report.live import Options, as_planned, conclude, opened, recorded, run_all
from zharness.report.outputs import Outputs
from zharness.report.uncompared import KERNELS, uncompared
from zharness.run import Planned, Record, Request, Runner, plan
from zharness.run.configuration import configured, is_file, why
from zharness.run.facts import Facts, examined, too_large, tried_out, words
from zharness.run.plan import Claims, validate
from zharness.run.runner import surroundings
from zharness.world.limits import available_memory
from zharness.world.server import Surroundings

DROPOUT = (
    "dropout: kernels of the engine's own draw other numbers than torch's, and they are compared by samples in another "
    "order, each of which drops out something else; set the model's dropout to 0 to have its gradients compared"
)
CONFIGURED = "model.configured"
Sink = Callable[[], Any]


@dataclass(frozen=True)
class Asked:
    """A model by its factory's path, the file of a configuration or none, and the axes, as that says where empty."""

    model: str
    config: str = ""
    engine: str = "reference"
    stages: tuple[int, ...] = ()
    world_size: int = 2
    dtype: str = ""
    steps: int = 3

    def request(self) -> Request:
        """The cells of it."""
        if self.config and not is_file(self.config):
            raise UsageError(f"got the configuration {self.config!r}; expected a JSON file whose name ends in .json")
        says = configured(self.config)
        stages = self.stages or (() if says.stage is None else (says.stage,))
        dtype = self.dtype or says.dtype or "fp32"
        return Request((), (self.engine,), stages, (self.world_size,), (dtype,), (self.model,), self.config)


def command(asked: Asked, options: Options, outputs: Outputs, place: Callable[[str], Surroundings]) -> int:
    """Run the laws and report; the exit code. Raises UsageError before anything long starts."""
    outputs.check_writable()
    began = time.monotonic()
    with ExitStack() as stack:
        records = run_model(asked, options, partial(opened, stack, outputs.jsonl), place, tell)
    code, complaint = conclude(records, time.monotonic() - began, outputs), uncompared(records)
    if code == 0 and complaint:
        click.echo(complaint)
        return 1
    return code


def tell(line: str) -> None:
    """A line for who waits."""
    click.echo(line, err=True)


def run_model(
    asked: Asked,
    options: Options,
    sink: Sink,
    place: Callable[[str], Surroundings] = surroundings,
    told: Callable[[str], None] = lambda _line: None,
) -> list[Record]:
    """The records of every law that is stated for the model, in the order of the matrix.

    Raises UsageError for a model that cannot be judged or does not fit, and a configuration that the engine refuses.
    """
    request = asked.request()
    validate(request)
    told(f"{asked.model}: called, run twice by plain PyTorch, and built into {asked.engine}")
    for key in configured(asked.config).left_out:
        told(f"{asked.config}: {key} is left out: {why(key)}")
    with ExitStack() as stack:
        first = stack.enter_context(options.runner({asked.engine: place(asked.engine)}))
        facts: Facts = first.ask(examined, asked.model, request.dtypes[0], asked.config)
        reason = too_large(facts, asked.world_size, available_memory())
        if reason:
            raise UsageError(f"{asked.model}: {reason}")
        cells = cells_of(request, asked, facts, first.claims)
        broken = try_out(first, cells)
        cells = [unbuilt(cell, broken) for cell in cells]
        running = [cell.case for cell in cells if not cell.unsupported and cell.case not in broken]
        lanes = [first, *(more_lanes(stack, options, asked, facts, place) if running else ())]
        if running:
            told(words(facts, running, asked.world_size, len(lanes), os.cpu_count() or 1))
        found = chain(broken.values(), run_all([cell for cell in cells if cell.case not in broken], lanes))
        return as_planned(list(recorded(found, sink(), len(cells))), cells)


def more_lanes(
    stack: ExitStack, options: Options, asked: Asked, facts: Facts, place: Callable[[str], Surroundings]
) -> list[Runner]:
    """Runners beside the first: as many as asked for, else for each core, as far as the model's memory allows."""
    fitting = int(available_memory() // facts.memory(asked.world_size))
    width = max(1, min(options.width(), fitting))
    return [stack.enter_context(options.runner({asked.engine: place(asked.engine)})) for _ in range(width - 1)]


def cells_of(request: Request, asked: Asked, facts: Facts, claims: Claims) -> list[Planned]:
    """The cells: the number of steps set, and those left out that say nothing of this model."""
    found = [counted(cell, asked.steps) for cell in plan(request, claims)]
    return [undrawn(cell, facts) for cell in found if tells(cell.case, facts, claims)]


def undrawn(cell: Planned, facts: Facts) -> Planned:
    """The cell; not run where it would compare kernels of a forward that draws random numbers."""
    if cell.unsupported or cell.case.check != KERNELS or not facts.draws:
        return cell
    return replace(cell, unsupported=DROPOUT)


def counted(cell: Planned, steps: int) -> Planned:
    """A cell of so many steps, where the check counts them."""
    if not check_named(cell.case.check).counted:
        return cell
    return replace(cell, case=replace(cell.case, variant=str(steps)))


def tells(case: Case, facts: Facts, claims: Claims) -> bool:
    """Whether a law is one of this model, engine and configuration."""
    if case.check == "model.checkpointing":
        return facts.checkpoints
    if case.check == KERNELS:
        # Where local gradients are compared bitwise no calibrated comparison adds anything.
        return case.stage in claims(case.engine, case.stage).own_kernels
    # The laws of autocast set its section themselves, with and without.
    return not (case.check.startswith("precision.") and configured(case.engine_variant).autocast is not None)


def try_out(runner: Runner, cells: Sequence[Planned]) -> dict[Case, Record]:
    """Build the engine at each stage as the user configured it; a record for each stage where that crashes or hangs.

    Raises UsageError with the engine's own words where it refuses.
    """
    found = {}
    cases = [cell.case for cell in cells if not cell.unsupported]
    # The law of the training as configured builds just this engine.
    for case in {case.stage: case for case in sorted(cases, key=lambda case: case.check == CONFIGURED)}.values():
        record = runner.attempt(case, tried_out)
        if record is not None:
            found[case] = replace(record, cause=f"while the engine was built around the model: {record.cause}")
    return found


def unbuilt(cell: Planned, broken: Mapping[Case, Record]) -> Planned:
    """The cell; not run where the engine cannot be built at its stage, which takes the time-out where it hangs."""
    first = next((record for case, record in broken.items() if case.stage == cell.case.stage), None)
    if first is None or cell.unsupported or cell.case in broken:
        return cell
    return replace(cell, unsupported=f"the engine cannot be built around the model, see {first.case.check}")
