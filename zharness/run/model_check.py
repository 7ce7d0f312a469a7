"""Check a user's model against every law that applies to it: the command ``zharness model`` and ``zharness.verify``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import chain

from zharness.cell import Cell
from zharness.engines.warm_up import GetEnvironment
from zharness.errors import UsageError
from zharness.law_set import list_later_changes
from zharness.laws import get_law
from zharness.mesh import DEFAULT_MESH, Mesh
from zharness.run import PlannedCell, Record, Request, Runner, plan
from zharness.run.check_loop import RunOptions, collect_records, run_cells
from zharness.run.configuration import (
    explain_ignored_key,
    is_config_file,
    load_variant_configuration,
    translate_configuration,
)
from zharness.run.mesh_claims import require_mesh_at_some_stage
from zharness.run.model_facts import (
    ModelFacts,
    build_and_close_engine,
    describe_model_run,
    measure_model,
)
from zharness.run.model_files import (
    FreeSpace,
    count_fitting_cells,
    estimate_file_bytes,
    find_file_problem,
    format_file_bytes,
    measure_free_space,
)
from zharness.run.model_limits import describe_uneven_ranks, skip_unjudgeable
from zharness.run.model_memory import (
    IGNORE_OPTION,
    ModelSize,
    SizeEstimate,
    estimate_size,
    explain_current_limit,
    needs_calibration,
    require_fitting,
)
from zharness.run.plan import ClaimsLookup, select_stages, validate_request
from zharness.run.record import RecordFile

OpenSink = Callable[[], RecordFile | None]
ReportStatus = Callable[[str], None]


@dataclass(frozen=True)
class ModelCheckRequest:
    """The model to check, named by the path of its factory, and the settings of its cells.

    ``config`` is the path of a DeepSpeed JSON file, or empty. If ``stages`` or ``dtype`` is empty, the file determines
    it. ``steps`` is the number of training steps of the law ``model.configured``. ``only`` are patterns of laws; if it
    is empty, every law that applies to any model runs. With ``ignore_memory_limit``, a model that does not fit into
    memory is not refused: a line of output warns instead. ``law_set`` is the version of the law set, empty for the
    newest.
    """

    model: str
    config: str = ""
    engine: str = "reference"
    stages: tuple[int, ...] = ()
    world_size: int = 2
    dtype: str = ""
    steps: int = 3
    only: tuple[str, ...] = ()
    ignore_memory_limit: bool = False
    mesh: Mesh = DEFAULT_MESH
    law_set: str = ""

    def build_request(self) -> Request:
        """Build the request for the cells. Raises UsageError for a configuration that is not a JSON file."""
        if self.config and not is_config_file(self.config):
            raise UsageError(f"got the configuration {self.config!r}; expected a JSON file whose name ends in .json")
        config = load_variant_configuration(self.config)
        stages = self.stages or (() if config.stage is None else (config.stage,))
        dtype = self.dtype or config.dtype or "fp32"
        models, sizes = (self.model,), (self.world_size,)
        return Request(
            self.only,
            (self.engine,),
            stages,
            sizes,
            (dtype,),
            models,
            self.config,
            mesh=self.mesh,
            law_set=self.law_set,
        )


class RunnerLanes:
    """The runners of one engine, started when they are needed and shared by the models that are checked in turn."""

    def __init__(self, options: RunOptions, engine: str, get_environment: GetEnvironment) -> None:
        self.options = options
        self._environments = {engine: get_environment(engine)}
        self._stack = ExitStack()
        self._runners: list[Runner] = []

    def take(self, count: int) -> list[Runner]:
        """Return ``count`` runners; those that do not exist yet are started."""
        while len(self._runners) < count:
            self._runners.append(self._stack.enter_context(self.options.create_runner(self._environments)))
        return self._runners[:count]

    def import_ahead(self, modules: Iterable[str]) -> None:
        """Import ``modules`` in this process, and start the runners anew, so that ranks and judges inherit them.

        Otherwise each rank and judge would need seconds for the import. The import of ``modules`` must not run a tensor
        operation, because ranks that are forked after one could hang. Nothing is imported if ranks use a release of the
        engine from a folder of its own, because transformers would import the installed accelerate.
        """
        if any(environment.module for environment in self._environments.values()):
            return
        missing = [name for name in modules if name not in sys.modules]
        for name in missing:
            with suppress(Exception, SystemExit):  # if the factory changed sys.path, only the ranks can import a module
                importlib.import_module(name)
        if any(name in sys.modules for name in missing):
            self._stack.close()
            self._runners.clear()

    def close_model(self, model: str) -> None:
        """End the ranks and judges of a model that no later cell trains, which frees its memory."""
        for runner in self._runners:
            runner.close_pools(needed=())
            runner.close_judge(model)

    def __enter__(self) -> RunnerLanes:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def check_model(
    check_request: ModelCheckRequest,
    options: RunOptions,
    open_sink: OpenSink,
    get_environment: GetEnvironment,
    report_status: ReportStatus = lambda _line: None,
) -> list[Record]:
    """Run every law that applies to the model, and return the records in the order of the matrix.

    ``report_status`` is called with lines that describe what runs next. Raises UsageError if the model cannot be judged
    or does not fit into memory, or if the engine refuses the configuration.
    """
    with RunnerLanes(options, check_request.engine, get_environment) as lanes:
        return check_model_on(lanes, check_request, open_sink, report_status)


def check_model_on(
    lanes: RunnerLanes, check_request: ModelCheckRequest, open_sink: OpenSink, report_status: ReportStatus
) -> list[Record]:
    """Run the laws of one model on runners that earlier models may have used; see ``check_model``."""
    request = check_request.build_request()
    validate_request(request)
    (first,) = lanes.take(1)
    require_claimed_mesh(request, first.claims)
    report_status(
        f"{check_request.model}: building it, running it twice in plain PyTorch, and building {check_request.engine} "
        "around it"
    )
    report_configuration(check_request, report_status)
    ignore_limit = check_request.ignore_memory_limit
    is_calibrated = needs_calibration(request, first.claims)
    estimate = require_estimated_to_fit(first, request, is_calibrated, ignore_limit, report_status)
    lanes.import_ahead(estimate.modules)
    (first,) = lanes.take(1)
    request = choose_nearest_stage(request, check_request, first.claims, report_status)
    facts: ModelFacts = first.call_in_judge(
        measure_model,
        check_request.model,
        request.dtypes[0],
        check_request.config,
        check_request.world_size,
        ignore_limit,
        request.mesh,
    )
    facts = replace(facts, size=replace(facts.size, is_calibrated=is_calibrated))
    if estimate.size is None:
        require_or_warn(check_request.model, facts.size, check_request.world_size, ignore_limit, report_status)
    free = measure_free_space()
    file_problem = find_file_problem(
        check_request.model, facts.size, check_request.world_size, check_request.steps, free, ignore_limit
    )
    if file_problem:
        report_status(file_problem)
    request = announce_unused_parameters(request, facts, first.claims, report_status)
    if facts.unsplit_parts:
        whole = f"whole on every rank of tp, because no engine here splits them: {facts.unsplit_parts}"
        report_status(f"{check_request.model}: {whole}")
    if facts.uneven_parameters:
        report_status(f"{check_request.model}: {describe_uneven_ranks(facts)}")
    cells = plan_model_cells(request, check_request, facts, first.claims)
    failed_builds = build_engines(first, cells)
    cells = [skip_unbuildable_stage(cell, failed_builds) for cell in cells]
    running = [cell.cell for cell in cells if not cell.unsupported_reason and cell.cell not in failed_builds]
    runners = lanes.take(count_lanes(lanes.options, facts, check_request, free) if running else 1)
    if running:
        report_status(describe_run(facts, running, check_request, len(runners)))
    finished = run_cells(order_by_length([cell for cell in cells if cell.cell not in failed_builds]), runners)
    records = chain(failed_builds.values(), finished)
    return collect_records(records, open_sink(), cells)


def order_by_length(cells: Sequence[PlannedCell]) -> list[PlannedCell]:
    """Return the cells in the order in which they run, the longest first, so that no runner waits long for another."""
    return sorted(cells, key=lambda cell: not get_law(cell.cell.law).is_long)


def report_configuration(check_request: ModelCheckRequest, report_status: ReportStatus) -> None:
    """Report what the law set leaves out, and which keys of the configuration are ignored, filled in or translated."""
    left_out = list_later_changes(check_request.law_set) if check_request.law_set else {}
    if left_out:
        report_status(
            f"the law set {check_request.law_set} leaves out {len(left_out)} law variants; "
            f"`zharness laws diff {check_request.law_set}` lists them"
        )
    config = translate_configuration(check_request.engine, check_request.config)
    for key in config.ignored_keys:
        report_status(f"{check_request.config}: {key} is ignored: {explain_ignored_key(key)}")
    for notice in config.notices:
        report_status(f"{check_request.config}: {notice}")


def require_claimed_mesh(request: Request, claims: ClaimsLookup) -> None:
    """Raise UsageError, before the model is built, if the engine does not claim the mesh."""
    (engine,) = request.engines
    known = select_stages(engine, (), claims)
    stages = [stage for stage in request.stages if stage in known] or known
    claims_at_stages = (claims(engine, stage) for stage in stages)
    require_mesh_at_some_stage(engine, request.mesh, request.world_sizes, claims_at_stages)


def choose_nearest_stage(
    request: Request, check_request: ModelCheckRequest, claims: ClaimsLookup, report_status: ReportStatus
) -> Request:
    """Return the request at the nearest stage of the engine if the engine lacks the stage of the configuration file."""
    if check_request.stages or not request.stages:
        return request
    (stage,) = request.stages
    known = select_stages(check_request.engine, (), claims)
    nearest = min(known, key=lambda candidate: (abs(candidate - stage), -candidate))
    if nearest == stage:
        return request
    report_status(
        f"{check_request.config}: {check_request.engine} has no stage {stage}, only {', '.join(map(str, known))}; "
        f"checked at stage {nearest}"
    )
    return replace(request, stages=(nearest,))


def require_estimated_to_fit(
    runner: Runner, request: Request, is_calibrated: bool, ignore_memory_limit: bool, report_status: ReportStatus
) -> SizeEstimate:
    """Estimate the size of a model before it is built, and raise UsageError if it does not fit into memory.

    With ``ignore_memory_limit``, a line of output warns instead. If the factory cannot run on tensors without memory, a
    line of output says so, and the model is measured after it was built. For ``is_calibrated`` see ``ModelSize``.
    """
    (model,), (dtype,), (world_size,) = request.models, request.dtypes, request.world_sizes
    estimate: SizeEstimate = runner.call_in_judge(estimate_size, model, dtype)
    if estimate.reason:
        report_status(
            f"{model}: its size is not known before it is built, because the factory does not run on tensors without "
            f"memory ({estimate.reason})"
        )
    elif estimate.size is not None:
        size = replace(estimate.size, is_calibrated=is_calibrated)
        require_or_warn(model, size, world_size, ignore_memory_limit, report_status)
    return estimate


def require_or_warn(
    model: str, size: ModelSize, world_size: int, ignore_memory_limit: bool, report_status: ReportStatus
) -> None:
    """Raise UsageError if the model does not fit into memory; with ``ignore_memory_limit``, print a warning instead."""
    if not ignore_memory_limit:
        require_fitting(model, size, world_size)
        return
    reason = explain_current_limit(size, world_size)
    if reason:
        report_status(f"WARNING {model}: {reason}; the laws run nevertheless because of {IGNORE_OPTION}")


def announce_unused_parameters(
    request: Request, facts: ModelFacts, claims: ClaimsLookup, report_status: ReportStatus
) -> Request:
    """Return the request with the option that the engine requires if a loss does not use every parameter.

    A line of output names the parameters and the option. With a configuration file, the request does not change.
    """
    (engine,) = request.engines
    option = claims(engine, (request.stages or select_stages(engine, (), claims))[0]).unused_parameters_option
    if not facts.unused_parameters:
        return request
    shown = ", ".join(facts.unused_parameters[:3]) + (" ..." if len(facts.unused_parameters) > 3 else "")
    often = "always " if facts.uneven_parameters else ""
    line = f"{request.models[0]}: the loss does not {often}use {len(facts.unused_parameters)} parameters ({shown})"
    if not option or request.engine_variant:
        report_status(line)
        return request
    report_status(f"{line}; {engine} requires the option {option} for such a loss, so every cell sets it")
    return replace(request, engine_variant=option)


def describe_run(facts: ModelFacts, cells: Sequence[Cell], check_request: ModelCheckRequest, jobs: int) -> str:
    """Describe the run in one line: the model's size, the number of cells, the estimated time, memory and files."""
    world_size = check_request.world_size
    files = jobs * estimate_file_bytes(facts.size, world_size, check_request.steps)
    described = describe_model_run(facts, cells, world_size, jobs, os.cpu_count() or 1)
    return f"{described}, and {format_file_bytes(files)} of temporary files"


