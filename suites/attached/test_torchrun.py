"""Tests and cells on ranks that torchrun started give one report that judges every rank, and leave no process.

In most tests the agents and ranks are forks of the warm Python, which has imported torch. Three tests start them as a
shell does: those of two machines, of four ranks on one machine, and of cells.
"""

from __future__ import annotations

import os
import re
import shutil
import textwrap
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from suites import inner
from suites.attached.launches import (
    ADDRESSES,
    LaunchResult,
    connect_two_namespaces,
    run_one_agent,
    run_one_agent_from_shell,
    run_two_agents,
    run_two_agents_from_shell,
)

PYTEST = ("pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", "-v")
HEAD = """
import ctypes, os, threading
import pytest, torch, torch.distributed as dist
from zharness.world import exchange

def total(rank):
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    return value.item()
"""


def write_tests(folder: Path, text: str, name: str = "test_it.py") -> Path:
    """Write a test module and its pytest.ini into ``folder``; return the folder."""
    (folder / name).write_text(HEAD + textwrap.dedent(text))
    (folder / "pytest.ini").write_text(inner.settings(text))
    return folder


def section(done: LaunchResult, start: str, end: str) -> str:
    """Return the output between the texts ``start`` and ``end``."""
    return done.output.partition(start)[2].partition(end)[0]


def test_four_ranks_give_one_report_in_which_every_rank_is_judged(tmp_path: Path) -> None:
    folder = write_tests(
        tmp_path,
        """
        @pytest.fixture(scope="module")
        def pid(rank):
            yield os.getpid()
            print("torn down on", rank)

        @pytest.mark.world_size(1, 2, 4, 8)
        def test_group(rank, world_size, pid):
            assert total(rank) == sum(range(world_size))
            assert dist.get_world_size() == world_size == int(os.environ["WORLD_SIZE"])
            assert exchange(rank) == list(range(world_size))
            assert len(set(exchange(pid))) == world_size

        def test_without_ranks(tmp_path, rank):
            assert not dist.is_initialized() and rank == 0
            print("once, in", os.environ["RANK"])
            assert os.environ["RANK"] == "0"

        @pytest.mark.world_size(4)
        def test_fails_on_one(rank):
            print("seen on", rank)
            group = dist.new_group([0, 1, 2, 3])  # a local of the frame that raises
            if rank == 2:
                child = os.fork()
                if child == 0:
                    ctypes.string_at(0)  # not the rank's death; its dump goes to the rank's output
                os.waitpid(child, 0)
                raise ValueError("only here")
            dist.barrier(group=group)

        @pytest.mark.world_size(4)
        def test_skips_on_one(rank):
            if rank == 1:
                pytest.skip("not on rank 1")
            total(rank)

        @pytest.mark.world_size(2)
        def test_calls_different_collectives(rank, comm):
            value = torch.ones(2)
            comm.all_reduce(value) if rank else comm.broadcast(value)

        @pytest.mark.world_size(3)
        def test_skips_on_all():
            pytest.skip("nowhere")

        @pytest.mark.world_size(3)
        @pytest.mark.xfail(raises=KeyError)
        def test_fails_as_expected(rank):
            raise KeyError(rank)

        @pytest.mark.world_size(4)
        @pytest.mark.isolation("fresh", group="none")
        @pytest.mark.parametrize("again", [1, 2])
        def test_forms_a_group_of_its_own(rank, again, shared_tmp_path):
            dist.init_process_group("gloo")
            assert total(rank) == 6
            (shared_tmp_path / str(rank)).touch()
            dist.barrier()
            assert len(list(shared_tmp_path.iterdir())) == 4
        """,
    )
    done = run_one_agent_from_shell(4, *PYTEST, "--junitxml=report.xml", "--basetemp=base", cwd=folder)
    assert done.statuses == (1,), done.output
    assert done.output.count("test session starts") == 1
    assert len(done.lines("FAILED ")) == 3
    assert "= 3 failed, 6 passed, 1 skipped, 1 deselected, 1 xfailed in " in done.output
    assert "attached to 4 ranks that torchrun started on this machine" in done.output
    assert "deselected, because only 4 ranks were launched: test_it.py::test_group[w8] (world size 8)" in done.output
    failure = section(done, "_ test_fails_on_one[w4] _", "_ test_skips_on_one[w4] _")
    assert "rank 2 failed first, in call: ValueError: only here" in failure
    assert "ranks 0-1, 3 were stopped because another rank had failed, in call" in failure
    assert all(f"[rank {rank}] seen on {rank}" in failure for rank in range(4))
    assert "[rank 2] Fatal Python error: Segmentation fault" in failure
    assert (
        "collective calls differ between ranks at call 1: rank 0 calls broadcast float32[2] (test_it.py, line "
        in done.output
    )
    assert "skipped on rank 1 of 4 only: not on rank 1; ranks 0, 2-3 were stopped" in done.output
    suite = ElementTree.parse(folder / "report.xml").getroot().find("testsuite")  # noqa: S314 - our own file
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("11", "3", "2")
    assert not done.leftovers


