"""Test modules to run on ranks, in which each test uses one feature of pytest, and their expected verdicts."""

from __future__ import annotations

LIFE = """
    import logging, os, sys, warnings
    from pathlib import Path
    import pytest, torch, torch.distributed as dist
    from zharness.world import assert_together, exchange

    pytestmark = pytest.mark.world_size(2)
    EVENTS = []

    @pytest.fixture(scope="session")
    def session_fixture(rank):
        EVENTS.append("session")
        yield rank
        EVENTS.remove("session")

    @pytest.fixture(scope="module")
    def module_fixture(session_fixture):
        EVENTS.append("module")
        yield session_fixture + 10
        EVENTS.remove("module")

    @pytest.fixture
    def function_fixture(module_fixture, world_size):
        EVENTS.append("function")
        yield module_fixture + 10
        EVENTS.remove("function")

    @pytest.mark.world_size(2, 4)
    def test_scopes(function_fixture, rank, world_size):
        assert function_fixture == rank + 20
        assert EVENTS == ["session", "module", "function"]
        assert exchange(rank) == list(range(world_size))

    class TestClass:
        @pytest.fixture(scope="class")
        def class_fixture(self, module_fixture):
            EVENTS.append("class")
            yield
            EVENTS.remove("class")

        @pytest.fixture(autouse=True)
        def own(self):
            self.number = 7

        def test_in_a_class(self, class_fixture):
            assert EVENTS[-1] == "class" and self.number == 7

        def test_in_a_class_again(self, class_fixture):
            assert EVENTS[-1] == "class" and "function" not in EVENTS

    @pytest.mark.parametrize("make", [lambda number: number + 1], ids=["closure"])
    @pytest.mark.parametrize("number", [1, 2])
    def test_parametrized(make, number, rank):
        lock = __import__("threading").Lock()
        assert make(number) == number + 1 and not lock.locked()

    def test_monkeypatch(monkeypatch, rank):
        monkeypatch.setenv("PLANTED", str(rank))
        monkeypatch.setattr(os, "sep", "planted")
        assert exchange(os.environ["PLANTED"])[rank] == str(rank)

    def test_monkeypatch_is_undone():
        assert "PLANTED" not in os.environ and os.sep == "/"

    @pytest.mark.world_size(2, 4)
    def test_tmp_path_is_private(tmp_path, rank, world_size):
        (tmp_path / "file").write_text(str(rank))
        dist.barrier()
        assert len(set(exchange(str(tmp_path)))) == world_size
        assert [path.read_text() for path in tmp_path.iterdir()] == [str(rank)]

    @pytest.mark.world_size(2, 4)
    def test_shared_tmp_path_is_shared(shared_tmp_path, rank, world_size):
        (shared_tmp_path / str(rank)).touch()
        dist.barrier()
        assert sorted(path.name for path in shared_tmp_path.iterdir()) == [str(peer) for peer in range(world_size)]

    def test_capsys(capsys, rank):
        print("printed", rank)
        assert capsys.readouterr().out == f"printed {rank}\\n"

    def test_capfd(capfd, rank):
        os.write(1, b"written")
        os.system("echo shell")
        assert capfd.readouterr().out == "writtenshell\\n"

    def test_caplog(caplog, rank):
        logging.getLogger("planted").warning("logged %d", rank)
        assert [record.getMessage() for record in caplog.records if record.name == "planted"] == [f"logged {rank}"]

    def test_recwarn(recwarn):
        warnings.warn("seen")
        assert len(recwarn) == 1

    @pytest.mark.world_size(2, 4)
    def test_differs(rank):
        assert [1, 2, rank] == [1, 2, 99]

    @pytest.mark.world_size(2, 4)
    def test_fails_together(rank):
        assert_together(rank != 1, f"planted on {rank}")

    @pytest.mark.world_size(2, 4)
    def test_exchanges(rank, world_size):
        assert exchange({"rank": rank}) == [{"rank": peer} for peer in range(world_size)]

    @pytest.mark.xfail(strict=True, reason="planted")
    def test_xfail_strict(rank):
        assert rank < 0

    @pytest.mark.world_size(2, 4)
    @pytest.mark.xfail(strict=False, reason="planted")
    def test_xfail(rank):
        assert rank != 1
        dist.barrier()

    @pytest.mark.xfail(strict=False, reason="planted")
    def test_xpass():
        dist.barrier()

    @pytest.mark.xfail(strict=True, reason="planted")
    def test_xpass_strict():
        dist.barrier()

    @pytest.mark.xfail(run=False, reason="planted")
    def test_xfail_not_run():
        os._exit(1)

    @pytest.mark.skipif(sys.version_info > (3,), reason="planted")
    def test_skipif():
        os._exit(1)

    def test_skips_everywhere():
        pytest.skip("planted")

    def test_importorskip():
        pytest.importorskip("no_such_module")

    @pytest.mark.usefixtures("module_fixture")
    def test_usefixtures():
        assert EVENTS[-1] == "module"

    def test_missing_fixture(no_such_fixture):
        pass

    def test_getfixturevalue(request, rank):
        assert request.getfixturevalue("module_fixture") == rank + 10

    def test_same_random_numbers(rank, world_size):
        assert len(set(exchange(torch.rand(1).item()))) == 1

    @pytest.mark.isolation("pooled", group="none")
    def test_without_a_group():
        assert not dist.is_initialized()

    @pytest.mark.isolation("fresh")
    def test_fresh_whatever_the_mode():
        dist.barrier()

    def test_comm(comm, rank, world_size):
        assert comm.all_reduce(torch.tensor([1.0])).item() == world_size
"""