def count_lanes(options: RunOptions, facts: ModelFacts, check_request: ModelCheckRequest, free: FreeSpace) -> int:
    """Return the number of cells that run at a time: as requested or one per core, if memory and disk suffice."""
    fitting = count_fitting_cells(facts.size, check_request.world_size, check_request.steps, free)
    return max(1, min(options.job_count(), fitting))


def plan_model_cells(
    request: Request, check_request: ModelCheckRequest, facts: ModelFacts, claims: ClaimsLookup
) -> list[PlannedCell]:
    """Plan the cells with the requested number of steps, and leave out cells that test nothing for this model."""
    cells = [set_step_count(cell, check_request.steps) for cell in plan(request, claims)]
    relevant = [cell for cell in cells if is_relevant(cell.cell, facts, claims)]
    return [skip_unjudgeable(cell, facts, claims) for cell in relevant]


def set_step_count(planned: PlannedCell, steps: int) -> PlannedCell:
    """Set the number of training steps of the cell to ``steps`` if its law trains a configurable number of steps."""
    if not runs_configured_training(planned.cell):
        return planned
    return replace(planned, cell=replace(planned.cell, variant=str(steps)))


def is_relevant(cell: Cell, facts: ModelFacts, claims: ClaimsLookup) -> bool:
    """Return whether the law of ``cell`` tests anything for this model, engine and configuration."""
    law = get_law(cell.law)
    if cell.law in facts.inapplicable_laws:
        return False
    if law.is_calibrated or law.only_own_kernels:
        # With torch's kernels local gradients are compared bitwise, and a calibrated comparison adds nothing.
        return cell.stage in claims(cell.engine, cell.stage).on_mesh(cell.mesh).own_kernels
    return not (law.sets_autocast and load_variant_configuration(cell.engine_variant).autocast_dtype is not None)


