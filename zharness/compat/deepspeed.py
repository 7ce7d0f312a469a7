"""DeepSpeed's DistributedTest and DistributedFixture as drop-ins: its own test files run by swapping an import.

    from zharness.compat.deepspeed import DistributedFixture, DistributedTest, get_test_path, preferred_dtype

A DistributedTest is a class of tests in ranks: its attributes are read as this package's markers when the class is
made, so markers of one's own on a class or a method count as everywhere. A DistributedFixture is a fixture that runs
on ranks of its own, before those of the test that asks for it by the name of the class.

What differs from DeepSpeed's own classes: fixtures are set up inside the ranks, in each of them; a list of world sizes
is one test for each; a world size that the CPU accelerator counts no devices for is run and not skipped; a hang ends
the test and not the session; ``non_daemonic_procs`` says nothing here, since ranks may start processes anyway; and a
DistributedFixture is asked for by name only, never called.

Read from the environment, once, when this module is imported: ``DS_UNITTEST_TIMEOUT``, seconds for one test (600), and
``DS_DISABLE_REUSE_DIST_ENV``, where 1 makes ``reuse_dist_env`` say nothing. DeepSpeed itself is imported by the ranks,
and by helpers that ask it something; without it, tests run on torch.distributed alone.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest

from zharness.compat.deepspeed_helpers import (
    EnableDeterminism,
    allclose_on_all_ranks,
    enable_determinism,
    get_master_port,
    get_start_method_for_platform,
    get_test_path,
    get_xdist_worker_id,
    is_rocm_pytorch,
    preferred_dtype,
    reduce_boolean_flags,
    set_accelerator_visible,
)
from zharness.compat.deepspeed_rank_setup import DistributedSettings, class_directory, prepare_rank, test_directory
from zharness.errors import UsageError
from zharness.pytest_ranks import remote_fixtures
from zharness.pytest_ranks.rank_requirements import parse_isolation
from zharness.world.task import Group, Isolation

__all__ = [
    "DEEPSPEED_TEST_TIMEOUT",
    "DistributedExec",
    "DistributedFixture",
    "DistributedTest",
    "EnableDeterminism",
    "allclose_on_all_ranks",
    "enable_determinism",
    "get_master_port",
    "get_start_method_for_platform",
    "get_test_path",
    "get_xdist_worker_id",
    "is_rocm_pytorch",
    "preferred_dtype",
    "reduce_boolean_flags",
    "set_accelerator_visible",
]


def parse_timeout(environment: Mapping[str, str]) -> float:
    """``DS_UNITTEST_TIMEOUT``, or DeepSpeed's own default. Raises UsageError for what is no number of seconds."""
    text = environment.get("DS_UNITTEST_TIMEOUT", "600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UsageError(f"got DS_UNITTEST_TIMEOUT={text}; expected a number of seconds above 0")
    return seconds


DEEPSPEED_TEST_TIMEOUT = parse_timeout(os.environ)
REUSE_DIST_ENV_DISABLED = os.environ.get("DS_DISABLE_REUSE_DIST_ENV", "0") == "1"
DEEPSPEED_INSTALLED = importlib.util.find_spec("deepspeed") is not None


class DistributedExec:
    """The attributes that tests and fixtures have in common, with DeepSpeed's defaults.

    ``backend`` empty is that of the ranks' device. ``exec_timeout`` is in seconds.
    """

    world_size: ClassVar[Any] = 2
    backend: ClassVar[str] = ""
    init_distributed: ClassVar[bool] = True
    set_dist_env: ClassVar[bool] = True
    requires_cuda_env: ClassVar[bool] = True
    reuse_dist_env: ClassVar[bool] = False
    non_daemonic_procs: ClassVar[bool] = False
    exec_timeout: ClassVar[float] = DEEPSPEED_TEST_TIMEOUT
    # DeepSpeed's tests/conftest.py closes these, and starts processes of its own for classes whose is_dist_test is set.
    _pool_cache: ClassVar[dict[int, Any]] = {}

    @classmethod
    def _rank_settings(cls) -> DistributedSettings:
        return DistributedSettings(cls.backend, cls.init_distributed, cls.set_dist_env, cls.requires_cuda_env)


class DistributedTest(DistributedExec):
    """A class of tests, each of which runs with all its fixtures in ``world_size`` ranks.

    ``world_size`` is a number or a list, and ``@pytest.mark.world_size(N)`` on a method comes before it, as does a
    parameter of that name. ``tmpdir`` and ``tmp_path`` are one directory for all ranks of a test and for its
    DistributedFixtures, ``class_tmpdir`` one for all tests of the class.
    """

    pytestmark: ClassVar[list[pytest.MarkDecorator | pytest.Mark]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        base = next(one for one in cls.__mro__[1:] if issubclass(one, DistributedTest))
        own = cls.__dict__.get("pytestmark", [])
        above = {} if base is DistributedTest else class_markers(base)
        new = [mark for name, mark in class_markers(cls).items() if above.get(name) != mark]
        if "isolation" in above and "isolation" not in class_markers(cls):
            new.append(pytest.mark.isolation("fresh"))
        # In front of the class's own, which therefore count more, and without those of its bases, which pytest adds.
        cls.pytestmark = [*new, *(own if isinstance(own, Sequence) else [own])]

    @pytest.fixture(autouse=True)
    @staticmethod
    def _in_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
        # A rank that is there for a DistributedFixture gets its readiness from that.
        if request.node.stash.get(remote_fixtures.RUNNING_FIXTURE, ""):
            yield
            return
        isolation, _ = parse_isolation(request.node)
        with prepare_rank(request.cls._wishes(), reuses_rank=isolation is Isolation.POOLED):
            yield

    @pytest.fixture(scope="class")
    @staticmethod
    def class_tmpdir(request: pytest.FixtureRequest, tmpdir_factory: Any) -> Any:
        """A directory that all ranks of all tests of the class share, and so do the fixtures that run elsewhere."""
        return to_py_path(class_directory(request), tmpdir_factory)

    @pytest.fixture
    @staticmethod
    def tmp_path(request: pytest.FixtureRequest) -> Path:
        """A directory that all ranks of the test share."""
        return test_directory(request)

    @pytest.fixture
    @staticmethod
    def tmpdir(tmp_path: Path, tmpdir_factory: Any) -> Any:
        """``tmp_path`` as a path of the kind that pytest's own ``tmpdir`` is."""
        return to_py_path(tmp_path, tmpdir_factory)


def to_py_path(path: Path, tmpdir_factory: Any) -> Any:
    """``path`` as a py.path.local, which nothing public makes but pytest's own fixtures."""
    return type(tmpdir_factory.getbasetemp())(path)


def class_markers(cls: type[DistributedTest]) -> dict[str, pytest.MarkDecorator]:
    """The attributes of the class as markers, by their names."""
    size = cls.world_size
    marks = {"rank_timeout": pytest.mark.rank_timeout(cls.exec_timeout)}
    if size is not None:
        marks["world_size"] = pytest.mark.world_size(*dict.fromkeys([size] if isinstance(size, int) else size))
    if cls.reuse_dist_env and not REUSE_DIST_ENV_DISABLED:
        marks["isolation"] = pytest.mark.isolation("pooled", group="kept" if cls.init_distributed else "none")
    elif not cls.init_distributed:
        marks["isolation"] = pytest.mark.isolation("fresh", group="none")
    if DEEPSPEED_INSTALLED:
        marks["warm"] = pytest.mark.warm("deepspeed")
    return marks


class DistributedFixture(DistributedExec):
    """A fixture that runs ``run`` on ``world_size`` ranks before the test that asks for it by the name of the class.

    ``run`` takes other fixtures as parameters, and its value is not handed on: what it leaves for the test it writes
    into ``tmpdir`` or ``class_tmpdir``. It runs once for each test. A class whose ``world_size`` is None is a base of
    others.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.world_size is None:
            return
        if isinstance(cls.world_size, bool) or not isinstance(cls.world_size, int) or cls.world_size < 1:
            raise UsageError(
                f"{cls.__qualname__}: got world_size {cls.world_size!r}; a DistributedFixture takes one whole number"
            )
        group = Group.DEFAULT if cls.init_distributed else Group.NONE
        where = remote_fixtures.RemoteFixture(cls.__name__, cls.world_size, group, cls.exec_timeout)
        # pytest finds the fixtures of a module among its attributes, and the name of the class is taken by the class.
        module = sys.modules[cls.__module__]
        setattr(module, f"fixture_{cls.__name__}", remote_fixtures.define_remote_fixture(cls._rank_function(), where))

    @classmethod
    def _rank_function(cls) -> Any:
        """What the ranks call: ``run`` with the same parameters, once they are ready for it."""
        run = cls.run.__get__(cls())

        def run_in_ranks(**fixtures: Any) -> None:
            with prepare_rank(cls._rank_settings()):
                run(**fixtures)

        run_in_ranks.__doc__ = cls.__doc__
        run_in_ranks.__wrapped__ = run  # type: ignore[attr-defined]  # inspect.signature looks there
        return run_in_ranks

    def run(self, **fixtures: Any) -> None:
        """What the fixture does, in each of its ranks."""
        raise NotImplementedError(f"{type(self).__name__} is a DistributedFixture without a method run")

    def __call__(self, request: pytest.FixtureRequest) -> NoReturn:
        """Raises UsageError: ranks cannot start ranks, so the test has to ask for the fixture by its name."""
        raise UsageError(
            f"got a call of the DistributedFixture {type(self).__name__}; a test that needs it takes a parameter named "
            f"{type(self).__name__}, and it has run before the test's own ranks start"
        )
