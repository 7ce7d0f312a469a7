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

from zharness.cell import Cell
from zharness.errors import UsageError
from zharness.laws import get_law
from zharness.report.outputs import Outputs
from zharness.report.uncompared_gradients import KERNELS_LAW, explain_uncompared_gradients
from zharness.run import PlannedCell, Record, Request, Runner, plan
from zharness.run.check_loop import (
    RunOptions,
    open_optional_record_file,
    report_run,
    run_cells,
    sort_as_planned,
    write_with_progress,
)
from zharness.run.configuration import configuration_for, explain_ignored_key, is_config_file
from zharness.run.model_facts import (
    ModelFacts,
    build_and_close_engine,
    describe_model_run,
    explain_too_large,
    measure_model,
)
from zharness.run.plan import ClaimsLookup, validate_request
from zharness.run.runner import build_rank_environment
from zharness.world.limits import available_memory
from zharness.world.server import RankEnvironment

DROPOUT_REASON = (
    "dropout: kernels of the engine's own draw other numbers than torch's, and they are compared by samples in another "
    "order, each of which drops out something else; set the model's dropout to 0 to have its gradients compared"
)
CONFIGURED_LAW = "model.configured"
Sink = Callable[[], Any]


@dataclass(frozen=True)
class ModelCheckRequest:
    """A model by its factory's path, the file of a configuration or none, and the axes, as that says where empty."""

    model: str
    config: str = ""
    engine: str = "reference"
    stages: tuple[int, ...] = ()
    world_size: int = 2
    dtype: str = ""
    steps: int = 3

    def build_request(self) -> Request:
        """The cells of it."""
        if self.config and not is_config_file(self.config):
            raise UsageError(f"got the configuration {self.config!r}; expected a JSON file whose name ends in .json")
        says = configuration_for(self.config)
        stages = self.stages or (() if says.stage is None else (says.stage,))
        dtype = self.dtype or says.dtype or "fp32"
        return Request((), (self.engine,), stages, (self.world_size,), (dtype,), (self.model,), self.config)


def run_model_command(
    check_request: ModelCheckRequest,
    options: RunOptions,
    outputs: Outputs,
    get_environment: Callable[[str], RankEnvironment],
) -> int:
    """Run the laws and report; the exit code. Raises UsageError before anything long starts."""
    outputs.require_writable()
    began = time.monotonic()
    with ExitStack() as stack:
        records = check_model(
            check_request,
            options,
            partial(open_optional_record_file, stack, outputs.jsonl),
            get_environment,
            print_status,
        )
    code, complaint = report_run(records, time.monotonic() - began, outputs), explain_uncompared_gradients(records)
    if code == 0 and complaint:
        click.echo(complaint)
        return 1
    return code


def print_status(line: str) -> None:
    """A line for who waits."""
    click.echo(line, err=True)


def check_model(
    check_request: ModelCheckRequest,
    options: RunOptions,
    open_sink: Sink,
    get_environment: Callable[[str], RankEnvironment] = build_rank_environment,
    report_status: Callable[[str], None] = lambda _line: None,
) -> list[Record]:
    """The records of every law that is stated for the model, in the order of the matrix.

    Raises UsageError for a model that cannot be judged or does not fit, and a configuration that the engine refuses.
    """
    request = check_request.build_request()
    validate_request(request)
    report_status(f"{check_request.model}: called, run twice by plain PyTorch, and built into {check_request.engine}")
    for key in configuration_for(check_request.config).ignored_keys:
        report_status(f"{check_request.config}: {key} is left out: {explain_ignored_key(key)}")
    with ExitStack() as stack:
        first = stack.enter_context(
            options.create_runner({check_request.engine: get_environment(check_request.engine)})
        )
        facts: ModelFacts = first.call_in_judge(
            measure_model, check_request.model, request.dtypes[0], check_request.config
        )
        reason = explain_too_large(facts, check_request.world_size, available_memory())
        if reason:
            raise UsageError(f"{check_request.model}: {reason}")
        cells = plan_model_cells(request, check_request, facts, first.claims)
        broken = build_engines(first, cells)
        cells = [skip_unbuildable_stage(cell, broken) for cell in cells]
        running = [cell.cell for cell in cells if not cell.unsupported_reason and cell.cell not in broken]
        lanes = [first, *(start_more_runners(stack, options, check_request, facts, get_environment) if running else ())]
        if running:
            report_status(describe_model_run(facts, running, check_request.world_size, len(lanes), os.cpu_count() or 1))
        found = chain(broken.values(), run_cells([cell for cell in cells if cell.cell not in broken], lanes))
        return sort_as_planned(list(write_with_progress(found, open_sink(), len(cells))), cells)