def runs_configured_training(cell: Cell) -> bool:
    """Return whether the law of ``cell`` runs several steps of the training that the user configured."""
    return get_law(cell.law).get_variant(cell.variant).is_step_count


def build_engines(runner: Runner, cells: Sequence[PlannedCell]) -> dict[Cell, Record]:
    """Build the engine once at each stage, with the user's configuration.

    Returns a failure record for each stage at which the engine crashes or hangs. Raises UsageError with the message of
    the exception if the engine raises one.
    """
    failures = {}
    supported = [cell.cell for cell in cells if not cell.unsupported_reason]
    # Take one cell per stage, if possible one that runs the configured training: its law builds exactly this engine.
    by_stage = {cell.stage: cell for cell in sorted(supported, key=runs_configured_training)}
    for cell in by_stage.values():
        record = runner.try_on_ranks(cell, build_and_close_engine)
        if record is not None:
            failures[cell] = replace(record, cause=f"while the engine was built around the model: {record.cause}")
    return failures


def skip_unbuildable_stage(planned: PlannedCell, failure_records: Mapping[Cell, Record]) -> PlannedCell:
    """Mark the cell as unsupported if the engine crashed or hung while it was built at the cell's stage.

    Each further attempt to build the engine could take the whole time-out again.
    """
    failure = next((record for cell, record in failure_records.items() if cell.stage == planned.cell.stage), None)
    if failure is None or planned.unsupported_reason or planned.cell in failure_records:
        return planned
    return replace(
        planned,
        unsupported_reason=f"the engine cannot be built around the model; see the failure of {failure.cell.law}",
    )
