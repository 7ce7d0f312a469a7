"""Show within a minute what a law is, which broken engines the laws find, and which law a real engine breaks.

The tour runs six cells, one after the other, and prints each result as soon as it is known.
"""

from __future__ import annotations

import textwrap
import time
from dataclasses import dataclass

import click

from zharness.cell import Cell
from zharness.engines.warm_up import GetEnvironment
from zharness.laws import get_law
from zharness.mutants import MUTANTS
from zharness.report.failures import shorten_cause
from zharness.report.heat_map import render_heat_map
from zharness.run import Record, Request, Verdict, plan
from zharness.run.check_loop import RunOptions
from zharness.world import Isolation

WIDTH = 96
MUTANT_PREFIX = "zharness.mutants:"


@dataclass(frozen=True)
class Exhibit:
    """A cell of the tour. ``heading`` is the heading of a part of the tour, or empty for a later cell of the part.

    ``explanation`` says what the reader sees; for a mutant, the mutant's docstring says what is broken.
    """

    cell: str
    heading: str = ""
    explanation: str = ""

    def describe(self) -> str:
        """Return the explanation, or the description of the fault in the mutant of the cell."""
        engine = Cell.parse(self.cell).engine
        if self.explanation or not engine.startswith(MUTANT_PREFIX):
            return self.explanation
        return f"Broken on purpose: {MUTANTS[engine.removeprefix(MUTANT_PREFIX)].description}"


EXHIBITS = (
    Exhibit(
        "training.grads[reference-zero3-w2-fp32-mlp]",
        "1. A law holds on a correct engine",
        "The reference engine shards weights, gradients and optimizer state over 2 ranks (ZeRO stage 3). Each rank "
        "trains one micro-batch, and plain PyTorch trains both on a model with the same initial weights.",
    ),
    Exhibit(
        f"training.grads[{MUTANT_PREFIX}loses_the_shards_edge-zero2-w2-fp32-mlp]",
        "2. The same laws find engines that are broken on purpose",
    ),
    Exhibit(f"training.clip_and_norm[{MUTANT_PREFIX}norm_of_its_own_shard-zero2-w2-fp32-mlp]"),
    Exhibit(
        f"window.partly_used[{MUTANT_PREFIX}steps_with_the_last_micro_batch-zero0-w2-fp32-experts-first_2_by_engine]"
    ),
    Exhibit(f"training.trajectory[{MUTANT_PREFIX}forwards_with_the_weights_before-zero0-w2-fp32-mlp-sgd]"),
    Exhibit(
        "double_backward.retained_then_zero_grad[ddp-zero0-w2-fp32-mlp]",
        "3. What a real engine does",
        "torch's DistributedDataParallel, the installed release. In the releases of FINDINGS.md a second backward on a "
        "retained graph is not reduced, so each rank steps with its own gradient, and nothing raises.",
    ),
)

WHERE_TO_GO = """\
4. Where to go from here
  zharness check                              every law on the reference engine (two minutes)
  zharness check training --engine fsdp2      a real engine: deepspeed, fsdp1, fsdp2, ddp, zero1, ...
  zharness check --engine package.module:f    your engine (zharness docs your-engine)
  zharness model package.module:factory       your model on an engine (zharness docs your-model)
  zharness repro 7352                         a bug of DeepSpeed, on a release that has it
  zharness list laws                          every law in a sentence"""


def run_tour(get_environment: GetEnvironment) -> int:
    """Run the exhibits and print each one; return 1 if a mutant passed or another cell failed unexpectedly, else 0.

    ``get_environment(engine)`` returns the environment of an engine's rank server.
    """
    began, surprises = time.monotonic(), 0
    for exhibit in EXHIBITS:
        if exhibit.heading:
            click.echo(f"{exhibit.heading}\n")
        cell = Cell.parse(exhibit.cell)
        for text in (exhibit.describe(), f"The law {cell.law}: {get_law(cell.law).statement}."):
            click.echo(textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  "))
        record = run_exhibit(cell, get_environment)
        click.echo(render_exhibit(record) + "\n")
        surprises += not ends_as_announced(record)
    click.echo(WHERE_TO_GO)
    click.echo(f"\n{len(EXHIBITS)} cells in {time.monotonic() - began:.1f} s")
    return int(bool(surprises))


def run_exhibit(cell: Cell, get_environment: GetEnvironment) -> Record:
    """Run one cell on fresh ranks."""
    options = RunOptions(isolation=Isolation.FRESH)
    with options.create_runner({cell.engine: get_environment(cell.engine)}) as runner:
        (planned,) = plan(Request((cell.id,), (cell.engine,)), runner.claims)
        return runner.run(planned)


def render_exhibit(record: Record) -> str:
    """Render the verdict of a cell; for a failure also the first wrong number, its heat map and the known issue."""
    lines = [f"  -> {record.verdict.value.upper()}"]
    if record.cause:
        lines.append(textwrap.fill(shorten_cause(record.cause), WIDTH, initial_indent="  ", subsequent_indent="  "))
        lines.extend(f"  {line}" for line in render_heat_map(record.evidence))
    if record.expected_failure:
        lines.append(f"  known as {record.expected_failure}, in FINDINGS.md: an expected failure")
    return "\n".join([*lines, f"  again: {record.command}"])


def ends_as_announced(record: Record) -> bool:
    """Return whether a mutant's cell failed, and any other cell ended as expected."""
    if record.cell.engine.startswith(MUTANT_PREFIX):
        return record.verdict is Verdict.FAIL
    return record.is_expected
