"""Mixins that run the tests of PyTorch's MultiProcessTestCase and MultiProcContinuousTest on this package's ranks.

PyTorch's classes have two kinds of instances: pytest creates one, and each spawned process creates another, with a
rank. The mixins keep both, so that subclasses which override ``_run``, ``_init_pg`` or ``world_size`` work. On each
rank, pytest calls ``setUp`` and ``tearDown`` of the first instance, whose test method runs the test on the second.
"""

from __future__ import annotations

import os
import tempfile
import types
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch.distributed as dist
from torch.testing._internal.common_distributed import TEST_SKIPS, MultiProcessTestCase, get_timeout
from torch.testing._internal.common_utils import set_rng_seed

# PyTorch's classes start their processes without the variables of launchers.
from zharness.compat.launcher_variables import delete_launcher_variables
from zharness.errors import WorldError
from zharness.world import GroupMode, current_rank, exchange, is_rank, run

SKIP_MESSAGES = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}


@contextmanager
def exit_codes_as_outcomes(expected_code: int | None = 0) -> Iterator[None]:
    """Translate ``sys.exit`` in a test inside the block: codes of TEST_SKIPS skip it, and ``expected_code`` passes.

    A code of TEST_SKIPS skips the test even if it is expected, as in PyTorch's classes. Raises AssertionError for any
    other code, and for a test that returns although ``expected_code`` is not 0. With None as ``expected_code``, a test
    passes without a code and with any but that of PyTorch's errors.
    """
    try:
        yield
    except SystemExit as error:
        code = error.code or 0
        if expected_code is None and code != MultiProcessTestCase.TEST_ERROR_EXIT_CODE:
            return
        if code in SKIP_MESSAGES:
            raise unittest.SkipTest(SKIP_MESSAGES[int(code)]) from None
        if code == expected_code:
            return
        raise AssertionError(f"the test called sys.exit({code!r}); expected the code {expected_code}") from error
    if expected_code not in (None, 0):
        raise AssertionError(f"the test returned without sys.exit; expected the code {expected_code}")


def list_markers(test_class: Any, test_name: str, isolation: pytest.MarkDecorator) -> list[pytest.MarkDecorator]:
    """Return the pytest markers of a test: those of ranks, a skip for a world size of 0, or none.

    None for a class that simulates its ranks in one process, and if the world size cannot be evaluated: then the test
    fails or skips in pytest's own process, where it evaluates the world size again.
    """
    try:
        case = test_class(test_name)
        is_simulated, world_size = getattr(case, "is_local_tensor_enabled", False), case._count_ranks()
    except Exception:  # noqa: BLE001 - a property of a test class may raise any exception; the test will raise it again
        return []
    if is_simulated:
        return []
    if world_size < 1:
        return [pytest.mark.skip(reason=f"world size {world_size}: PyTorch's class would start no process")]
    return [
        pytest.mark.world_size(world_size),
        pytest.mark.rank_timeout(float(get_timeout(case.id()))),
        pytest.mark.collectives("trusted"),  # PyTorch's classes do not compare them either
        isolation,
    ]


def run_without_pytest(run_on_rank: Callable[[], None], world_size: int, test_id: str) -> None:
    """Run a test of plain unittest on new ranks. Raises SkipTest if all ranks skip, and RanksFailed if a rank fails."""

    def return_skip() -> str:
        with pytest.MonkeyPatch.context() as patch:
            delete_launcher_variables(patch)
            try:
                run_on_rank()
            except unittest.SkipTest as skip:
                return str(skip)
        return ""

    reasons = run(return_skip, world_size=world_size, timeout=float(get_timeout(test_id)), group=GroupMode.NONE)
    skipped = [rank for rank, reason in enumerate(reasons) if reason]
    if len(skipped) == world_size:
        raise unittest.SkipTest(reasons[0])
    if skipped:
        raise AssertionError(f"ranks {skipped} skipped the test, and the others did not: {reasons[skipped[0]]}")


def wait_for_ranks() -> None:
    """Return when the test has ended on all ranks, or on one with a failure, which the verdict will show."""
    with suppress(WorldError):
        exchange(None)


def make_rank_test(
    case: Any, test: Callable[[], None], on_rank: Callable[[], None], on_new_rank: Callable[[], None]
) -> Callable[[], None]:
    """Return the method that replaces ``test`` on ``case``: the instance without rank starts the test, others call it.

    ``on_rank`` runs the test on a rank of this package's pytest plugin, and ``on_new_rank`` on each rank that is
    started without the plugin.
    """

    @wraps(test)
    def run_or_start(case: Any) -> None:
        if case.rank != case.MAIN_PROCESS_RANK:
            test()
        elif is_rank():
            on_rank()
        else:
            run_without_pytest(on_new_rank, case._count_ranks(), case.id())

    return types.MethodType(run_or_start, case)


