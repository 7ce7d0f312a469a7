"""Merged reports of N ranks: the cause comes first with its ranks, and no failure is reported as passed."""

from __future__ import annotations

import pytest

from suites.pytest_ranks.simulated_ranks import (
    CALL_FAILED,
    KILLED,
    PASSED,
    PASSES,
    SETUP_FAILED,
    SITE,
    STOPPED,
    RunTest,
    make_end,
    make_run_test,
)
from zharness.pytest_ranks.rank_text import format_rank_sentence, format_ranks, prefix_lines
from zharness.world.outcome import MISMATCH_EXCEPTION, CapturedOutput, RankEnd

FAILS_ON_1 = """
    def test_it(rank):
        assert [1, rank] == [1, 0]
"""
TEARDOWN_FAILED = {**PASSED, "teardown": "failed"}


@pytest.fixture
def run_test(tmp_path, capsys, monkeypatch) -> RunTest:
    return make_run_test(tmp_path, capsys, monkeypatch)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_that_all_pass_make_a_passed_test(run_test: RunTest, world_size: int) -> None:
    ranks = run_test(PASSES, world_size)
    assert ranks.outcomes == PASSED
    assert "1 passed in" in ranks.text


def test_a_failure_keeps_the_diff_of_its_assertion_and_names_its_rank(run_test: RunTest) -> None:
    ranks = run_test(FAILS_ON_1)
    assert ranks.outcomes == CALL_FAILED
    text = ranks.report("call").longreprtext
    assert "assert [1, rank] == [1, 0]" in text
    assert "At index 1 diff: 1 != 0" in text
    assert ranks.message().startswith("rank 1: assert [1, 1] == [1, 0]")
    assert "::test_it - rank 1: assert [1, 1] == [1, 0]" in ranks.text
    assert "1 failed in" in ranks.text


@pytest.mark.parametrize("style", ["long", "short", "native", "line", "no"])
def test_every_style_of_traceback_works(run_test: RunTest, style: str) -> None:
    assert "FAILED test_simulated" in run_test(FAILS_ON_1, args=[f"--tb={style}"]).text


def test_colours_of_tracebacks_are_kept(run_test: RunTest) -> None:
    assert "\x1b[31mE       assert [1, 1] == [1, 0]" in run_test(FAILS_ON_1, args=["--color=yes"]).text.replace(
        "\x1b[1m", ""
    )


def test_a_chain_of_exceptions_is_kept(run_test: RunTest) -> None:
    ranks = run_test("""
        def test_it(rank):
            try:
                raise KeyError("inner")
            except KeyError as error:
                raise ValueError("outer") from error
    """)
    assert ranks.message() == "ranks 0-1: ValueError: outer"
    assert "KeyError: 'inner'" in ranks.report("call").longreprtext
    assert "direct cause" in ranks.report("call").longreprtext


def test_the_earliest_failure_is_the_cause_and_others_are_sections(run_test: RunTest) -> None:
    source = """
        def test_it(rank):
            if rank == 1: raise ValueError("planted")
            raise RuntimeError("connection closed")
    """
    ranks = run_test(source, 3, clock={(1, "call"): 5})
    assert ranks.message() == "rank 1: ValueError: planted"
    assert ranks.section("Ranks").splitlines() == [
        "rank 1 failed first, in call: ValueError: planted",
        "ranks 0, 2 failed in call: RuntimeError: connection closed",
    ]
    assert 'raise RuntimeError("connection closed")' in ranks.section("ranks 0, 2: also failed in call")


def test_a_lost_connection_is_not_the_cause_if_another_rank_failed(run_test: RunTest) -> None:
    source = """
        def test_it(rank):
            if rank == 1: raise ValueError("planted")
            raise RuntimeError("Gloo connectFullMesh failed with Connection closed by peer [127.0.0.1]:5")
    """
    ranks = run_test(source, 3, clock={(0, "call"): 5, (1, "call"): 9})
    assert ranks.message() == "rank 1: ValueError: planted"
    assert ranks.section("Ranks").splitlines()[0] == "rank 1 failed first, in call: ValueError: planted"


