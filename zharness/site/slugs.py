"""Make names of files from texts."""

from __future__ import annotations

import hashlib
import re


def slugify(text: str) -> str:
    """Return ``text`` with only letters, digits, dots, signs and underscores, for the name of a file."""
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", text).strip("-.")


def make_slug(name: str, *parts: str) -> str:
    """Return ``name`` for the name of a file, with a digest of ``parts``, which distinguishes pages of one name."""
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
    return f"{slugify(name)}-{digest}"
