"""Drop-in replacements for DeepSpeed's DistributedTest and DistributedFixture: change one import in its test files.

    from zharness.compat.deepspeed import DistributedFixture, DistributedTest, get_test_path, preferred_dtype

A DistributedTest is a class whose tests run on several ranks. When the class is created, its attributes are translated
into this package's pytest markers; a marker on a class or a method overrides the attribute. A DistributedFixture is a
fixture that runs on ranks of its own before the ranks of the test start; a test requests it by the name of the class.

The classes differ from DeepSpeed's in six ways. Fixtures are set up in every rank. A list of world sizes produces one
test for each world size, with the world size in its id; with a single world size, ids do not change. A test whose world
size exceeds the CPU accelerator's device count runs instead of being skipped. A hang ends the test, not the session.
``non_daemonic_procs`` has no effect, because ranks may always start processes. A DistributedFixture is requested by
name, or called in the function of a fixture, during its setup; any other call raises UsageError.

Collectives are not compared across the ranks, unless a test has the marker ``collectives("checked")``.

This module reads two environment variables when it is imported. ``DS_UNITTEST_TIMEOUT`` is the time limit of one test
in seconds (default: 600). ``DS_DISABLE_REUSE_DIST_ENV=1`` disables ``reuse_dist_env``. With
``ZHARNESS_DEEPSPEED_SHM=1``, collectives of DeepSpeed on CPUs run through its shared-memory operator, as in DeepSpeed's
own classes; the operator is built once, before the ranks start. DeepSpeed is imported only in the ranks, and by helper
functions that use it. If DeepSpeed is not installed, tests run with torch.distributed alone.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from zharness.compat import deepspeed_engine
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
from zharness.world.task import GroupMode, Isolation

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
    """Return the seconds in ``DS_UNITTEST_TIMEOUT``, or 600 if unset. Raises UsageError unless the value is above 0."""
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
    """Base class of DistributedTest and DistributedFixture: the attributes that both have, with DeepSpeed's defaults.

    An empty ``backend`` selects the backend that suits the device of the ranks. ``exec_timeout`` is in seconds.
    """

    world_size: ClassVar[Any] = 2
    backend: ClassVar[str] = ""
    init_distributed: ClassVar[bool] = True
    set_dist_env: ClassVar[bool] = True
    requires_cuda_env: ClassVar[bool] = True
    reuse_dist_env: ClassVar[bool] = False
    non_daemonic_procs: ClassVar[bool] = False
    exec_timeout: ClassVar[float] = DEEPSPEED_TEST_TIMEOUT
    _keeps_ids: ClassVar[bool] = True  # keep test ids, so that lists of deselected tests and recorded durations match
    # DeepSpeed's tests/conftest.py closes the pools in this dictionary; ranks here belong to the rank server instead.
    _pool_cache: ClassVar[dict[int, Any]] = {}

    @classmethod
    def _rank_settings(cls) -> DistributedSettings:
        """Return those attributes of the class that the ranks need."""
        return DistributedSettings(cls.backend, cls.init_distributed, cls.set_dist_env, cls.requires_cuda_env)


class DistributedTest(DistributedExec):
    """Base class of tests that run, with their fixtures, on ``world_size`` ranks.

    ``world_size`` is a number or a list of numbers. ``@pytest.mark.world_size(N)`` on a method overrides the attribute,
    and so does a test parameter named ``world_size``. All ranks of a test and of its DistributedFixtures share the
    directories ``tmpdir`` and ``tmp_path``; all tests of the class share the directory ``class_tmpdir``.
    """

    pytestmark: ClassVar[list[pytest.MarkDecorator | pytest.Mark]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Add a pytest marker to the class for each attribute that differs from the base class's attribute."""
        super().__init_subclass__(**kwargs)
        base = next(ancestor for ancestor in cls.__mro__[1:] if issubclass(ancestor, DistributedTest))
        own_marks = cls.__dict__.get("pytestmark", [])
        base_marks = {} if base is DistributedTest else class_markers(base)
        new_marks = [mark for name, mark in class_markers(cls).items() if base_marks.get(name) != mark]
        if "isolation" in base_marks and "isolation" not in class_markers(cls):
            new_marks.append(pytest.mark.isolation("fresh"))
        # The last marker of a class counts, so put the class's own markers last. pytest adds those of base classes.
        cls.pytestmark = [*new_marks, *(own_marks if isinstance(own_marks, Sequence) else [own_marks])]

    @pytest.fixture(autouse=True)
    @staticmethod
    def _prepared_rank(request: pytest.FixtureRequest) -> Iterator[None]:
        """Prepare the rank as the attributes of the test class require, for the duration of the test."""
        # On the ranks of a DistributedFixture, the fixture itself prepares the rank with its own settings.
        if request.node.stash.get(remote_fixtures.RUNNING_FIXTURE, ""):
            yield
            return
        isolation, _ = parse_isolation(request.node)
        with prepare_rank(request.cls._rank_settings(), is_pooled=isolation is Isolation.POOLED):
            yield

    @pytest.fixture(scope="class")
    @staticmethod
    def class_tmpdir(request: pytest.FixtureRequest, tmpdir_factory: Any) -> Any:
        """Return a directory that is shared by all tests of the class and their DistributedFixtures, on all ranks."""
        return to_py_path(class_directory(request), tmpdir_factory)

    @pytest.fixture
    @staticmethod
    def tmp_path(request: pytest.FixtureRequest) -> Path:
        """Return a directory that all ranks of the test share."""
        return test_directory(request)

    @pytest.fixture
    @staticmethod
    def tmpdir(tmp_path: Path, tmpdir_factory: Any) -> Any:
        """Return ``tmp_path`` as a ``py.path.local``, the type of pytest's own ``tmpdir``."""
        return to_py_path(tmp_path, tmpdir_factory)


