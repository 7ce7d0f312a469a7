"""The command ``zharness doctor``."""

from __future__ import annotations

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def doctor(as_json: bool) -> int:
    """Check whether this machine can run zharness.

    The inspections cover versions, memory, limits, devices, settings of torch, and a run on two ranks.

    The result of each inspection is ok, a warning or a problem; warnings and problems have a remedy. The exit code is
    1 if there is a problem.
    """
    from zharness.doctor.command import run_doctor
    from zharness.releases.overlay import cache_folder

    return run_doctor(cache_folder(), as_json)
