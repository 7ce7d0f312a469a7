"""Define the law mesh.routing: experts that a gate of random weights chooses freely, on every mesh.

An expert that is chosen otherwise than in plain PyTorch is no rounding error, unless two experts are as good as tied.
So the judge first computes how far the two best experts of each token are apart, and how far rounding can move them. A
cell in which a tie could flip is undetermined.
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
    """Return which token's expert rounding may change, or "" if the choice of every token is certain."""
    model = ctx.baseline.build_module()
    # Each of the two layers multiplies two factors, which TF32 rounds or, in kernels that do not round, truncates.
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
        "a gate of random weights chooses plain PyTorch's expert for each token, and the mean gradient is as near to "
        "float64 as torch's",
        observe_mean_gradient,
        judge_routing,
        kept_because="the only law of experts whose choice the numbers decide, with a check of ties",
        models=("random_routed",),
        tier=Tier.CALIBRATED,
    ),
)
