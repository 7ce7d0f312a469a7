"""Define the law training.muon: each step of Muon works on whole matrices, also if they are sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zharness.engines.protocol import Feature, OptimizerSpec
from zharness.law_kit.hints import add_hint, hint_unmoved
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.law_steps import LawSteps
from zharness.law_kit.optimizer_step import RecordedStep, compare_ranks_after_step
from zharness.law_kit.rank_context import RankContext
from zharness.mesh import TENSOR
from zharness.parity import Comparison, Mismatch, Part, Tier, compare_bitwise, compare_within_bound
from zharness.parity.bounds import unit_roundoff
from zharness.parity.comparison import TensorLocation
from zharness.parity.muon import MOMENTUM, MUON_STEPS, MuonStep, bound_step

MUON = OptimizerSpec("muon", {"lr": 2.0**-5, "momentum": 0.75, "weight_decay": 0.5})

STEPS = 3

LOST_MOMENTUM_HINT = "the rank that owns it used nothing of the momentum of earlier steps"
OWN_PART_HINT = "each rank of tp orthogonalized its own part of the matrix"


def observe_muon(ctx: RankContext) -> None:
    """Train several steps with Muon."""
    engine = ctx.build_engine(optimizer=MUON)
    for step in range(STEPS):
        ctx.record_training_state(engine, step)
        ctx.train(engine, step)
        engine.step()
        engine.zero_grad()
    ctx.record_training_state(engine, STEPS)
    engine.close()


def judge_muon(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare every step bitwise with one definition of Muon, the same definition for all weights and steps.

    The judge uses plain PyTorch's gradients, because an engine may store its update in the gradients. If a matrix is
    sharded and no definition fits, the engine may compute norms from shards, so weights are compared within a bound. If
    no definition fits and no matrix is sharded, the comparisons with torch.optim are yielded. Momentum that the engine
    does not report is compared last, so that it hides no wrong weight.
    """
    steps = list(list_steps(ctx, [average_gradients(ctx, step) for step in range(STEPS)]))
    by_definition = [list(compare_steps(ctx, definition, steps)) for definition in MUON_STEPS.values()]
    fitting = [comparisons for comparisons in by_definition if all(each.mismatch is None for each in comparisons)]
    if not fitting and any(len(pieces) > 1 for pieces in ctx.evidence[0].layout.values()):
        fitting.append(list(compare_steps_within_bounds(ctx, steps)))
    yield from (fitting or by_definition)[0]
    yield from compare_missing_momentum(ctx, steps)
    for step in range(1, STEPS + 1):
        yield from compare_ranks_after_step(ctx, RecordedStep(step))


def average_gradients(ctx: JudgeContext, step: int) -> dict[str, Tensor]:
    """Return the mean over ranks of plain PyTorch's gradients, which are integers."""
    local = [result.grads for result in ctx.compute_local_grads(step)]
    return {name: torch.stack([grads[name] for grads in local]).sum(dim=0) / len(local) for name in local[0]}


@dataclass(frozen=True)
class MatrixStep:
    """The recorded weight and momentum of one matrix before and after a step, and the gradient of the step.

    ``momentum`` and ``momentum_after`` are None if the engine does not report momentum.
    """

    step: int
    name: str
    grad: Tensor
    weight: Tensor
    momentum: Tensor | None
    weight_after: Tensor
    momentum_after: Tensor | None


def list_steps(ctx: JudgeContext, grads: list[dict[str, Tensor]]) -> Iterator[MatrixStep]:
    """Yield each step of each matrix. The momentum before the first step is zeros."""
    for step in range(STEPS):
        before, after = (ctx.rank_records("masters", at)[0] for at in (step, step + 1))
        old_state, new_state = (ctx.rank_records("state", at)[0] for at in (step, step + 1))
        for name, weight in before.items():
            key = f"{name}/{MOMENTUM}"
            momentum = old_state.get(key) if step else torch.zeros_like(weight)
            yield MatrixStep(step, name, grads[step][name], weight, momentum, after[name], new_state.get(key))


