"""How long a planted failure takes to shrink, and to how small a model.

    python scripts/bench_shrink.py --jsonl shrink.jsonl

A mutant (an engine broken on purpose, `zharness list mutants`) is shrunk from the cell that kills it, as
`zharness shrink` does it, export and its check left out. Figure to reach: 60 s, a model of at most 3 modules.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tqdm import tqdm

from zharness.cell import Cell
from zharness.export.shrink import shrink_failure
from zharness.mutants import MUTANTS
from zharness.run.runner import build_rank_environment

SECONDS, MODULES = 60.0, 3
SEARCH = 45.0  # seconds of them, as the command has by default: ranks have to start, and what was found runs once more
# Of each right engine, and of each way in which training goes wrong: a factor, a loss, shards, clipping, the optimizer,
# graphs, parameters.
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


def case_of(name: str) -> Cell:
    """The cell that is meant to kill a mutant."""
    mutant = MUTANTS[name]
    target = mutant.targets[0]
    stage = mutant.stages[0] if target.stage is None else target.stage
    return Cell(target.law, mutant.engine, stage, 2, target.dtype, target.model, target.variant)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mutants", nargs="*", default=list(CHOSEN))
    parser.add_argument("--seconds", type=float, default=SEARCH, help="For the search of each.")
    parser.add_argument("--jsonl", type=Path)
    given = parser.parse_args()
    late = 0
    lines = []
    for name in tqdm(given.mutants, unit="mutant", leave=False, disable=not sys.stderr.isatty()):
        case, began = case_of(name), time.monotonic()
        found = shrink_failure(case, 0, build_rank_environment(case.engine), 30.0, given.seconds)
        took, size = time.monotonic() - began, found.module_count
        late += took > SECONDS or size > MODULES
        shown = found.record.cell.id if found.program is None else str(found.program)
        print(f"{took:6.1f} s  {size} modules  {found.attempts:3} tried  {case.id}\n{'':9}{shown}", flush=True)
        lines.append(
            {"case": case.id, "seconds": round(took, 2), "modules": size, "tried": found.attempts, "to": shown}
        )
    if given.jsonl is not None:
        given.jsonl.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{len(given.mutants) - late} of {len(given.mutants)} within {SECONDS:.0f} s and {MODULES} modules")
    return int(late > 0)


if __name__ == "__main__":
    sys.exit(main())
