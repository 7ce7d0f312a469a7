"""Faults between ranks: one hangs, disagrees with its peers, skips without them, or leaves something behind."""

from __future__ import annotations

from suites.world.faults.fault import ANY_TIME, HUNG, LATER, TEARDOWN, Fault, fault


def hangs(name: str, statement: str, headline: str, **more: object) -> Fault:
    """Return the fault in which ``statement`` never ends on one rank while its peers wait in an all-reduce."""
    source = f"""
        @pytest.mark.rank_timeout(TIMEOUT)
        def test_{name}(rank):
            if rank == CULPRIT:
                {statement}
            dist.all_reduce(torch.ones(2))  # site
    """
    patterns = (r"waits in all_reduce",)
    return fault(name, source, headline, patterns=patterns, bar=HUNG, **more)  # type: ignore[arg-type]


def disagrees(name: str, culprit_call: str, peer_call: str, *patterns: str, by: str = "dist") -> Fault:
    """Return the fault in which one rank calls another collective than its peers."""
    source = f"""
        def test_{name}(rank{"" if by == "dist" else ", " + by}):
            if rank == CULPRIT:
                {by}.{culprit_call}  # site
            else:
                {by}.{peer_call}  # site
    """
    if by == "dist":
        return fault(name, source, "Detected mismatch between collectives", blamed="either", patterns=patterns)
    # CULPRIT may stand first or second: the pattern holds for both.
    headline = "collective calls differ between ranks at call 1: rank .* calls .*rank .* calls"
    return fault(name, source, headline, blamed="either", patterns=(*patterns, r"rank CULPRIT calls"))


OUT_OF_TIME = "did not finish in time, in call: still running after 2 s; "

HANGING = (
    hangs("hangs_in_python", "threading.Event().wait()  # site", OUT_OF_TIME + "is in wait", stacks="all"),
    hangs("hangs_in_c", "ctypes.CDLL(None).pause()  # site", OUT_OF_TIME + "is in test_hangs_in_c", stacks="all"),
    hangs(
        "hangs_with_all_signals_blocked",
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()), ctypes.CDLL(None).pause()",
        OUT_OF_TIME,
        stacks="others",
    ),
    fault(
        "waits_in_a_collective_alone",
        """
        @pytest.mark.rank_timeout(TIMEOUT)
        def test_waits_in_a_collective_alone(rank):
            if rank == CULPRIT:
                dist.all_reduce(torch.ones(2))  # site
        """,
        OUT_OF_TIME + "waits in all_reduce",
        patterns=("ranks? .* passed",),
        bar=HUNG,
    ),
    fault(
        "does_not_come_to_a_collective",
        """
        @pytest.mark.rank_timeout(TIMEOUT)
        def test_does_not_come_to_a_collective(rank):
            if rank != CULPRIT:
                dist.all_reduce(torch.ones(2))  # site
        """,
        OUT_OF_TIME + "waits in all_reduce",
        blamed="others",
        patterns=("rank CULPRIT passed",),
        stacks="others",
        bar=HUNG,
    ),
    fault(
        "comes_to_a_later_collective",
        """
        @pytest.mark.rank_timeout(TIMEOUT)
        def test_comes_to_a_later_collective(rank):
            half = dist.new_group([CULPRIT, (CULPRIT + 1) % WORLD])
            if rank == CULPRIT:
                dist.barrier(half)  # site
            else:
                dist.all_reduce(torch.ones(2))  # site
        """,
        OUT_OF_TIME + "waits in",
        blamed="either",
        patterns=("rank CULPRIT did not finish in time, in call: .*waits in barrier", "waits in all_reduce"),
        stacks="all",
        bar=HUNG,
    ),
)

DISAGREEING = (
    disagrees(
        "calls_another_collective",
        "all_reduce(torch.ones(4))",
        "broadcast(torch.ones(4), 0)",
        "OpType=ALLREDUCE",
        "OpType=BROADCAST",
    ),
    disagrees(
        "passes_another_shape",
        "all_reduce(torch.ones(5))",
        "all_reduce(torch.ones(4))",
        r"TensorShape=\[5\]",
        r"TensorShape=\[4\]",
    ),
    disagrees(
        "passes_another_dtype",
        "all_reduce(torch.ones(4, dtype=torch.float64))",
        "all_reduce(torch.ones(4))",
        "TensorDtypes=Double",
        "TensorDtypes=Float",
    ),
    disagrees(
        "calls_another_collective_by_comm",
        "all_reduce(torch.ones(4))",
        "broadcast(torch.ones(4))",
        r"rank CULPRIT calls all_reduce float32\[4\]",
        r"calls broadcast float32\[4\]",
        by="comm",
    ),
    disagrees(
        "passes_another_shape_to_comm",
        "all_reduce(torch.ones(5))",
        "all_reduce(torch.ones(4))",
        r"rank CULPRIT calls all_reduce float32\[5\]",
        r"calls all_reduce float32\[4\]",
        by="comm",
    ),
    disagrees(
        "passes_another_dtype_to_comm",
        "all_reduce(torch.ones(4, dtype=torch.float64))",
        "all_reduce(torch.ones(4))",
        r"rank CULPRIT calls all_reduce float64\[4\]",
        r"calls all_reduce float32\[4\]",
        by="comm",
    ),
)

