"""The command ``zharness docs``: print the pages of the documentation, which a wheel also contains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from zharness.errors import UsageError

PACKAGE = Path(__file__).resolve().parents[1]
BESIDE_THE_PAGES = ("README.md", "FINDINGS.md", "CHANGELOG.md")


def find_pages() -> Mapping[str, Path]:
    """Return the path of each page by its name. In a wheel, pyproject.toml puts the pages inside the package."""
    root = PACKAGE if (PACKAGE / "docs").is_dir() else PACKAGE.parent
    found = [*(root / name for name in BESIDE_THE_PAGES), *sorted((root / "docs").glob("*.md"))]
    return {path.stem.lower(): path for path in found}


@click.command()
@click.argument("page", required=False)
def docs(page: str | None) -> int:
    """Print a PAGE of the documentation, as Markdown. Without a PAGE, list all pages with their titles and folder.

    \b
    zharness docs your-engine
    zharness docs findings | less
    """
    pages = find_pages()
    if page is None:
        width = max(map(len, pages))
        for name, path in pages.items():
            click.echo(f"{name:{width}}  {read_title(path)}")
        click.echo(f"\nin {pages['readme'].parent}")
        return 0
    if page not in pages:
        raise UsageError.unknown_name("page", page, list(pages))
    click.echo(pages[page].read_text(encoding="utf-8"), nl=False)
    return 0


def read_title(page: Path) -> str:
    """Return the first heading of a page in Markdown."""
    with page.open(encoding="utf-8") as lines:
        return next((line.lstrip("# ").rstrip() for line in lines if line.startswith("# ")), "")
