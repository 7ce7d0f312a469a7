"""Write one self-contained HTML page, which contains assets/ and the compressed records and fetches nothing.

The charts of a cell use Observable Plot, inlined with d3 (490 KB together): axes, scales and labels of four kinds of
chart are more code than this package should own, and pictures drawn by matplotlib would take 50 KB and more for every
failing cell. A content security policy lets the browser run only these scripts, and forbids all requests.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from zharness.errors import UsageError
from zharness.report.comparison import RunComparison
from zharness.report.failures import render_summary
from zharness.report.page.columns import build_payload, compress_payload
from zharness.run.files import require_writable, write_atomically
from zharness.run.record import Record

NO_SOURCE = "'none'"
VENDOR_SCRIPTS = ("vendor/d3.min.js", "vendor/plot.umd.min.js")
# One program in several files, which share a scope.
PAGE_SCRIPTS = (
    "data.js",
    "dom.js",
    "filters.js",
    "grid.js",
    "matrix.js",
    "lists.js",
    "charts.js",
    "evidence.js",
    "cell.js",
)
MAIN_SCRIPT = "main.js"
MISSING_JINJA_MESSAGE = (
    'the HTML page needs jinja2, which is not installed; install it with: pip install "zharness[report]"'
)
# The style sheet that Plot adds to each chart of class "chart"; the policy has to allow it by its hash.
PLOT_STYLE = """:where(.chart) {
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


def require_page_writable(path: Path) -> None:
    """Raise UsageError if no page can be written to ``path``, or jinja2 is missing.

    Call this function before a long run.
    """
    if find_spec("jinja2") is None:
        raise UsageError(MISSING_JINJA_MESSAGE)
    require_writable(path)


def write_page(
    records: Sequence[Record],
    seconds: float,
    path: Path,
    skipped: Sequence[str] = (),
    comparison: RunComparison | None = None,
) -> None:
    """Write the page. Raises UsageError if the file cannot be written, or jinja2 is missing."""
    write_atomically(render_page(records, seconds, skipped, comparison), path)


def render_page(
    records: Sequence[Record], seconds: float, skipped: Sequence[str] = (), comparison: RunComparison | None = None
) -> str:
    """Render the page; ``skipped`` describe lines that are not records. Raises UsageError if jinja2 is missing."""
    try:
        from jinja2 import Environment
        from markupsafe import Markup
    except ImportError:
        raise UsageError(MISSING_JINJA_MESSAGE) from None
    css = read_base_styles() + read_asset("page.css")
    program = "\n".join(['"use strict";', *map(read_asset, PAGE_SCRIPTS), read_asset(MAIN_SCRIPT)])
    scripts = [*map(read_asset, VENDOR_SCRIPTS), program]
    return (
        Environment(autoescape=True)
        .from_string(read_asset("page.html"))
        .render(
            summary=render_summary(records, seconds),
            command=describe_command(),
            versions=describe_versions(records),
            date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            policy=content_security_policy(scripts, [css, PLOT_STYLE]),
            css=Markup(css),  # noqa: S704 - a file of this package
            scripts=[Markup(script) for script in scripts],  # noqa: S704 - files of this package
            data=compress_payload(build_payload(records, skipped, comparison)),
        )
    )


def describe_command() -> str:
    """Return the command line of this process, without the folder of its program."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def describe_versions(records: Sequence[Record]) -> str:
    """Return the releases of torch and of every engine, each once."""
    torch_versions = dict.fromkeys(f"torch {record.torch_version}" for record in records)
    engine_versions = dict.fromkeys(f"{record.cell.engine} {record.engine_version}" for record in records)
    return ", ".join([*torch_versions, *engine_versions])


def read_base_styles() -> str:
    """Read the style sheet that all pages share: colours, text, tables and the signs of outcomes."""
    return read_asset("base.css")


def read_asset(name: str) -> str:
    """Read the file ``name`` in assets/."""
    return files(__package__).joinpath("assets", *name.split("/")).read_text(encoding="utf-8")


def content_security_policy(scripts: Iterable[str], styles: Iterable[str]) -> str:
    """Return a Content-Security-Policy that allows only these scripts and styles, and forbids all requests."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(csp_hash, scripts)) or NO_SOURCE}",
            f"style-src {' '.join(map(csp_hash, styles))}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def csp_hash(text: str) -> str:
    """Return the policy's source expression for an inline element, which contains the hash of the element's text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"
