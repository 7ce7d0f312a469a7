"""Each element of a weight has the owners that stage, axes and plan give it, and other ones are named by their axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product

import pytest
import torch

from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.other_norms import list_axes
from zharness.law_kit.owners import count_along, count_owners, iter_wrong_axes, mark_owners
from zharness.mesh import Mesh
from zharness.parity.baseline import Baseline
from zharness.parity.snapshot import RankEvidence
from zharness.workload import model_spec

EXPERT, GATE = "moe.experts.0.linear.weight", "moe.gate.weight"
# Mesh, number of ranks, stage, parameter, the ranks that own an element of it, and the axes that are wrong.
CASES = [
    ("rep2", 4, 2, GATE, (0, 2), []),
    ("rep2", 4, 2, GATE, (0, 1), ["1 along dp_replicate instead of 2", "2 along dp_shard instead of 1"]),
    ("rep2", 4, 2, GATE, (0, 1, 2, 3), ["2 along dp_shard instead of 1"]),
    ("rep2", 4, 2, GATE, (0,), ["1 along dp_replicate instead of 2"]),
    ("rep2", 4, 2, GATE, (0, 3), ["2 along dp_shard instead of 1"]),
    ("tp2", 4, 1, GATE, (1, 2), []),
    ("tp2", 4, 1, GATE, (0, 2), ["2 along dp_shard instead of 1", "1 along tp instead of 2"]),
    ("cp2", 4, 1, GATE, (0, 1), ["2 along cp instead of 1"]),
    ("cp2", 4, 0, GATE, (0, 1, 2, 3), []),
    ("cp2", 4, 0, GATE, (0, 2), ["1 along cp instead of 2"]),
    ("ep2", 2, 0, EXPERT, (1,), []),
    ("ep2", 2, 0, EXPERT, (0, 1), ["2 along ep instead of 1"]),
    ("ep2", 2, 0, EXPERT, (), ["0 along ep instead of 1"]),
    ("ep2", 4, 0, EXPERT, (1, 3), []),
    ("ep2", 4, 0, EXPERT, (0, 1, 2, 3), ["2 along ep instead of 1"]),
    ("ep2", 4, 1, EXPERT, (1, 3), ["2 along dp_shard instead of 1"]),
    ("rep2.cp2.tp2", 16, 2, GATE, (0, 1, 8, 9), []),
    (
        # Both copies, and both ranks of tp, have owners, of which no two are neighbours along a split axis.
        "rep2.cp2.tp2",
        16,
        2,
        GATE,
        (0, 6, 9, 15),
        [
            "1 along dp_replicate instead of 2",
            "2 along dp_shard instead of 1",
            "2 along cp instead of 1",
            "1 along tp instead of 2",
        ],
    ),
]
# Mesh, number of ranks, stage, the axes that split GATE, and those that copy it of which each coordinate cuts it alone.
MESHES = [
    ("rep2.cp2.tp2", 16, 2, ("dp_shard", "cp"), ("tp",)),
    ("rep4", 16, 1, ("dp_shard",), ()),
    ("ep2.tp2", 16, 0, (), ()),
    ("ep2.tp2", 16, 1, ("dp_shard",), ("tp",)),
    ("tp4", 8, 1, ("dp_shard",), ("tp",)),
]


def build_context(text: str, world_size: int) -> JudgeContext:
    """Return the context of a judge on a mesh; no rank has evidence."""
    mesh = Mesh.parse(text)
    baseline = Baseline(model_spec("routed"), 0, mesh.data_size(world_size))
    return JudgeContext(baseline, (RankEvidence((), {}),) * world_size, torch.float32, mesh=mesh)


@pytest.mark.parametrize(("text", "world_size", "stage", "name", "owners", "wrong"), CASES)
def test_each_axis_with_too_many_or_too_few_owners_is_named(
    text: str, world_size: int, stage: int, name: str, owners: tuple[int, ...], wrong: list[str]
) -> None:
    ctx = build_context(text, world_size)
    counts = count_owners(ctx, stage, name, (4, 4))
    _, marks = mark_owners(16, [((3, 8),) if rank in owners else ((0, 3),) for rank in range(world_size)])
    found = {axis: int(count_along(ctx, axis, marks, counts)[1]) for axis in list_axes(ctx)}
    assert list(iter_wrong_axes(counts, found)) == wrong


@pytest.mark.parametrize(("text", "world_size", "stage", "split", "cut_alone"), MESHES)
def test_of_all_sets_of_ranks_those_that_are_whole_copies_are_right(
    text: str,
    world_size: int,
    stage: int,
    split: tuple[str, ...],
    cut_alone: tuple[str, ...],
) -> None:
    ctx = build_context(text, world_size)
    counts = count_owners(ctx, stage, GATE, (4, 4))
    sets = 2**world_size
    owners = torch.tensor([[number >> rank & 1 for number in range(sets)] for rank in range(world_size)]).float()
    is_right = owners.sum(dim=0) == math.prod(counts.values())
    for axis in list_axes(ctx):
        is_right &= count_along(ctx, axis, owners, counts) == counts[axis]
    found = set(is_right.nonzero().flatten().tolist())
    places = [ctx.mesh.coordinates(rank, world_size) for rank in range(world_size)]
    assert found == {sum(2**rank for rank in ranks) for ranks in iter_owners(places, split, cut_alone)}


def iter_owners(
    places: list[Mapping[str, int]], split: tuple[str, ...], cut_alone: tuple[str, ...]
) -> Iterator[list[int]]:
    """Yield the ranks that may own an element: of each coordinate that cuts alone, those at one place of split axes."""
    shards = sorted({tuple(place[axis] for axis in split) for place in places})
    groups = sorted({tuple(place[axis] for axis in cut_alone) for place in places})
    for chosen in product(shards, repeat=len(groups)):
        shard_of = dict(zip(groups, chosen, strict=True))
        yield [
            rank
            for rank, place in enumerate(places)
            if tuple(place[axis] for axis in split) == shard_of[tuple(place[axis] for axis in cut_alone)]
        ]
