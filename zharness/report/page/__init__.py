"""The records as one self-contained page: assets/ inlined, the records deflated inside, nothing fetched.

The charts of a cell are Observable Plot's, inlined with d3 (490 KB together): axes, scales and labels of four kinds of
chart are more code than this package should own, and a picture for every failing cell, drawn beforehand by matplotlib,
would come to 50 KB and more each. A policy in the page lets the browser run these scripts alone and fetch nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from zharness.errors import UsageError
from zharness.report.comparison import Comparison
from zharness.report.page.columns import packed, payload
from zharness.report.words import summary
from zharness.run.files import check_writable, write_whole
from zharness.run.record import Record

VENDOR = ("vendor/d3.min.js", "vendor/plot.umd.min.js")
# One program in parts, which share a scope.
SCRIPTS = ("data.js", "dom.js", "filters.js", "grid.js", "matrix.js", "lists.js", "charts.js", "evidence.js", "cell.js")
MAIN = "main.js"
NO_JINJA = 'the page needs jinja2; install it with: pip install "zharness[report]"'
# The style sheet that Plot puts into each chart of class "chart": the policy names what may be one.
STYLE_OF_PLOT = """:where(.chart) {
  --plot-background: white;
  display: block;
  height: auto;
  height: intrinsic;
  max-width: 100%;
}
:where(.chart text),
:where(.chart tspan) {
  white-space: pre;
}"""


def check_page(path: Path) -> None:
    """Raises UsageError when a page cannot be written to ``path``, or jinja2 is missing: before a long run."""
    if find_spec("jinja2") is None:
        raise UsageError(NO_JINJA)
    check_writable(path)


def write_page(
    records: Sequence[Record],
    seconds: float,
    path: Path,
    skipped: Sequence[str] = (),
    comparison: Comparison | None = None,
) -> None:
    """Write the page. Raises UsageError when it cannot be written, or jinja2 is missing."""
    write_whole(page(records, seconds, skipped, comparison), path)


def page(
    records: Sequence[Record], seconds: float, skipped: Sequence[str] = (), comparison: Comparison | None = None
) -> str:
    """The page's text; ``skipped`` are lines that were no records. Raises UsageError where jinja2 is missing."""
    try:
        from jinja2 import Environment
        from markupsafe import Markup
    except ImportError:
        raise UsageError(NO_JINJA) from None
    css = asset("page.css")
    program = "\n".join(['"use strict";', *map(asset, SCRIPTS), asset(MAIN)])
    scripts = [*map(asset, VENDOR), program]
    return (
        Environment(autoescape=True)
        .from_string(asset("page.html"))
        .render(
            summary=summary(records, seconds),
            policy=policy(scripts, [css, STYLE_OF_PLOT]),
            css=Markup(css),  # noqa: S704 - a file of this package
            scripts=[Markup(script) for script in scripts],  # noqa: S704 - files of this package
            data=packed(payload(records, skipped, comparison)),
        )
    )


def asset(name: str) -> str:
    """A file of this package."""
    return files(__package__).joinpath("assets", *name.split("/")).read_text(encoding="utf-8")


def policy(scripts: Iterable[str], styles: Iterable[str]) -> str:
    """A Content-Security-Policy under which these run and nothing else, and nothing is fetched."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(digest, scripts))}",
            f"style-src {' '.join(map(digest, styles))}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def digest(text: str) -> str:
    """A source expression of the policy: the hash of an inline element's text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"