def test_a_hang_is_named_with_the_stacks_of_all_ranks_and_ends_the_session(tmp_path: Path) -> None:
    folder = write_tests(
        tmp_path,
        """
        @pytest.mark.world_size(2)
        def test_before(rank):
            assert total(rank) == 1

        @pytest.mark.world_size(3)
        @pytest.mark.rank_timeout(5)
        def test_hangs(rank):
            print("printed by", rank)
            if rank == 1:
                threading.Event().wait()
            dist.barrier()

        def test_after():
            assert False, "never run"
        """,
    )
    done = run_one_agent(4, *PYTEST, "--junitxml=report.xml", cwd=folder)
    assert done.statuses == (1,), done.output
    assert "rank 1 did not finish in time, in call: still running after 5 s; is in wait" in done.output
    assert (
        "ranks 0, 2 did not finish in time, in call: still running after 5 s; waits in barrier (test_it.py"
        in done.output
    )
    assert "in test_hangs" in section(done, "- stack of rank 1 -", "Captured stdout")
    assert "in test_hangs" in section(done, "- stack of ranks 0, 2 -", "- stack of rank 1 -")
    assert all(f"[rank {rank}] printed by {rank}" in done.output for rank in range(3))
    assert "test_it.py::test_hangs[w3] did not end within 5 s; torchrun's ranks cannot be replaced" in done.output
    assert "= 1 failed, 1 passed in " in done.output
    assert (folder / "report.xml").read_text().count("<testcase ") == 2
    assert not done.leftovers


def test_a_death_is_named_with_its_signal_and_its_stack_and_ends_the_session(tmp_path: Path) -> None:
    folder = write_tests(
        tmp_path,
        """
        @pytest.mark.world_size(2)
        def test_dies(rank):
            if rank == int(os.environ["DIES"]):
                ctypes.string_at(0)
            total(rank)

        def test_after():
            assert False, "never run"
        """,
    )
    done = run_one_agent(2, *PYTEST, cwd=folder, DIES="1")
    assert done.statuses == (1,), done.output
    assert "rank 1 was ended by a signal: SIGSEGV, in call, in string_at" in done.output
    assert "rank 0 was stopped because another rank had failed" in done.output
    assert "test_it.py" in section(done, "Fatal Python error: Segmentation fault", "E  ")
    assert "= 1 failed in " in done.output
    assert not done.leftovers
    done = run_one_agent(2, *PYTEST, cwd=folder, DIES="0")
    assert done.statuses == (1,), done.output
    assert "rank 0 was ended by a signal: SIGSEGV, while test_it.py::test_dies[w2] ran; it was the rank" in done.output
    assert not done.leftovers


TWO = """
FAILS, DIES = int(os.environ.get("FAILS", "-1")), int(os.environ.get("DIES", "-1"))

@pytest.mark.world_size(2, 4)
def test_group(rank, world_size):
    assert total(rank) == sum(range(world_size))
    print("agent", os.environ["GROUP_RANK"])

@pytest.mark.world_size(4)
def test_fails(rank):
    assert rank != FAILS
    total(rank)

@pytest.mark.world_size(4)
def test_dies(rank):
    if rank == DIES:
        os._exit(5)
    total(rank)
"""


