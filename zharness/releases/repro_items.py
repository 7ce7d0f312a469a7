"""Collect reproductions as pytest items, one per script and release, such as ``repro/deepspeed_7913_x.py::0.18.8``.

The option ``--engine`` selects the releases, like ``--on`` of `zharness repro`. Scripts of other engines then yield no
items.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zharness.engines.registry import split_release
from zharness.errors import UsageError
from zharness.pytest_ranks.options import get_option
from zharness.releases import repro_runs
from zharness.releases.prepared_release import prepare_release
from zharness.releases.repro_table import describe_expected, describe_run
from zharness.releases.repros import Repro, ReproVerdict, get_distribution, parse_repro, run_repro


class ReproFile(pytest.File):
    """A pytest collector for one reproduction script."""

    def collect(self) -> Iterator[ReproItem]:
        """Yield one item for each release on which the script is to be run."""
        try:
            repro = parse_repro(self.path)
            for engine in repro_runs.select_releases(repro, get_option(self.config, "engine")):
                yield ReproItem.from_parent(self, name=render_title(engine), repro=repro, engine=engine)
        except UsageError as error:
            raise self.CollectError(str(error)) from None


def render_title(engine: str) -> str:
    """Return the last part of an item's id: the release, ``@`` and the path of a checkout, or ``installed``."""
    _, at, path = engine.partition("@")
    return split_release(engine)[1] or f"{at}{path}" or "installed"


class ReproItem(pytest.Item):
    """A pytest item that runs one script on one release.

    The item passes if the verdict is the one that the script's header predicts.
    """

    def __init__(self, repro: Repro, engine: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._repro = repro
        self._engine = engine

    def runtest(self) -> None:
        """Run the script, and fail unless the verdict is as expected; skip the item if a requirement is missing."""
        result = run_repro(
            self._repro, self._engine, prepare_release(self._engine, get_distribution(self._repro.engine))
        )
        if result.verdict is ReproVerdict.UNSUPPORTED:
            pytest.skip(result.evidence)
        if not result.is_expected:
            pytest.fail(
                f"{result.verdict.value}, expected {describe_expected(result)}\n{describe_run(result)}", pytrace=False
            )

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return only the error message, without a traceback, if the release cannot be installed."""
        if isinstance(excinfo.value, UsageError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return the path and the title that pytest shows for this item."""
        return self.path, None, f"{self._repro.id} on {self._engine}"
