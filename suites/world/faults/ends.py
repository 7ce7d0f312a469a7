"""Faults of one rank: it raises, dies, runs out of memory or prints too much, in its test or in a fixture."""

from __future__ import annotations

import importlib.util

from suites.world.faults.fault import HUNG, LATER, SETUP, fault, in_fixture, on_culprit

RAISE = 'raise ValueError("planted")'
STOPPED = "(was|were) stopped because another rank had failed, waiting in barrier"
RAISE_HERE = RAISE + "  # site"
RAISED = "ValueError: planted"

_SUBTESTS = (
    fault(
        "fails_a_subtest",
        """
        def test_fails_a_subtest(rank, subtests):
            for i in range(3):
                with subtests.test(i=i):
                    assert rank != CULPRIT or i != 1  # site
        """,
        "assert .* 1 != 1",
        outcome=("passed", "any", "passed"),
        patterns=("assert .* 1 != 1",),
    ),
)
SUBTESTS = _SUBTESTS if importlib.util.find_spec("_pytest.subtests") else ()  # built into pytest 9

RAISING = (
    on_culprit(
        "raises_while_peers_wait",
        RAISE,
        RAISED,
        patterns=("(was|were) stopped because another rank had failed, waiting in barrier",),
    ),
    on_culprit("fails_by_an_assertion", "assert rank + 1 == 0", "assert .* == 0"),
    on_culprit("fails_by_pytest_fail", 'pytest.fail("planted")', "Failed: planted"),
    on_culprit("calls_sys_exit", "sys.exit(3)", "SystemExit: 3"),
    on_culprit("raises_a_base_exception", 'raise BaseException("planted")', "BaseException: planted"),
    fault(
        "raises_what_cannot_be_pickled",
        """
        class Stubborn(Exception):
            def __init__(self, lock):
                super().__init__("planted")
                self.lock = lock

            def __reduce__(self):
                raise TypeError("no pickling today")

        def test_raises_what_cannot_be_pickled(rank):
            if rank == CULPRIT:
                raise Stubborn(threading.Lock())  # site
            dist.barrier()
        """,
        "Stubborn: planted",
    ),
    fault(
        "raises_what_cannot_be_printed",
        """
        class Mute(Exception):
            def __str__(self):
                raise TypeError("no words today")

            __repr__ = __str__

        def test_raises_what_cannot_be_printed(rank):
            if rank == CULPRIT:
                raise Mute  # site
            dist.barrier()
        """,
        "Mute",
    ),
    fault(
        "raises_while_peers_exchange",
        """
        def test_raises_while_peers_exchange(rank):
            if rank == CULPRIT:
                raise ValueError("planted")  # site
            exchange(rank)
        """,
        RAISED,
    ),
    fault(
        "fails_together",
        """
        def test_fails_together(rank):
            assert_together(rank != CULPRIT, "planted")  # site
            dist.barrier()
        """,
        r"AssertionError: 1 of \d ranks: rank CULPRIT: planted",
        blamed="all",
    ),
    fault(
        "raises_before_backward_of_ddp",
        """
        def test_raises_before_backward_of_ddp(rank):
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
            loss = model(torch.ones(1, 2)).sum()
            if rank == CULPRIT:
                raise ValueError("planted")  # site
            loss.backward()  # site
        """,
        RAISED,
        bar=LATER,
    ),
    *SUBTESTS,
    fault(
        "fails_an_example_of_hypothesis",
        """
        from hypothesis import given, settings, strategies as st

        @settings(max_examples=60)
        @given(x=st.integers(0, 10_000))
        def test_fails_an_example_of_hypothesis(rank, x):
            note(f"{rank} {x}")
            if rank == CULPRIT and x >= 100:
                raise ValueError(f"too much: {x}")  # site
        """,
        "ValueError: too much: 100",
        blamed="either",
        patterns=("rank CULPRIT: ValueError: too much: 100", "x=100"),
        bar=LATER,
    ),
)

