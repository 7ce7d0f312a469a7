"""The command ``laws``: list the versions of the law set, and the laws that a version added or made stricter."""

from __future__ import annotations

import click

from zharness.law_set import describe_difference, read_versions


@click.group()
def laws() -> None:
    """Show the versions of the law set, which `zharness check --laws VERSION` and `zharness model --laws VERSION` pin.

    With a pinned version, a law that a newer zharness added cannot fail. `zharness list laws` prints what each law
    states.
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
    """List the laws that the law set NEW, by default the newest, added or made stricter since the version OLD."""
    lines = describe_difference(old, new or read_versions()[-1].name)
    click.echo("\n".join(lines) or "the two versions have the same law variants, none of them stricter")
