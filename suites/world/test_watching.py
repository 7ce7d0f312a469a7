"""What a server makes of what its ranks print, of where they stand, and of how long they take."""

import os
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from zharness.world import End, Group, RankServer, labour, run
from zharness.world import postmortem as postmortem_module
from zharness.world.deadline import Deadline
from zharness.world.here import here
from zharness.world.outcome import Printed, RankOutcome
from zharness.world.stacks import is_building, main_thread, standing_in, waiting_in, without_machinery
from zharness.world.streams import HEAD, TAIL, Stream, marker


def streamed(*chunks: bytes) -> tuple[Printed, ...]:
    source, sink = os.pipe()
    stream = Stream("stdout", source, None)
    for chunk in chunks:
        os.write(sink, chunk)
        stream.pump()
    os.close(sink)
    found = stream.taken()
    stream.close()
    return found


def test_what_is_printed_is_cut_into_phases_wherever_the_reads_fall() -> None:
    whole = b"before" + marker("setup") + b"one\n" + marker("call") + b"two\0\x1eno marker" + marker("") + b"after"
    expected = {"": "beforeafter", "setup": "one\n", "call": "two\0\x1eno marker"}
    for at in range(len(whole)):
        assert {part.label: part.text for part in streamed(whole[:at], whole[at:])} == expected


def test_much_output_keeps_its_beginning_and_its_end() -> None:
    chunks = [bytes([65 + number % 26]) * 60_000 for number in range(50)]
    (part,) = streamed(*chunks)
    assert part.text.startswith("A" * HEAD)
    assert part.text.endswith("X" * TAIL)
    assert f"{50 * 60_000 - HEAD - TAIL:,} bytes left out" in part.text


def test_output_that_is_no_text_is_no_fault() -> None:
    assert streamed(b"\xff\xfe\n")[0].text == "\ufffd\ufffd\n"


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


def test_a_stack_says_which_collective_a_rank_waits_in_and_where_it_is_called() -> None:
    frames = main_thread(STACK)
    assert waiting_in(frames) == "all_reduce (test_mine.py, line 21)"
    assert not is_building(frames)


def test_a_stack_is_shown_without_the_frames_that_every_rank_has() -> None:
    shown = without_machinery(STACK)
    assert "test_it" in shown
    assert "run" in shown
    for machinery in ("pluggy", "zharness"):
        assert machinery not in shown


def test_a_stack_outside_of_collectives_names_the_innermost_call_and_the_user_s() -> None:
    frames = main_thread(
        'Current thread 0x1 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 3 in wait\n'
        '  File "/home/me/test_mine.py", line 7 in test_it\n'
    )
    assert waiting_in(frames) == ""
    assert standing_in(frames) == "wait (threading.py, line 3), called in test_it (test_mine.py, line 7)"


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


def test_an_import_that_does_nothing_is_a_hang_in_the_end(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(labour, "IDLE", 1.0)
    (tmp_path / "never_imported.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.syspath_prepend(tmp_path)

    def main() -> None:
        if here().rank == 1:
            import never_imported  # noqa: F401

    with RankServer(inherited=main) as server:
        outcome = server.call(world_size=2, timeout=2.0)
    assert [rank.end for rank in outcome.ranks] == [End.RETURNED, End.HUNG]
    assert "never_imported.py, line 2" in outcome.ranks[1].cause


def test_a_build_goes_on_while_it_computes_and_for_a_while_after(monkeypatch) -> None:
    clock, used = [0.0], [1.0]
    monkeypatch.setattr(labour.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(labour, "processor_seconds", lambda groups: used[0])
    build = labour.Labour()
    assert build.goes_on([1])
    clock[0], used[0] = 29.0, 1.0 + labour.BUSY
    assert build.goes_on([1])
    clock[0], used[0] = 58.0, 1.1 + labour.BUSY
    assert build.goes_on([1]), "less than BUSY is nothing, but the time is not over"
    clock[0] = 59.0
    assert not build.goes_on([1])


def test_a_hang_behind_an_import_is_one(tmp_path, monkeypatch) -> None:
    (tmp_path / "quite_slow_to_import.py").write_text("import threading\nthreading.Event().wait(1.5)\n")
    monkeypatch.syspath_prepend(tmp_path)

    def body():
        if dist.get_rank() == 1:
            import quite_slow_to_import  # noqa: F401

            threading.Event().wait()
        dist.barrier()

    with RankServer(inherited=body) as server:
        outcome = server.call(world_size=2, timeout=1.0)
    assert [rank.end for rank in outcome.ranks] == [End.HUNG, End.HUNG]
    assert outcome.cause is not None
    assert outcome.cause.rank == 1, "rank 0 only waits for it"
    assert outcome.ranks[0].site.startswith("barrier (test_watching.py, line ")


def test_a_deadline_is_off_while_a_person_looks() -> None:
    def body():
        here().channel.hold("debugging")
        threading.Event().wait(1.5)
        here().channel.hold("")
        return True

    assert run(body, world_size=2, timeout=0.5, group=Group.NONE) == [True, True]


def test_building_puts_a_deadline_off_and_gives_the_time_back_afterwards() -> None:
    deadline = Deadline(0.0)
    assert deadline.is_over()
    assert deadline.extend(building=True)
    assert not deadline.is_over()
    assert deadline.extend(building=False), "the time-out begins when the building is over"
    assert not deadline.extend(building=False)


def fill_memory() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, hard))
    torch.empty(2**40, dtype=torch.uint8).fill_(1)


def test_memory_that_cannot_be_had_is_told_as_the_exception_that_torch_raises() -> None:
    with RankServer() as server:
        outcome = server.run(fill_memory, world_size=2, group=Group.NONE)
    assert all("can't allocate memory" in rank.cause or "not enough memory" in rank.cause for rank in outcome.ranks)


def test_a_kill_for_want_of_memory_is_named_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postmortem_module, "killed_for_memory", lambda: 4)
    assert "out of memory" in postmortem_module.kill_words(9, kills_before=3)
    assert postmortem_module.kill_words(9, kills_before=4) == ""
    assert postmortem_module.kill_words(11, kills_before=3) == ""


def shut_the_pipes() -> None:
    os.closerange(3, 4096)
    threading.Event().wait()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere the end of a process is seen by a pipe")
def test_a_rank_that_closes_its_pipes_and_goes_on_is_named() -> None:
    with RankServer() as server:
        outcome = server.run(shut_the_pipes, world_size=2, group=Group.NONE)
    assert all("closed the pipe on which it reports" in rank.cause for rank in outcome.ranks)
    assert outcome.seconds < 10.0, "long before the time-out; test_faults.py judges the bar of 2 s"


def test_a_crash_that_is_known_says_what_to_do() -> None:
    stack = 'Fatal Python error: Segmentation fault\n\n  File "/x/distributed.py", line 1473 in _ddp_init_helper\n'
    died = RankOutcome(0, End.SIGNALLED, 0, cause="SIGSEGV", printed=(Printed("call", "stderr", stack),))
    assert postmortem_module.named(died, None).cause.endswith("run pytest with --collectives trusted")