def to_py_path(path: Path, tmpdir_factory: Any) -> Any:
    """Convert ``path`` to ``py.path.local``. pytest does not export the type, so ``tmpdir_factory`` supplies it."""
    return type(tmpdir_factory.getbasetemp())(path)


def class_markers(cls: type[DistributedTest]) -> dict[str, pytest.MarkDecorator]:
    """Translate the attributes of a DistributedTest into pytest markers; return the markers by name."""
    size = cls.world_size
    marks = {
        "rank_timeout": pytest.mark.rank_timeout(cls.exec_timeout),
        "collectives": pytest.mark.collectives("trusted"),  # DeepSpeed's classes do not compare collectives either
    }
    if size is not None:
        marks["world_size"] = pytest.mark.world_size(*dict.fromkeys([size] if isinstance(size, int) else size))
    if cls.reuse_dist_env and not REUSE_DIST_ENV_DISABLED:
        marks["isolation"] = pytest.mark.isolation("pooled", group="kept" if cls.init_distributed else "none")
    elif not cls.init_distributed:
        marks["isolation"] = pytest.mark.isolation("fresh", group="none")
    if DEEPSPEED_INSTALLED and not deepspeed_engine.is_installed():
        marks["warm"] = pytest.mark.warm("deepspeed")
    return marks


class DistributedFixture(DistributedExec):
    """Base class of fixtures that call ``run`` on ``world_size`` ranks of their own before the test.

    A test requests the fixture by the name of the class, or a fixture that calls the class, and ``run`` is called once
    for each such test. The parameters of ``run`` are the names of other fixtures. The return value of ``run`` is
    ignored: ``run`` passes data to the test as files in ``tmpdir`` or ``class_tmpdir``. A class whose ``world_size`` is
    None defines no fixture; it serves as a base class.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Define a pytest fixture in the class's module. Raises UsageError unless ``world_size`` is one integer."""
        super().__init_subclass__(**kwargs)
        if cls.world_size is None:
            return
        if isinstance(cls.world_size, bool) or not isinstance(cls.world_size, int) or cls.world_size < 1:
            raise UsageError(
                f"{cls.__qualname__}: got world_size {cls.world_size!r}; a DistributedFixture takes one whole number"
            )
        group = GroupMode.DEFAULT if cls.init_distributed else GroupMode.NONE
        remote = remote_fixtures.RemoteFixture(cls.__name__, cls.world_size, group, cls.exec_timeout)
        # pytest finds fixtures among the attributes of a module, where the class itself already has its own name.
        module = sys.modules[cls.__module__]
        fixture = remote_fixtures.define_remote_fixture(cls._rank_function(), remote, cls)
        setattr(module, f"fixture_{cls.__name__}", fixture)

    @classmethod
    def _rank_function(cls) -> Any:
        """Return the function that each rank calls: it prepares the rank and passes its own parameters to ``run``."""
        run = cls.run.__get__(cls())

        def run_in_ranks(**fixtures: Any) -> None:
            # No docstring: the docstring of the class is assigned below.
            with prepare_rank(cls._rank_settings()):
                run(**fixtures)

        run_in_ranks.__doc__ = cls.__doc__
        run_in_ranks.__wrapped__ = run  # type: ignore[attr-defined]  # inspect.signature returns the signature of run
        return run_in_ranks

    def run(self, **fixtures: Any) -> None:
        """Do the work of the fixture on each of its ranks; subclasses override this method."""
        raise NotImplementedError(
            f"{type(self).__name__} has no method run, which every DistributedFixture has to define"
        )

    def __call__(self, request: pytest.FixtureRequest) -> None:
        """Do nothing in the setup of a test's fixture, before which ``run`` was called; elsewhere, raise UsageError.

        A rank cannot start ranks, so ``run`` is called before the test if the call can be found in advance.
        """
        remote_fixtures.check_call(type(self), request)
