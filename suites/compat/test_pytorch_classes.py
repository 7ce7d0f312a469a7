"""The drop-ins for PyTorch's test classes run its forms of tests on ranks, and name the rank that failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from suites.compat.session_runs import SessionRun, run

HEAD = """
import contextlib
import os
import sys
import threading
import unittest

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

from zharness.compat.pytorch.common_distributed import (
    DistributedTestBase, MultiProcContinuousTest, MultiProcessTestCase, requires_nccl, run_subtests, skip_if_lt_x_gpu,
)
from zharness.compat.pytorch.common_dtensor import DTensorContinuousTestBase, DTensorTestBase, with_comms
from zharness.compat.pytorch.common_dtensor import create_local_tensor_test_class
from zharness.compat.pytorch.common_fsdp import FSDPTest, FSDPTestContinuous
"""

PROCESSES = """
class ProcessTests(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        os.environ["SET_UP"] = "yes"
        self._spawn_processes()

    def tearDown(self):
        super().tearDown()
        os.environ["TORN_DOWN"] = "yes"
        with contextlib.suppress(OSError):
            os.remove(self.file_name)

    def form_group(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)


class TestProcesses(ProcessTests):
    def test_passes(self):
        self.form_group()
        total = torch.ones(1) + self.rank
        dist.all_reduce(total)
        self.assertEqual(total.item(), 3)
        self.assertEqual(os.environ["SET_UP"], "yes")
        self.assertNotIn("TORN_DOWN", os.environ)
        self.assertNotIn("RANK", os.environ)

    def test_ends_without_meeting(self):
        self.form_group()

    def test_forms_the_group_again(self):
        self.form_group()
        dist.barrier()
        dist.destroy_process_group()
        second = dist.FileStore(self.file_name + ".second", self.world_size)
        dist.init_process_group("gloo", store=second, rank=self.rank, world_size=self.world_size)
        dist.barrier()

    def test_one_rank_fails(self):
        self.form_group()
        if self.rank == 1:
            raise ValueError("no room")
        dist.barrier()

    @pytest.mark.rank_timeout(3)
    def test_hangs(self):
        self.form_group()
        if self.rank == 0:
            dist.barrier()
        threading.Event().wait()

    @skip_if_lt_x_gpu(2)
    def test_needs_devices(self):
        raise AssertionError

    @requires_nccl()
    def test_needs_nccl(self):
        raise AssertionError

    def test_skips_itself(self):
        self.skipTest("own reason")

    def test_one_rank_skips(self):
        if self.rank == 0:
            sys.exit(75)

    def test_exits_with_zero(self):
        sys.exit(0)

    def test_one_rank_exits(self):
        if self.rank == 1:
            sys.exit(3)

    @parametrize("number", [1, 2])
    def test_number(self, number):
        self.assertLess(number, 2)

    @unittest.expectedFailure
    def test_fails_as_expected(self):
        self.assertEqual(self.rank, -5)

    def test_subtests(self):
        self.form_group()
        run_subtests(self, {"number": [1, 2], "letter": ["a", "b"]}, self.check_number)

    def check_number(self, number, letter):
        self.assertFalse(number == 2 and letter == "b" and self.rank == 1)


instantiate_parametrized_tests(TestProcesses)


class TestCodes(ProcessTests):
    def setUp(self):
        super().setUp()
        test = getattr(self, self._testMethodName).__wrapped__
        self.special_return_code_checks = {test: 75 if "skip" in test.__name__ else 3}
        self.skip_return_code_checks = [test] if "unchecked" in test.__name__ else []

    def test_exits_as_expected(self): sys.exit(3)
    def test_exits_with_a_skip_code_as_expected(self): sys.exit(75)
    def test_exits_with_another_code(self): sys.exit(4)
    def test_exits_unchecked(self): sys.exit(5)
    def test_returns(self): pass


class TestSizes(DistributedTestBase):
    @property
    def world_size(self):
        return 3 if self._current_test_name() == "test_three" else 0

    def test_three(self):
        self.create_pg("cpu")
        self.assertEqual(dist.get_world_size(), 3)

    def test_none(self):
        raise AssertionError


class TestNoSize(ProcessTests):
    @property
    def world_size(self):
        raise ValueError("no size")

    def test_it(self):
        pass


class TestSetUpFails(ProcessTests):
    def setUp(self):
        super().setUp()
        raise ValueError("no tables")

    def test_it(self):
        pass


class TestMesh(DTensorTestBase):
    @property
    def world_size(self):
        return 2

    @with_comms
    def test_mesh(self):
        self.assertEqual(self.build_device_mesh().size(), 2)


TestMeshOfOneProcess = create_local_tensor_test_class(TestMesh)


class TestSharded(FSDPTest):
    @property
    def world_size(self):
        return torch.cpu.device_count()

    @skip_if_lt_x_gpu(2)
    def test_subtests(self):
        self.run_subtests({"number": [1, 2]}, self.check_number)

    def check_number(self, number):
        total = torch.full((1,), float(number))
        dist.all_reduce(total, group=self.process_group)
        self.assertEqual(total.item(), number * self.world_size)

    @skip_if_lt_x_gpu(8)
    def test_needs_eight(self):
        raise AssertionError


if __name__ == "__main__":
    run_tests()
"""

CONTINUOUS = """
class TestContinuous(MultiProcContinuousTest):
    world_size = 2
    set_up = 0

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def _init_pg(cls, rank, world_size, rdvz_file):
        super()._init_pg(rank, world_size, rdvz_file)
        os.environ["INITIALIZED_BY"] = cls.__name__
        cls.set_up += 1

    def check(self):
        self.assertEqual((type(self).set_up, os.environ["INITIALIZED_BY"]), (1, "TestContinuous"))
        total = torch.ones(1)
        dist.all_reduce(total)
        self.assertEqual(total.item(), 2)
        print("PROCESS", os.getpid(), id(dist.group.WORLD))

    def test_a(self):
        self.check()

    def test_b(self):
        self.check()

    def test_c_one_rank_fails(self):
        if self.rank == 1:
            raise ValueError("no room")
        dist.barrier()

    def test_d_follows_a_failure(self):
        self.check()


class TestOtherGroup(TestContinuous):
    @property
    def world_size(self):
        return 2

    def check(self):
        self.assertEqual(os.environ["INITIALIZED_BY"], "TestOtherGroup")


class TestMeshes(DTensorContinuousTestBase):
    world_size = 2

    def test_mesh(self):
        self.assertEqual(self.build_device_mesh().size(), 2)


class TestShards(FSDPTestContinuous):
    world_size = 2

    def test_it(self):
        raise AssertionError("PyTorch's class skips the test without two accelerators")


if __name__ == "__main__":
    run_tests()
"""


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> SessionRun:
    """Run the tests of MultiProcessTestCase and its subclasses."""
    return run(tmp_path_factory.mktemp("processes"), PROCESSES, head=HEAD)


@pytest.fixture(scope="module")
def continuous(tmp_path_factory: pytest.TempPathFactory) -> SessionRun:
    """Run the tests of MultiProcContinuousTest and its subclasses."""
    return run(tmp_path_factory.mktemp("continuous"), CONTINUOUS, "-rP", head=HEAD)


def test_verdicts_of_processes(processes: SessionRun) -> None:
    """Every form of test has its verdict."""
    assert processes.verdicts("TestProcesses::") == {
        "test_passes": "passed",
        "test_ends_without_meeting": "passed",
        "test_forms_the_group_again": "passed",
        "test_one_rank_fails": "failed",
        "test_hangs": "failed",
        "test_needs_devices": "skipped",
        "test_needs_nccl": "skipped",
        "test_skips_itself": "skipped",
        "test_one_rank_skips": "failed",
        "test_exits_with_zero": "passed",
        "test_one_rank_exits": "failed",
        "test_number_number_1": "passed",
        "test_number_number_2": "failed",
        "test_fails_as_expected": "skipped",
        "test_subtests": "failed",
    }


def test_an_expected_exit_code_is_required(processes: SessionRun) -> None:
    """A test that expects an exit code passes with that code only; a code for skips skips it all the same."""
    assert processes.verdicts("TestCodes::") == {
        "test_exits_as_expected": "passed",
        "test_exits_with_a_skip_code_as_expected": "skipped",
        "test_exits_with_another_code": "failed",
        "test_exits_unchecked": "passed",
        "test_returns": "failed",
    }
    assert "the test returned without sys.exit; expected the code 3" in processes.text("TestCodes::test_returns")


def test_verdicts_of_other_classes(processes: SessionRun) -> None:
    """A world size may depend on the test; 0 skips it, and one that raises fails it."""
    assert processes.verdicts("TestSizes::") == {"test_three": "passed", "test_none": "skipped"}
    assert processes.verdicts("TestNoSize::") == {"test_it": "failed"}
    assert processes.verdicts("TestSetUpFails::") == {"test_it": "failed"}
    assert processes.verdicts("TestMesh::") == {"test_mesh": "passed"}
    assert processes.verdicts("TestMeshOfOneProcess::") == {"test_mesh": "passed"}
    assert processes.verdicts("TestSharded::") == {"test_subtests": "skipped", "test_needs_eight": "skipped"}


@pytest.mark.parametrize(
    ("test", "texts"),
    [
        ("test_one_rank_fails", ["rank 1 failed first, in call: ValueError: no room", "rank 0 was stopped"]),
        ("test_hangs", ["rank 1 did not finish in time", "called in test_hangs", "rank 0", "waits in barrier"]),
        ("test_needs_devices", ["Need at least 2 CUDA devices"]),
        ("test_needs_nccl", ["c10d was not compiled with the NCCL backend"]),
        ("test_skips_itself", ["own reason"]),
        ("test_one_rank_skips", ["skipped on rank 0 of 2 only: Need at least 1 CUDA device"]),
        ("test_one_rank_exits", ["rank 1", "the test called sys.exit(3)"]),
        ("test_subtests", ["rank 1 failed first"]),
    ],
)
def test_reports_name_ranks_and_causes(processes: SessionRun, test: str, texts: list[str]) -> None:
    """The report of a fault names the rank, the cause and where the other rank stood."""
    report = processes.text(f"TestProcesses::{test}")
    assert [text for text in texts if text not in report] == []


def test_verdicts_of_continuous_classes(continuous: SessionRun) -> None:
    """Tests after a failed one run; each class has its process group."""
    assert continuous.verdicts("TestContinuous::") == {
        "test_a": "passed",
        "test_b": "passed",
        "test_c_one_rank_fails": "failed",
        "test_d_follows_a_failure": "passed",
    }
    assert continuous.verdicts("TestOtherGroup::")["test_a"] == "passed"
    assert continuous.verdicts("TestMeshes::") == {"test_mesh": "passed"}
    assert continuous.verdicts("TestShards::") == {"test_it": "skipped"}
    assert "Need at least 2 CUDA devices" in continuous.text("TestShards::test_it")


def test_tests_of_a_continuous_class_share_processes(continuous: SessionRun) -> None:
    """Two tests have the same processes and group; the test after a failure has new ones."""
    lines = [line for line in continuous.output.splitlines() if "[rank 0] PROCESS" in line]
    assert len(lines) == 3, continuous.output
    assert lines[0] == lines[1] != lines[2]


def test_cpus_count_as_devices(tmp_path: Path) -> None:
    """With ZHARNESS_CPU_DEVICES, tests that need accelerators run, up to that number."""
    session = run(tmp_path, PROCESSES, "-k", "TestSharded or needs", head=HEAD, ZHARNESS_CPU_DEVICES="2")
    assert session.verdicts("TestSharded::") == {"test_subtests": "passed", "test_needs_eight": "skipped"}
    assert session.verdicts("TestProcesses::") == {"test_needs_devices": "failed", "test_needs_nccl": "skipped"}


def test_plain_unittest_runs_on_ranks(tmp_path: Path) -> None:
    """``python test_file.py`` runs the tests on ranks too, and its tracebacks name the rank."""
    path = tmp_path / "test_plain.py"
    path.write_text(HEAD + PROCESSES)
    names = ("passes", "one_rank_fails", "one_rank_skips", "skips_itself")
    command = [sys.executable, str(path), *(f"TestProcesses.test_{name}" for name in names)]
    # Where CI is set, PyTorch's run_tests imports xmlrunner, which only its own jobs install.
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 1
    assert "Ran 4 tests" in done.stderr
    assert "FAILED (failures=1, errors=1, skipped=1)" in done.stderr, done.stderr
    assert "rank 1" in done.stderr
    assert "ValueError: no room" in done.stderr