def start_more_runners(
    stack: ExitStack,
    options: RunOptions,
    check_request: ModelCheckRequest,
    facts: ModelFacts,
    get_environment: Callable[[str], RankEnvironment],
) -> list[Runner]:
    """Runners beside the first: as many as asked for, else for each core, as far as the model's memory allows."""
    fitting = int(available_memory() // facts.estimate_memory(check_request.world_size))
    width = max(1, min(options.job_count(), fitting))
    return [
        stack.enter_context(options.create_runner({check_request.engine: get_environment(check_request.engine)}))
        for _ in range(width - 1)
    ]


def plan_model_cells(
    request: Request, check_request: ModelCheckRequest, facts: ModelFacts, claims: ClaimsLookup
) -> list[PlannedCell]:
    """The cells: the number of steps set, and those left out that say nothing of this model."""
    found = [set_step_count(cell, check_request.steps) for cell in plan(request, claims)]
    return [skip_random_forward(cell, facts) for cell in found if is_relevant(cell.cell, facts, claims)]


def skip_random_forward(planned: PlannedCell, facts: ModelFacts) -> PlannedCell:
    """The cell; not run where it would compare kernels of a forward that draws random numbers."""
    if planned.unsupported_reason or planned.cell.law != KERNELS_LAW or not facts.draws_random_numbers:
        return planned
    return replace(planned, unsupported_reason=DROPOUT_REASON)


def set_step_count(planned: PlannedCell, steps: int) -> PlannedCell:
    """A cell of so many steps, where the check counts them."""
    if not get_law(planned.cell.law).get_variant(planned.cell.variant).is_step_count:
        return planned
    return replace(planned, cell=replace(planned.cell, variant=str(steps)))


def is_relevant(cell: Cell, facts: ModelFacts, claims: ClaimsLookup) -> bool:
    """Whether a law is one of this model, engine and configuration."""
    if cell.law == "model.checkpointing":
        return facts.supports_checkpointing
    if cell.law == KERNELS_LAW:
        # Where local gradients are compared bitwise no calibrated comparison adds anything.
        return cell.stage in claims(cell.engine, cell.stage).own_kernels
    # The laws of autocast set its section themselves, with and without.
    return not (cell.law.startswith("precision.") and configuration_for(cell.engine_variant).autocast_dtype is not None)


def build_engines(runner: Runner, cells: Sequence[PlannedCell]) -> dict[Cell, Record]:
    """Build the engine at each stage as the user configured it; a record for each stage where that crashes or hangs.

    Raises UsageError with the engine's own words where it refuses.
    """
    found = {}
    cases = [cell.cell for cell in cells if not cell.unsupported_reason]
    # The law of the training as configured builds just this engine.
    for case in {case.stage: case for case in sorted(cases, key=lambda case: case.law == CONFIGURED_LAW)}.values():
        record = runner.try_on_ranks(case, build_and_close_engine)
        if record is not None:
            found[case] = replace(record, cause=f"while the engine was built around the model: {record.cause}")
    return found


def skip_unbuildable_stage(planned: PlannedCell, failure_records: Mapping[Cell, Record]) -> PlannedCell:
    """The cell; not run where the engine cannot be built at its stage, which takes the time-out where it hangs."""
    first = next((record for case, record in failure_records.items() if case.stage == planned.cell.stage), None)
    if first is None or planned.unsupported_reason or planned.cell in failure_records:
        return planned
    return replace(planned, unsupported_reason=f"the engine cannot be built around the model, see {first.cell.law}")