def test_failures_that_differ_only_in_addresses_are_reported_once(run_test: RunTest) -> None:
    ranks = run_test("def test_it(rank): raise ValueError(f'of {hex(id(rank) + rank)}')", 4)
    assert ranks.message().startswith("ranks 0-3: ValueError: of 0x")
    assert ranks.section("Ranks").startswith("ranks 0-3 failed first, in call: ")
    assert ranks.text.count("ValueError: of") == 3, "in the failure, in the line of the ranks and in the summary"


def test_ranks_that_are_not_contiguous_are_listed(run_test: RunTest) -> None:
    ranks = run_test("def test_it(rank):\n    if rank != 1: raise ValueError('odd')", 5)
    assert ranks.message() == "ranks 0, 2-4: ValueError: odd"


def test_a_stopped_rank_is_never_the_cause_and_its_stack_is_shown(run_test: RunTest) -> None:
    stack = 'Current thread 0x{:x} (most recent call first):\n  File "/x/test_x.py", line 7 in test_it\n'
    ends = {rank: {**STOPPED, "at_ns": 1, "stack": stack.format(rank + 16)} for rank in (0, 2, 3)}
    ranks = run_test(FAILS_ON_1, 4, ends=ends)
    assert ranks.message().startswith("rank 1: ")
    assert ranks.section("Ranks").splitlines()[1] == (
        f"ranks 0, 2-3 were stopped because another rank had failed, waiting in {SITE}"
    )
    assert 'File "/x/test_x.py", line 7 in test_it' in ranks.section("stack of ranks 0, 2-3")


def test_a_failed_setup_has_no_call_and_a_passed_teardown(run_test: RunTest) -> None:
    ranks = run_test("""
        @pytest.fixture
        def thing(rank):
            if rank == 1: raise ValueError("planted")
        def test_it(thing, rank): assert rank == 1
    """)
    assert ranks.outcomes == SETUP_FAILED
    assert ranks.message("setup") == "rank 1: ValueError: planted"
    assert "rank 0: also failed in call" in ranks.text
    assert "1 error in" in ranks.text


def test_a_missing_fixture_is_reported_from_its_plain_text(run_test: RunTest) -> None:
    ranks = run_test("def test_it(rank, nonexistent): pass")
    assert ranks.message("setup") == "ranks 0-1: fixture 'nonexistent' not found"
    assert "available fixtures" in ranks.report("setup").longreprtext


def teardown(when: str, body: str = "pass") -> str:
    return f"""
        @pytest.fixture
        def thing(rank):
            yield
            if {when}: raise ValueError("down")
        def test_it(thing, rank): {body}
    """


def test_a_failed_teardown_alone_leaves_a_passed_call(run_test: RunTest) -> None:
    ranks = run_test(teardown("rank == 1"))
    assert ranks.outcomes == TEARDOWN_FAILED
    assert ranks.message("teardown") == "rank 1: ValueError: down"
    assert "1 passed, 1 error in" in ranks.text


def test_a_teardown_that_fails_after_the_call_of_its_rank_is_reported_in_teardown(run_test: RunTest) -> None:
    ranks = run_test(teardown("rank == 1", "assert rank == 0"))
    assert ranks.outcomes == {**CALL_FAILED, "teardown": "failed"}
    assert "1 failed, 1 error in" in ranks.text
    assert "; then failed in teardown: ValueError: down" in ranks.section("Ranks")


def test_a_teardown_that_fails_because_of_another_rank_is_a_section_of_the_call(run_test: RunTest) -> None:
    ranks = run_test(teardown("rank == 0", "assert rank == 0"))
    assert ranks.outcomes == CALL_FAILED
    assert "ValueError: down" in ranks.section("rank 0: also failed in teardown")


def test_a_call_that_one_rank_did_not_finish_is_not_reported_as_passed(run_test: RunTest) -> None:
    ranks = run_test(teardown("rank == 0"), ends={1: {**STOPPED, "stack": "in spin"}})
    assert ranks.text.count("stack of rank 1") == 1, "the stack is shown with the cause only"
    assert ranks.outcomes == {**CALL_FAILED, "teardown": "failed"}
    assert ranks.message("teardown") == "rank 0: ValueError: down"
    assert ranks.message() == f"rank 1 was stopped because another rank had failed, waiting in {SITE}"


