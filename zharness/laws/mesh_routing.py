"""Define the law mesh.routing: a gate with random weights chooses the same experts on every mesh.

A choice that differs from plain PyTorch's is no rounding error, unless the scores of two experts are nearly equal. So
the judge first computes the difference of the two best scores of each token, and how much rounding can change it. If
rounding could change a choice, the cell is undetermined.
"""

from __future__ import annotations

from collections.abc import Iterator

from zharness.device.float32_products import Float32Products
from zharness.law_kit.judge_context import JudgeContext
from zharness.laws.mesh import judge_mean_gradient, mesh_law, observe_mean_gradient
from zharness.parity import Comparison, Part, Tier
from zharness.parity.bounds import gamma
from zharness.workload.random_routed import SUMMED_TERMS, compute_gate_logits


def judge_routing(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the mean gradient by tier C, unless rounding may choose another expert for a token."""
    tie = describe_near_tie(ctx)
    if not tie:
        yield from judge_mean_gradient(ctx)
        return
    place = ctx.location("moe.gate.weight", Part.LOCAL_GRADIENT)
    yield Comparison(Tier.CALIBRATED, 0.0, float("inf"), elements=1, undetermined=1, note=tie, location=place)


def describe_near_tie(ctx: JudgeContext) -> str:
    """Return a text that names a token whose expert rounding may change, or "" if every choice is certain."""
    model = ctx.baseline.build_module()
    # Each of the two layers multiplies two factors, which TF32 rounds, or truncates in some kernels.
    factors = (1 + ctx.baseline.eps) ** 4 if ctx.baseline.products is Float32Products.TF32 else 1.0
    relative_error = (1 + gamma(SUMMED_TERMS, ctx.dtype)) * factors - 1
    for coordinate in range(ctx.data_size):
        logits = compute_gate_logits(model, ctx.baseline.batch(coordinate, 0).inputs)
        near = logits.find_near_tie(relative_error)
        if near is not None:
            return (
                f"a tie could flip: two experts of token {near.token} of micro-batch {coordinate} are "
                f"{near.margin:.1e} apart, and rounding changes that by up to {near.error:.1e}; use another --seed"
            )
    return ""


LAWS = (
    mesh_law(
        "routing",
        "a gate with random weights chooses plain PyTorch's expert for each token, and the mean gradient is as close "
        "to float64 as torch's",
        observe_mean_gradient,
        judge_routing,
        kept_because="the only law in which random scores choose experts, with a check for near ties",
        models=("random_routed",),
        tier=Tier.CALIBRATED,
    ),
)
