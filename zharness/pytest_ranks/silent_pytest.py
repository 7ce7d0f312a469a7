"""A pytest beside the one that reports: it shows nothing, writes nothing, and takes nobody's temporary paths."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import pytest

# Plugins that write a file about the session: one process does.
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
    """The terminal's output held back until it is known whether this process reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._writer: Any = None  # the writer behind pytest's reporter: there is no public way to it
        self._terminal_file: Any = None
        self._buffer = io.StringIO()

    def start_buffering(self) -> None:
        """Hold back what is printed from now on."""
        reporter = self._config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None:
            self._writer = reporter._tw
            self._terminal_file, self._writer._file = self._writer._file, self._buffer

    def release(self) -> None:
        """Print what was held back, and all that follows."""
        if self._writer is not None:
            self._writer._file = self._terminal_file
            self._terminal_file.write(self._buffer.getvalue())
            self._terminal_file.flush()

    def discard(self) -> None:
        """Print nothing, ever."""
        if self._writer is not None:
            self._writer._file = open(os.devnull, "w")  # noqa: SIM115 - lives as long as the process


def unregister_file_writers(config: pytest.Config) -> None:
    """Take the plugins away that would write the files which rank 0 writes."""
    plugins = config.pluginmanager
    for plugin in plugins.get_plugins():
        module = plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__module__
        if module.startswith(_FILE_WRITING_PLUGINS):
            plugins.unregister(plugin)


def use_private_basetemp(config: pytest.Config, rank: int) -> None:
    """Beside the directory that --basetemp names, which rank 0 removes and makes anew, one of this rank's own."""
    factory = getattr(config, "_tmp_path_factory", None)
    if factory is not None and factory._given_basetemp is not None and factory._basetemp is None:
        given = Path(factory._given_basetemp)
        given.parent.mkdir(parents=True, exist_ok=True)
        factory._given_basetemp = given.with_name(f"{given.name}-rank{rank}")


def find_capture_files(config: pytest.Config) -> Mapping[str, IO[Any]]:
    """The files into which pytest's own capture has the output of this process go, if it uses files."""
    capture = getattr(config.pluginmanager.getplugin("capturemanager"), "_global_capturing", None)
    found = {}
    for name, stream in (("stdout", getattr(capture, "out", None)), ("stderr", getattr(capture, "err", None))):
        file = getattr(stream, "tmpfile", None)
        try:
            file.fileno()  # type: ignore[union-attr]  # None, or a file in memory, has no descriptor
        except (AttributeError, OSError):
            continue
        found[name] = file
    return found  # type: ignore[return-value]  # those that have no descriptor are left out