def test_a_stop_in_setup_does_not_hide_the_call_that_caused_it(run_test: RunTest) -> None:
    ranks = run_test(FAILS_ON_1, ends={0: make_end(RankEnd.STOPPED, phase="setup", site=SITE)})
    assert ranks.outcomes == CALL_FAILED
    assert ranks.message().startswith("rank 1: assert")


def test_a_crash_comes_before_a_failure_that_was_reported_earlier(run_test: RunTest) -> None:
    fatal = 'Fatal Python error: Segmentation fault\n\n  File "/x/test_x.py", line 3 in boom\n'
    printed = (CapturedOutput("call", "stderr", f"hello\n{fatal}"),)
    ranks = run_test(
        "def test_it(rank): raise RuntimeError('closed')", ends={1: {**KILLED, "captured_output": printed}}
    )
    assert ranks.message() == "rank 1 was ended by a signal: SIGSEGV, in call"
    assert ranks.section("Ranks").splitlines() == [
        "rank 1 was ended by a signal: SIGSEGV, in call",
        "rank 0 failed in call: RuntimeError: closed",
    ]
    assert "line 3 in boom" in ranks.report("call").longreprtext
    assert "::test_it - rank 1 was ended by a signal: SIGSEGV, in call" in ranks.text
    assert ranks.report("call").longrepr.reprcrash.lineno == 3


def test_a_failure_before_the_crash_of_the_same_rank_is_the_cause(run_test: RunTest) -> None:
    ranks = run_test(FAILS_ON_1, ends={1: {**KILLED, "reported": ("setup", "call"), "phase": "teardown"}})
    assert ranks.outcomes == {**CALL_FAILED, "teardown": "failed"}
    assert ranks.message().startswith("rank 1: assert")
    assert ranks.message("teardown") == "rank 1 was ended by a signal: SIGSEGV, in teardown"
    assert ranks.section("Ranks").startswith("rank 1 failed first, in call: ")


def test_a_teardown_that_failed_before_another_rank_crashed_is_reported_in_teardown(run_test: RunTest) -> None:
    ranks = run_test(teardown("rank == 0"), ends={1: KILLED})
    assert ranks.outcomes == {**CALL_FAILED, "teardown": "failed"}
    assert ranks.message("teardown") == "rank 0: ValueError: down"


def test_a_rank_that_fails_and_then_waits_in_its_teardown_has_one_failure(run_test: RunTest) -> None:
    ranks = run_test(FAILS_ON_1, ends={1: make_end(RankEnd.HUNG, "setup", "call", phase="teardown", site=SITE)})
    assert ranks.outcomes == CALL_FAILED
    assert f"; then did not finish in time, in teardown, waiting in {SITE}" in ranks.section("Ranks")


@pytest.mark.parametrize("phase", ["", "setup"])
def test_a_harness_error_before_any_phase_fails_setup(run_test: RunTest, phase: str) -> None:
    end = make_end(RankEnd.RAISED, cause="RuntimeError: no rendezvous", traceback="Traceback: join_group", phase=phase)
    ranks = run_test(PASSES, ends={0: end, 1: end})
    assert ranks.outcomes == SETUP_FAILED
    where = "in" if phase else "before"
    assert ranks.message("setup") == f"ranks 0-1 raised: RuntimeError: no rendezvous, {where} setup"
    assert "Traceback: join_group" in ranks.report("setup").longreprtext


def test_a_harness_error_after_the_last_phase_is_not_the_cause_of_an_earlier_failure(run_test: RunTest) -> None:
    end = {"end": RankEnd.RAISED, "cause": "RuntimeError: closed by peer", "at_ns": 99}
    ranks = run_test(FAILS_ON_1, ends={0: end})
    assert ranks.outcomes == CALL_FAILED
    assert ranks.message().startswith("rank 1: assert")


