"""zharness answers one question: does a sharded training engine compute what plain PyTorch computes?

[Note: a cell from case to verdict]
``case.py`` says what a cell is. ``run/plan.py`` makes the cells that were asked for, and decides from an engine's
claims which cannot be run. ``run/runner.py`` takes one cell: it has ``world/`` fork the ranks, in each of which
``run/cell.py:observe`` lets a check of ``checks/`` drive an engine of ``engines/`` on a model of ``workload/`` and
write down what it saw. Then ``run/cell.py:judge``, in a process that never saw the engine, holds the evidence against
the plain model with the bounds of ``parity/``. ``run/excuses.py`` knows the failures that are expected,
``run/record.py`` is the line that is left, ``report/`` makes it readable, ``cli/`` and ``plugin.py`` are the doors.

[Note: a test from marker to verdict]
``plugin.py`` makes one item for each world size of a ``world_size`` marker. After collection ``items/conductor.py`` has
``world/server.py`` fork a rank server, which holds every test and has run none. For each item the server forks a team
of ranks, or gives the work to a team that lives on (``world/pools.py``, ``world/team.py``). ``world/rank.py`` is the
life of a rank; in it ``items/inside.py`` runs pytest's own protocol of the item and tells each phase's report when it
is made. ``world/watch.py`` takes in what the ranks tell and print, until each has an outcome; ``items/joint.py`` makes
one verdict of them, which the conductor logs like any other.

[Note: the house]
A file imports lower floors or files of its own package; ``suites/meta/test_house.py`` has the table of floors. Where
the code departs from the first design, the reason is here:

- The engine runs first and the baseline second, in the judge's process: teacher forcing needs the engine's weights, and
  the judge then needs nothing of the engine's process, whose torch functions an engine may have replaced.
- The optimizer's replay is a running error analysis and not a closed formula: every operation carries its own rounding,
  so one class serves AdamW, SGD and whatever comes next.
- Stage 3 of the reference neither frees nor refills storages: what autograd saved of a gathered parameter becomes a
  promise to gather it again, one saved tensor at a time (``reference/gathered.py`` and ``reference/promises.py``). The
  gradients of all reads in one forward meet before they are reduced: a tied weight is rounded as in plain PyTorch.
- A rank's captured output runs through pipes to its server, cut into phases by markers: pytest's own capture files are
  shared with its forks, and would go down with a rank that dies.
- Modules of torch that a rank was the first to import are imported by its server before it forks the next one, so that
  nobody pays at the start for what a session never needs.
- Which collective a hung rank waits in is read from its stack: that costs nothing before, and replaces nothing.
- Reproductions are found, run and judged in ``releases/``, because they need its overlays; the command is their door.
- A cell's seed leaves engine, stage and check out, so that cells that differ in those alone train the same numbers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zharness.conformance import check_engine, run_laws
    from zharness.reference.initialize import initialize
    from zharness.verification import verify

__version__ = "0.1.0"

__all__ = ["__version__", "check_engine", "initialize", "run_laws", "verify"]

_MODULE_OF = {
    "check_engine": "zharness.conformance",
    "initialize": "zharness.reference",
    "run_laws": "zharness.conformance",
    "verify": "zharness.verification",
}


def __getattr__(name: str) -> Any:
    """Import the public API lazily: it loads torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
