"""Options of an engine, laid one over the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Options = Mapping[str, Any]


def laid_over(base: Options, over: Options) -> dict[str, Any]:
    """``base`` with other options laid over it, section by section."""
    deep = {
        key: laid_over(base[key], value)
        for key, value in over.items()
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
    }
    return {**base, **over, **deep}
