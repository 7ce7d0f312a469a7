"""The command ``zharness model``: check a user's model against every law that applies to it."""

from __future__ import annotations

from pathlib import Path

import click

from zharness.cli.options import (
    LAW_SET_HELP,
    OUTPUT,
    SECONDS,
    IntegerRange,
    OnceCommand,
    add_mesh_option,
    parse_integer_option,
)
from zharness.cli.project_options import read_project_failures
from zharness.law_set import list_later_changes
from zharness.mesh import Mesh
from zharness.project_file import ProjectFile


@click.command(cls=OnceCommand)
@click.argument("factories", metavar="PACKAGE.MODULE:FACTORY...", nargs=-1, required=True)
@click.option(
    "--config",
    "configs",
    multiple=True,
    metavar="FILE",
    help="DeepSpeed JSON file that sets the optimizer, gradient clipping, stage and so on; may be repeated.",
)
@click.option(
    "--engine",
    "engines",
    multiple=True,
    default=("reference",),
    show_default=True,
    help="Engine to check: NAME, NAME==RELEASE, NAME@CHECKOUT or package.module:factory; may be repeated.",
)
@click.option(
    "--stage",
    "stages",
    callback=parse_integer_option,
    metavar="0,1,2,3",
    help="ZeRO stages to check; by default the stage that --config sets, or all stages of the engine.",
)
@click.option(
    "--world-size", type=IntegerRange(1), default=2, show_default=True, help="Number of ranks that train the model."
)
@add_mesh_option("tp splits a model by the plan that transformers ships with it")
@click.option(
    "--dtype",
    default="",
    metavar="fp32",
    show_default="the dtype that --config sets, or fp32",
    help="Dtype in which the model is trained.",
)
@click.option(
    "--steps",
    type=IntegerRange(1),
    default=3,
    show_default=True,
    help="Number of steps that the law model.configured trains.",
)
@click.option(
    "--only", multiple=True, metavar="LAW", help="Run only this law, or laws that match a pattern; may be repeated."
)
@click.option("--laws", "law_set", metavar="VERSION", help=LAW_SET_HELP)
@click.option(
    "--seed", default=0, show_default=True, help="Seed from which the weights and data of every cell are drawn."
)
@click.option(
    "--timeout",
    type=SECONDS,
    default=300.0,
    show_default=True,
    help="Time limit for the ranks of one cell, in seconds.",
)
@click.option(
    "--jobs",
    type=IntegerRange(1),
    help="Number of cells to run at the same time; by default one per core, if memory allows.",
)
@click.option(
    "--ignore-memory-limit",
    is_flag=True,
    help="Print a warning instead of refusing a model that needs more memory than is free.",
)
@click.option(
    "--against",
    type=OUTPUT,
    metavar="RECORD",
    help="File that --jsonl wrote in an earlier run; the exit code is 1 only if a law got worse since that run.",
)
@click.option(
    "--baseline-cache",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder in which plain PyTorch's losses and gradients are kept for later runs.",
)
@click.option("--jsonl", type=OUTPUT, help="Write the record of each cell to FILE, as one line of JSON.")
@click.option("--html", type=OUTPUT, help="Write the results as one self-contained HTML page.")
@click.option("--junitxml", type=OUTPUT, help="Write a JUnit XML report, as pytest does.")
@click.pass_obj
def model(
    project: ProjectFile | None,
    factories: tuple[str, ...],
    configs: tuple[str, ...],
    engines: tuple[str, ...],
    stages: tuple[int, ...],
    world_size: int,
    mesh: Mesh,
    dtype: str,
    steps: int,
    only: tuple[str, ...],
    law_set: str | None,
    seed: int,
    timeout: float,
    jobs: int | None,
    ignore_memory_limit: bool,
    against: Path | None,
    baseline_cache: Path | None,
    jsonl: Path | None,
    html: Path | None,
    junitxml: Path | None,
) -> int:
    """Train your models with engines beside plain PyTorch and report which laws hold.

    Each model is checked on each engine with each configuration. A pattern such as my_models:gpt* names all functions
    of a module that need no argument.

    FACTORY() returns a model, or (model, batch), or (model, batch, loss). batch(generator) draws the arguments of the
    model: a tensor, or a tuple or dict of tensors, with one row for each sample. loss(output, batch) returns a scalar.
    A model of the transformers package needs neither batch nor loss.
    """
    from zharness.cli.name_index import require_known_names

    if law_set is not None:
        list_later_changes(law_set)  # an unknown version raises UsageError
    require_known_names(engine_names=engines, stages=stages, dtypes=[dtype] if dtype else [])
    from zharness.errors import UsageError
    from zharness.parity.baseline_cache import use_cache
    from zharness.releases.rank_environment import prepare_rank_environment
    from zharness.report.model_outputs import ModelOutputs
    from zharness.run.check_loop import RunOptions
    from zharness.run.model_matrix import ModelMatrix, run_model_matrix
    from zharness.workload.user_model import is_user_model
    from zharness.world import Isolation
    from zharness.world.launch import detect_launch

    if detect_launch() is not None:
        raise UsageError(
            "zharness model starts its own ranks, so torchrun must not start it; run it without torchrun, or run "
            "`zharness check` under torchrun"
        )
    matrix = ModelMatrix(
        factories,
        engines,
        configs or ("",),
        stages,
        world_size,
        dtype,
        steps,
        only,
        ignore_memory_limit,
        mesh,
        law_set or "",
    )
    for request in matrix.expand():
        if not is_user_model(request.model):
            raise UsageError(
                f"got {request.model!r} as the factory of a model; expected package.module:factory, where "
                "package.module can be imported from the current directory"
            )
    options = RunOptions(timeout, seed, jobs or 0, Isolation.POOLED, read_project_failures(project))
    outputs = ModelOutputs(jsonl, html, junitxml, against)
    with use_cache(baseline_cache, lambda line: click.echo(line, err=True)):
        return run_model_matrix(matrix, options, outputs, prepare_rank_environment)
