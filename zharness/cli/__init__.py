"""The command line: each command a few lines that delegate."""

from __future__ import annotations

import signal
import sys
import traceback
from pathlib import Path

import click

import zharness
from zharness.cli import cells, releases
from zharness.cli.doctor import doctor
from zharness.cli.model import model
from zharness.cli.options import OUTPUT, SECONDS, parse_integer_option, parse_name_option
from zharness.errors import UsageError, ZHarnessError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(zharness.__version__, prog_name="zharness")
def cli() -> None:
    """Does a sharded training engine compute what plain PyTorch computes?

    \b
    zharness check                                the reference engine, every law, stages 0-3
    zharness check --engine deepspeed --stage 2,3 the real DeepSpeed
    zharness check 'torch_func.*' --engine my_package.my_module:factory
    zharness model my_package.my_model:factory    your own model, every law that is stated for any
    zharness list checks                          every law in words
    zharness mutants                              engines broken on purpose, and who notices
    zharness repro 7352                           a real bug, on the releases that have it and have it not
    zharness releases deepspeed 0.18.8 0.19.8     the same laws on several releases, and where each flipped
    zharness doctor                               whether this machine can run it, and what to do

    Exit codes: 0 everything as expected, 1 a law is broken, 2 wrong usage, 3 the harness itself failed.
    """


@cli.command()
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option(
    "--engine", "engines", multiple=True, help="NAME, NAME==RELEASE or package.module:factory; may be repeated."
)
@click.option(
    "--stage", "stages", callback=parse_integer_option, metavar="0,1,2,3", help="ZeRO stages; all the engine has."
)
@click.option(
    "--world-size",
    "world_sizes",
    callback=parse_integer_option,
    metavar="1,2,4",
    show_default="2, and under torchrun the number of its ranks",
)
@click.option("--dtype", "dtypes", callback=parse_name_option, default="fp32", metavar="fp32,bf16", show_default=True)
@click.option(
    "--model", "models", callback=parse_name_option, metavar="NAME,...", help="Models of the workload; all of them."
)
@click.option("--variant", "engine_variant", default="", help="Options of the engine by name, as it lists them.")
@click.option(
    "--excuses",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Expected failures of your own (TOML), before those of the package; may be repeated.",
)
@click.option("--probe-withheld", is_flag=True, help="Try what an engine does not claim, and say where the law holds.")
@click.option("--seed", default=0, show_default=True, help="Another number gives other weights and data.")
@click.option("--timeout", type=SECONDS, default=60.0, show_default=True, help="For the ranks of one cell.")
@click.option(
    "--isolation",
    type=click.Choice(["fresh", "pooled"]),
    default="fresh",
    show_default=True,
    help="New ranks for every cell, or ranks that live on for the cells of one engine and stage.",
)
@click.option("--shuffle", type=int, metavar="SEED", help="Run the cells in another order, which follows from SEED.")
@click.option("--jobs", type=click.IntRange(1), help="Cells at a time; one for each core, and then on that core alone.")
@click.option("--jsonl", type=OUTPUT, help="Write one JSON line for each cell.")
@click.option("--html", type=OUTPUT, help="Write one self-contained page.")
@click.option("--junitxml", type=OUTPUT, help="Write JUnit's XML, as pytest does.")
def check(
    patterns: tuple[str, ...],
    engines: tuple[str, ...],
    stages: tuple[int, ...],
    world_sizes: tuple[int, ...],
    dtypes: tuple[str, ...],
    models: tuple[str, ...],
    engine_variant: str,
    excuses: tuple[Path, ...],
    probe_withheld: bool,
    seed: int,
    timeout: float,
    isolation: str,
    shuffle: int | None,
    jobs: int | None,
    jsonl: Path | None,
    html: Path | None,
    junitxml: Path | None,
) -> int:
    """Put an engine beside vanilla PyTorch and say which laws hold.

    A PATTERN is a check (training.grads), a group (training), a glob ('*.grads') or the id of one cell, as the report
    of a failure prints it. Without one, every check runs.
    """
    from zharness.releases.rank_environment import get_release_environment
    from zharness.report.outputs import Outputs
    from zharness.run import Request
    from zharness.run.check_loop import RunOptions
    from zharness.run.check_loop import run_check as run
    from zharness.run.expected_failures import read_expected_failures
    from zharness.run.runner import WithheldPolicy
    from zharness.world import Isolation
    from zharness.world.launch import default_world_size

    sizes = world_sizes or (default_world_size(),)
    request = Request(patterns, engines or ("reference",), stages, sizes, dtypes, models, engine_variant)
    withheld = WithheldPolicy.TRY if probe_withheld else WithheldPolicy.SKIP
    options = RunOptions(
        timeout, seed, jobs or 0, Isolation(isolation), read_expected_failures(excuses), withheld, shuffle
    )
    return run(request, options, Outputs(jsonl, html, junitxml), get_release_environment)


