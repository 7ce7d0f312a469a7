"""Run thousands of cells with new seeds on correct engines and count the false alarms.

    python scripts/soak.py cells --cells 10000 --jsonl clean.jsonl
    python scripts/soak.py cells --cells 10000 --settings --jsonl settings.jsonl
    python scripts/soak.py cells --cells 3000 --mesh tp2 --mesh rep2 --engine fsdp2 --world-size 4 --jsonl meshes.jsonl

Each seed contributes a sample of the whole matrix, or with `--settings` a sample of all laws under the engine options,
accumulation windows and calls of backward of the covering array. With `--mesh`, which may be repeated, it is a sample
of the matrices of each engine on those of the meshes that it claims. Cells that are in the file are not run again.

Below each alarm stand the known failures that it resembles: expected failures of other cells with its signature, and
with one of its options or its law. It counts as an alarm all the same.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path

from tqdm import tqdm

from zharness.cell import parse_integers
from zharness.kill_matrix.clean_record import make_clean_record
from zharness.kill_matrix.resume import load_finished_records
from zharness.laws import DTYPES
from zharness.mesh import Mesh
from zharness.releases.rank_environment import prepare_rank_environment
from zharness.run import PlannedCell, Record, Request, Runner, plan
from zharness.run.check_loop import RunOptions, run_cells
from zharness.run.mesh_claims import explain_unclaimed_mesh
from zharness.run.plan import select_stages
from zharness.run.record import RecordFile, open_record_file
from zharness.run.runner import pin_runners_to_cores
from zharness.world import Isolation

ENGINES = ("reference", "fsdp2", "ddp", "deepspeed")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``run``."""
    parser.add_argument("--cells", type=int, default=1000, help="total number, earlier runs included (%(default)s)")
    parser.add_argument("--per-seed", type=int, default=50, help="cells with one seed (%(default)s)")
    parser.add_argument("--first-seed", type=int, default=1, help="0 is the seed of the tests (%(default)s)")
    parser.add_argument("--engine", action="append", dest="engines", help=f"may be repeated ({', '.join(ENGINES)})")
    parser.add_argument(
        "--law", "--check", action="append", dest="checks", default=[], help="a law, a group or a glob; may be repeated"
    )
    parser.add_argument("--world-size", default="1,2,3,4", help="(%(default)s)")
    parser.add_argument(
        "--mesh", action="append", dest="meshes", default=[], help="axes beside data parallelism; may be repeated"
    )
    parser.add_argument("--dtype", default=",".join(DTYPES), help="(%(default)s)")
    parser.add_argument(
        "--settings", action="store_true", help="draw the cells of `zharness check --depth 4` that have a setting"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for the ranks of one cell (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time (%(default)s)")
    parser.add_argument(
        "--jsonl", type=Path, required=True, help="records; cells that are in the file already are not run again"
    )


def run(options: argparse.Namespace) -> int:
    """Run cells until there are enough; return 1 if there is a false alarm or a harness error, else 0."""
    known = load_finished_records(options.jsonl)
    with ExitStack() as stack:
        environments = {name: prepare_rank_environment(name) for name in options.engines or ENGINES}
        runners = [
            stack.enter_context(Runner(environments, options.timeout, isolation=Isolation.POOLED))
            for _ in range(options.jobs)
        ]
        file = stack.enter_context(open_record_file(options.jsonl))
        for record in known:
            file.add(record)
        matrix = plan_matrix(options, runners[0])
        pin_runners_to_cores(runners, matrix[: options.per_seed])  # as many cells run at a time as one seed has
        known.extend(soak(options, matrix, runners, known, file))
    summary = make_clean_record(known)
    print(summary.describe())
    return 1 if summary.false_alarms or summary.errors else 0


def plan_matrix(options: argparse.Namespace, runner: Runner) -> list[PlannedCell]:
    """Return every cell that its engine supports, or with ``--settings`` those of the covering array at depth 4."""
    request = Request(
        tuple(options.checks),
        engines=tuple(options.engines or ENGINES),
        world_sizes=parse_integers(options.world_size),
        dtypes=tuple(options.dtype.split(",")),
        depth=4 if options.settings else 1,
    )
    requests = list(iter_mesh_requests(request, options.meshes, runner)) if options.meshes else [request]
    planned = (cell for each in requests for cell in plan(each, runner.claims))
    cells = [cell for cell in planned if not cell.unsupported_reason]
    return [cell for cell in cells if cell.cell.engine_variant] if options.settings else cells


def iter_mesh_requests(request: Request, meshes: Sequence[str], runner: Runner) -> Iterator[Request]:
    """Yield ``request`` for each engine, world size and mesh, unless the mesh does not fit or is not claimed."""
    for engine, world_size, mesh in product(request.engines, request.world_sizes, map(Mesh.parse, meshes)):
        capabilities = runner.claims(engine, select_stages(engine, (), runner.claims)[0])
        if not mesh.explain_misfit(world_size) and not explain_unclaimed_mesh(engine, mesh, world_size, capabilities):
            yield replace(request, engines=(engine,), world_sizes=(world_size,), mesh=mesh)


def soak(
    options: argparse.Namespace,
    matrix: Sequence[PlannedCell],
    runners: Sequence[Runner],
    known: Sequence[Record],
    file: RecordFile,
) -> Iterator[Record]:
    """Run cells with new seeds until ``options.cells`` are done; yield their records."""
    done = {(record.cell, record.seed) for record in known}
    left, alarms = options.cells - len(known), 0
    size = min(options.per_seed, len(matrix))
    with tqdm(total=options.cells, initial=len(known), unit="cell", disable=not sys.stderr.isatty()) as bar:
        seed = options.first_seed
        while left > 0:
            sample = random.Random(seed).sample(matrix, size)  # noqa: S311 - reproducible, not secret
            # Cut before the cells are ordered by pool, so that a part of a sample is random too.
            cells = RunOptions().order_cells([cell for cell in sample if (cell.cell, seed) not in done][:left])
            for runner in runners:
                runner.seed = seed
            for record in run_cells(cells, runners):
                file.add(record)
                alarms += record.verdict.is_broken and not record.expected_failure
                bar.set_postfix_str(f"seed {seed}, {alarms} alarms", refresh=False)
                bar.update()
                yield record
            left -= len(cells)
            seed += 1