def test_two_agents_give_one_report_and_one_exit_status(tmp_path: Path) -> None:
    folder = write_tests(tmp_path, TWO)
    done = run_two_agents(2, *PYTEST, "--junitxml=report.xml", cwd=folder)
    assert done.statuses == (0, 0), done.output
    assert "attached to 4 ranks that torchrun started by 2 agents" in done.outputs[0]
    assert "= 4 passed in " in done.outputs[0]
    assert "pytest" not in done.outputs[1]
    assert not done.leftovers


@pytest.mark.exhaustive
def test_two_machines_give_one_report_in_which_remote_ranks_are_judged(tmp_path: Path) -> None:
    folder = write_tests(tmp_path, TWO)
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    try:
        with connect_two_namespaces() as prefixes:
            options = {"prefixes": prefixes, "address": ADDRESSES[0], "GLOO_SOCKET_IFNAME": "cable"}
            done = run_two_agents_from_shell(2, *PYTEST, cwd=folder, FAILS="3", DIES="2", **options)  # type: ignore[arg-type]
    except OSError as error:
        pytest.skip(f"network namespaces: {error}")
    assert 0 not in done.statuses, done.output
    assert "= 2 failed, 2 passed in " in done.outputs[0], done.output
    assert "rank 3 failed first, in call: assert 3 != 3" in done.outputs[0]
    # Either the witness reads the exit status first, or torchrun reaps the process first.
    status = r"(exit status 5, in call|its process has ended, and only torchrun has its exit status)"
    assert re.search(f"rank 2 exited without a result: {status}", done.outputs[0]), done.outputs[0]
    assert "test session starts" not in done.outputs[1]
    assert not done.leftovers


def test_a_project_without_tests_in_ranks_runs_all_tests_in_every_process(tmp_path: Path) -> None:
    folder = write_tests(tmp_path, "def test_everywhere():\n    dist.init_process_group('gloo')\n    dist.barrier()\n")
    done = run_one_agent(2, *PYTEST, cwd=folder)
    assert done.statuses == (0,), done.output
    assert done.output.count("= 1 passed in ") == 2


def test_cells_run_on_the_ranks_of_the_launch(tmp_path: Path) -> None:
    arguments = ("zharness", "check", "training.grads", "--model", "mlp", "--stage", "0,3", "--jsonl", "records")
    done = run_one_agent_from_shell(2, *arguments, cwd=tmp_path)
    assert done.statuses == (0,), done.output
    assert done.output.count("training.grads  pass 1") == 1
    assert len((tmp_path / "records").read_text().splitlines()) == 2
    assert not done.leftovers


def test_a_run_stops_early_and_refuses_to_select_cells_for_a_change(tmp_path: Path) -> None:
    arguments = ("zharness", "check", "training.grads", "--model", "mlp", "--engine", "zharness.mutants:never_reduces")
    stopped = run_one_agent(2, *arguments, "--world-size", "2,1", "-x", cwd=tmp_path)
    assert "STOPPED after 1 of 2 cells" in stopped.output, stopped.output
    refused = run_one_agent(2, *arguments, "--record-reach", "reach.jsonl", cwd=tmp_path)
    assert refused.statuses == (1,), refused.output  # that of torchrun
    assert "--changed, --continue and --record-reach do not work under torchrun" in refused.output


def test_an_engine_that_hangs_is_named_and_ends_the_command(tmp_path: Path) -> None:
    engine = """
    from zharness.engines.reference import factory as reference

    def hangs(model, config):
        if config.stage == 1 and dist.is_initialized() and dist.get_rank() == 1:
            threading.Event().wait()
        return reference(model, config)
    """
    write_tests(tmp_path, engine, "mine.py")
    arguments = ("check", "training.grads", "--model", "mlp", "--stage", "0,1,2", "--world-size", "1,2,4")
    done = run_one_agent(
        2, "zharness", *arguments, "--engine", "mine:hangs", "--timeout", "3", "--jsonl", "records", cwd=tmp_path
    )
    assert done.statuses == (1,), done.output
    assert "the cell needs 4 ranks, and torchrun started 2" in (tmp_path / "records").read_text()
    assert "rank 1 did not finish in time" in done.output
    assert "mine.py" in done.output
    assert "torchrun's ranks cannot be replaced" in done.output
    assert not done.leftovers
