"""Define functions that several laws of the group ``resources`` use."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from zharness.engines.protocol import Engine, Feature
from zharness.errors import EngineContractError
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.observed_collectives import split_shapes
from zharness.law_kit.rank_context import RankContext
from zharness.mesh import CONTEXT, DATA_SHARD, REPLICATE, TENSOR
from zharness.parity import Comparison, Tier

T = TypeVar("T")

ACCUMULATIONS = (1, 2, 3)


def require_observation(engine: Engine, attribute: str, kind: type[T]) -> T:
    """Return an attribute of ``engine.observe()``.

    Raise EngineContractError if the attribute is absent although the engine claims it.
    """
    observed = getattr(engine.observe(), attribute)
    if not isinstance(observed, kind):
        raise EngineContractError(
            f"engine.observe() returned no {attribute}: {observed.reason}; expected {kind.__qualname__}"
        )
    return observed


def record_stage(ctx: RankContext) -> None:
    """Record the stage for the judge, whose formulas depend on it."""
    ctx.record("case", {"stage": torch.tensor(ctx.config.stage)})


def read_stage(ctx: JudgeContext) -> int:
    """Return the stage that ``record_stage`` recorded."""
    return int(ctx.rank_records("case")[0]["stage"])


@dataclass(frozen=True)
class Division:
    """The parts of the parameters that one tp rank holds, and the numbers of shards and copies of these parts.

    ``shapes`` maps a parameter's name to the shape of its part. ``ranks`` are the ranks with this coordinate of tp.
    """

    shapes: Mapping[str, tuple[int, ...]]
    ranks: tuple[int, ...]
    shards: int
    copies: int

    @property
    def sizes(self) -> list[int]:
        """Return the number of elements of each part."""
        return [math.prod(shape) for shape in self.shapes.values()]


def divide_parameters(ctx: JudgeContext) -> list[Division]:
    """Return how the cell's mesh divides the parameters of the model, for each coordinate of tp."""
    axes = ctx.mesh.shape(ctx.world_size)
    shapes = {name: p.shape for name, p in ctx.baseline.build_module().named_parameters()}
    coordinates = [ctx.mesh.coordinates(rank, ctx.world_size)[TENSOR] for rank in range(ctx.world_size)]
    return [
        Division(
            split_shapes(shapes, ctx.baseline.spec.tp_plan, axes[TENSOR], at),
            tuple(rank for rank, coordinate in enumerate(coordinates) if coordinate == at),
            axes[DATA_SHARD] * axes[CONTEXT],
            axes[REPLICATE],
        )
        for at in range(axes[TENSOR])
    ]


def two_largest_modules_bytes(division: Division) -> float:
    """Return the bytes of the parameters in the two largest modules; parameters of submodules do not count."""
    modules: Counter[str] = Counter()
    for name, size in zip(division.shapes, division.sizes, strict=True):
        modules[name.rpartition(".")[0]] += size
    return 4.0 * sum(sorted(modules.values())[-2:])


JudgeFunction = Callable[[JudgeContext], Iterator[Comparison]]


def resource_law(
    name: str,
    statement: str,
    observe: Callable[[RankContext], None],
    judge: JudgeFunction,
    *features: Feature,
    **law_fields: Any,
) -> Law:
    """Build a law of the group ``resources``; ``law_fields`` are further fields of Law.

    The model is in fp32, because the formulas count four bytes for each element.
    """
    fields = {
        "models": ("mlp",),
        "variants": (Variant(compares_engine_with_itself=True),),
        "dtypes": ("fp32",),
        "weights_stay_integers": False,
        **law_fields,
    }
    return Law(
        f"resources.{name}",
        statement,
        Tier.EXACT,
        observe=observe,
        judge=judge,
        features=features,
        **fields,
    )
