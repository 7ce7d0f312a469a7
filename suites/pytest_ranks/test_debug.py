"""A debugger on one rank: which rank stops, which rank skips its breakpoint, and what is reported if none can stop."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from suites.pytest_ranks.sessions import BREAKPOINT, HEAD, Session, make_session


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """A function that runs pytest on a source with ``typed`` in its standard input."""
    return make_session(tmp_path)


def test_a_breakpoint_stops_the_chosen_rank_in_the_frame_of_the_test(session: Session) -> None:
    result = session(
        """
        @pytest.mark.world_size(2)
        def test_it(rank):
            number = rank + 40
            breakpoint()
            number += 1
        """,
        "--pdb-rank=1",
        "-rP",
        typed="p number\nw\nc\n",
    )
    assert result.counts == {"passed": 1}, result.text
    assert "rank 1 of 2 stopped in test_it.py::test_it[w2] (call)" in result.text
    assert re.search(r"^> \S+test_it.py\(\d+\)test_it\(\)$", result.text, re.MULTILINE)
    assert "(Pdb) 41\n" in result.text
    assert "breakpoint() on rank 0 is skipped: --pdb-rank is 1" in result.text
    assert result.count("stopped in") == 1


def test_all_ways_to_open_a_debugger_stop_the_rank_and_lose_no_line_of_input(session: Session) -> None:
    result = session(
        """
        @pytest.mark.world_size(2)
        @pytest.mark.parametrize("ask", [pdb.set_trace, pytest.set_trace, set_trace])
        def test_it(rank, ask):
            ask()

        @pytest.fixture
        def stops():
            breakpoint()
            yield
            breakpoint()

        @pytest.mark.world_size(2)
        def test_fixture(stops):
            ...
        """,
        typed="".join(f"p 'answer', {n}\nc\n" for n in range(5)),
    )
    assert result.counts == {"passed": 4}, result.text
    assert re.findall(r"\('answer', (\d)\)", result.text) == list("01234")
    assert result.count("rank 0 of 2 stopped in") == 5
    assert result.count("test_fixture[w2] (setup)") == result.count("test_fixture[w2] (teardown)") == 1


def test_a_breakpoint_set_in_the_debugger_gets_the_terminal_and_capfd_keeps_its_output(session: Session) -> None:
    source = """
        @pytest.mark.world_size(2)
        def test_it(rank, capfd):
            os.system("echo before")
            breakpoint()
            os.system("echo between")
            there = True
            os.system("echo behind")
            assert capfd.readouterr().out == "before\\nbetween\\nbehind\\n"

        @pytest.mark.world_size(2)
        def test_sys(rank, capsys):
            print("before")
            breakpoint()
            print("behind")
            assert capsys.readouterr() == ("before\\nbehind\\n", "")
        """
    line = (HEAD + dedent(source)).splitlines().index("    there = True") + 1
    result = session(source, typed=f"b {line}\nc\np 'there'\nc\nc\n")
    assert result.counts == {"passed": 2}, result.text
    assert "(Pdb) 'there'\n" in result.text
    assert result.count("stopped in") == 3


def test_the_debugger_suspends_the_rank_timeout(session: Session) -> None:
    result = session(
        """
        import torch

        @pytest.mark.world_size(2)
        @pytest.mark.rank_timeout(2)
        def test_it(rank):
            number = rank + 40
            assert number == 0

        @pytest.mark.world_size(2)
        @pytest.mark.rank_timeout(2)
        def test_together(rank):
            if rank == 1:
                breakpoint()
            total = torch.ones(1)
            torch.distributed.all_reduce(total)
            assert total == 2
        """,
        "--pdb",
        "--pdb-rank=1",
        typed="!threading.Event().wait(3)\np number\nc\n!threading.Event().wait(3)\nc\n",
    )
    assert result.counts == {"failed": 1, "passed": 1}, result.text
    assert "(Pdb) 41\n" in result.text
    assert "rank 0 failed" in result.text
    assert "rank 1 failed" in result.text
    assert "did not finish" not in result.text
    assert "--pdb on rank 0 is skipped: --pdb-rank is 1" in result.text


def test_an_expected_failure_opens_no_debugger_and_keeps_the_timeout(session: Session) -> None:
    result = session(
        """
        @pytest.mark.world_size(2)
        @pytest.mark.rank_timeout(2)
        @pytest.mark.xfail
        def test_it(rank, hangs):
            assert rank > 2

        @pytest.fixture
        def hangs():
            yield
            threading.Event().wait()
        """,
        "--pdb",
    )
    assert "stopped in" not in result.text
    assert " 1 xfailed in " in result.text


def test_quitting_the_debugger_ends_the_session(session: Session) -> None:
    result = session(
        """
        @pytest.mark.world_size(2)
        def test_it(rank):
            breakpoint()

        @pytest.mark.world_size(2)
        def test_next():
            raise AssertionError
        """,
        typed="q\n",
    )
    assert "Exit: rank 0: Quitting debugger" in result.text
    assert result.status == pytest.ExitCode.INTERRUPTED
    assert "AssertionError" not in result.text


def test_the_end_of_the_input_fails_the_test_and_the_session_continues(session: Session) -> None:
    result = session(
        """
        @pytest.mark.world_size(2)
        def test_it(rank):
            breakpoint()
            print("behind")

        @pytest.mark.world_size(2)
        def test_next(rank):
            assert os.path.samefile("/dev/fd/0", os.devnull)
            print("from rank", rank)

        @pytest.mark.world_size(2)
        def test_child(rank):
            child = os.fork()
            if not child:
                breakpoint()
                sys.stderr.flush()
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        """,
        "--isolation=pooled",
        "-rP",
    )
    assert result.counts == {"failed": 1, "passed": 2}, result.text
    assert "BdbQuit" in result.text
    assert "[rank 0] from rank 0" in result.text
    assert "breakpoint() in a child process of rank 0 is skipped" in result.text


def test_a_breakpoint_in_a_module_fixtures_teardown_stops(session: Session) -> None:
    result = session(
        """
        @pytest.fixture(scope="module")
        def kept():
            yield
            breakpoint()

        @pytest.mark.world_size(2)
        def test_it(kept):
            ...

        def test_of_no_rank():
            ...
        """,
        "--isolation=pooled",
        typed="p 'looked'\nc\n",
    )
    assert result.counts == {"passed": 2}, result.text
    assert "'looked'" in result.text


def test_trace_stops_the_chosen_rank_at_the_first_line(session: Session) -> None:
    result = session(
        """
        @pytest.mark.world_size(2)
        def test_it(rank):
            number = rank + 40
        """,
        "--trace",
        "--pdb-rank=1",
        typed="n\np number\nc\n",
    )
    assert result.counts == {"passed": 1}, result.text
    assert "(Pdb) 41\n" in result.text
    assert result.count("stopped in") == 1


def test_output_of_ranks_is_echoed_with_s_but_not_from_the_debugger(session: Session) -> None:
    result = session(
        """
        @pytest.mark.world_size(2)
        def test_it(rank):
            print("before")
            breakpoint()
            print("behind")
        """,
        "-s",
        typed="!print('meanwhile')\nc\n",
    )
    assert result.counts == {"passed": 1}, result.text
    assert all(f"[rank {rank}] {word}\n" in result.text for rank in (0, 1) for word in ("before", "behind"))
    assert "meanwhile\n" in result.text
    assert "[rank 0] meanwhile" not in result.text


FAILING = """
@pytest.mark.world_size(2)
def test_failing():
    raise AssertionError
