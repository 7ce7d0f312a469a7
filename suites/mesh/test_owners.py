"""A weight that the wrong number of ranks own is named by the axis along which they are too many or too few."""

from __future__ import annotations

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
    ("rep2", 4, 2, GATE, (0, 3), []),
    ("tp2", 4, 1, GATE, (1, 2), []),
    ("tp2", 4, 1, GATE, (0, 2), ["2 along dp_shard instead of 1", "1 along tp instead of 2"]),
    ("cp2", 4, 1, GATE, (0, 1), ["2 along cp instead of 1"]),
    ("cp2", 4, 0, GATE, (0, 1, 2, 3), []),
    ("cp2", 4, 0, GATE, (0, 2), ["1 along cp instead of 2"]),
    ("ep2", 2, 0, EXPERT, (1,), []),
    ("ep2", 2, 0, EXPERT, (0, 1), ["2 along ep instead of 1"]),
    ("ep2", 2, 0, EXPERT, (), ["0 along ep instead of 1"]),
    ("ep2", 4, 0, EXPERT, (1, 3), []),
    ("ep2", 4, 0, EXPERT, (0, 1, 2, 3), ["4 along dp_shard instead of 2", "2 along ep instead of 1"]),
    ("ep2", 4, 1, EXPERT, (1, 3), ["2 along dp_shard instead of 1"]),
]


@pytest.mark.parametrize(("text", "world_size", "stage", "name", "owners", "wrong"), CASES)
def test_each_axis_with_too_many_or_too_few_owners_is_named(
    text: str, world_size: int, stage: int, name: str, owners: tuple[int, ...], wrong: list[str]
) -> None:
    mesh = Mesh.parse(text)
    baseline = Baseline(model_spec("routed"), 0, mesh.data_size(world_size))
    ctx = JudgeContext(baseline, (RankEvidence((), {}),) * world_size, torch.float32, mesh=mesh)
    counts = count_owners(ctx, stage, name, (4, 4))
    _, marks = mark_owners(16, [((3, 8),) if rank in owners else ((0, 3),) for rank in range(world_size)])
    found = {axis: int(count_along(ctx, axis, marks, counts[axis])[1]) for axis in list_axes(ctx)}
    assert list(iter_wrong_axes(counts, found)) == wrong