def test_different_collectives_are_the_cause_of_the_failures_that_follow(run_test: RunTest) -> None:
    cause = "collective calls differ between ranks at call 1: rank 0 calls all_reduce, rank 1 calls barrier"
    end = {"end": RankEnd.RAISED, "cause": cause, "exception": MISMATCH_EXCEPTION, "phase": "teardown"}
    ranks = run_test("def test_it(rank): raise RuntimeError(f'gloo on {rank}')", ends={0: end, 1: end})
    assert ranks.outcomes == CALL_FAILED
    assert ranks.message() == f"ranks 0-1 disagreed: {cause}"


def test_a_rank_that_hangs_outside_of_a_collective_is_blamed_first(run_test: RunTest) -> None:
    waits = make_end(
        RankEnd.HUNG, "setup", phase="call", site=SITE, cause=f"still running after 9 s; waits in {SITE}", at_ns=1
    )
    alone = make_end(
        RankEnd.HUNG, "setup", phase="call", cause="still running after 9 s; is in spin", at_ns=2, stack="in spin"
    )
    ranks = run_test(PASSES, 3, ends={0: waits, 1: alone, 2: waits})
    assert ranks.outcomes == CALL_FAILED
    assert ranks.message() == "rank 1 did not finish in time, in call: still running after 9 s; is in spin"
    assert ranks.section("stack of rank 1") == "in spin"
    assert ranks.section("Ranks").splitlines()[1].startswith("ranks 0, 2 did not finish in time, in call: ")
    assert ranks.report("call").duration > 1.0, "the time of the whole group, because no rank reported its call"


def test_the_location_of_a_hang_is_the_line_of_the_collective(run_test: RunTest, tmp_path) -> None:
    end = make_end(RankEnd.HUNG, "setup", phase="call", site="barrier (FILE, line 42)")
    ranks = run_test(PASSES, 1)
    name = ranks.report("call").nodeid.partition("::")[0]
    number = int(name.removeprefix("test_simulated_").removesuffix(".py")) + 1
    end["site"] = end["site"].replace("FILE", f"test_simulated_{number}.py")
    assert run_test(PASSES, 1, ends={0: end}).report("call").longrepr.reprcrash.lineno == 42


def test_output_has_the_rank_in_front_of_each_line(run_test: RunTest) -> None:
    parts = (
        CapturedOutput("", "stdout", "early\n"),
        CapturedOutput("call", "stdout", "a\nb"),
        CapturedOutput("teardown", "stderr", "c\n"),
    )
    ranks = run_test(FAILS_ON_1, ends={0: {"captured_output": parts}, 1: {"captured_output": parts}})
    call = dict(ranks.report("call").sections)
    assert call == {
        "Captured stdout setup": "[rank 0] early\n[rank 1] early\n",
        "Captured stdout call": "[rank 0] a\n[rank 0] b\n[rank 1] a\n[rank 1] b\n",
    }
    assert dict(ranks.report("teardown").sections) == {**call, "Captured stderr teardown": "[rank 0] c\n[rank 1] c\n"}
    assert list(dict(ranks.report("setup").sections)) == ["Captured stdout setup"]


def test_output_of_a_call_that_has_no_report_is_shown_with_setup(run_test: RunTest) -> None:
    end = make_end(RankEnd.EXITED, phase="setup", cause="exit status 1")
    ranks = run_test(PASSES, ends={0: {"captured_output": (CapturedOutput("call", "stdout", "on"),)}, 1: end})
    assert dict(ranks.report("setup").sections) == {"Captured stdout call": "[rank 0] on\n"}


def test_logs_have_the_rank_in_front_of_each_line(run_test: RunTest) -> None:
    ranks = run_test("def test_it(rank):\n    logging.getLogger().error('at %d', rank)\n    assert 0")
    text = dict(ranks.report("call").sections)["Captured log call"]
    assert [line.partition(" ERROR")[0].rstrip() for line in text.splitlines()] == ["[rank 0]", "[rank 1]"]


def test_different_user_properties_have_the_rank_in_their_keys(run_test: RunTest) -> None:
    ranks = run_test("""
        def test_it(rank, record_property):
            record_property("same", 1)
            record_property("loss", rank)
            if rank == 1: record_property("only", "here")
    """)
    expected = [("same", 1), ("loss[rank 0]", 0), ("loss[rank 1]", 1), ("only", "here")]
    assert ranks.report("call").user_properties == expected
    assert ranks.report("setup").user_properties == []


