"""The command that looks at the machine."""

from __future__ import annotations

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def doctor(as_json: bool) -> int:
    """Say whether this machine can run the harness: versions, memory, limits, devices, settings of torch, two ranks.

    Every point is ok, a warning or a problem, with what to do. Exit code 1 when there is a problem.
    """
    from zharness.doctor.command import run_doctor as run
    from zharness.releases.overlay import cache_folder

    return run(cache_folder(), as_json)
