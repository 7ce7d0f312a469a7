"""Ranks made of plain processes, each running pytest on one file in step with the others, for the tests of given.py."""

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

import hypothesis.stateful  # here rather than in every rank, where pytest would rewrite its asserts
import pytest

from zharness.errors import WorldError
from zharness.pytest_ranks.hypothesis_sync import ExampleVerdict, sync_examples
from zharness.world.current_rank import ExchangeMismatchError

PATIENCE = 60.0  # seconds without a word from any rank

HEADER = """
import os
import pytest
import hypothesis
from hypothesis import assume, example, given, seed, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

RANK = int(os.environ["RANK"])

def saw(*values):
    with open(f"saw-{RANK}", "a") as file:
        print(values, file=file)
"""


@dataclass
class Rank:
    """What one rank tells: the outcome and the report of each test, the examples seen, and whether all was put back."""

    outcomes: list[str] = field(default_factory=list)
    text: str = ""
    saw: list[tuple[Any, ...]] = field(default_factory=list)
    restored: bool = True


class Hub:
    """The parent's end: gives the ranks each other's values, and collects what they tell at their end."""

    def __init__(self, pipes: list[Connection]) -> None:
        self.pipes = pipes
        self.ranks: dict[Connection, Rank] = {}

    def serve(self) -> list[Rank]:
        votes: dict[Connection, Any] = {}
        open_pipes = list(self.pipes)
        while open_pipes:
            ready = wait([pipe for pipe in open_pipes if pipe not in votes], PATIENCE)
            assert ready, "the ranks wait for each other"
            for pipe in ready:
                kind, value = self.hear(pipe)
                if kind == "vote":
                    votes[pipe] = value
                elif kind == "rank":
                    self.ranks[pipe] = value
                else:
                    open_pipes.remove(pipe)
            if votes and set(votes) == set(open_pipes):
                self.answer(votes)
                votes = {}
        return [self.ranks.get(pipe, Rank(["died"])) for pipe in self.pipes]

    @staticmethod
    def hear(pipe: Connection) -> tuple[str, Any]:
        try:
            return pipe.recv()
        except EOFError:
            return "end", None

    def answer(self, votes: dict[Connection, Any]) -> None:
        complete = len(votes) == len(self.pipes)
        for pipe in votes:
            pipe.send([votes[voter] for voter in self.pipes] if complete else None)


class Stepping:
    """The plugin of a rank: every test runs in step; what becomes of it is noted."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.rank = Rank()

    def exchange(self, value: object) -> list[Any]:
        self.pipe.send(("vote", value))
        answer = self.pipe.recv()
        if answer is None:
            raise WorldError("a peer has ended")
        if len({isinstance(value, ExampleVerdict) for value in answer}) > 1:
            raise ExchangeMismatchError("one in the test's own exchange, another after an example")
        return answer

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        before = state_of(item)
        try:
            with sync_examples(item, self.exchange):
                return (yield)
        finally:
            self.rank.restored &= before == state_of(item)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            self.rank.outcomes.append(report.outcome)
            self.rank.text += report.longreprtext + "".join(text for _, text in report.sections)


def state_of(item: pytest.Item) -> list[Any]:
    function = getattr(item.obj, "__func__", item.obj)  # type: ignore[attr-defined]
    inner = getattr(getattr(function, "hypothesis", None), "inner_test", None)
    names = ("_hypothesis_internal_use_settings", "_hypothesis_internal_use_seed")
    return [
        inner,
        *(getattr(function, name, None) for name in names),
        hypothesis.internal.conjecture.engine.MAX_SHRINKING_SECONDS,
        *constants_of_modules(),
    ]


def constants_of_modules() -> list[Any]:
    providers = sys.modules.get("hypothesis.internal.conjecture.providers")
    return [getattr(providers, name, None) for name in ("_get_local_constants", "CONSTANTS_CACHE")]


def be_rank(rank: int, pairs: list[tuple[Connection, Connection]], options: tuple[str, ...]) -> None:
    os.environ["RANK"] = str(rank)
    _, pipe = pairs[rank]
    for other in (end for pair in pairs for end in pair if end is not pipe):
        other.close()  # or a rank's end would go unnoticed while its peers hold copies
    stepping = Stepping(pipe)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    plugins = ("-p", "_hypothesis_pytestplugin", "-p", "no:cacheprovider")
    # Hypothesis takes a profile of its own, without random seeds, wherever the variable CI is set.
    pytest.main(["test_it.py", "-q", "--hypothesis-profile=default", *plugins, *options], [stepping])
    log = Path(f"saw-{rank}")
    stepping.rank.saw = [ast.literal_eval(line) for line in log.read_text().splitlines()] if log.exists() else []
    pipe.send(("rank", stepping.rank))


class Ranks:
    """Runs a test file on several processes, as a rank server would."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def run(self, source: str, *options: str, world_size: int = 2) -> list[Rank]:
        for log in self.place.glob("saw-*"):
            log.unlink()
        (self.place / "test_it.py").write_text(HEADER + textwrap.dedent(source))
        fork = multiprocessing.get_context("fork")
        pairs = [fork.Pipe() for _ in range(world_size)]
        processes = [fork.Process(target=be_rank, args=(rank, pairs, options)) for rank in range(world_size)]
        for process in processes:
            process.start()
        for _, there in pairs:
            there.close()
        try:
            ranks = Hub([ours for ours, _ in pairs]).serve()
        finally:
            for process in processes:
                process.kill()
                process.join()
        assert all(rank.restored for rank in ranks)
        return ranks

    def agree(self, source: str, *options: str, world_size: int = 2, outcome: str = "passed") -> list[Rank]:
        """Run it; all ranks have to see the same examples and to end alike."""
        ranks = self.run(source, *options, world_size=world_size)
        assert [rank.outcomes for rank in ranks] == [[outcome]] * world_size, ranks[0].text
        assert all(rank.saw == ranks[0].saw for rank in ranks)
        return ranks
