"""The command line: each command parses its options and calls the package."""

from __future__ import annotations

import errno
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import click

import zharness
from zharness.cli import cells, releases
from zharness.cli.check import check
from zharness.cli.compare import compare
from zharness.cli.docs import docs
from zharness.cli.doctor import doctor
from zharness.cli.hunt import hunt
from zharness.cli.init import init
from zharness.cli.laws import laws
from zharness.cli.model import model
from zharness.cli.options import (
    OUTPUT,
    PROGRAM_MESHES,
    SECONDS,
    IntegerRange,
    NameChoice,
    NumberRange,
    OnceCommand,
    add_law_option,
    add_mesh_option,
    parse_integer_option,
    parse_name_option,
)
from zharness.cli.project_options import set_defaults
from zharness.cli.site import site
from zharness.cli.tour import tour
from zharness.environment import look_for_gpus_by_nvml
from zharness.errors import UsageError, ZHarnessError
from zharness.mesh import Mesh

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(zharness.__version__, prog_name="zharness")
@click.pass_context
def cli(context: click.Context) -> None:
    """Does a sharded training engine compute what plain PyTorch computes?

    \b
    zharness tour                                 a law, broken engines and a real bug, within a minute
    zharness check                                the reference engine, every law, stages 0-3
    zharness check --engine deepspeed --stage 2,3 the real DeepSpeed
    zharness check 'torch_func.*' --engine my_package.my_module:factory
    zharness model my_package.my_model:factory    your own model, with every law that applies to any model
    zharness list laws                            every law and its statement
    zharness mutants                              engines broken on purpose, and which law finds each
    zharness repro 7352                           a real bug, on a release that has it and one that does not
    zharness releases deepspeed 0.18.8 0.19.8     the same laws on several releases, and what changed
    zharness site RECORDS.jsonl... -o FOLDER      a static site of many runs: every engine, release, law and finding
    zharness hunt deepspeed --minutes 60          run random programs to find bugs that no finding records
    zharness doctor                               whether this machine can run zharness, and what to fix

    Write options of check and model that a repository always uses into zharness.toml (`zharness docs your-engine`).

    Exit codes: 0 everything is as expected, 1 a law is broken, 2 wrong usage, 3 the harness itself failed, 130
    interrupted by Ctrl-C, 143 ended by SIGTERM.
    """
    set_defaults(context, cli)


@cli.command(cls=OnceCommand)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--contracts",
    "table",
    flag_value="contracts",
    help="Print a Markdown table of the differences that engines document.",
)
@click.option(
    "--combinations",
    "table",
    flag_value="combinations",
    help="Print a Markdown table of engines and meshes, with the number of laws that ran on each.",
)
@click.option(
    "--against",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="OLD.jsonl",
    help="Records of an earlier run; print first how the results differ from that run.",
)
@click.option("--html", type=OUTPUT, help="Write the results as one self-contained HTML page.")
@click.option("--junitxml", type=OUTPUT, help="Write a JUnit XML report, as pytest does.")
def report(
    files: tuple[Path, ...], table: str | None, against: Path | None, html: Path | None, junitxml: Path | None
) -> int:
    """Render the records of earlier runs (`zharness check --jsonl FILE`) as one table: laws x engines and stages.

    Lines that are not records are skipped and counted. The exit code is that of `zharness check`, with one exception:
    it is 2 if every record is as expected but a line was skipped, because the skipped line may be a failure.
    """
    from zharness.report.command import run_report
    from zharness.report.outputs import Outputs

    return run_report(files, against, table or "", Outputs(None, html, junitxml))