"""


def test_a_pdb_rank_above_the_world_size_is_reported(session: Session) -> None:
    result = session(BREAKPOINT + FAILING, "--pdb", "--pdb-rank=3", typed="c\n")
    assert result.counts == {"passed": 1, "failed": 1}, result.text
    for what in ("breakpoint()", "--pdb"):
        assert result.count(f"{what} is skipped: --pdb-rank is 3, but this test has ranks 0 to 1") == 1, result.text
    assert "(Pdb)" not in result.text


def test_a_breakpoint_without_standard_input_is_skipped_with_a_warning(session: Session) -> None:
    result = session(BREAKPOINT, stdin=subprocess.DEVNULL)
    assert result.counts == {"passed": 1}, result.text
    message = "PytestWarning: breakpoint() is skipped: standard input is /dev/null"
    assert re.search(rf"test_it.py:\d+: {re.escape(message)}", result.text)


@pytest.mark.parametrize(
    ("option", "options", "message"),
    [
        ("--pdb", {"stdin": subprocess.DEVNULL}, "--pdb cannot open a debugger on a rank: standard input is /dev/null"),
        (
            "--trace",
            {"preexec_fn": lambda: os.close(0)},
            "--trace cannot open a debugger on a rank: standard input is closed",
        ),
        ("--pdb-rank=-1", {}, "--pdb-rank -1: expected the number of a rank, from 0 up"),
    ],
)
def test_a_debugger_that_cannot_open_is_a_usage_error(
    session: Session, option: str, options: dict[str, Any], message: str
) -> None:
    result = session(FAILING, option, **options)
    assert result.status == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: {message}\n" in result.text


def test_an_xdist_worker_has_no_terminal(session: Session) -> None:
    pytest.importorskip("xdist")
    result = session(BREAKPOINT, "-n1", "--trace", typed="c\n")
    assert result.counts == {"passed": 1}, result.text
    message = "breakpoint() is skipped: an xdist worker has no terminal; run with -n 0 or -p no:xdist"
    assert result.count(message) == 1
    assert session(FAILING, "-n0", "--pdb", typed="c\n").count("rank 0 of 2 stopped in") == 1
