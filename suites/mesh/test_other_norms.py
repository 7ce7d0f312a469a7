"""A wrong norm on a mesh is named by the axis whose ranks it counts repeatedly, or whose coordinate it is of."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from zharness.engines.protocol import Piece
from zharness.law_kit.clipping import hint_norm_on_mesh
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.other_norms import iter_other_norms
from zharness.law_kit.training_run import total_norm_and_bound
from zharness.mesh import Mesh, find_chunk
from zharness.parity import Part, compare_within_bound
from zharness.parity.baseline import Baseline
from zharness.parity.snapshot import RankEvidence
from zharness.workload import model_spec

EXPERT, SHARED = "moe.experts.0.weight", "moe.gate.weight"
GRADS = {EXPERT: torch.arange(1.0, 9.0), SHARED: torch.arange(3.0, 11.0)}
ZERO = {EXPERT: ("dp_shard",), SHARED: ("dp_shard",)}  # the axes that split each gradient
SPLIT_BY_TENSOR = {EXPERT: ("tp", "dp_shard"), SHARED: ("dp_shard",)}
SPLIT_EXPERTS = {EXPERT: ("ep",), SHARED: ("dp_shard",)}
TIED: Mapping[str, tuple[str, ...]] = {EXPERT: ("pp",), SHARED: ()}
BY_TENSOR_ALONE: Mapping[str, tuple[str, ...]] = {EXPERT: ("tp",), SHARED: ()}

REPLICAS = [
    ("rep2", 4, ZERO, (2, 2), "what 2 ranks of dp_replicate have in common 2 times"),
    ("rep4", 4, ZERO, (4, 4), "what 4 ranks of dp_replicate have in common 4 times"),
    ("tp2", 4, SPLIT_BY_TENSOR, (1, 2), "what 2 ranks of tp have in common 2 times"),
    ("cp2", 4, dict.fromkeys(GRADS, ("dp_shard", "cp")), (2, 2), "what 2 ranks of cp have in common 2 times"),
    ("ep2", 2, SPLIT_EXPERTS, (1, 2), "what 2 ranks of ep have in common 2 times"),
    ("pp2", 2, TIED, (1, 2), "what 2 ranks of pp have in common 2 times"),
    ("tp2", 4, BY_TENSOR_ALONE, (2, 2), "what 2 ranks of dp_shard have in common 2 times"),
    (
        "rep2.tp2",
        8,
        SPLIT_BY_TENSOR,
        (2, 4),
        "what 2 ranks of dp_replicate have in common 2 times and what 2 ranks of tp have in common 2 times",
    ),
    (
        "rep2.cp2",
        8,
        ZERO,
        (2, 2),
        "what 2 ranks of dp_replicate have in common 2 times, or what 2 ranks of cp have in common 2 times",
    ),
]


def make_context(mesh: Mesh, world_size: int, axes: Mapping[str, tuple[str, ...]]) -> JudgeContext:
    """Return a context in whose layout ``axes``, outermost first, split each gradient."""

    def find_piece(rank: int, name: str) -> Piece:
        span = range(GRADS[name].numel())
        sizes = {**mesh.shape(world_size), "ep": mesh.size("ep")}
        for axis in axes[name]:
            span = find_chunk(span, sizes[axis], mesh.coordinates(rank, world_size)[axis])
        return Piece(rank, span.start, span.stop)

    layout = {name: tuple(find_piece(rank, name) for rank in range(world_size)) for name in GRADS}
    baseline = Baseline(model_spec("routed"), 0, mesh.data_size(world_size))
    return JudgeContext(baseline, (RankEvidence((), layout),) * world_size, torch.float32, mesh=mesh)


def name_norm(ctx: JudgeContext, norm: Tensor) -> str | None:
    """Return the hint for an engine's norm, or None if it is right."""
    right, error = total_norm_and_bound(GRADS)
    comparison = compare_within_bound(ctx.location("norm", Part.REDUCTION), right, norm, error)
    mismatch = hint_norm_on_mesh(ctx, comparison, GRADS).mismatch
    return None if mismatch is None else mismatch.hint


@pytest.mark.parametrize(("mesh", "world_size", "axes", "times", "words"), REPLICAS)
def test_a_norm_that_counts_replicas_is_named_by_their_axis(
    mesh: str, world_size: int, axes: Mapping[str, tuple[str, ...]], times: tuple[int, int], words: str
) -> None:
    ctx = make_context(Mesh.parse(mesh), world_size, axes)
    squares = [count * grad.double().square().sum() for count, grad in zip(times, GRADS.values(), strict=True)]
    assert name_norm(ctx, torch.stack(squares).sum().sqrt().float()) == f"it counts {words}"
    right, error = total_norm_and_bound(GRADS)
    assert name_norm(ctx, right.float()) is None
    assert name_norm(ctx, right.float() * 1.01) == "", "a norm of nothing that is known"
    repeated = [norm.value for norm in iter_other_norms(ctx, GRADS) if norm.meaning.startswith("counts ")]
    assert all(abs(value - float(right)) > float(error) for value in repeated)


def test_a_norm_of_one_coordinate_or_the_mean_of_those_is_named() -> None:
    ctx = make_context(Mesh.parse("tp2"), 4, SPLIT_BY_TENSOR)
    halves = [torch.cat([half, GRADS[SHARED]]).double().norm() for half in GRADS[EXPERT].chunk(2)]
    assert name_norm(ctx, halves[1].float()) == "it is the norm of what the ranks of tp 1 have"
    mean = torch.stack(halves).mean().float()
    assert name_norm(ctx, mean) == "it is the mean of the norms of what the coordinates of tp have"


def test_experts_of_one_coordinate_count_with_all_that_its_ranks_share() -> None:
    ctx = make_context(Mesh.parse("ep2"), 2, SPLIT_EXPERTS)
    own = torch.cat([GRADS[EXPERT][:4], GRADS[SHARED]]).norm()
    assert name_norm(ctx, own) == "it is the norm of what the ranks of ep 0 have"


def test_a_world_without_named_axes_has_no_such_hint() -> None:
    assert name_norm(make_context(Mesh(), 2, dict.fromkeys(GRADS, ())), torch.tensor(1.0)) == ""
