"""Run a cell or a program on the ranks that torchrun started; exported scripts that import this package call this."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import click
import torch.distributed as dist

from zharness import engines
from zharness.cell import Cell
from zharness.engines import Capabilities, registry
from zharness.engines.warm_up import build_warm_up_environment
from zharness.errors import WorldError
from zharness.law_kit.rank_actions import shared_folder
from zharness.mesh import Mesh
from zharness.run.claims import probe_capabilities
from zharness.run.observe_and_judge import judge, observe
from zharness.run.program_runner import judge_programs, observe_programs
from zharness.run.record import Verdict
from zharness.run.verdicts import conclude_judgement
from zharness.workload.program_text import parse_program
from zharness.world import GroupMode, RankServer, RankTask
from zharness.world.server import prepare_process

REPRODUCED = "repro: REPRODUCED"
JUDGE_TIMEOUT = 600.0  # seconds
HOLDS_CODE, BROKEN_CODE, UNDECIDED_CODE = 0, 1, 2


@dataclass(frozen=True)
class ScriptEnding:
    """The text that the output of a broken engine contains, and the line that a correct engine prints."""

    signature: str
    ok: str


def run_cell(cell_id: str, seed: int, signature: str, ok: str) -> int:
    """Run and judge the cell on this launch's ranks, print the verdict, and return the exit code.

    The code is 0 if the law holds, 1 if it fails with ``signature``, and 2 otherwise.
    """
    cell = Cell.parse(cell_id)

    def observe_cell(folder: str, claims: Capabilities) -> RankTask:
        """Observe the cell on this rank, and return the task that judges the evidence."""
        observe(cell, seed, folder, claims, {})
        return RankTask(judge, (cell, seed, folder, claims), timeout=JUDGE_TIMEOUT, group=GroupMode.NONE)

    return run_and_judge(cell.engine, cell.stage, observe_cell, ScriptEnding(signature, ok))


def run_program(engine: str, text: str, signature: str, ok: str, mesh: str = "", **settings: Any) -> int:
    """Run and judge a program as ``run_cell`` runs and judges a cell; ``settings`` are further fields of Program."""
    program = replace(parse_program(text), mesh=Mesh.parse(mesh), **settings)

    def observe_it(folder: str, claims: Capabilities) -> RankTask:
        """Run the program on this rank, and return the task that judges the evidence."""
        observe_programs(engine, (program,), folder, claims)
        return RankTask(judge_programs, ((program,), folder, claims), timeout=JUDGE_TIMEOUT, group=GroupMode.NONE)

    return run_and_judge(engine, program.stage, observe_it, ScriptEnding(signature, ok))


def run_and_judge(
    engine: str, stage: int, observe_on_rank: Callable[[str, Capabilities], RankTask], ending: ScriptEnding
) -> int:
    """Run ``observe_on_rank`` on every rank, judge on rank 0, print the verdict there, and return the exit code."""
    sys.path.insert(0, os.getcwd())  # where a factory is imported from
    # The judge's process is forked before the engine is imported, because an engine may replace functions of torch.
    judge_server = RankServer() if int(os.environ.get("RANK", "0")) == 0 else None
    difference = describe_other_release(engine)
    if difference and judge_server is not None:
        click.echo(difference, err=True)
    problem = prepare_process(build_warm_up_environment(engine))
    if problem:
        raise WorldError(problem)
    dist.init_process_group("gloo")
    claims = engines.capabilities(engine, stage) or probe_capabilities(engine, stage)
    with shared_folder() as folder:
        try:
            task = observe_on_rank(str(folder), claims)
        except Exception as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())
            if ending.signature not in message:
                raise
            click.echo(f"{REPRODUCED}: rank {dist.get_rank()}: {message}")
            os._exit(BROKEN_CODE)  # do not wait for other ranks, which may wait for this rank
        dist.barrier()
        endings = [(UNDECIDED_CODE, "") if judge_server is None else conclude_script(judge_server, task, ending)]
        dist.broadcast_object_list(endings)
    code, line = endings[0]
    if dist.get_rank() == 0:
        click.echo(line)
    dist.destroy_process_group()
    return code


def describe_other_release(engine: str) -> str:
    """Return the sentence that ``engine``, written ``NAME==RELEASE``, is installed in another release, or ""."""
    name, wanted = registry.split_release(engine)
    installed = registry.info(name).version() if wanted is not None else None
    if wanted is None or (installed is not None and registry.is_same_release(wanted, installed)):
        return ""
    return (
        f"The failure was seen on {name} {wanted}, but {name} {installed or '(not found)'} is installed here, "
        "which may end differently."
    )


def conclude_script(server: RankServer, task: RankTask, ending: ScriptEnding) -> tuple[int, str]:
    """Judge the evidence, close the server, and return the exit code and the last line of the script."""
    outcome = server.submit(task)
    server.close()
    if outcome.cause is not None:  # the judge raised, for example because the engine breaks the protocol
        verdict, cause = Verdict.FAIL, outcome.cause.describe()
    else:
        verdict, cause = conclude_judgement(outcome.ranks[0].value)
    if verdict is Verdict.PASS:
        return HOLDS_CODE, ending.ok
    if ending.signature in cause:
        return BROKEN_CODE, f"{REPRODUCED}: {cause}"
    return UNDECIDED_CODE, f"something other than {ending.signature} is wrong: {cause}"
