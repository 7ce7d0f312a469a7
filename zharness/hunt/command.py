"""The command ``zharness hunt``: hunt for unknown failures, report the groups of alarms, and export the new ones."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import click
from tqdm import tqdm

from zharness.engines import Capabilities
from zharness.engines.registry import split_release
from zharness.engines.warm_up import GetEnvironment
from zharness.errors import UsageError, ZHarnessError
from zharness.export.imported_script import render_imported_program_script
from zharness.export.program_script import render_judged_program_script, render_program_script
from zharness.export.script_writer import Script
from zharness.export.verify import REPRODUCED, RunScript
from zharness.hunt.draw import PairCoverage
from zharness.hunt.engine_coverage import EngineCoverage, make_measured_observer
from zharness.hunt.groups import AlarmGroup
from zharness.hunt.hunter import Hunter, HuntLimits
from zharness.hunt.known import explain_changed_numbers, find_known
from zharness.hunt.log import HuntLog, HuntState
from zharness.hunt.space import Space
from zharness.hunt.unreached import describe_unreached, read_functions
from zharness.mesh import DEFAULT_MESH, Mesh
from zharness.run.claims import get_engine_version
from zharness.run.files import require_writable, unwritable_error, write_atomically
from zharness.run.mesh_claims import explain_unclaimed_axes
from zharness.run.program_runner import ProgramOutcome, ProgramRunner, observe_programs
from zharness.run.record import Verdict
from zharness.workload.legal_programs import UNLIMITED_OUTPUTS
from zharness.workload.programs import Act, LayerKind, Mark, Program

RenderProgram = Callable[[str, str, Program, ProgramOutcome, Capabilities], Script]

LOG_NAME = "hunt.jsonl"
ARCS_FOLDER = "coverage"
UNREACHED_NAME = "unreached.txt"
ALL_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class HuntOptions:
    """The options of a hunt.

    Without ``stages``, all stages that the engine claims on ``mesh`` are drawn. ``output`` is the folder of the scripts
    and, unless ``jsonl`` names another file, of the log. With ``trust_records``, failures that are already recorded are
    known. With ``measures_engine``, the branches of the engine that draws reach are measured, and guide further draws.
    """

    limits: HuntLimits
    seed: int = 0
    stages: tuple[int, ...] = ()
    world_sizes: tuple[int, ...] = (1, 2, 3)
    dtypes: tuple[str, ...] = ()
    excluded_names: tuple[str, ...] = ()
    max_outputs: int = UNLIMITED_OUTPUTS
    output: Path | None = None
    jsonl: Path | None = None
    trust_records: bool = True
    timeout: float = 30.0
    measures_engine: bool = False
    mesh: Mesh = DEFAULT_MESH


def run_hunt(engine: str, options: HuntOptions, get_environment: GetEnvironment, run_script: RunScript | None) -> int:
    """Hunt on ``engine``, print the groups of alarms, and return the exit code.

    ``run_script`` runs a script to verify it; if it is None, scripts are not verified. Raises UsageError for a name
    that the engine does not know, and for a folder that cannot be written.
    """
    environment = get_environment(engine)
    folder = options.output or Path(f"hunt-{re.sub(r'[^A-Za-z0-9.]+', '-', engine)}")
    jsonl = options.jsonl or folder / LOG_NAME
    prepare_folder(folder, jsonl)
    version = get_engine_version(engine)
    arcs_folder = folder / ARCS_FOLDER
    observe = make_measured_observer(engine, arcs_folder) if options.measures_engine else observe_programs
    engine_coverage = EngineCoverage(arcs_folder) if options.measures_engine else None
    with ExitStack() as stack:
        runner = stack.enter_context(ProgramRunner(environment, options.timeout, observe))
        space = build_space(engine, options, runner)
        log = stack.enter_context(HuntLog(jsonl, describe_settings(engine, version, options, space)))
        bar = stack.enter_context(tqdm(bar_format="{desc}", disable=not sys.stderr.isatty(), leave=False))
        coverage = PairCoverage(space.list_claimed_pairs())

        def is_known(program: Program, outcome: ProgramOutcome) -> str:
            """Return the place where a failure is recorded, or '' if it is new."""
            if not options.trust_records:
                return ""
            needed = space.get_kernel_options(program.stage) or ()
            claims = space.claims_at[program.stage]
            recorded = find_known(engine, version, program, outcome, claims, needed)
            return recorded or explain_changed_numbers(program, outcome, claims)

        hunter = Hunter(
            space,
            runner,
            log,
            coverage,
            is_known,
            lambda group: export_group(folder, engine, version, group, space.claims_at, run_script),
            lambda state: bar.set_description_str(
                f"{describe_progress(state)}, {len(coverage.covered)} of {len(coverage.claimed)} pairs covered"
            ),
            engine_coverage.collect if engine_coverage is not None else int,
        )
        try:
            hunter.hunt(options.seed, options.limits)
        finally:
            bar.close()
            click.echo(describe_result(engine, version, options.seed, log.state, coverage))
            if engine_coverage is not None:
                click.echo(report_unreached(engine_coverage, folder))
            click.echo(f"log: {jsonl}")
    return get_exit_code(log.state)


def prepare_folder(folder: Path, jsonl: Path) -> None:
    """Create the folders of the scripts and of the log. Raises UsageError if nothing can be written there."""
    for path in (folder, jsonl.parent):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable_error(path, error) from error
    require_writable(folder / LOG_NAME)
    require_writable(jsonl)


def build_space(engine: str, options: HuntOptions, runner: ProgramRunner) -> Space:
    """Return the space of draws. Raises UsageError for a stage, mesh, dtype or name that the engine does not know."""
    claims_at = collect_claims(engine, options, runner)
    dtypes = sorted(set().union(*(claims.dtypes for claims in claims_at.values())), key=["fp32", "bf16", "fp16"].index)
    for dtype in options.dtypes:
        if dtype not in dtypes:
            raise UsageError.unknown_name(f"dtype of {engine}", dtype, dtypes)
    names = {member.value for axis in (LayerKind, Act, Mark) for member in axis}
    names |= {name for claims in claims_at.values() for name in claims.engine_options}
    for name in options.excluded_names:
        if name not in names:
            raise UsageError.unknown_name("layer, verb, mark or engine option to leave out", name, sorted(names))
    space = Space(
        engine,
        claims_at,
        options.world_sizes,
        options.dtypes or tuple(dtypes),
        options.excluded_names,
        options.max_outputs,
        options.mesh,
    )
    if not space.stages:
        reasons = "; ".join(
            dict.fromkeys(text for claims in claims_at.values() for text in claims.own_kernels.values())
        )
        raise UsageError(f"no program can be judged on {engine} at these stages: {reasons}")
    return space


def collect_claims(engine: str, options: HuntOptions, runner: ProgramRunner) -> dict[int, Capabilities]:
    """Return the claims of ``engine`` on the mesh at each stage to draw.

    Raises UsageError for a stage that the engine does not have, and if the engine does not claim the mesh at a named
    stage or at any stage.
    """
    claims_at, unclaimed = dict[int, Capabilities](), ""
    for stage in options.stages or ALL_STAGES:
        is_first = not (claims_at or unclaimed)  # if the engine can be built at no stage, its own error is raised
        claims = runner.claims(engine, stage) if options.stages or is_first else get_claims(runner, engine, stage)
        if claims is not None and claims.absent:
            raise UsageError(f"{engine} cannot be built here: {claims.absent}")
        if claims is not None and stage in claims.stages:
            unclaimed = explain_unclaimed_axes(engine, options.mesh, claims)
            if not unclaimed:
                claims_at[stage] = claims.on_mesh(options.mesh)
            elif options.stages:
                raise UsageError(unclaimed)
        elif options.stages:
            known = sorted(claims.stages) if claims is not None else []
            raise UsageError.unknown_name(f"stage of {engine}", str(stage), [str(at) for at in known])
    if not claims_at:
        raise UsageError(unclaimed or f"{engine} claims none of the stages {', '.join(map(str, ALL_STAGES))}")
    return claims_at


def get_claims(runner: ProgramRunner, engine: str, stage: int) -> Capabilities | None:
    """Return the claims of ``engine`` at ``stage``, or None if the engine cannot be built at ``stage``."""
    try:
        return runner.claims(engine, stage)
    except UsageError:
        return None


def describe_settings(engine: str, version: str, options: HuntOptions, space: Space) -> dict[str, object]:
    """Return the settings that determine the draws; two calls with one log must have the same settings."""
    return {
        "engine": engine,
        "version": version,
        "seed": options.seed,
        "stages": list(space.stages),
        "world_sizes": list(space.world_sizes),
        "dtypes": list(space.dtypes),
        "without": list(space.excluded_names),
        "outputs": space.max_outputs,
        "options": {str(stage): space.list_options(stage) for stage in space.stages},
        **({"coverage": True} if options.measures_engine else {}),
        **({"mesh": options.mesh.label} if options.mesh.sizes else {}),
    }


def report_unreached(engine_coverage: EngineCoverage, folder: Path) -> str:
    """Write the functions of the engine that no draw has reached into ``folder``; return the most promising ones."""
    data_file = engine_coverage.combine()
    if data_file is None:
        return "the engine's source: nothing was reached"
    functions = read_functions(data_file)
    path = folder / UNREACHED_NAME
    write_atomically(describe_unreached(functions, limit=None) + "\n", path)
    return f"{describe_unreached(functions)}\nall of it: {path}; for coverage.py: {data_file}"


def export_group(
    folder: Path,
    engine: str,
    version: str,
    group: AlarmGroup,
    claims_at: Mapping[int, Capabilities],
    run_script: RunScript | None,
) -> tuple[str, str]:
    """Write the script of a group into ``folder`` and run it; return its name and the result of the run."""
    if group.outcome.verdict is Verdict.HANG:
        return "", "no script is written, because it would not end"
    claims = claims_at[group.smallest.stage]
    stem = re.sub(
        r"\W+", "_", f"{split_release(engine)[0]}_{group.number}_{group.cause.signature.failure_kind}".lower()
    )
    path = folder / f"{stem.strip('_')}.py"
    verified = ""
    for render in choose_renderers(group.smallest):
        try:
            script = render(engine, version, group.smallest, group.outcome, claims)
        except ZHarnessError as error:
            return path.name if path.exists() else "", f"{verified}no script can be written: {error}"
        write_atomically(script.text, path)
        if run_script is None:
            return path.name, "not run"
        result = run_script(path)
        verified = f"{result.verdict}: {result.evidence}"
        if result.verdict == REPRODUCED:
            break
    return path.name, verified


def choose_renderers(program: Program) -> tuple[RenderProgram, ...]:
    """Return the functions that may write ``program`` as a script; the first script that shows the failure is used."""
    if program.mesh.sizes:  # no script without zharness can build a mesh
        return (render_imported_program_script,)
    if program.options:  # a short script has its own engine, which knows no options of an adapter
        return (render_judged_program_script,)
    return render_program_script, render_judged_program_script  # a short script compares less than the judge


def describe_progress(state: HuntState) -> str:
    """Return the numbers of draws, alarms and groups."""
    new = sum(not group.known for group in state.groups)
    return f"{state.draw_count} draws, {state.alarm_count} alarms of {len(state.groups)} causes ({new} new)"


def describe_result(engine: str, version: str, seed: int, state: HuntState, coverage: PairCoverage) -> str:
    """Describe the outcome of a hunt: a summary, the groups of alarms with new groups first, and irregularities."""
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(state.verdicts.items()))
    lines = [f"{engine} {version}, seed {seed}: {describe_progress(state)}; {verdicts}", coverage.describe()]
    lines += [group.describe(engine) for group in sorted(state.groups, key=lambda group: bool(group.known))]
    if state.unconfirmed:
        lines.append(f"not confirmed on new ranks: {len(state.unconfirmed)}")
        lines += [f"   {text}" for text in state.unconfirmed]
    if state.errors:
        lines.append(f"errors of the harness: {len(state.errors)}")
        lines += [f"   {text}" for text in state.errors]
    return "\n".join(lines)


def get_exit_code(state: HuntState) -> int:
    """Return 3 if the harness failed in a draw, 1 if an alarm is new, else 0."""
    if state.errors:
        return 3
    return int(any(not group.known for group in state.groups))
