"""Shrink the setting and the program of an alarm together, to the smallest program that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from zharness.hunt.space import Space
from zharness.law_kit.program_features import explain_unsupported
from zharness.mesh import DATA_SHARD, DEFAULT_MESH, REPLICATE, Mesh
from zharness.run.record import Verdict
from zharness.workload.legal_programs import legal_verbs, smaller_programs
from zharness.workload.programs import Program

# The limit on runs for each alarm. After a crash, new ranks have to be forked, and a hang takes the whole time limit.
MAX_RUNS = {Verdict.FAIL: 150, Verdict.CRASH: 80, Verdict.HANG: 4}


@dataclass(frozen=True)
class Shrunk:
    """The smallest program that fails in the same way, and the number of programs that were run to find it."""

    program: Program
    runs: int


def shrink_program(space: Space, program: Program, verdict: Verdict, fails_alike: Callable[[Program], bool]) -> Shrunk:
    """Return the smallest program for which ``fails_alike`` is true, found with a limited number of runs."""
    limit = MAX_RUNS[verdict]
    seen = {program}
    while True:
        for candidate in iter_smaller(space, program):
            if candidate in seen:
                continue
            if len(seen) > limit:
                return Shrunk(program, len(seen) - 1)
            seen.add(candidate)
            if fails_alike(candidate):
                program = candidate
                break
        else:
            return Shrunk(program, len(seen) - 1)


def iter_smaller(space: Space, program: Program) -> Iterator[Program]:
    """Yield programs that the engine can run and that lack a part of ``program``: settings first, then verbs."""
    for candidate in (*iter_simpler_settings(space, program), *iter_smaller_texts(space, program)):
        if not explain_unsupported(candidate, space.claims_at[candidate.stage]):
            yield candidate


def iter_simpler_settings(space: Space, program: Program) -> Iterator[Program]:
    """Yield ``program`` with a simpler value of one setting."""
    needed = space.get_kernel_options(program.stage) or ()
    drawn = [name for name in program.options if name not in needed]
    for size in range(len(drawn)):
        # Remove all options first, then one of two options.
        for kept in {tuple(drawn[:size]), tuple(drawn[len(drawn) - size :])}:
            yield replace(program, options=(*needed, *kept))
    for window in (1, 2):
        if window < program.window:
            yield with_window(space, program, window)
    if program.clip is not None:
        yield replace(program, clip=None)
    if program.reduction != "mean":
        yield replace(program, reduction="mean")
    if program.optimizer != "sgd":
        yield replace(program, optimizer="sgd")
    if program.dtype != "fp32":
        yield replace(program, dtype="fp32")
    yield from iter_fewer_copies(program)
    sizes = (size for size in range(1, program.world_size) if not program.mesh.explain_misfit(size))
    yield from (replace(program, world_size=size) for size in sizes)
    for stage in space.stages:
        options = space.complete_options(stage, drawn)
        if stage < program.stage and options is not None:
            yield replace(program, stage=stage, options=options)


def iter_fewer_copies(program: Program) -> Iterator[Program]:
    """Yield ``program`` with fewer replicas of the same shards, beginning with one, then without a mesh on all ranks.

    If the program also fails without the mesh, the mesh is not the cause.
    """
    if not program.mesh.sizes:
        return
    shards = program.mesh.shape(program.world_size)[DATA_SHARD]
    for copies in range(1, program.mesh.size(REPLICATE)):
        mesh = Mesh(((REPLICATE, copies),)) if copies > 1 else DEFAULT_MESH
        yield replace(program, mesh=mesh, world_size=copies * shards)
    yield replace(program, mesh=DEFAULT_MESH)


def with_window(space: Space, program: Program, window: int) -> Program:
    """Return ``program`` with a smaller window, without the verbs that are illegal in the smaller window."""
    limits = space.get_repertoire(program.stage, program.options).limits
    owner = program.window_owner if window > 1 else "engine"
    verbs = legal_verbs(program.layers, program.verbs, limits, window, owner)
    return replace(program, window=window, window_owner=owner, verbs=verbs)


def iter_smaller_texts(space: Space, program: Program) -> Iterator[Program]:
    """Yield programs with fewer verbs, layers or marks, or smaller layers."""
    yield from smaller_programs(program, space.get_repertoire(program.stage, program.options).limits)
