"""The command ``zharness hunt``."""

from __future__ import annotations

from pathlib import Path

import click

from zharness.cli.cells import make_script_runner
from zharness.cli.options import (
    OUTPUT,
    PROGRAM_MESHES,
    SECONDS,
    IntegerRange,
    OnceCommand,
    add_mesh_option,
    parse_integer_option,
    parse_name_option,
)
from zharness.errors import UsageError
from zharness.mesh import Mesh

FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command(cls=OnceCommand)
@click.argument("engine")
@click.option("--minutes", type=float, help="Time after which no further program is drawn; default 10.")
@click.option(
    "--draws",
    type=IntegerRange(1),
    metavar="N",
    help="End after the N-th draw of the log; with --draws and without --minutes, the time is not limited.",
)
@click.option(
    "--seed", default=0, show_default=True, help="Seed of the draws; the n-th draw of a seed is always the same."
)
@click.option(
    "--stage",
    "stages",
    callback=parse_integer_option,
    metavar="0,1,2,3",
    help="Stages to draw; by default those that the engine claims.",
)
@click.option(
    "--world-size",
    "world_sizes",
    callback=parse_integer_option,
    show_default="1,2,3; on a mesh its ranks, and twice as many",
    metavar="1,2,3",
)
@add_mesh_option(PROGRAM_MESHES)
@click.option(
    "--dtype",
    "dtypes",
    callback=parse_name_option,
    metavar="fp32,bf16",
    help="Dtypes to draw; by default those that the engine claims.",
)
@click.option(
    "--without",
    callback=parse_name_option,
    metavar="i,tied,...",
    help="Layers, verbs, marks (see `zharness program --help`) and engine options to leave out, because a known bug "
    "in them hides others.",
)
@click.option(
    "--outputs", type=IntegerRange(1), help="Maximum number of outputs that a program keeps for later backwards."
)
@click.option(
    "-o", "--output", type=FOLDER, metavar="DIR", help="Folder for the scripts and the log; default hunt-ENGINE."
)
@click.option("--jsonl", type=OUTPUT, help="File of the log; default hunt.jsonl in the folder.")
@click.option(
    "--all-new", is_flag=True, help="Report every failure as new, also if an expected failure or repro/ records it."
)
@click.option(
    "--coverage",
    "measures_engine",
    is_flag=True,
    help="Measure on the ranks which branches of the engine the draws reach, draw again with settings that reached "
    "new branches, and list at the end what no draw reached; needs coverage.py.",
)
@click.option("--no-verify", is_flag=True, help="Do not run the exported scripts.")
@click.option(
    "--timeout", type=SECONDS, default=30.0, show_default=True, help="Time limit for the ranks of one run, in seconds."
)
def hunt(
    engine: str,
    minutes: float | None,
    draws: int | None,
    seed: int,
    stages: tuple[int, ...],
    world_sizes: tuple[int, ...],
    mesh: Mesh,
    dtypes: tuple[str, ...],
    without: tuple[str, ...],
    outputs: int | None,
    output: Path | None,
    jsonl: Path | None,
    all_new: bool,
    measures_engine: bool,
    no_verify: bool,
    timeout: float,
) -> int:
    """Hunt for unknown failures of ENGINE: NAME, NAME==RELEASE, NAME@CHECKOUT or package.module:factory.

    Programs (see `zharness program`) are drawn together with up to two options of the engine, the stage, the
    accumulation window and its owner, the dtype, the optimizer and the world size, and run beside plain PyTorch. Pairs
    of an option and another value that no draw has run yet come first.

    Each alarm is confirmed on new ranks. Its program and all these values are shrunk together to the smallest program
    that fails in the same way, and the alarm is grouped with the alarms of the same cause. A cause that an expected
    failure or a script in repro/ records is known. A new cause is exported as a script that runs without zharness, and
    the script is run.

    A call with the same folder and options resumes: it repeats no draw and keeps the groups. Ctrl-C ends the ranks and
    keeps what was found.

    \b
    zharness hunt deepspeed --minutes 60
    zharness hunt deepspeed==0.18.8 --minutes 10 --stage 1,2 --without retain,xb
    zharness hunt fsdp2 --draws 200 --seed 7 -o found

    Exit codes: 0 no alarm or only known alarms, 1 a new alarm, 2 wrong usage, 3 the harness itself failed.
    """
    from zharness.cli.name_index import require_known_names

    require_known_names(engine_names=[engine], stages=stages, dtypes=dtypes)
    from zharness.hunt.command import HuntOptions, run_hunt
    from zharness.hunt.hunter import HuntLimits
    from zharness.releases.rank_environment import prepare_rank_environment
    from zharness.run.program_meshes import require_program_mesh
    from zharness.workload.legal_programs import UNLIMITED_OUTPUTS

    if minutes is not None and not 0 < minutes < float("inf"):
        raise UsageError(f"--minutes: got {minutes:g}; expected a finite number above 0")
    world_sizes = world_sizes or (tuple(mesh.smallest_world * times for times in (1, 2)) if mesh.sizes else (1, 2, 3))
    require_program_mesh(engine, mesh, world_sizes)
    if minutes is None and draws is None:
        minutes = 10.0
    options = HuntOptions(
        HuntLimits(None if minutes is None else 60 * minutes, draws),
        seed,
        stages,
        world_sizes,
        dtypes,
        without,
        outputs or UNLIMITED_OUTPUTS,
        output,
        jsonl,
        not all_new,
        timeout,
        measures_engine,
        mesh,
    )
    return run_hunt(engine, options, prepare_rank_environment, None if no_verify else make_script_runner(engine))
