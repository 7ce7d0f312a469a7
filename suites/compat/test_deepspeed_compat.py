"""DistributedTest behaves as DeepSpeed's test files expect of their own class."""

from __future__ import annotations

from pathlib import Path

import pytest

from suites.compat.session_runs import SessionRun, run

SIZES = """
class TestSizes(DistributedTest):
    world_size = [1, 3]

    def test_attribute(self):
        assert str(dist.get_world_size()) == os.environ["WORLD_SIZE"] == os.environ["LOCAL_SIZE"]
        assert str(dist.get_rank()) == os.environ["RANK"] == os.environ["LOCAL_RANK"]
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()

    @pytest.mark.world_size(2)
    def test_marker(self):
        assert dist.get_world_size() == 2

    @pytest.mark.world_size([1, 2])
    def test_marker_with_a_list(self):
        assert dist.get_world_size() < 3

    @pytest.mark.parametrize("world_size", [1, 2])
    def test_parameter(self, world_size):
        assert dist.get_world_size() == world_size


class TestInherited(TestSizes):
    world_size = 2


@pytest.mark.parametrize("number", [7])
class TestArguments(DistributedTest):
    @pytest.fixture(params=[5, 6])
    def other(self, request):
        return request.param

    def test_all(self, number, other, color="purple"):
        assert (number, color) == (7, "purple")
        assert other in (5, 6)


@pytest.mark.skipif(True, reason="not here")
class TestSkippedByMarker(DistributedTest):
    def test_it(self):
        raise AssertionError
"""

VERDICTS = """
class TestVerdicts(DistributedTest):
    def test_one_rank_fails(self):
        if dist.get_rank() == 1:
            raise ValueError("no room")
        dist.barrier()

    def test_all_skip(self):
        pytest.skip("not today")

    def test_passes(self):
        dist.barrier()
"""

GROUPS = """
class TestNoGroup(DistributedTest):
    init_distributed = False

    def test_forms_its_own(self):
        assert not dist.is_initialized()
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2


class TestNoVariables(DistributedTest):
    init_distributed = False
    set_dist_env = False

    def test_has_none(self):
        assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} & set(os.environ)


class TestWrapped(DistributedTest):
    @pytest.mark.parametrize("number", [0, 1])
    def test_builds_ddp(self, number):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2) * dist.get_rank()).sum().backward()
        assert model.module.weight.grad.eq(0.5).all()
        assert torch._C._distributed_c10d.get_debug_level().name == "OFF"


class TestOtherBackend(DistributedTest):
    backend = "mpi"

    def test_it(self):
        pass
"""

REUSE = """
class TestReuse(DistributedTest):
    reuse_dist_env = True

    @pytest.mark.parametrize("turn", [0, 1, 2])
    def test_it(self, turn, class_tmpdir):
        me = Path(class_tmpdir, f"rank{dist.get_rank()}")
        before = me.read_text() if me.exists() else ""
        me.write_text(f"{os.getpid()} {id(dist.group.WORLD)}")
        assert os.environ.get("DS_DISABLE_REUSE_DIST_ENV") == "1" or before in ("", me.read_text())
        assert os.environ.get("DS_DISABLE_REUSE_DIST_ENV") != "1" or not before.startswith(f"{os.getpid()} ")


class TestReuseWithoutGroup(DistributedTest):
    reuse_dist_env = True
    init_distributed = False

    @pytest.mark.parametrize("turn", [0, 1])
    def test_it(self, turn):
        assert not dist.is_initialized()
"""

HANGS = """
class TestHangs(DistributedTest):
    def test_it(self):
        if dist.get_rank() == 1:
            threading.Event().wait()

    def test_next(self):
        dist.barrier()
"""

# The hooks by which DeepSpeed's own conftest runs tests; they must not act on the drop-in classes.
ITS_CONFTEST = """
import sys

import pytest

sys.modules["deepspeed"] = None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    if getattr(item.cls, "is_dist_test", False):
        item.cls()(item._request)
        item.runtest = lambda: True


def pytest_runtest_teardown(item, nextitem):
    if getattr(item.cls, "reuse_dist_env", False) and not nextitem:
        launcher = item.cls()
        for size, pool in launcher._pool_cache.items():
            launcher._close_pool(pool, size, force=True)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef, request):
    if getattr(fixturedef.func, "is_dist_fixture", False):
        fixturedef.func()(request)
"""

