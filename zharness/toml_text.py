"""Parse TOML with Python's own parser, or with tomli before Python 3.11. The module does not import torch."""

from __future__ import annotations

import sys
from typing import Any

from zharness.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Return the content of ``text``, which is that of the file ``source``. Raises UsageError if it is not TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source} is not valid TOML: {error}") from error