EXAMPLES = (
    fault(
        "leaves_an_example",
        """
        import hypothesis
        from hypothesis import strategies

        @hypothesis.settings(max_examples=10)
        @hypothesis.given(n=strategies.integers(0, 9), later=strategies.booleans())
        def test_leaves_an_example(rank, n, later):
            if rank == CULPRIT and later:
                assert n < 3  # site
            dist.barrier()  # site
        """,
        "AssertionError: assert 3 < 3",
        patterns=("waited in barrier", "n=3", "later=True"),
        bar=HUNG + LATER,
    ),
    fault(
        "returns_from_an_example",
        """
        import hypothesis
        from hypothesis import strategies

        @hypothesis.settings(max_examples=10)
        @hypothesis.given(n=strategies.integers(0, 1))
        def test_returns_from_an_example(rank, n):
            if rank == CULPRIT and n > 0:
                return
            dist.barrier()  # site
        """,
        "rank CULPRIT: had returned from the test",
        blamed="either",
        patterns=("waited in barrier", "n=1"),
        bar=HUNG + 2 * LATER,
    ),
)

SKIPPING = (
    fault(
        "skips_alone",
        """
        def test_skips_alone(rank):
            if rank == CULPRIT:
                pytest.skip("no such thing here")  # site
            dist.barrier()
        """,
        r"skipped on rank CULPRIT of \d only: no such thing here",
        blamed="either",
        patterns=("(was|were) stopped, waiting in barrier",),
        bar=LATER,
    ),
    fault(
        "skips_alone_unnoticed",
        """
        def test_skips_alone_unnoticed(rank):
            if rank == CULPRIT:
                pytest.skip("no such thing here")  # site
        """,
        r"skipped on rank CULPRIT of \d only: no such thing here",
        blamed="either",
        patterns=("passed",),
    ),
    fault(
        "does_not_skip_with_its_peers",
        """
        def test_does_not_skip_with_its_peers(rank):
            if rank != CULPRIT:
                pytest.skip("no such thing here")  # site
            dist.barrier()
        """,
        r"skipped on ranks? .* of \d only: no such thing here; rank CULPRIT was stopped, waiting in barrier",
        blamed="either",
        bar=LATER,
    ),
    fault(
        "skips_alone_in_setup",
        """
        @pytest.fixture
        def given_up(rank):
            if rank == CULPRIT:
                pytest.skip("no such thing here")

        def test_skips_alone_in_setup(given_up):
            dist.barrier()
        """,
        r"skipped on rank CULPRIT of \d only: no such thing here",
        ("failed", None, "passed"),
        blamed="either",
        bar=LATER,
    ),
)

LEAVING = (
    fault(
        "leaves_a_thread",
        """
        def test_leaves_a_thread(rank):
            if rank == CULPRIT:
                threading.Thread(target=threading.Event().wait, name="worker").start()
        """,
        "left behind: thread 'worker'",
        TEARDOWN,
    ),
    fault(
        "leaves_a_child",
        """
        def test_leaves_a_child(rank):
            if rank == CULPRIT:
                note(subprocess.Popen(["tail", "-f", "/dev/null"]).pid)
        """,
        "left behind: process .*tail",
        TEARDOWN,
    ),
    fault(
        "leaves_a_fork",
        """
        def test_leaves_a_fork(rank):
            if rank == CULPRIT:
                pid = os.fork()
                if pid == 0:
                    threading.Event().wait()
                note(pid)
        """,
        "left behind: process",
        TEARDOWN,
    ),
    fault(
        "leaves_a_child_in_a_session_of_its_own",
        """
        def test_leaves_a_child_in_a_session_of_its_own(rank):
            if rank == CULPRIT:
                note(subprocess.Popen(["tail", "-f", "/dev/null"], start_new_session=True).pid)
        """,
        "left behind: process .*tail",
        TEARDOWN,
    ),
    fault(
        "dies_leaving_a_child",
        """
        def test_dies_leaving_a_child(rank):
            if rank == CULPRIT:
                note(subprocess.Popen(["tail", "-f", "/dev/null"]).pid)
                note(subprocess.Popen(["tail", "-f", "/dev/null"], start_new_session=True).pid)
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
        """,
        "SIGKILL, in call",
    ),
)

# Faults after which no test can run on the same ranks, or in the same session at all.
AT_EXIT = fault(
    "exits_at_exit",
    """
        def test_exits_at_exit(rank):
            if rank == CULPRIT:
                atexit.register(os._exit, 7)
        """,
    "exit status 7",
    TEARDOWN,
    bar=ANY_TIME,
)

EXITS = fault(
    "calls_pytest_exit",
    """
        def test_calls_pytest_exit(rank):
            if rank == CULPRIT:
                pytest.exit("planted end", returncode=7)
            dist.barrier()
    """,
    "planted end",
)
INTERRUPTS = fault(
    "raises_a_keyboard_interrupt",
    """
        def test_raises_a_keyboard_interrupt(rank):
            if rank == CULPRIT:
                raise KeyboardInterrupt("planted interrupt")  # site
            dist.barrier()
    """,
    "planted interrupt",
)
