"""Name the pools of ranks on which cells run."""

from __future__ import annotations

from typing import NamedTuple

from zharness.cell import Cell
from zharness.engines.engine_info import PoolScope
from zharness.engines.registry import info
from zharness.run.configuration import is_config_file
from zharness.workload.user_model import is_user_model, parse_user_model_name
from zharness.world import Isolation


class RankPool(NamedTuple):
    """A pool of ranks, on which the cells of one engine, world size, mesh, configuration file and factory run.

    The pool of an engine with PoolScope.STAGE runs only the cells of one stage.
    """

    engine: str
    world_size: int
    name: str


def rank_pool(cell: Cell) -> RankPool:
    """Return the pool whose ranks run ``cell``, unless the cell runs on fresh ranks."""
    stage = f"stage {cell.stage}" if info(cell.engine).pool_scope is PoolScope.STAGE else "all stages"
    name = f"{stage} {cell.mesh.label} {pool_variant(cell.engine_variant)} {factory_path(cell.model)}"
    return RankPool(cell.engine, cell.world_size, name)


def pool_variant(engine_variant: str) -> str:
    """Return the part of a pool's name for an engine variant: the path of a configuration file, or ''.

    Cells with named options share ranks with cells without options, because a covering array has hundreds of settings.
    A cell that fails on pooled ranks runs again on fresh ranks.
    """
    return engine_variant if is_config_file(engine_variant) else ""


def factory_path(model: str) -> str:
    """Return the path of a user model's factory, or an empty string for a model of the workload.

    Cells of different factories must not share a process: importing a factory may change global state.
    """
    return parse_user_model_name(model)[0] if is_user_model(model) else ""


def name_pool(cell: Cell, isolation: Isolation) -> str:
    """Return the name of a cell's pool on its rank server.

    Cells that are expected to raise share a pool of their own, because an error may leave state in the process that
    changes the outcome of a passing cell. A cell of this pool that does not fail as expected runs again on fresh ranks.
    """
    name = rank_pool(cell).name
    return f"{name} after errors" if isolation is Isolation.POOLED_AFTER_ERRORS else name