@cli.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--contracts", is_flag=True, help="Where engines document that they differ, as a table in Markdown.")
@click.option(
    "--against",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="OLD.jsonl",
    help="An earlier run: what differs from it comes first.",
)
@click.option("--html", type=OUTPUT, help="Write one self-contained page.")
@click.option("--junitxml", type=OUTPUT, help="Write JUnit's XML, as pytest does.")
def report(
    files: tuple[Path, ...], contracts: bool, against: Path | None, html: Path | None, junitxml: Path | None
) -> int:
    """Put the records of earlier runs (`zharness check --jsonl FILE`) into one table: laws x engines and stages.

    Lines that are no records are skipped and counted. The exit code is that of the runs, as of `zharness check`; 2
    where they are as expected and a line was skipped, which may have been a failure.
    """
    from zharness.report.command import run_report as run
    from zharness.report.outputs import Outputs

    return run(files, against, contracts, Outputs(None, html, junitxml))


@cli.command(name="list")
@click.argument("what", type=click.Choice(["engines", "checks", "models", "mutants", "repros"]))
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option("--long", is_flag=True, help="Of checks: with the mutants that each has to kill.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def list_(what: str, patterns: tuple[str, ...], long: bool, as_json: bool) -> int:
    """Print what there is: engines and their versions, laws, models, mutants, reproductions.

    A PATTERN is a name, a glob, or a group of checks.
    """
    from zharness.releases.repro_table import list_repro_rows
    from zharness.report.listing import ROW_BUILDERS, add_killed_mutants, filter_rows, render_rows

    found = filter_rows({**ROW_BUILDERS, "repros": list_repro_rows}[what](), what, patterns)
    click.echo(render_rows(add_killed_mutants(found) if long and what == "checks" else found, as_json))
    return 0


for command in (
    releases.repro,
    releases.releases,
    releases.bisect,
    releases.compare,
    doctor,
    model,
    cells.export,
    cells.shrink,
):
    cli.add_command(command)


@cli.command()
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option("--check", "checks", multiple=True, help="A check, a group or a glob; all checks. May be repeated.")
@click.option(
    "--scope",
    type=click.Choice(["every", "targets"]),
    default="every",
    show_default=True,
    help="Every check on every mutant, or on each the checks that it names as its killers: minutes, not hours.",
)
@click.option(
    "--world-size", "world_sizes", callback=parse_integer_option, default="2", metavar="2,4", show_default=True
)
@click.option(
    "--model", "models", callback=parse_name_option, metavar="NAME,...", help="Models; the first that each check takes."
)
@click.option("--timeout", type=SECONDS, default=60.0, show_default=True, help="For the ranks of one cell.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Cells at a time.")
@click.option("--jsonl", type=OUTPUT, help="Read and write records: resumes.")
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
    """Try the checks on engines broken on purpose, and say who kills whom.

    A PATTERN is a mutant's name or a glob; without one, every mutant is tried. A check stops at its first cell that
    kills. Exit code 1 when a mutant survives, or a check kills nobody. `zharness list mutants` describes them.
    """
    from zharness.kill_matrix.command import KillOptions, LawScope
    from zharness.kill_matrix.command import run_mutants as run
    from zharness.run.check_loop import run_cells

    return run(patterns, KillOptions(checks, world_sizes, models, timeout, jobs, LawScope(scope)), jsonl, run_cells)


@cli.command()
@click.argument("texts", nargs=-1, metavar="['MODEL | VERBS']...")
@click.option("--engine", default="reference", show_default=True, help="NAME, NAME==RELEASE or package.module:factory.")
@click.option("--stage", "stages", callback=parse_integer_option, default="0", show_default=True, metavar="0,1,2,3")
@click.option(
    "--world-size", "world_sizes", callback=parse_integer_option, default="2", show_default=True, metavar="1,2,4"
)
@click.option("--dtype", "dtypes", callback=parse_name_option, default="fp32", show_default=True, metavar="fp32,bf16")
@click.option("--optimizer", type=click.Choice(["sgd", "adamw", "adam", "nesterov"]), default="sgd", show_default=True)
@click.option("--clip", type=click.FloatRange(0, min_open=True), help="The norm to which gradients are clipped.")
@click.option(
    "--window", type=click.IntRange(1), default=1, show_default=True, help="Micro-batches of an engine's step."
)
@click.option("--reduction", type=click.Choice(["mean", "sum"]), default="mean", show_default=True, help="Over ranks.")
@click.option("--batches", type=click.IntRange(1), default=20, show_default=True, help="Of 8 programs, to draw.")
@click.option("--seed", default=0, show_default=True, help="Another number draws other programs.")
@click.option(
    "--without", callback=parse_name_option, metavar="i,tied,...", help="Layers, verbs and marks that none has."
)
@click.option("--outputs", type=click.IntRange(1), help="Not more of them kept for backward at once.")
@click.option("--timeout", type=SECONDS, default=60.0, show_default=True, help="For the ranks of one run.")
def program(
    texts: tuple[str, ...],
    engine: str,
    stages: tuple[int, ...],
    world_sizes: tuple[int, ...],
    dtypes: tuple[str, ...],
    optimizer: str,
    clip: float | None,
    window: int,
    reduction: str,
    batches: int,
    seed: int,
    without: tuple[str, ...],
    outputs: int | None,
    timeout: float,
) -> int:
    """Run a small model and an order of calls, as in 'x(3) linear(2) relu | f b:retain b s', or draw many.

    Several run one after the other in the same ranks. Without any, Hypothesis draws programs, and the smallest that
    fails is printed as a command.

    \b
    Layers: x(3) or tokens(5,3) first; linear(n), matrix(n), frozen(n), read(n), conv(n), unused(n),
            norm, relu, gelu, tied; residual[...], twice[...], sometimes[...], checkpoint[...], reentrant[...]
    Verbs:  f forward (f:few,kw), b backward (b:old,tensor,scale,other,retain,unseen), n both in no_sync, s step,
            z zero_grad, e and i forwards under no_grad and inference_mode, v and vg in eval mode, vg with a graph,
            g and t gradients of inputs by autograd.grad and torch.func.grad, l look at everything, xf and xb a
            forward and a backward that raise, idle a step without gradient, edit, save, load (:old)
    """
    from zharness.releases.rank_environment import get_release_environment
    from zharness.run.program_commands import run_given_programs, run_program_search
    from zharness.run.program_search import SearchOptions
    from zharness.workload.legal_programs import UNLIMITED_OUTPUTS
    from zharness.workload.programs import Program

    if clip is not None and not clip < float("inf"):
        raise UsageError(f"--clip: got {clip}, expected a number above 0")
    settings = Program((), (), optimizer=optimizer, clip=clip, window=window, reduction=reduction)
    if texts:
        return run_given_programs(
            texts, engine, stages, world_sizes, dtypes, settings, timeout, get_release_environment
        )
    if settings.with_default_settings != settings:
        raise UsageError("--clip, --window and --reduction are for programs that are given; got none to run with them")
    wanted = SearchOptions(stages, world_sizes, dtypes, batches, seed, without, outputs or UNLIMITED_OUTPUTS)
    return run_program_search(engine, wanted, timeout, get_release_environment)


def main() -> None:
    """The console command: every error of the user's one sentence, every exit code as documented."""
    signal.signal(signal.SIGTERM, exit_on_sigterm)
    try:
        sys.exit(cli.main(standalone_mode=False) or 0)
    except click.exceptions.Exit as exit_:
        sys.exit(exit_.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except UsageError as error:
        click.echo(f"zharness: {error}", err=True)
        sys.exit(2)
    except ZHarnessError as error:
        click.echo(f"zharness: the harness failed: {error}", err=True)
        sys.exit(3)
    except (KeyboardInterrupt, click.Abort):
        click.echo("zharness: interrupted; every rank was ended", err=True)
        sys.exit(130)
    except Exception:  # noqa: BLE001 - a bug of this package: shown whole, and never as exit code 1, "a law is broken"
        traceback.print_exc()
        click.echo("zharness: the harness failed, see above; please report it", err=True)
        sys.exit(3)


def exit_on_sigterm(_signal: int, _frame: object) -> None:
    """Unwind on SIGTERM, so that ranks are ended and finished records take their name."""
    raise SystemExit(143)