def test_leftover_threads_fail_the_teardown(run_test: RunTest) -> None:
    left = {"leftovers": ("thread 'w', in spin (x.py, line 3)",)}
    ranks = run_test(PASSES, ends={1: left})
    assert ranks.outcomes == TEARDOWN_FAILED
    assert ranks.message("teardown") == "rank 1 left behind: thread 'w', in spin (x.py, line 3)"
    failed = run_test(teardown("rank == 0"), ends={1: left})
    assert failed.message("teardown") == "rank 0: ValueError: down"
    assert failed.section("left behind by rank 1") == left["leftovers"][0]


def test_an_exit_after_the_last_phase_fails_the_teardown(run_test: RunTest) -> None:
    ranks = run_test(
        PASSES, ends={1: {"end": RankEnd.EXITED, "cause": "exit status 3, after its function had returned"}}
    )
    assert ranks.outcomes == TEARDOWN_FAILED
    message = "rank 1 exited without a result: exit status 3, after its function had returned"
    assert ranks.message("teardown") == message


@pytest.mark.parametrize("missing", ["setup", "call", "teardown"])
def test_a_rank_that_returns_without_the_report_of_a_phase_has_failed(run_test: RunTest, missing: str) -> None:
    output = tuple(phase for phase in PASSED if phase != missing)
    ranks = run_test(PASSES, ends={1: make_end(RankEnd.RETURNED, *output)})
    assert ranks.outcomes[missing] == "failed"
    assert ranks.message(missing) == f"rank 1 sent no report of its {missing}"


@pytest.mark.parametrize("world_size", [0, 1, 3])
def test_ranks_without_any_report_have_failed(run_test: RunTest, world_size: int) -> None:
    ranks = run_test(PASSES, world_size, ends={rank: make_end(RankEnd.RETURNED) for rank in range(world_size)})
    assert ranks.outcomes == SETUP_FAILED


def test_a_phase_lasts_from_the_first_start_to_the_last_end(run_test: RunTest) -> None:
    ranks = run_test(
        "import time\ndef test_it(rank):\n    until = time.time() + 0.05 * rank\n    while time.time() < until: pass"
    )
    report = ranks.report("call")
    assert report.duration >= 0.05
    assert report.stop - report.start >= 0.05


def test_setup_alone_is_shown_without_a_call(run_test: RunTest) -> None:
    assert run_test(PASSES, args=["--setup-only"]).outcomes == {"setup": "passed", "teardown": "passed"}


def test_an_attribute_that_a_plugin_sets_on_a_report_is_kept(run_test: RunTest, tmp_path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import pytest\n@pytest.hookimpl(wrapper=True)\ndef pytest_runtest_makereport():\n"
        "    report = yield\n    report.extras = ['x']\n    return report\n"
    )
    assert run_test(PASSES).report("call").extras == ["x"]


def test_a_failure_without_a_traceback_stays_without_one(run_test: RunTest) -> None:
    ranks = run_test("def test_it(rank): pytest.fail('just so', pytrace=False)")
    assert ranks.message() == "ranks 0-1: Failed: just so"
    assert "def test_it" not in ranks.report("call").longreprtext


@pytest.mark.parametrize(("ranks", "text"), [([3], "rank 3"), ([1, 0], "ranks 0-1"), ([5, 0, 2, 3], "ranks 0, 2-3, 5")])
def test_contiguous_ranks_are_formatted_as_ranges(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


def test_sentences_about_several_ranks_use_the_plural() -> None:
    assert format_rank_sentence([1], "failed", "was stopped") == "rank 1 failed; then was stopped"
    assert format_rank_sentence([0, 1], "failed", "was stopped") == "ranks 0-1 failed; then were stopped"
    assert format_rank_sentence([0, 1], "sent no report of its call") == "ranks 0-1 sent no report of their call"


def test_prefix_lines_puts_the_rank_in_front_of_every_line() -> None:
    assert prefix_lines(3, "a\n\nb") == "[rank 3] a\n[rank 3] \n[rank 3] b\n"
