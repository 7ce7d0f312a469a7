"""How a server handles the output, the stacks and the deadlines of its ranks."""

import os
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from zharness.world import GroupMode, RankEnd, RankServer, progress, run
from zharness.world import postmortem as postmortem_module
from zharness.world.current_rank import current_rank
from zharness.world.deadline import Deadline
from zharness.world.outcome import CapturedOutput, RankOutcome
from zharness.world.stacks import (
    describe_innermost_frame,
    find_waiting_collective,
    is_building,
    parse_main_thread,
    strip_harness_frames,
)
from zharness.world.streams import HEAD_BYTES, TAIL_BYTES, RankStream, phase_marker


def stream_chunks(*chunks: bytes) -> tuple[CapturedOutput, ...]:
    """Send the chunks through a pipe, one read each; return the captured output."""
    source, sink = os.pipe()
    stream = RankStream("stdout", source, None)
    for chunk in chunks:
        os.write(sink, chunk)
        stream.read_available()
    os.close(sink)
    parts = stream.take_output()
    stream.close()
    return parts


def test_output_is_split_into_phases_wherever_reads_end() -> None:
    whole = (
        b"before"
        + phase_marker("setup")
        + b"one\n"
        + phase_marker("call")
        + b"two\0\x1eno marker"
        + phase_marker("")
        + b"after"
    )
    expected = {"": "beforeafter", "setup": "one\n", "call": "two\0\x1eno marker"}
    for at in range(len(whole)):
        assert {part.phase: part.text for part in stream_chunks(whole[:at], whole[at:])} == expected


def test_long_output_keeps_its_beginning_and_its_end() -> None:
    chunks = [bytes([65 + number % 26]) * 60_000 for number in range(50)]
    (part,) = stream_chunks(*chunks)
    assert part.text.startswith("A" * HEAD_BYTES)
    assert part.text.endswith("X" * TAIL_BYTES)
    assert f"{50 * 60_000 - HEAD_BYTES - TAIL_BYTES:,} bytes left out" in part.text


def test_output_that_is_not_utf_8_is_decoded_with_replacements() -> None:
    assert stream_chunks(b"\xff\xfe\n")[0].text == "\ufffd\ufffd\n"


STACK = """Thread 0x0000 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 10 in run

Current thread 0x0001 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 3245 in all_reduce
  File "/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/test_mine.py", line 21 in helper
  File "/home/me/test_mine.py", line 30 in test_it
  File "/site-packages/pluggy/_callers.py", line 5 in multicall
  File "/src/zharness/world/rank.py", line 9 in attempt
  File "/src/zharness/plugin.py", line 9 in pytest_collection_finish
"""


def test_a_stack_names_the_collective_in_which_a_rank_waits_and_its_call_site() -> None:
    frames = parse_main_thread(STACK)
    assert find_waiting_collective(frames) == "all_reduce (test_mine.py, line 21)"
    assert not is_building(frames)


def test_a_stack_is_shown_without_the_frames_of_the_harness() -> None:
    shown = strip_harness_frames(STACK)
    assert "test_it" in shown
    assert "run" in shown
    for package in ("pluggy", "zharness"):
        assert package not in shown


def test_a_stack_outside_of_collectives_names_the_innermost_frame_and_the_user_s() -> None:
    frames = parse_main_thread(
        'Current thread 0x1 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 3 in wait\n'
        '  File "/home/me/test_mine.py", line 7 in test_it\n'
    )
    assert find_waiting_collective(frames) == ""
    assert describe_innermost_frame(frames) == "wait (threading.py, line 3), called in test_it (test_mine.py, line 7)"


def test_a_first_import_is_not_counted_as_a_hang(tmp_path, monkeypatch) -> None:
    (tmp_path / "slow_to_import.py").write_text("import threading\nthreading.Event().wait(2.5)\nDONE = True\n")
    monkeypatch.syspath_prepend(tmp_path)

    def body():
        if dist.get_rank() == 1:
            import slow_to_import

            assert slow_to_import.DONE
        dist.barrier()  # rank 0 waits here longer than its time-out
        return True

    assert run(body, world_size=2, timeout=1.0) == [True, True]