FIXTURES = (
    in_fixture("raises_in_setup", "function", "setup", RAISE_HERE, RAISED),
    in_fixture("raises_in_setup_of_a_module", "module", "setup", RAISE_HERE, RAISED),
    in_fixture("raises_in_teardown", "function", "teardown", RAISE_HERE, RAISED),
    in_fixture("raises_in_teardown_of_a_module", "module", "teardown", RAISE_HERE, RAISED),
    in_fixture("exits_in_setup", "function", "setup", "os._exit(5)", "exit status 5"),
    in_fixture("exits_in_teardown", "function", "teardown", "os._exit(6)", "exit status 6"),
    in_fixture("segfaults_in_setup", "function", "setup", "ctypes.string_at(0)  # site", "SIGSEGV"),
    in_fixture("is_killed_in_teardown", "module", "teardown", "os.kill(os.getpid(), 9)", "SIGKILL"),
    fault(
        "hangs_in_setup",
        """
        @pytest.fixture
        def stuck(rank):
            if rank == CULPRIT:
                threading.Event().wait()  # site
            dist.barrier()  # site

        @pytest.mark.rank_timeout(TIMEOUT)
        def test_hangs_in_setup(stuck):
            pass
        """,
        "did not finish in time, in setup: .*wait",
        SETUP,
        stacks="all",
        bar=HUNG,
    ),
)

DYING = (
    on_culprit("segfaults", "ctypes.string_at(0)", "SIGSEGV", patterns=("Segmentation fault",)),
    fault(
        "is_killed",
        """
        def test_is_killed(rank):
            if rank == CULPRIT:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
        """,
        "SIGKILL, in call",
    ),
    on_culprit("aborts", "os.abort()", "SIGABRT", patterns=("Aborted",)),
    fault(
        "exits_with_status_0",
        """
        def test_exits_with_status_0(rank):
            if rank == CULPRIT:
                os._exit(0)
            dist.barrier()
        """,
        "exit status 0, in call",
    ),
    fault(
        "exits_with_status_3",
        """
        def test_exits_with_status_3(rank):
            if rank == CULPRIT:
                os._exit(3)
        """,
        "exit status 3, in call",
    ),
    fault(
        "closes_its_pipes",
        """
        def test_closes_its_pipes(rank):
            if rank == CULPRIT:
                os.closerange(3, 4096)
        """,
        "SIGABRT|closed the pipe through which it reports",  # gloo aborts once it wakes up
    ),
)

LIMIT = """
        def leave_memory(free):
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + free, resource.getrlimit(resource.RLIMIT_AS)[1]))
"""

MEMORY = (
    fault(
        "asks_for_too_much_memory",
        f"""
        {LIMIT}
        def test_asks_for_too_much_memory(rank):
            if rank == CULPRIT:
                leave_memory(1 << 28)
                bytearray(1 << 34)  # site
            dist.barrier()
        """,
        "MemoryError",
    ),
    fault(
        "uses_up_its_memory",
        f"""
        {LIMIT}
        def test_uses_up_its_memory(rank):
            hoard = []
            if rank == CULPRIT:
                leave_memory(1 << 26)
                while True:
                    hoard.append(bytearray(1 << 16))
            dist.barrier()
        """,
        "MemoryError",
        ("passed", "failed", "any"),  # too little memory is left to look for leftovers
    ),
    fault(
        "asks_torch_for_too_much_memory",
        f"""
        {LIMIT}
        def test_asks_torch_for_too_much_memory(rank):
            if rank == CULPRIT:
                leave_memory(1 << 28)
                torch.empty(1 << 34, dtype=torch.uint8)  # site
            dist.barrier()
        """,
        "RuntimeError: .*memory",
    ),
    fault(
        "prints_very_much",
        """
        def peak(pid):
            (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in line]
            return int(line.split()[1]) / 1024

        def test_prints_very_much(rank):
            if rank == CULPRIT:
                before = peak(os.getppid())
                print("the first words")
                for _ in range(64):
                    sys.stdout.write(("x" * 63 + "\\n") * (1 << 14))
                print("the last words")
                grown = peak(os.getppid()) - before
                assert grown < 16, f"the server has grown by {grown} MiB"
                raise ValueError("planted")  # site
            dist.barrier()
        """,
        RAISED,
        patterns=(
            r"\[rank CULPRIT\] the first words",
            r"\[rank CULPRIT\] the last words",
            r"6\d,\d{3},\d{3} bytes left",
        ),
        bar=LATER,
    ),
)