COUNTED = """
class counted(DistributedFixture):
    world_size = 3

    def run(self, class_tmpdir):
        with open(Path(class_tmpdir, "ran"), "a") as file:
            file.write("fixture\\n")


class TestCounted(DistributedTest):
    reuse_dist_env = True

    def test_it(self, counted, class_tmpdir):
        dist.barrier()
        with open(Path(class_tmpdir, "ran"), "a") as file:
            file.write("body\\n")
        dist.barrier()
        assert sorted(Path(class_tmpdir, "ran").read_text().split()) == ["body"] * 2 + ["fixture"] * 3
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> SessionRun:
    """One session with the tests of SIZES, VERDICTS and GROUPS, without DeepSpeed."""
    return run(tmp_path_factory.mktemp("session"), SIZES + VERDICTS + GROUPS)


def test_a_list_of_world_sizes_is_one_test_for_each(session: SessionRun) -> None:
    assert session.verdicts("TestSizes::test_attribute") == {"[w1]": "passed", "[w3]": "passed"}
    assert session.verdicts("TestInherited::test_attribute") == {"": "passed"}


def test_a_marker_or_a_parameter_overrides_the_attribute(session: SessionRun) -> None:
    for name in ("TestSizes", "TestInherited"):
        assert session.verdicts(f"{name}::test_marker") == {
            "": "passed",
            "_with_a_list[w1]": "passed",
            "_with_a_list[w2]": "passed",
        }
        assert session.verdicts(f"{name}::test_parameter") == {"[1]": "passed", "[2]": "passed"}


def test_parameters_fixtures_and_markers_work_inside_the_ranks(session: SessionRun) -> None:
    assert set(session.verdicts("TestArguments").values()) == {"passed"}
    assert len(session.verdicts("TestArguments")) == 2
    assert session.verdicts("TestSkippedByMarker") == {"::test_it": "skipped"}


def test_a_failing_rank_is_named_and_the_other_is_reported_as_stopped(session: SessionRun) -> None:
    assert session.verdicts("TestVerdicts::test_") == {
        "one_rank_fails": "failed",
        "all_skip": "skipped",
        "passes": "passed",
    }
    result = session.text("TestVerdicts::test_one_rank_fails")
    assert "rank 1: ValueError: no room" in result
    assert "rank 0 was stopped because another rank had failed, waiting in barrier" in result


def test_attributes_decide_on_the_group_and_the_variables(session: SessionRun) -> None:
    for name in ("TestNoGroup", "TestNoVariables"):
        assert set(session.verdicts(name).values()) == {"passed"}
    result = session.text("TestOtherBackend::test_it")
    assert "got backend 'mpi'; the process group of these ranks uses 'gloo'" in result


def test_a_class_with_one_world_size_keeps_its_ids_and_trusts_its_collectives(session: SessionRun) -> None:
    assert session.verdicts("TestWrapped::test_builds_ddp") == {"[0]": "passed", "[1]": "passed"}


@pytest.mark.parametrize("disabled", ["0", "1"])
def test_ranks_are_reused_unless_the_variable_forbids_it(tmp_path: Path, disabled: str) -> None:
    session = run(tmp_path, REUSE, DS_DISABLE_REUSE_DIST_ENV=disabled)
    assert len(session.tests) == 5
    assert set(session.verdicts("").values()) == {"passed"}


def test_the_timeout_variable_ends_a_hang_and_not_the_session(tmp_path: Path) -> None:
    session = run(tmp_path, HANGS, DS_UNITTEST_TIMEOUT="2")
    assert session.verdicts("TestHangs") == {"::test_it": "failed", "::test_next": "passed"}
    assert "rank 1 did not finish in time" in session.text("TestHangs::test_it")


def test_a_timeout_variable_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    session = run(tmp_path, HANGS, DS_UNITTEST_TIMEOUT="soon")
    assert session.status == pytest.ExitCode.INTERRUPTED
    assert "got DS_UNITTEST_TIMEOUT=soon; expected a number of seconds above 0" in session.output


def test_deepspeeds_own_conftest_runs_nothing_twice(tmp_path: Path) -> None:
    session = run(tmp_path, COUNTED, conftest=ITS_CONFTEST)
    assert session.verdicts("TestCounted") == {"::test_it": "passed"}