LIFE_ALONE = """
    import unittest
    import pytest, torch.distributed as dist
    from zharness.world import exchange

    @pytest.mark.world_size(2)
    class TestCase(unittest.TestCase):
        def setUp(self):
            self.rank = dist.get_rank()

        def test_case_alone(self):
            self.assertEqual(exchange(self.rank), [0, 1])

        def test_case_fails_alone(self):
            self.assertEqual(self.rank, 0)

    def test_plain_alone(rank, world_size):
        assert (rank, world_size) == (0, 1)
"""

ON_FOUR_TOO = (
    "test_scopes",
    "test_tmp_path_is_private",
    "test_shared_tmp_path_is_shared",
    "test_differs",
    "test_fails_together",
    "test_exchanges",
    "test_xfail",
)

VERDICTS = {
    "test_scopes": "passed",
    "test_in_a_class": "passed",
    "test_in_a_class_again": "passed",
    "test_parametrized": "passed",
    "test_monkeypatch": "passed",
    "test_monkeypatch_is_undone": "passed",
    "test_tmp_path_is_private": "passed",
    "test_shared_tmp_path_is_shared": "passed",
    "test_capsys": "passed",
    "test_capfd": "passed",
    "test_caplog": "passed",
    "test_recwarn": "passed",
    "test_differs": "call failed",
    "test_fails_together": "call failed",
    "test_exchanges": "passed",
    "test_xfail_strict": "call skipped",
    "test_xfail": "call skipped",
    "test_xpass": "passed",
    "test_xpass_strict": "call failed",
    "test_xfail_not_run": "setup skipped",
    "test_skipif": "setup skipped",
    "test_skips_everywhere": "call skipped",
    "test_importorskip": "call skipped",
    "test_usefixtures": "passed",
    "test_missing_fixture": "setup failed",
    "test_getfixturevalue": "passed",
    "test_same_random_numbers": "passed",
    "test_without_a_group": "passed",
    "test_fresh_whatever_the_mode": "passed",
    "test_comm": "passed",
    "test_case_alone": "passed",
    "test_case_fails_alone": "call failed",
    "test_plain_alone": "passed",
}

# Patterns that the report has to match.
REPORT_PATTERNS = {
    "test_differs": (r"assert \[1, 2, 0\] == \[1, 2, 99\]", "At index 2 diff: 0 != 99", r"assert \[1, 2, 1\] =="),
    "test_fails_together": (r"ranks 0-\d failed", r"1 of \d ranks: rank 1: planted on 1"),
    "test_skipif": ("planted",),
    "test_skips_everywhere": ("planted",),
    "test_importorskip": ("no_such_module",),
    "test_missing_fixture": ("fixture 'no_such_fixture' not found",),
    "test_case_fails_alone": ("rank 1 failed", "AssertionError: 1 != 0"),
}

# A module with one world size, on which options and other plugins are tested.
OPTIONS = """
    import warnings
    import pytest, torch.distributed as dist

    pytestmark = pytest.mark.filterwarnings("default")

    @pytest.mark.world_size(2)
    def test_passes(rank, record_property):
        print(f"hello from {rank}")
        record_property("world", 2)
        record_property("number", rank)
        dist.barrier()

    @pytest.mark.world_size(2)
    def test_warns():
        warnings.warn("planted warning")

    @pytest.mark.world_size(2)
    def test_fails(rank):
        dist.barrier()
        assert rank == 0

    def test_plain():
        pass

    @pytest.mark.world_size(2)
    def test_skips():
        pytest.skip("planted")

    def test_plain_fails():
        assert not "planted"
"""
