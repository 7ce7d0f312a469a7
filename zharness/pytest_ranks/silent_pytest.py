"""Silence pytest on all ranks of torchrun except rank 0: no terminal output, no report files, a private basetemp."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import pytest

# Plugins that write a file about the session; only rank 0 must write it.
_FILE_WRITING_PLUGINS = (
    "_pytest.junitxml",
    "_pytest.cacheprovider",
    "_pytest.stepwise",
    "_pytest.pastebin",
    "pytest_reportlog",
    "pytest_jsonreport",
    "pytest_html",
)


class DeferredTerminalOutput:
    """A buffer for pytest's terminal output, which is printed or discarded once it is known which rank reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._writer: Any = None  # the TerminalWriter of pytest's reporter, which has no public name
        self._terminal_file: Any = None
        self._buffer = io.StringIO()

    def start_buffering(self) -> None:
        """Buffer all terminal output of pytest from now on."""
        reporter = self._config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None:
            self._writer = reporter._tw
            self._terminal_file, self._writer._file = self._writer._file, self._buffer

    def release(self) -> None:
        """Print the buffered output and stop buffering."""
        if self._writer is not None:
            self._writer._file = self._terminal_file
            self._terminal_file.write(self._buffer.getvalue())
            self._terminal_file.flush()

    def discard(self) -> None:
        """Discard the buffered output and all later output."""
        if self._writer is not None:
            self._writer._file = open(os.devnull, "w")  # noqa: SIM115 - stays open until the process ends


def unregister_file_writers(config: pytest.Config) -> None:
    """Unregister plugins that write files about the session, because rank 0 already writes these files."""
    plugins = config.pluginmanager
    for plugin in plugins.get_plugins():
        module = plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__module__
        if module.startswith(_FILE_WRITING_PLUGINS):
            plugins.unregister(plugin)


def use_private_basetemp(config: pytest.Config, rank: int) -> None:
    """Use a separate base directory on each rank other than 0.

    The directory has the name of ``--basetemp`` with the rank appended, since rank 0 deletes and recreates
    ``--basetemp``.
    """
    factory = getattr(config, "_tmp_path_factory", None)
    if factory is not None and factory._given_basetemp is not None and factory._basetemp is None:
        basetemp = Path(factory._given_basetemp)
        basetemp.parent.mkdir(parents=True, exist_ok=True)
        factory._given_basetemp = basetemp.with_name(f"{basetemp.name}-rank{rank}")


def find_capture_files(config: pytest.Config) -> Mapping[str, IO[Any]]:
    """Return the files to which pytest's capture redirects "stdout" and "stderr"; without capture, an empty mapping."""
    capture = getattr(config.pluginmanager.getplugin("capturemanager"), "_global_capturing", None)
    files = {}
    for name, stream in (("stdout", getattr(capture, "out", None)), ("stderr", getattr(capture, "err", None))):
        file = getattr(stream, "tmpfile", None)
        try:
            file.fileno()  # type: ignore[union-attr]  # raises for None and for a file in memory
        except (AttributeError, OSError):
            continue
        files[name] = file
    return files  # type: ignore[return-value]  # every file has a descriptor, so none is None
