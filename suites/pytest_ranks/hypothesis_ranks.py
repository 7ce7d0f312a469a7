"""Run a Hypothesis test file on forked processes that act as ranks, to test hypothesis_sync.py without a server."""

from __future__ import annotations

import ast
import multiprocessing
import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import hypothesis.stateful  # import it before the fork: in each rank, pytest would rewrite its asserts, which is slow
import pytest

from zharness.errors import WorldError
from zharness.pytest_ranks.hypothesis_sync import ExampleVerdict, sync_examples
from zharness.world.current_rank import ExchangeMismatchError

MESSAGE_TIMEOUT = 60.0  # seconds until some rank has to send a message

HEADER = """
import os
import pytest
import hypothesis
from hypothesis import assume, example, given, seed, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

RANK = int(os.environ["RANK"])

def record(*values):
    with open(f"examples-{RANK}", "a") as file:
        print(values, file=file)
"""


@dataclass
class RankLog:
    """Results of one rank: test outcomes, report texts, recorded examples, and whether all patches were undone."""

    outcomes: list[str] = field(default_factory=list)
    text: str = ""
    examples: list[tuple[Any, ...]] = field(default_factory=list)
    restored: bool = True


class ExchangeServer:
    """The parent process's part: send each rank the values of all ranks, and collect their logs."""

    def __init__(self, pipes: list[Connection]) -> None:
        self.pipes = pipes
        self.logs: dict[Connection, RankLog] = {}

    def serve(self) -> list[RankLog]:
        """Exchange values until every rank has ended; return their logs in rank order."""
        values: dict[Connection, Any] = {}
        open_pipes = list(self.pipes)
        while open_pipes:
            ready = wait([pipe for pipe in open_pipes if pipe not in values], MESSAGE_TIMEOUT)
            assert ready, "the ranks wait for each other"
            for pipe in ready:
                kind, value = self.receive(pipe)
                if kind == "value":
                    values[pipe] = value
                elif kind == "log":
                    self.logs[pipe] = value
                else:
                    open_pipes.remove(pipe)
            if values and set(values) == set(open_pipes):
                self.send_values(values)
                values = {}
        return [self.logs.get(pipe, RankLog(["died"])) for pipe in self.pipes]

    @staticmethod
    def receive(pipe: Connection) -> tuple[str, Any]:
        """Return the kind and the content of the next message; the kind is "end" if the rank has closed its pipe."""
        try:
            return pipe.recv()
        except EOFError:
            return "end", None

    def send_values(self, values: dict[Connection, Any]) -> None:
        """Send all values to every rank that waits, or None if a rank has ended without one."""
        complete = len(values) == len(self.pipes)
        for pipe in values:
            pipe.send([values[sender] for sender in self.pipes] if complete else None)


class SyncPlugin:
    """Pytest plugin of a rank: synchronizes every test with the other ranks and logs its outcome."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.log = RankLog()

    def exchange(self, value: object) -> list[Any]:
        """Return every rank's value. Raises WorldError if a rank has ended, or ExchangeMismatchError."""
        self.pipe.send(("value", value))
        values = self.pipe.recv()
        if values is None:
            raise WorldError("a peer has ended")
        if len({isinstance(value, ExampleVerdict) for value in values}) > 1:
            raise ExchangeMismatchError("one rank is in the test's own exchange, another after an example")
        return values

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Synchronize the call and check that all patches are undone afterwards."""
        before = get_patched_state(item)
        try:
            with sync_examples(item, self.exchange):
                return (yield)
        finally:
            self.log.restored &= before == get_patched_state(item)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Log the outcome of a call and every failure."""
        if report.when == "call" or report.failed:
            self.log.outcomes.append(report.outcome)
            self.log.text += report.longreprtext + "".join(text for _, text in report.sections)


def get_patched_state(item: pytest.Item) -> list[Any]:
    """Return the current value of every attribute that ``sync_examples`` patches."""
    function = getattr(item.obj, "__func__", item.obj)  # type: ignore[attr-defined]
    inner = getattr(getattr(function, "hypothesis", None), "inner_test", None)
    names = ("_hypothesis_internal_use_settings", "_hypothesis_internal_use_seed")
    return [
        inner,
        *(getattr(function, name, None) for name in names),
        hypothesis.internal.conjecture.engine.MAX_SHRINKING_SECONDS,
        *get_local_constants(),
    ]


def get_local_constants() -> list[Any]:
    """Return the attributes with constants of imported modules, which newer versions of Hypothesis have."""
    providers = sys.modules.get("hypothesis.internal.conjecture.providers")
    return [getattr(providers, name, None) for name in ("_get_local_constants", "CONSTANTS_CACHE")]


def run_rank(rank: int, pairs: list[tuple[Connection, Connection]], options: tuple[str, ...]) -> None:
    """Run pytest in a forked process as ``rank`` and send its log to the parent."""
    os.environ["RANK"] = str(rank)
    _, pipe = pairs[rank]
    for other in (end for pair in pairs for end in pair if end is not pipe):
        other.close()  # otherwise the parent would not see that a rank ended while its peers hold copies of the pipe
    plugin = SyncPlugin(pipe)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    plugins = ("-p", "_hypothesis_pytestplugin", "-p", "no:cacheprovider")
    # If the variable CI is set, Hypothesis would use another profile, which has no random seeds.
    pytest.main(["test_it.py", "-q", "--hypothesis-profile=default", *plugins, *options], [plugin])
    file = Path(f"examples-{rank}")
    plugin.log.examples = [ast.literal_eval(line) for line in file.read_text().splitlines()] if file.exists() else []
    pipe.send(("log", plugin.log))


class RankProcesses:
    """Runs a test file on several forked processes, as a rank server would."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def run(self, source: str, *options: str, world_size: int = 2) -> list[RankLog]:
        """Run ``source`` as a test file; return the log of each rank. ``record`` in the source records an example."""
        for file in self.directory.glob("examples-*"):
            file.unlink()
        (self.directory / "test_it.py").write_text(HEADER + textwrap.dedent(source))
        fork = multiprocessing.get_context("fork")
        pairs = [fork.Pipe() for _ in range(world_size)]
        processes = [fork.Process(target=run_rank, args=(rank, pairs, options)) for rank in range(world_size)]
        for process in processes:
            process.start()
        for _, child_end in pairs:
            child_end.close()
        try:
            logs = ExchangeServer([parent_end for parent_end, _ in pairs]).serve()
        finally:
            for process in processes:
                process.kill()
                process.join()
        assert all(log.restored for log in logs)
        return logs

    def run_equal(self, source: str, *options: str, world_size: int = 2, outcome: str = "passed") -> list[RankLog]:
        """Run ``source`` and check that all ranks have the same ``outcome`` and recorded the same examples."""
        logs = self.run(source, *options, world_size=world_size)
        assert [log.outcomes for log in logs] == [[outcome]] * world_size, logs[0].text
        assert all(log.examples == logs[0].examples for log in logs)
        return logs
