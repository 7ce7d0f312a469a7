"""Check an engine against the laws from a test file (``check_engine``) or a program (``run_laws``)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from zharness.engines import EngineFactory
from zharness.errors import UsageError
from zharness.mesh import Mesh
from zharness.releases.rank_environment import prepare_rank_environment
from zharness.run.arguments import require_at_least, require_names, require_tuples
from zharness.run.plan import Request, choose_patterns, plan
from zharness.run.record import Record
from zharness.run.runner import Runner
from zharness.world import Isolation

StringTuple = tuple[str, ...]
IntTuple = tuple[int, ...]


def check_engine(
    factory: EngineFactory | str,
    *,
    laws: StringTuple = (),
    checks: StringTuple = (),
    stages: IntTuple = (),
    world_sizes: IntTuple = (2,),
    dtypes: StringTuple = ("fp32",),
    models: StringTuple = (),
    variant: str = "",
    mesh: str = "",
) -> Callable[[Record], None]:
    """Return a pytest test of the engine ``factory(model, config)``, with one case for each law, model and stage.

    The ids of the cases are cell ids. Bind the test to a name that pytest collects:
    ``test_laws = zharness.check_engine(my_factory, stages=(3,))``.

    ``factory`` is a function or class at the top level of a module, or an engine's name, which may name a release
    (``deepspeed==0.18.8``). ``laws`` are patterns; ``checks`` is an older name of this parameter. An empty tuple
    selects all values; for ``stages``, all stages that the engine claims. ``mesh`` has the axes of parallelism beside
    data parallelism, as the option ``--mesh`` takes them (``"tp2"``). Raises UsageError if ranks cannot import the
    factory, if both ``laws`` and ``checks`` are given, or for a malformed mesh.
    """
    import pytest

    from zharness.run.pytest_cells import describe_problem

    require_request_types(laws, checks, stages, world_sizes, dtypes, models, variant, mesh)
    Mesh.parse(mesh)  # raises UsageError

    @pytest.mark.cells(
        importable_engine_name(factory),
        world_sizes=world_sizes,
        dtypes=dtypes,
        laws=choose_patterns(laws, checks),
        models=models,
        stages=stages,
        variant=variant,
        mesh=mesh,
    )
    def test_the_law_holds(record: Record) -> None:
        """Fail with the cause and the command that runs the cell again, unless the outcome of the cell is expected."""
        assert not describe_problem(record), describe_problem(record)

    return test_the_law_holds


def run_laws(
    factory: EngineFactory | str,
    *,
    laws: StringTuple = (),
    checks: StringTuple = (),
    stages: IntTuple = (),
    world_sizes: IntTuple = (2,),
    dtypes: StringTuple = ("fp32",),
    models: StringTuple = (),
    variant: str = "",
    mesh: str = "",
    timeout: float = 60.0,
) -> list[Record]:
    """Run the cells of ``check_engine`` without pytest, and return the record of every cell.

    ``record.is_expected`` tells whether the outcome of a cell is expected. Call this function before any tensor
    operation of this process, because ranks are forked from this process. ``timeout`` is the time limit for the ranks
    of one cell, in seconds. Raises UsageError for a factory, law, stage, dtype or model that does not exist, for a mesh
    that the engine does not claim or that does not fit the world, or if both ``laws`` and ``checks`` are given.
    """
    require_request_types(laws, checks, stages, world_sizes, dtypes, models, variant, mesh)
    require_at_least(1, timeout=timeout)
    name = importable_engine_name(factory)
    axes = (stages, world_sizes, dtypes, models, variant)
    request = Request(choose_patterns(laws, checks), (name,), *axes, mesh=Mesh.parse(mesh))
    with Runner({name: prepare_rank_environment(name)}, timeout, isolation=Isolation.POOLED) as runner:
        return [runner.run(planned) for planned in plan(request, runner.claims)]


def require_request_types(
    laws: Any, checks: Any, stages: Any, world_sizes: Any, dtypes: Any, models: Any, variant: Any, mesh: Any
) -> None:
    """Raise UsageError for an argument of ``check_engine`` or ``run_laws`` that has another type."""
    require_tuples(str, laws=laws, checks=checks, dtypes=dtypes, models=models)
    require_tuples(int, stages=stages, world_sizes=world_sizes)
    require_names(variant=variant, mesh=mesh)


def importable_engine_name(factory: EngineFactory | str) -> str:
    """Return the name by which ranks import ``factory``. Raises UsageError if ranks cannot import it."""
    if isinstance(factory, str):
        return factory
    module, name = getattr(factory, "__module__", ""), getattr(factory, "__qualname__", "")
    if getattr(sys.modules.get(module), name, None) is not factory:
        raise UsageError(
            f"ranks cannot import the factory {factory!r}; "
            "expected a function or class at the top level of a module, or its path 'package.module:factory'"
        )
    return f"{module}:{name}"