def compare_steps(ctx: JudgeContext, definition: MuonStep, steps: Sequence[MatrixStep]) -> Iterator[Comparison]:
    """Compare weights and momentum after each step with ``definition``, which starts from the engine's own numbers.

    If the engine reports no momentum, the judge uses the momentum of ``definition`` after the previous step.
    """
    momenta: dict[str, Tensor] = {}
    for matrix_step in steps:
        momentum = momenta[matrix_step.name] if matrix_step.momentum is None else matrix_step.momentum
        expected = definition(matrix_step.weight, matrix_step.grad, momentum, MUON.args)
        momenta[matrix_step.name] = expected.momentum
        yield from compare_momentum(ctx, matrix_step, expected.momentum)
        comparison = compare_bitwise(locate(ctx, matrix_step), expected.weight, matrix_step.weight_after)
        yield hint_wrong_weight(ctx, comparison, matrix_step)


def compare_steps_within_bounds(ctx: JudgeContext, steps: Sequence[MatrixStep]) -> Iterator[Comparison]:
    """Compare the momentum after each step bitwise, and the weights within the rounding of Newton-Schulz."""
    beta = MUON.args["momentum"]
    momenta: dict[str, Tensor] = {}
    for matrix_step in steps:
        momentum = momenta[matrix_step.name] if matrix_step.momentum is None else matrix_step.momentum
        momenta[matrix_step.name] = momentum.lerp(matrix_step.grad, 1 - beta)
        yield from compare_momentum(ctx, matrix_step, momenta[matrix_step.name])
        update = matrix_step.grad.lerp(momenta[matrix_step.name], beta)
        expected, error = bound_step(matrix_step.weight, update, MUON.args, len(ctx.evidence))
        change = expected - matrix_step.weight.double()
        comparison = compare_within_bound(
            locate(ctx, matrix_step), expected, matrix_step.weight_after, error, signal=change
        )
        yield hint_wrong_weight(ctx, comparison, matrix_step)


def compare_momentum(ctx: JudgeContext, matrix_step: MatrixStep, expected: Tensor) -> Iterator[Comparison]:
    """Compare the momentum after a step bitwise with ``expected``, if the engine reports it."""
    if matrix_step.momentum_after is not None:
        yield compare_bitwise(locate(ctx, matrix_step, f"/{MOMENTUM}"), expected, matrix_step.momentum_after)


def compare_missing_momentum(ctx: JudgeContext, steps: Sequence[MatrixStep]) -> Iterator[Comparison]:
    """Yield a mismatch for each momentum that the engine does not report after a step."""
    for matrix_step in steps:
        if matrix_step.momentum_after is None:
            nothing = torch.full_like(matrix_step.weight, torch.nan)
            comparison = compare_bitwise(
                locate(ctx, matrix_step, f"/{MOMENTUM}"), torch.zeros_like(matrix_step.weight), nothing
            )
            yield add_hint(comparison, "the engine reports no momentum of this parameter")


def hint_wrong_weight(ctx: JudgeContext, comparison: Comparison, matrix_step: MatrixStep) -> Comparison:
    """Add a hint to a mismatch of a weight if a known error explains the weight after the step."""
    if comparison.mismatch is None:
        return comparison
    if is_moved_by_gradient(matrix_step):
        return add_hint(comparison, "the step used the gradient itself, which nothing orthogonalized")
    if matrix_step.step == 0 and any(
        is_partly_reduced(ctx, matrix_step, definition) for definition in MUON_STEPS.values()
    ):
        return add_hint(comparison, "each rank orthogonalized a matrix of which only its own part was reduced")
    if any(is_orthogonalized_in_parts(ctx, matrix_step, definition) for definition in MUON_STEPS.values()):
        return add_hint(comparison, OWN_PART_HINT)
    part = find_owned_part(ctx, matrix_step, comparison.mismatch)
    if matrix_step.step > 0 and any(
        is_without_momentum(matrix_step, definition, part) for definition in MUON_STEPS.values()
    ):
        return add_hint(comparison, LOST_MOMENTUM_HINT)
    return hint_unmoved(comparison, matrix_step.weight, matrix_step.weight_after)


def is_moved_by_gradient(matrix_step: MatrixStep) -> bool:
    """Return whether the step subtracted the gradient, as SGD does."""
    rate = MUON.args["lr"]
    decayed = matrix_step.weight.double() * (1 - rate * MUON.args["weight_decay"])
    moved = rate * matrix_step.grad.double()
    rounding = 4 * unit_roundoff(matrix_step.weight.dtype) * (decayed.abs() + moved.abs())
    return bool(((matrix_step.weight_after.double() - (decayed - moved)).abs() <= rounding).all())


