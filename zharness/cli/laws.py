"""The command ``laws``: the versions of the law set, and what a version brought or made stricter."""

from __future__ import annotations

import click

from zharness.law_set import describe_difference, read_versions


@click.group()
def laws() -> None:
    """Show the versions of the law set, which `zharness check --laws VERSION` and `zharness model --laws VERSION` pin.

    A pinned engine does not turn red by a law of a newer zharness. `zharness list laws` prints what each law states.
    """


@laws.command()
def versions() -> None:
    """List the versions of the law set, the oldest first."""
    for version in read_versions():
        names = {name.partition("-")[0] for name in version.added}
        click.echo(
            f"{version.name}: {len(version.added)} law variants of {len(names)} laws added, {len(version.stricter)} "
            "made stricter"
        )


@laws.command()
@click.argument("old")
@click.argument("new", required=False)
def diff(old: str, new: str | None) -> None:
    """List what the law set NEW, by default the newest, brought or made stricter since the version OLD."""
    lines = describe_difference(old, new or read_versions()[-1].name)
    click.echo("\n".join(lines) or "the two versions have the same law variants, none of them stricter")
