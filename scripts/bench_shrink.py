"""Measure how long shrinking a failure takes, and how small the resulting model is.

    python scripts/bench_shrink.py --jsonl shrink.jsonl

Each mutant (an engine broken on purpose, `zharness list mutants`) is shrunk from the cell that kills it, as
`zharness shrink` does, but without exporting a script. Target: 60 s, a model of at most 3 modules.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tqdm import tqdm

from zharness.cell import Cell
from zharness.engines.warm_up import build_warm_up_environment
from zharness.export.shrink import shrink_failure
from zharness.mutants import MUTANTS

SECONDS, MODULES = 60.0, 3
SEARCH = 45.0  # seconds of the search, the command's default; starting ranks and the final run take the rest
# These mutants cover each engine on which mutants are built, and each kind of fault: a factor, a loss, shards,
# clipping, the optimizer, graphs, parameters.
CHOSEN = (
    "never_reduces",
    "leaves_out_the_last_rank",
    "loses_the_shards_edge",
    "only_the_first_backward_counts",
    "zero_grad_forgets_nothing",
    "loses_a_micro_batch",
    "forwards_with_the_weights_before",
    "wrong_epsilon",
    "forgets_weight_decay",
    "fsdp2_evaluation_goes_stale",
    "ddp_no_sync_leaks",
    "doubles_every_gradient",
)


def get_target_cell(name: str) -> Cell:
    """Return the cell of a mutant's first target."""
    mutant = MUTANTS[name]
    target = mutant.targets[0]
    stage = mutant.stages[0] if target.stage is None else target.stage
    return Cell(target.law, mutant.engine, stage, 2, target.dtype, target.model, target.variant)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mutants", nargs="*", default=list(CHOSEN))
    parser.add_argument("--seconds", type=float, default=SEARCH, help="Limit of each search.")
    parser.add_argument("--jsonl", type=Path)
    arguments = parser.parse_args()
    missed_count = 0
    lines = []
    for name in tqdm(arguments.mutants, unit="mutant", leave=False, disable=not sys.stderr.isatty()):
        cell, began = get_target_cell(name), time.monotonic()
        result = shrink_failure(cell, 0, build_warm_up_environment(cell.engine), 30.0, arguments.seconds)
        seconds, size = time.monotonic() - began, result.module_count
        missed_count += seconds > SECONDS or size > MODULES
        smallest = result.record.cell.id if result.program is None else str(result.program)
        print(f"{seconds:6.1f} s  {size} modules  {result.attempts:3} tried  {cell.id}\n{'':9}{smallest}", flush=True)
        lines.append(
            {"case": cell.id, "seconds": round(seconds, 2), "modules": size, "tried": result.attempts, "to": smallest}
        )
    if arguments.jsonl is not None:
        arguments.jsonl.write_text("".join(json.dumps(line) + "\n" for line in lines))
    count = len(arguments.mutants)
    print(f"{count - missed_count} of {count} within {SECONDS:.0f} s and {MODULES} modules")
    return int(missed_count > 0)


if __name__ == "__main__":
    sys.exit(main())