def is_without_momentum(matrix_step: MatrixStep, definition: MuonStep, part: slice) -> bool:
    """Return whether the step changed a part of the matrix as if the momentum before the step was zero."""
    update = definition(matrix_step.weight, matrix_step.grad, torch.zeros_like(matrix_step.weight), MUON.args)
    return torch.equal(update.weight.flatten()[part], matrix_step.weight_after.flatten()[part])


def find_owned_part(ctx: JudgeContext, matrix_step: MatrixStep, mismatch: Mismatch) -> slice:
    """Return the elements of the matrix that the wrong element's owner holds, or all if no rank owns the element."""
    at = int(torch.arange(matrix_step.weight.numel()).view_as(matrix_step.weight)[mismatch.index])
    pieces = ctx.evidence[0].layout.get(matrix_step.name, ())
    return next((slice(piece.start, piece.stop) for piece in pieces if piece.start <= at < piece.stop), slice(None))


def is_partly_reduced(ctx: JudgeContext, matrix_step: MatrixStep, definition: MuonStep) -> bool:
    """Return whether in the first step each rank used only its own share of the mean in the parts of other ranks."""
    pieces = ctx.evidence[0].layout.get(matrix_step.name, ())
    local = [result.grads[matrix_step.name] for result in ctx.compute_local_grads(matrix_step.step)]
    for piece in pieces:
        part = slice(piece.start, piece.stop)
        grad = local[ctx.data_coordinate(piece.rank)] / len(local)
        grad.view(-1)[part] = matrix_step.grad.flatten()[part]
        update = definition(matrix_step.weight, grad, torch.zeros_like(grad), MUON.args)
        if not torch.equal(update.weight.flatten()[part], matrix_step.weight_after.flatten()[part]):
            return False
    return len(pieces) > 1 and len(local) > 1


def is_orthogonalized_in_parts(ctx: JudgeContext, matrix_step: MatrixStep, definition: MuonStep) -> bool:
    """Return whether the step treated each part of the matrix on a tp rank as a separate matrix."""
    parts = list_tensor_parts(ctx, matrix_step)
    if matrix_step.momentum is None or len(parts) < 2:
        return False
    for part in parts:
        update = definition(matrix_step.weight[part], matrix_step.grad[part], matrix_step.momentum[part], MUON.args)
        if not torch.equal(update.weight, matrix_step.weight_after[part]):
            return False
    return True


def list_tensor_parts(ctx: JudgeContext, matrix_step: MatrixStep) -> list[tuple[slice, slice]]:
    """Return the rows and columns of the matrix that the ranks at each coordinate of tp own."""
    owned = torch.zeros(ctx.mesh.size(TENSOR), matrix_step.weight.numel(), dtype=torch.bool)
    for piece in ctx.evidence[0].layout.get(matrix_step.name, ()):
        owned[ctx.mesh.coordinates(piece.rank, ctx.world_size)[TENSOR], piece.start : piece.stop] = True
    found = []
    for part in owned.view(-1, *matrix_step.weight.shape):
        places = part.nonzero()
        if len(places):
            (top, left), (bottom, right) = (edge.tolist() for edge in (places.amin(dim=0), places.amax(dim=0)))
            found.append((slice(top, bottom + 1), slice(left, right + 1)))
    return found if len(set(map(str, found))) > 1 else []


def locate(ctx: JudgeContext, matrix_step: MatrixStep, key: str = "") -> TensorLocation:
    """Return the location of a matrix after its step or, with ``key``, of an entry of its optimizer state."""
    return ctx.location(matrix_step.name + key, Part.OPTIMIZER, matrix_step.step)


LAWS = (
    Law(
        name="training.muon",
        statement="a step of Muon scales the momentum by the norm of the whole matrix, bitwise as plain PyTorch does",
        tier=Tier.EXACT,
        models=("matrices", "dense_matrices"),
        observe=observe_muon,
        judge=judge_muon,
        features=(Feature.MUON,),
        weights_stay_integers=False,
        dtypes=("fp32",),
        variants=(Variant(compares_engine_with_itself=True),),
        steps=LawSteps(observe_muon),
        kept_because="the only optimizer whose update of a shard depends on the norm of the other shards",
    ),
)