def test_an_import_that_does_not_compute_counts_as_a_hang(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(progress, "MAX_IDLE_SECONDS", 1.0)
    (tmp_path / "never_imported.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.syspath_prepend(tmp_path)

    def main() -> None:
        if current_rank().rank == 1:
            import never_imported  # noqa: F401

    with RankServer(inherited_function=main) as server:
        outcome = server.call(world_size=2, timeout=2.0)
    assert [rank.end for rank in outcome.ranks] == [RankEnd.RETURNED, RankEnd.HUNG]
    assert "never_imported.py, line 2" in outcome.ranks[1].cause


def test_a_build_is_progressing_while_it_computes_and_for_some_time_after(monkeypatch) -> None:
    clock, used = [0.0], [1.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(progress, "processor_seconds", lambda groups: used[0])
    build = progress.ProgressMonitor()
    assert build.is_progressing([1])
    clock[0], used[0] = 29.0, 1.0 + progress.MIN_CPU_SECONDS
    assert build.is_progressing([1])
    clock[0], used[0] = 58.0, 1.1 + progress.MIN_CPU_SECONDS
    assert build.is_progressing([1]), "less than MIN_CPU_SECONDS is no progress, but the time is not over"
    clock[0] = 59.0
    assert not build.is_progressing([1])


def test_a_hang_after_an_import_counts_as_a_hang(tmp_path, monkeypatch) -> None:
    (tmp_path / "quite_slow_to_import.py").write_text("import threading\nthreading.Event().wait(1.5)\n")
    monkeypatch.syspath_prepend(tmp_path)

    def body():
        if dist.get_rank() == 1:
            import quite_slow_to_import  # noqa: F401

            threading.Event().wait()
        dist.barrier()

    with RankServer(inherited_function=body) as server:
        outcome = server.call(world_size=2, timeout=1.0)
    assert [rank.end for rank in outcome.ranks] == [RankEnd.HUNG, RankEnd.HUNG]
    assert outcome.cause is not None
    assert outcome.cause.rank == 1, "rank 0 only waits for it"
    assert outcome.ranks[0].site.startswith("barrier (test_watching.py, line ")


def test_a_deadline_is_suspended_while_a_debugger_holds_a_rank() -> None:
    def body():
        current_rank().channel.hold("debugging")
        threading.Event().wait(1.5)
        current_rank().channel.hold("")
        return True

    assert run(body, world_size=2, timeout=0.5, group=GroupMode.NONE) == [True, True]


def test_building_extends_a_deadline_and_restores_the_time_out_afterwards() -> None:
    deadline = Deadline(0.0)
    assert deadline.is_over()
    assert deadline.extend(is_building=True)
    assert not deadline.is_over()
    assert deadline.extend(is_building=False), "the time-out begins again when the build is over"
    assert not deadline.extend(is_building=False)


def fill_memory() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, hard))
    torch.empty(2**40, dtype=torch.uint8).fill_(1)


def test_a_failed_allocation_is_reported_as_the_exception_that_torch_raises() -> None:
    with RankServer() as server:
        outcome = server.run(fill_memory, world_size=2, group=GroupMode.NONE)
    assert all("can't allocate memory" in rank.cause or "not enough memory" in rank.cause for rank in outcome.ranks)


def test_an_out_of_memory_kill_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postmortem_module, "count_oom_kills", lambda: 4)
    assert "out of memory" in postmortem_module.explain_kill(9, oom_kills_before=3)
    assert postmortem_module.explain_kill(9, oom_kills_before=4) == ""
    assert postmortem_module.explain_kill(11, oom_kills_before=3) == ""


def close_pipes_and_wait() -> None:
    os.closerange(3, 4096)
    threading.Event().wait()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems detect the end of a process by a pipe")
def test_a_rank_that_closes_its_pipes_and_goes_on_is_named() -> None:
    with RankServer() as server:
        outcome = server.run(close_pipes_and_wait, world_size=2, group=GroupMode.NONE)
    assert all("closed the pipe through which it reports" in rank.cause for rank in outcome.ranks)
    assert outcome.seconds < 10.0, "long before the time-out; test_faults.py judges the bar of 2 s"


def test_a_known_crash_names_the_remedy() -> None:
    stack = 'Fatal Python error: Segmentation fault\n\n  File "/x/distributed.py", line 1473 in _ddp_init_helper\n'
    died = RankOutcome(
        0, RankEnd.SIGNALLED, 0, cause="SIGSEGV", captured_output=(CapturedOutput("call", "stderr", stack),)
    )
    assert postmortem_module.add_known_cause(died, None).cause.endswith("run pytest with --collectives trusted")


def test_a_crash_is_in_the_thread_that_faulthandler_marks_and_not_in_a_younger_one() -> None:
    stack = (
        "Fatal Python error: Segmentation fault\n\n"
        'Thread 0x1 (most recent call first):\n  File "/x/threading.py", line 1010 in run\n\n'
        'Current thread 0x2 (most recent call first):\n  File "/x/graph.py", line 869 in _engine_run_backward\n'
        '  File "/x/loss.py", line 3 in train\n'
    )
    died = RankOutcome(
        0, RankEnd.SIGNALLED, 0, cause="SIGSEGV", captured_output=(CapturedOutput("call", "stderr", stack),)
    )
    cause = postmortem_module.add_known_cause(died, None).cause
    assert cause == "SIGSEGV, in _engine_run_backward (/x/graph.py, line 869)"