class RankTestCase:
    """Mixin for subclasses of MultiProcessTestCase: each test runs on ``world_size`` new ranks without process group.

    All ranks of a test get the same ``file_name``, the name of an empty file.
    """

    file_name: str
    rank: int
    world_size: Any
    special_return_code_checks: ClassVar[dict[Any, int]]
    skip_return_code_checks: ClassVar[list[Any]]

    @classmethod
    def _list_rank_markers(cls, test_name: str) -> list[pytest.MarkDecorator]:
        """Return the pytest markers of one test; an empty list for a class that simulates its ranks in one process."""
        return list_markers(cls, test_name, pytest.mark.isolation("fresh", group="none"))

    def _count_ranks(self) -> int:
        """Return the world size of this test."""
        return int(self.world_size)

    @pytest.fixture(autouse=True)
    def _without_launcher(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Delete the environment variables of launchers before ``setUp``, which may set its own."""
        if is_rank():
            delete_launcher_variables(monkeypatch)

    def join_or_run(self, test: Callable[[], None]) -> Callable[[], None]:
        """Return the method that replaces ``test``: on the instance without rank it starts the test, else calls it."""

        run = partial(self._run_on_rank, test)
        return make_rank_test(self, test, run, run)

    def _run_on_rank(self, test: Callable[[], None]) -> None:
        """Run a test on this rank, as ``_run`` does in a process of PyTorch's class, and end its process group.

        The group ends after the test has ended on all ranks, because a rank may still connect to this one.
        """
        case: Any = self
        file_name = exchange(case.file_name)[0]
        is_checked = test not in case.skip_return_code_checks
        expected_code = case.special_return_code_checks.get(test, 0) if is_checked else None
        with exit_codes_as_outcomes(expected_code):
            type(case)._run(current_rank().rank, case._current_test_name(), file_name, None, **self._run_options())
        wait_for_ranks()  # tearDown of rank 0 may remove the file
        if case.destroy_pg_upon_exit and dist.is_initialized():
            dist.destroy_process_group()

    def _run_options(self) -> dict[str, Any]:
        """Return the keyword arguments that PyTorch's class passes to ``_run``."""
        return {"fake_pg": getattr(self, "fake_pg", False)}

    def run_test(self, test_name: str, parent_pipe: object) -> None:
        """Seed torch and call the test method."""
        os.environ["TORCH_SHOW_CPP_STACKTRACES"] = "1"  # some tests expect messages with C++ stacks
        set_rng_seed()  # type: ignore[no-untyped-call]
        getattr(self, test_name)()

    def _spawn_processes(self) -> None:
        """Start no process: the ranks exist already."""

    def _start_processes(self, proc: object) -> None:
        """Start no process: the ranks exist already."""


class RankContinuousTest:
    """Mixin for subclasses of MultiProcContinuousTest: the tests of a class run on pooled ranks with one process group.

    ``_init_pg`` of the class forms the process group once for each pool.
    """

    rank: int
    world_size: Any
    task_queues: ClassVar[list[Any]] = []
    processes: ClassVar[list[Any]] = []

    @classmethod
    def _list_rank_markers(cls, test_name: str) -> list[pytest.MarkDecorator]:
        """Return the pytest markers of one test; an empty list for a class that simulates its ranks in one process."""
        return list_markers(cls, test_name, pytest.mark.isolation("pooled", group="kept"))

    def _count_ranks(self) -> int:
        """Return the world size of the test class: that of its attribute or property, or else its number of devices."""
        test_class: Any = type(self)
        return int(test_class._get_world_size(find_device_type(test_class)))

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _group_of_class(
        cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[None]:
        """Form the process group of the test class on the pooled ranks, and destroy it after the last test."""
        if not is_rank():
            yield
            return
        with pytest.MonkeyPatch.context() as patch:
            delete_launcher_variables(patch)
            rendezvous = exchange(str(tmp_path_factory.mktemp("group") / "rendezvous"))[0]
            request.cls._form_group(rendezvous)
            yield
        if dist.is_initialized():
            dist.destroy_process_group()

    @classmethod
    def _form_group(cls, rendezvous: str) -> None:
        """Replace the process group of this rank by the one that ``_init_pg`` forms."""
        test_class: Any = cls
        if dist.is_initialized():
            dist.destroy_process_group()
        test_class.rank, test_class.world_size = current_rank().rank, current_rank().world_size
        with exit_codes_as_outcomes():
            test_class._init_pg(test_class.rank, test_class.world_size, rendezvous)

    def _worker_run_main_wait(self, test: Callable[[], None]) -> Callable[[], None]:
        """Return the method that replaces ``test``: on the instance without rank it starts the test, else calls it."""

        return make_rank_test(self, test, self._run_on_rank, self._run_on_new_rank)

    def _run_on_rank(self) -> None:
        """Run the test on this rank, as a process of PyTorch's class does."""
        case: Any = self
        with exit_codes_as_outcomes():
            type(case)._run_test_given_id(case.id())
        wait_for_ranks()

    def _run_on_new_rank(self) -> None:
        """Form the process group of the class on a new rank and run the test."""
        case: Any = self
        with tempfile.TemporaryDirectory() as folder:
            type(case)._form_group(exchange(str(Path(folder) / "rendezvous"))[0])
            self._run_on_rank()
        dist.destroy_process_group()

    @classmethod
    def _ensure_processes_spawned(cls) -> None:
        """Start no process: the ranks exist already."""


def find_device_type(test_class: Any) -> str:
    """Return the device type of a MultiProcContinuousTest, where it may be a method, a property or a string."""
    attribute = test_class.__dict__.get("device_type", test_class.device_type)
    if isinstance(attribute, classmethod):
        return str(attribute.__func__(test_class))
    if isinstance(attribute, property) and attribute.fget is not None:
        return str(attribute.fget(test_class))
    return str(attribute()) if callable(attribute) else str(attribute)