@cli.command(name="list", cls=OnceCommand)
@click.argument(
    "what",
    type=NameChoice(["engines", "laws", "checks", "models", "mutants", "repros"]),
    metavar="[engines|laws|models|mutants|repros]",
)
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option("--long", is_flag=True, help="With `list laws`: also list the mutants that each law has to kill.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def list_(what: str, patterns: tuple[str, ...], long: bool, as_json: bool) -> int:
    """List engines and their versions, laws, models, mutants or reproductions.

    A PATTERN is a name, a glob, or a group of laws. `checks` is an older name of `laws`.
    """
    from zharness.cli.name_index import load_index
    from zharness.releases.repro_table import list_repro_rows
    from zharness.report.listing import engine_rows, filter_rows, render_rows

    read_index = cache(load_index)
    builders: dict[str, Callable[[], list[dict[str, str]]]] = {
        "engines": engine_rows,
        "repros": list_repro_rows,
        "models": lambda: read_index().models,
        "mutants": lambda: read_index().mutants,
        "laws": lambda: read_index().laws,
        "checks": lambda: read_index().laws,  # the older name of laws
    }
    rows = filter_rows(builders[what](), what, patterns)
    if long and what in ("laws", "checks"):
        killed = read_index().killed
        rows = [{**row, "kills": ", ".join(killed[row["check"]])} for row in rows]
    click.echo(render_rows(rows, as_json))
    return 0


for command in (
    check,
    releases.repro,
    releases.releases,
    releases.bisect,
    compare,
    laws,
    docs,
    doctor,
    model,
    cells.export,
    cells.shrink,
    hunt,
    init,
    site,
    tour,
):
    cli.add_command(command)


@cli.command(cls=OnceCommand)
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@add_law_option(cell_ids=False)
@click.option(
    "--scope",
    type=NameChoice(["every", "targets"]),
    default="every",
    show_default=True,
    help="every: run all laws on each mutant, each law until one of its cells kills the mutant (hours). targets: run "
    "only the cells that have to kill the mutant (minutes).",
)
@click.option(
    "--world-size", "world_sizes", callback=parse_integer_option, default="2", metavar="2,4", show_default=True
)
@click.option(
    "--model",
    "models",
    callback=parse_name_option,
    metavar="NAME,...",
    help="Models to train; by default the first model of each law.",
)
@click.option(
    "--timeout", type=SECONDS, default=60.0, show_default=True, help="Time limit for the ranks of one cell, in seconds."
)
@click.option(
    "--jobs", type=IntegerRange(1), default=1, show_default=True, help="Number of cells to run at the same time."
)
@click.option(
    "--jsonl", type=OUTPUT, help="Write records to FILE, and skip the cells whose records are already in FILE."
)
def mutants(
    patterns: tuple[str, ...],
    checks: tuple[str, ...],
    scope: str,
    world_sizes: tuple[int, ...],
    models: tuple[str, ...],
    timeout: float,
    jobs: int,
    jsonl: Path | None,
) -> int:
    """Run the laws on mutants, engines that are broken on purpose, and report which law kills which mutant.

    A PATTERN is a mutant's name or a glob. Without a PATTERN, every mutant is run. The exit code is 1 if a mutant or
    one of its target cells survives, or if a law kills no mutant. `zharness list mutants` describes the mutants.
    """
    from zharness.cli.name_index import require_known_names

    require_known_names(mutants=patterns, laws=checks, models=models)
    from zharness.kill_matrix.command import KillOptions, Scope, run_mutants
    from zharness.run.check_loop import run_cells

    return run_mutants(
        patterns, KillOptions(checks, world_sizes, models, timeout, jobs, Scope(scope)), jsonl, run_cells
    )


@cli.command(cls=OnceCommand)
@click.argument("texts", nargs=-1, metavar="['MODEL | VERBS']...")
@click.option(
    "--engine",
    default="reference",
    show_default=True,
    help="Engine: NAME, NAME==RELEASE, NAME@CHECKOUT or package.module:factory.",
)
@click.option("--stage", "stages", callback=parse_integer_option, default="0", show_default=True, metavar="0,1,2,3")
@click.option(
    "--world-size", "world_sizes", callback=parse_integer_option, default="2", show_default=True, metavar="1,2,4"
)
@add_mesh_option(PROGRAM_MESHES)
@click.option("--dtype", "dtypes", callback=parse_name_option, default="fp32", show_default=True, metavar="fp32,bf16")
@click.option("--optimizer", type=NameChoice(["sgd", "adamw", "adam", "nesterov"]), default="sgd", show_default=True)
@click.option(
    "--clip", type=NumberRange(0, min_open=True), help="Norm to which gradients are clipped; by default they are not."
)
@click.option(
    "--window",
    type=IntegerRange(1),
    default=1,
    show_default=True,
    help="Number of micro-batches that are accumulated for one optimizer step.",
)
@click.option(
    "--window-owner",
    type=NameChoice(["engine", "caller"]),
    default="engine",
    show_default=True,
    help="Who counts the micro-batches of a window and divides by their number.",
)
@click.option(
    "--option",
    "engine_options",
    multiple=True,
    metavar="NAME",
    help="An option of the engine to set, by the name that cells use (`zharness hunt` draws them). May be repeated.",
)
@click.option(
    "--reduction",
    type=NameChoice(["mean", "sum"]),
    default="mean",
    show_default=True,
    help="How gradients are combined over ranks.",
)
@click.option(
    "--batches",
    type=IntegerRange(1),
    default=20,
    show_default=True,
    help="Number of batches to draw; each batch consists of 8 programs.",
)
@click.option("--seed", default=0, show_default=True, help="Seed from which the programs are drawn.")
@click.option(
    "--without",
    callback=parse_name_option,
    metavar="i,tied,...",
    help="Layers, verbs and options of verbs that drawn programs must not use.",
)
@click.option(
    "--outputs",
    type=IntegerRange(1),
    help="Maximum number of outputs that a drawn program keeps for later backwards at the same time.",
)
@click.option(
    "--timeout", type=SECONDS, default=60.0, show_default=True, help="Time limit for the ranks of one run, in seconds."
)
def program(
    texts: tuple[str, ...],
    engine: str,
    stages: tuple[int, ...],
    world_sizes: tuple[int, ...],
    mesh: Mesh,
    dtypes: tuple[str, ...],
    optimizer: str,
    clip: float | None,
    window: int,
    window_owner: str,
    engine_options: tuple[str, ...],
    reduction: str,
    batches: int,
    seed: int,
    without: tuple[str, ...],
    outputs: int | None,
    timeout: float,
) -> int:
    """Run programs (small models with sequences of calls), or draw random programs until one fails.

    A program is written as 'x(3) linear(2) relu | f b:retain b s'.

    Several programs run one after the other on the same ranks. Without a program, Hypothesis draws programs, and
    zharness prints a command that runs the smallest program that fails.

    \b
    Layers: x(3) or tokens(5,3) first; linear(n), matrix(n), frozen(n), read(n), conv(n), unused(n),
            norm, relu, gelu, tied; residual[...], twice[...], sometimes[...], checkpoint[...], reentrant[...]
    Verbs:  f forward (f:few,kw), b backward (b:old,tensor,scale,other,retain,unseen), n both in no_sync, s step,
            z zero_grad, e and i forward under no_grad and inference_mode, v and vg in eval mode, vg with a graph,
            g and t gradients of inputs by autograd.grad and torch.func.grad, l read all parameters and gradients,
            xf and xb a forward and a backward that raise, idle a step without gradient, edit, save, load (:old)
    """
    from zharness.cli.name_index import require_known_names

    require_known_names(engine_names=[engine], stages=stages, dtypes=dtypes)
    from zharness.releases.rank_environment import prepare_rank_environment
    from zharness.run.program_commands import run_given_programs, run_program_search
    from zharness.run.program_meshes import require_program_mesh
    from zharness.run.program_search import SearchOptions
    from zharness.workload.legal_programs import UNLIMITED_OUTPUTS
    from zharness.workload.programs import Program

    if clip is not None and not clip < float("inf"):
        raise UsageError(f"--clip: got {clip}; expected a finite number above 0")
    settings = Program((), (), optimizer=optimizer, clip=clip, window=window, reduction=reduction)
    settings = replace(settings, window_owner=window_owner, options=engine_options, mesh=mesh)
    require_program_mesh(engine, mesh, world_sizes)
    if texts:
        return run_given_programs(
            texts, engine, stages, world_sizes, dtypes, settings, timeout, prepare_rank_environment
        )
    if settings.with_default_settings != settings or engine_options:
        raise UsageError(
            "--clip, --window, --window-owner, --reduction and --option apply only to programs on the command line, "
            "and none was given; give a program, or leave these options out"
        )
    search = SearchOptions(stages, world_sizes, dtypes, batches, seed, without, outputs or UNLIMITED_OUTPUTS, mesh)
    return run_program_search(engine, search, timeout, prepare_rank_environment)


def main() -> None:
    """Run the command line; print expected errors as one sentence and exit with the documented codes."""
    signal.signal(signal.SIGTERM, exit_on_sigterm)
    look_for_gpus_by_nvml()
    try:
        sys.exit(cli.main(prog_name="zharness", standalone_mode=False) or 0)
    except click.exceptions.Exit as exit_:
        sys.exit(exit_.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        click.echo(render_click_error(error), err=True)
        sys.exit(2)
    except UsageError as error:
        click.echo(f"zharness: {error}", err=True)
        sys.exit(2)
    except ZHarnessError as error:
        click.echo(f"zharness: the harness failed: {error}", err=True)
        sys.exit(3)
    except (KeyboardInterrupt, click.Abort):
        click.echo("zharness: interrupted; all ranks were stopped", err=True)
        sys.exit(130)
    except Exception as error:  # noqa: BLE001 - a bug of this package must not end with exit code 1, "a law is broken"
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            click.echo(f"zharness: cannot write: {error.strerror}; free some space and run it again", err=True)
        else:
            traceback.print_exc()
            name = type(error).__name__
            click.echo(f"zharness: the harness itself failed: {name}, see the traceback above", err=True)
        sys.exit(3)


def render_click_error(error: click.ClickException) -> str:
    """Render an error of the command line as one sentence that names the --help of the command."""
    context = getattr(error, "ctx", None)
    named = sys.argv[1] if sys.argv[1:] and sys.argv[1] in cli.commands else ""  # click's parser sets no context
    command = context.command_path if context is not None else f"zharness {named}".strip()
    message = " ".join(error.format_message().split()).rstrip(".")
    if named == "check" and isinstance(error, click.NoSuchOption) and error.option_name == "--law":
        message = f"no such option '--law'. Laws are arguments: `{command} LAW...`"
    return f"{command}: {message[:1].lower()}{message[1:]} (see `{command} --help`)"


def exit_on_sigterm(_signal: int, _frame: object) -> None:
    """Raise SystemExit with exit code 143 on SIGTERM, so that the ranks end and finished records are kept."""
    raise SystemExit(143)
