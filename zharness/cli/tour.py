"""The command ``zharness tour``."""

from __future__ import annotations

import click


@click.command()
def tour() -> int:
    """Show within a minute what a law is, which broken engines the laws find, and what a real engine breaks.

    The exit code is 1 if an engine that is broken on purpose was not found.
    """
    click.echo("zharness compares a sharded training engine with plain PyTorch. Loading torch ...\n")
    from zharness.releases.rank_environment import prepare_rank_environment
    from zharness.tour import run_tour

    return run_tour(prepare_rank_environment)
