"""Pytest plugin that makes ``import deepspeed`` import the reference engine.

``pytest -p zharness.compat.deepspeed_engine.install`` loads it before the collection, so that test files and ranks see
only the stand-in. It imports the stand-in's modules when it is loaded, as a plugin or by an import.
"""

from __future__ import annotations

import sys

from zharness.compat.deepspeed_engine import MARK, is_installed
from zharness.compat.deepspeed_engine.modules import iter_modules
from zharness.errors import UsageError


def install() -> None:
    """Put the stand-in's modules into ``sys.modules``. Raises UsageError if the real DeepSpeed is imported already."""
    if is_installed():
        return
    if "deepspeed" in sys.modules:
        raise UsageError(
            "deepspeed is imported already, so the reference engine cannot stand in for it; load this plugin first, "
            "with pytest's option -p zharness.compat.deepspeed_engine.install"
        )
    for module in iter_modules():
        sys.modules[module.__name__] = module
    setattr(sys.modules["deepspeed"], MARK, True)


install()
