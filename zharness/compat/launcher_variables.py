"""Hide the environment variables that launchers set from tests that must not see them."""

from __future__ import annotations

import pytest

LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def delete_launcher_variables(patch: pytest.MonkeyPatch) -> None:
    """Delete the environment variables of launchers until ``patch`` is undone."""
    for name in LAUNCHER_VARIABLES:
        patch.delenv(name, raising=False)
