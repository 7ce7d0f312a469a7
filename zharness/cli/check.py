"""The command ``check``: run laws on engines."""

from __future__ import annotations

from pathlib import Path

import click

from zharness.cell import is_cell_id
from zharness.cli.options import (
    INPUT_FILE,
    LAW_SET_HELP,
    OUTPUT,
    SECONDS,
    IntegerRange,
    NameChoice,
    OnceCommand,
    add_mesh_option,
    parse_integer_option,
    parse_name_option,
    refuse_axes_beside_cells,
    requested_device,
    require_commit_with_reach,
)
from zharness.cli.project_options import read_project_failures, require_depth_of_command_line
from zharness.law_set import list_later_changes
from zharness.mesh import Mesh
from zharness.project_file import ProjectFile

SECONDS_OF_A_CHANGE = 120.0  # what a pull request can wait for


@click.command(cls=OnceCommand)
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option(
    "--engine",
    "engines",
    multiple=True,
    help="Engine: NAME, NAME==RELEASE, NAME@CHECKOUT or package.module:factory; may be repeated.",
)
@click.option(
    "--stage",
    "stages",
    callback=parse_integer_option,
    metavar="0,1,2,3",
    help="ZeRO stages to run; by default all stages of the engine.",
)
@click.option(
    "--world-size",
    "world_sizes",
    callback=parse_integer_option,
    metavar="1,2,4",
    show_default="2, at depth 2 also 1, 3 and 4; under torchrun, the number of ranks that torchrun started",
    help="World sizes: the numbers of ranks on which each law runs.",
)
@add_mesh_option()
@click.option(
    "--dtype",
    "dtypes",
    callback=parse_name_option,
    metavar="fp32,bf16",
    show_default="fp32; at depth 2 also the other dtypes that the engine claims; on a mesh some laws also in bf16",
)
@click.option(
    "--model", "models", callback=parse_name_option, metavar="NAME,...", help="Models to train; by default all models."
)
@click.option("--variant", "engine_variant", default="", help="Engine variant: the name of a set of engine options.")
@click.option(
    "--expected-failures",
    "--excuses",
    "expected_failures",
    multiple=True,
    type=OUTPUT,
    help="TOML file of failures that you expect; its entries take precedence over those of zharness. May be repeated.",
)
@click.option(
    "--probe-withheld",
    is_flag=True,
    help="Also run cells that need a feature that the engine does not claim, and report which of these cells pass.",
)
@click.option(
    "--device",
    type=NameChoice(["cpu", "cuda"]),
    show_default="that of ZHARNESS_DEVICE, else cpu",
    help="Device of ranks and plain PyTorch (`zharness docs gpu`). Ranks share a GPU if there are "
    "fewer GPUs than ranks.",
)
@click.option(
    "--backend",
    type=NameChoice(["gloo", "nccl", "staged"]),
    show_default="that of ZHARNESS_BACKEND, else gloo on a CPU, nccl with a GPU for each rank, staged on shared GPUs",
    help="Backend of torch.distributed. staged exchanges copies in host memory over gloo, and shows, also on a CPU, "
    "that an engine does not wait for a collective.",
)
@click.option("--seed", default=0, show_default=True, help="Seed for the weights and the data of every cell.")
@click.option(
    "--timeout", type=SECONDS, default=60.0, show_default=True, help="Time limit for the ranks of one cell, in seconds."
)
@click.option(
    "--isolation",
    type=NameChoice(["fresh", "pooled"]),
    default="pooled",
    show_default=True,
    help="pooled: reuse the same ranks for all cells of one engine and stage (fsdp2: of all stages), and run a cell "
    "that fails on reused ranks again on new ranks. fresh: fork new ranks for every cell.",
)
@click.option(
    "--depth",
    type=IntegerRange(1, 4),
    help="1: run each law under one setting. 2: also run cells that cover pairs of laws, options, accumulation "
    "windows, calls of backward, world sizes and dtypes. 3: cover these pairs for each variant of each law. 4: run "
    "each variant of each law under every setting of the covering array. The default is 1 with a PATTERN, --mesh or "
    "--variant, else 2.",
)
@click.option("--laws", "law_set", metavar="VERSION", help=LAW_SET_HELP)
@click.option(
    "-x",
    "--exitfirst",
    "max_failures",
    flag_value=1,
    type=int,
    default=0,
    help="Stop after the first unexpected outcome, as pytest does.",
)
@click.option(
    "--maxfail",
    "max_failures",
    type=IntegerRange(1),
    help="Stop after this number of unexpected outcomes; by default every cell runs.",
)
@click.option(
    "--max-seconds",
    type=SECONDS,
    show_default="120 with --changed",
    help="Start no further cell after this number of seconds, and report which laws did not run.",
)
@click.option(
    "--record-reach",
    "reach_output",
    type=OUTPUT,
    metavar="FILE",
    help="Write to FILE which functions of the engine's source each cell reaches; the run takes about 1.5 times as "
    "long. With --continue, FILE keeps its lines of the earlier cells. Needs coverage.py (pip install "
    "'zharness[coverage]').",
)
@click.option(
    "--changed",
    "base",
    metavar="COMMIT",
    help="Run only the cells that reach a function which has changed in the engine's repository since the branch left "
    "COMMIT; cells that are likely to fail run first. Needs --reach.",
)
@click.option(
    "--reach", "reach_input", type=INPUT_FILE, metavar="FILE", help="File that --record-reach wrote in an earlier run."
)
@click.option(
    "--continue",
    "earlier_runs",
    multiple=True,
    type=INPUT_FILE,
    metavar="FILE",
    help="File that --jsonl wrote in a run that stopped early; leave out the cells whose records it contains. May be "
    "repeated.",
)
@click.option("--shuffle", type=int, metavar="SEED", help="Run the cells in a random order that SEED determines.")
@click.option("--jobs", type=IntegerRange(1), help="Number of cells to run at once; by default one per core.")
@click.option("--jsonl", type=OUTPUT, help="Write the record of each cell to FILE, as one line of JSON.")
@click.option("--html", type=OUTPUT, help="Write the results as one self-contained HTML page.")
@click.option("--junitxml", type=OUTPUT, help="Write a JUnit XML report, as pytest does.")
@click.pass_obj
def check(
    project: ProjectFile | None,
    patterns: tuple[str, ...],
    engines: tuple[str, ...],
    stages: tuple[int, ...],
    world_sizes: tuple[int, ...],
    mesh: Mesh,
    dtypes: tuple[str, ...],
    models: tuple[str, ...],
    engine_variant: str,
    expected_failures: tuple[Path, ...],
    probe_withheld: bool,
    device: str | None,
    backend: str | None,
    seed: int,
    timeout: float,
    isolation: str,
    depth: int | None,
    law_set: str | None,
    max_failures: int | None,
    max_seconds: float | None,
    reach_output: Path | None,
    base: str | None,
    reach_input: Path | None,
    earlier_runs: tuple[Path, ...],
    shuffle: int | None,
    jobs: int | None,
    jsonl: Path | None,
    html: Path | None,
    junitxml: Path | None,
) -> int:
    """Run an engine beside plain PyTorch and report which laws hold.

    A PATTERN is a law (training.grads), a group (training), a glob ('*.grads') or the id of one cell, as the report of
    a failure prints it. Without a PATTERN, every law runs.
    """
    from zharness.cli.name_index import require_known_names

    require_commit_with_reach(base, reach_input)
    if reach_output is not None:
        from zharness.run.files import require_writable

        require_writable(reach_output)
    require_depth_of_command_line(project, depth or 1, {"--mesh": mesh.label, "--variant": engine_variant})
    if law_set is not None:
        list_later_changes(law_set)  # an unknown version raises UsageError
    if patterns and all(map(is_cell_id, patterns)):
        refuse_axes_beside_cells()
    require_known_names(engine_names=engines, laws=patterns, models=models, stages=stages, dtypes=dtypes)
    from zharness.device import choose_backend, choose_job_count, require_usable_gpus, share_gpu_memory
    from zharness.laws import DTYPES
    from zharness.releases.rank_environment import prepare_rank_environment
    from zharness.report.outputs import Outputs
    from zharness.run import Request
    from zharness.run.changed_cells import ChangeSelection
    from zharness.run.check_loop import RunOptions, Stop, run_check
    from zharness.run.engine_sources import require_coverage
    from zharness.run.plan import ARRAY_WORLD_SIZES
    from zharness.run.record_reader import read_cells
    from zharness.run.runner import WithheldPolicy
    from zharness.world import Isolation
    from zharness.world.launch import default_world_size, detect_launch

    sizes = world_sizes or (default_world_size(),)
    request = Request(
        patterns=patterns,
        engines=engines or ("reference",),
        stages=stages,
        world_sizes=sizes,
        dtypes=dtypes or ("fp32",),
        models=models,
        engine_variant=engine_variant,
        depth=depth or (1 if patterns or engine_variant or mesh.sizes else 2),
        array_world_sizes=sizes if world_sizes or detect_launch() else ARRAY_WORLD_SIZES,
        array_dtypes=dtypes or tuple(DTYPES),
        mesh=mesh,
        law_set=law_set or "",
    )
    withheld = WithheldPolicy.TRY if probe_withheld else WithheldPolicy.SKIP
    user_failures = read_project_failures(project, expected_failures)
    if reach_output is not None:
        require_coverage("--record-reach")
    changes = ChangeSelection(base, reach_input) if base is not None and reach_input is not None else None
    stop = Stop(max_failures or 0, max_seconds or (SECONDS_OF_A_CHANGE if changes else 0.0))
    with requested_device(device or "", backend or ""):
        choose_backend(max(sizes))  # raises UsageError for a backend that cannot have so many ranks
        largest = max(*sizes, *request.array_world_sizes)
        jobs = choose_job_count(largest) if jobs is None else jobs
        require_usable_gpus((largest + 1) * jobs)
        options = RunOptions(
            timeout=timeout,
            seed=seed,
            jobs=jobs,
            isolation=Isolation(isolation),
            user_expected_failures=user_failures,
            withheld_policy=withheld,
            shuffle_seed=shuffle,
            stop=stop,
            changes=changes,
            reach_file=reach_output,
            earlier_cells=read_cells(earlier_runs),
        )
        with share_gpu_memory((largest + 1) * jobs):
            return run_check(request, options, Outputs(jsonl, html, junitxml), prepare_rank_environment)
