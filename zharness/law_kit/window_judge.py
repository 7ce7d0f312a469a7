"""Compare the weights that an engine recorded in a window scenario with those of plain PyTorch.

A window scenario trains several accumulation windows. The judge starts each of them from the engine's weights, so the
first wrong step is the one reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from zharness.errors import RoundedScenarioError
from zharness.law_kit.clipped_step import hint_other_norm
from zharness.law_kit.clipping import NO_CLIPPING, ClipFactor, judge_clip_factor
from zharness.law_kit.hints import add_hint, hint_became_nan, hint_unmoved
from zharness.law_kit.judge_context import BoundedGrads, JudgeContext
from zharness.law_kit.record_comparisons import mix_old_weights
from zharness.law_kit.recorded_gradients import densify
from zharness.law_kit.scenario_baseline import make_plain_participant
from zharness.law_kit.scenarios import NamedTensors, Participant
from zharness.law_kit.window_scenarios import WindowScenario, WindowScript, scale_losses
from zharness.parity import Comparison, Part, compare_bitwise, compare_ranks, compare_within_bound
from zharness.parity.attribution import fit_scale, is_unexplained
from zharness.parity.baseline import LocalResult
from zharness.parity.bounds import BoundedTensor
from zharness.parity.compare import check_names
from zharness.parity.comparison import TensorLocation

OLD_WEIGHTS_HINT = "the first forward of the window used the weights from before the last step"
OLD_GRADIENTS_HINT = "it counts the gradients that unused weights had in an earlier step"


@dataclass(frozen=True)
class WindowResult:
    """The results of one accumulation window on the plain model.

    ``grads[micro][rank]`` are the gradients of one micro-batch on one rank, and ``values[micro][rank]`` are the values
    that the script returned there.
    """

    grads: Sequence[Sequence[NamedTensors]]
    values: Sequence[Sequence[NamedTensors]]

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor, in an order that depends only on the script."""
        for row in (*self.grads, *self.values):
            for record in row:
                yield from record.values()


class PlainRanks:
    """The plain models of all ranks, which train every accumulation window in one dtype."""

    def __init__(self, ctx: JudgeContext, scenario: WindowScenario, dtype: torch.dtype) -> None:
        self._scenario = scenario
        self._dtype = dtype
        self._participants = [
            scale_losses(make_plain_participant(ctx.baseline, ctx.variant, rank, dtype, None), scenario, ctx.data_size)
            for rank in range(ctx.data_size)
        ]
        for participant in self._participants:
            scenario.freeze_at_start(participant.module)

    def run_window(
        self, window: int, weights: Mapping[str, Tensor], script: WindowScript | None = None
    ) -> WindowResult:
        """Train one accumulation window from ``weights`` on every rank, and return the gradients and values.

        Without a ``script``, train that of the scenario.
        """
        train = script or self._scenario.train
        for participant in self._participants:
            load_weights(participant, weights)
        rows = [
            [self._train(train, participant, window, micro) for participant in self._participants]
            for micro in range(self._scenario.micro_batches)
        ]
        for action in filter(None, (self._scenario.before_step, self._scenario.after_step)):
            for participant in self._participants:
                action(participant, window)
        return WindowResult(
            [[grads for grads, _ in row] for row in rows], [[values for _, values in row] for row in rows]
        )

    def _train(
        self, train: WindowScript, participant: Participant, window: int, micro: int
    ) -> tuple[NamedTensors, NamedTensors]:
        """Train one micro-batch on one rank, and return its gradients and the values that the script returned."""
        participant.module.zero_grad()
        values = train(participant, window, micro) or {}
        grads = {
            name: densify(p.grad).clone() for name, p in participant.module.named_parameters() if p.grad is not None
        }
        return grads, {name: tensor.detach() for name, tensor in values.items()}


@torch.no_grad()
def load_weights(participant: Participant, weights: Mapping[str, Tensor]) -> None:
    """Copy ``weights`` into the plain model of ``participant``."""
    for name, parameter in participant.module.named_parameters():
        parameter.copy_(weights[name])


def make_window_judge(scenarios: Mapping[str, WindowScenario]) -> Callable[[JudgeContext], Iterator[Comparison]]:
    """Return a judge that compares weights after every accumulation window bitwise with those of plain PyTorch."""

    def judge(ctx: JudgeContext) -> Iterator[Comparison]:
        """Compare the values and weights of every window, and check that no weight stays gathered."""
        yield from judge_windows(ctx, scenarios[ctx.variant])
        for rank, counts in enumerate(ctx.rank_records("gathered")):
            for name, count in counts.items():
                yield compare_bitwise(ctx.location(name, Part.GATHER, 0, rank), torch.zeros_like(count), count)

    return judge


def judge_windows(ctx: JudgeContext, scenario: WindowScenario, suffix: str = "") -> Iterator[Comparison]:
    """Compare the values and weights of every accumulation window, recorded under labels that end in ``suffix``."""
    narrow, wide = (PlainRanks(ctx, scenario, dtype) for dtype in (ctx.dtype, torch.float64))
    is_exact = bool(ctx.rank_records("setting")[0]["exact"])
    momentum: dict[str, BoundedTensor] = {}
    last: dict[str, Tensor] = {}
    for window in range(scenario.windows):
        before = ctx.rank_records(f"params{suffix}", window)[0]
        result = narrow.run_window(window, before)
        if is_exact:
            require_exact(result, wide.run_window(window, before), window)
        for micro, values in enumerate(result.values):
            yield from ctx.compare_values(f"values{suffix}", values, window * scenario.micro_batches + micro)
        grads = reduce_grads(ctx, scenario, result, is_exact)
        factor = NO_CLIPPING
        if scenario.clip is not None:
            means = {name: grad.value.to(ctx.dtype) for name, grad in grads.items()}
            last |= means
            others = {OLD_GRADIENTS_HINT: last}
            factor = yield from judge_clip_factor(ctx, f"norm{suffix}", window, means, scenario.clip, others)
        clipped = {name: factor.apply_to(grad) for name, grad in grads.items()}
        updates = compute_updates(scenario, clipped, before, momentum)
        is_plain = scenario.clip is None and not scenario.momentum and not scenario.weight_decay
        for found in compare_weights(ctx, f"params{suffix}", window, updates, result):
            if found.mismatch is None or not is_plain:
                yield hint_norm_of_window(ctx, found, scenario, grads, f"params{suffix}", window, result)
                continue
            hinted = hint_wrong_script(ctx, found, scenario, narrow, f"params{suffix}", is_exact)
            yield hint_old_weights(ctx, hinted, scenario, narrow, f"params{suffix}", result) if window else hinted


def hint_old_weights(
    ctx: JudgeContext,
    comparison: Comparison,
    scenario: WindowScenario,
    plain: PlainRanks,
    label: str,
    result: WindowResult,
) -> Comparison:
    """Add a hint to the mismatch of a weight if the window's first micro-batch used weights from before the window.

    All weights may be old, or some. ``result`` is the result of the window with the right weights, and ``label`` is the
    label of the weights that were recorded before each window.
    """
    mismatch = comparison.mismatch
    assert mismatch is not None
    window, name = mismatch.step, mismatch.parameter
    old, new = (ctx.rank_records(label, at)[0] for at in (window - 1, window))
    before, after = (ctx.rank_records(label, at)[mismatch.seen_on][name].double() for at in (window, window + 1))
    if torch.equal(before, after):  # no step moved the weight; a gradient of 0 from old weights would be a coincidence
        return comparison
    for suffix, weights in mix_old_weights(old, new).items():
        mixed = WindowResult([plain.run_window(window, weights).grads[0], *result.grads[1:]], result.values)
        if any(name in grads for row in mixed.grads for grads in row):
            update = sum_terms(name, mixed) / (ctx.data_size * scenario.divisor)
            if torch.equal(before - update, after):
                return add_hint(comparison, f"{OLD_WEIGHTS_HINT}{suffix}")
    return comparison


def hint_wrong_script(
    ctx: JudgeContext, comparison: Comparison, scenario: WindowScenario, plain: PlainRanks, label: str, is_exact: bool
) -> Comparison:
    """Add a hint to the mismatch of a weight if the step used the gradients of one of the scenario's wrong scripts.

    ``label`` is the label of the weights that were recorded before each window. ``is_exact`` says that no engine rounds
    the gradients.
    """
    mismatch = comparison.mismatch
    assert mismatch is not None
    window, name = mismatch.step, mismatch.parameter
    before, after = (ctx.rank_records(label, at)[mismatch.seen_on] for at in (window, window + 1))
    for hint, script in scenario.wrong_scripts.items():
        grads = reduce_grads(ctx, scenario, plain.run_window(window, before, script), is_exact)
        place = ctx.location(name, Part.OPTIMIZER, window, mismatch.seen_on)
        if name in grads and compare_weight(place, before[name], after[name], grads[name]).mismatch is None:
            return add_hint(comparison, hint)
    return comparison


def require_exact(result: WindowResult, wide: WindowResult, window: int) -> None:
    """Raise RoundedScenarioError if ``result`` and ``wide`` differ, because a number in this window is then rounded."""
    for narrow_tensor, wide_tensor in zip(result.tensors(), wide.tensors(), strict=True):
        differs = narrow_tensor.double() != wide_tensor.double()
        if bool((differs & ~(narrow_tensor.isnan() & wide_tensor.isnan())).any()):
            raise RoundedScenarioError(
                f"the scenario is not exact: a number in accumulation window {window} is rounded, so no engine can be "
                "judged by it"
            )


def reduce_grads(ctx: JudgeContext, scenario: WindowScenario, result: WindowResult, is_exact: bool) -> BoundedGrads:
    """Return the reduced gradient, with an error bound, of each parameter that some rank used in this window."""
    micros = [[LocalResult(torch.zeros(()), grads) for grads in row] for row in result.grads]
    scale = scenario.micro_batches / scenario.divisor
    grads = ctx.compute_expected_grads(micros, scale, {})
    if not is_exact:
        return grads
    # Sum before dividing: a quotient by a world size of three would round.
    terms = ctx.data_size * scenario.divisor
    means = {name: sum_terms(name, result) / terms for name in grads}
    return {name: BoundedTensor(mean, torch.zeros_like(mean), ctx.dtype) for name, mean in means.items()}


def sum_terms(name: str, result: WindowResult) -> Tensor:
    """Return the float64 sum of the gradients of one parameter over ranks and micro-batches."""
    return reduce(torch.add, [grads[name].double() for row in result.grads for grads in row if name in grads])


def sum_by_rank(result: WindowResult) -> list[NamedTensors]:
    """Return, for each rank, the float64 sum of each parameter's gradients over the micro-batches."""
    sums: list[NamedTensors] = []
    for rank_grads in zip(*result.grads, strict=True):
        names = {name for grads in rank_grads for name in grads}
        sums.append(
            {name: reduce(torch.add, [grads[name].double() for grads in rank_grads if name in grads]) for name in names}
        )
    return sums


def compute_updates(
    scenario: WindowScenario,
    grads: BoundedGrads,
    weights: Mapping[str, Tensor],
    momentum: dict[str, BoundedTensor],
) -> BoundedGrads:
    """Return the update that SGD with a learning rate of 1 subtracts from each weight that has a gradient.

    ``momentum`` is the momentum of each weight that a step has moved; this function updates it.
    """
    updates: dict[str, BoundedTensor] = {}
    for name, grad in grads.items():
        update = grad
        if scenario.weight_decay:
            update = add_multiple(update, scenario.weight_decay, BoundedTensor.exact(weights[name]))
        if scenario.momentum:
            if name in momentum:
                update = add_multiple(update, scenario.momentum, momentum[name])
            momentum[name] = update
        updates[name] = update
    return updates


def add_multiple(tensor: BoundedTensor, factor: int, other: BoundedTensor) -> BoundedTensor:
    """Return ``tensor + factor * other``, exactly if both are exact.

    Raises RoundedScenarioError if the exact sum is rounded in the tensors' dtype: no engine can be judged by it.
    """
    if bool(tensor.error.any()) or bool(other.error.any()):
        return tensor + other.scalar(float(factor), roundings=0) * other
    value = tensor.value + factor * other.value
    if not torch.equal(value.to(tensor.dtype).double(), value):
        raise RoundedScenarioError("the scenario is not exact: the optimizer rounds an update")
    return BoundedTensor(value, tensor.error, tensor.dtype)


def hint_norm_of_window(
    ctx: JudgeContext,
    comparison: Comparison,
    scenario: WindowScenario,
    grads: BoundedGrads,
    label: str,
    window: int,
    result: WindowResult,
) -> Comparison:
    """Add to a mismatch of a clipped window the wrong norm that explains it, if the optimizer has no momentum."""
    if scenario.clip is None or scenario.momentum or comparison.mismatch is None:
        return comparison
    before = ctx.rank_records(label, window)[0]

    def judge(factor: ClipFactor) -> Iterator[Comparison]:
        """Compare the weights with those of a step that clipped by ``factor``."""
        clipped = {name: factor.apply_to(grad) for name, grad in grads.items()}
        return compare_weights(ctx, label, window, compute_updates(scenario, clipped, before, {}), result)

    means = {name: grad.value.to(ctx.dtype) for name, grad in grads.items()}
    return hint_other_norm(ctx, comparison, means, scenario.clip, judge)


def compare_weights(
    ctx: JudgeContext, label: str, window: int, grads: BoundedGrads, result: WindowResult
) -> Iterator[Comparison]:
    """Check that the step subtracted ``grads`` from the weights, and left every weight without a gradient unchanged.

    ``result`` has the gradients of each micro-batch and rank, which a hint may name.
    """
    rank_grads = sum_by_rank(result)
    before, after = (ctx.rank_records(label, number) for number in (window, window + 1))
    for rank, record in enumerate(after):
        check_names("full_params", before[0], record)
        for name, weight in before[0].items():
            place = ctx.location(name, Part.OPTIMIZER, window, rank)
            if name in grads:
                comparison = compare_weight(place, weight, record[name], grads[name])
                comparison = hint_used_gradient(
                    comparison, weight, record[name], grads[name], [g.get(name) for g in rank_grads]
                )
                owned = [rank_grads[ctx.data_coordinate(piece.rank)].get(name) for piece in place.pieces]
                yield hint_own_gradients(comparison, place, weight.double() - record[name].double(), owned)
            else:
                comparison = compare_bitwise(place, weight, record[name])
                yield add_hint(comparison, "the step moved a parameter that no rank used")
    for name in before[0]:
        yield from compare_ranks(ctx.location(name, Part.GATHER, window), [record[name] for record in after])


def compare_weight(place: TensorLocation, before: Tensor, after: Tensor, grad: BoundedTensor) -> Comparison:
    """Compare a weight after a step with ``before - grad``."""
    if not bool(grad.error.any()):
        return compare_bitwise(place, before.double() - grad.value, after)
    bounded = BoundedTensor.exact(before) - grad
    return compare_within_bound(place, bounded.value, after, bounded.error, signal=grad.value)


def hint_own_gradients(
    comparison: Comparison, place: TensorLocation, update: Tensor, owned: Sequence[Tensor | None]
) -> Comparison:
    """Add a hint to an unexplained mismatch of a weight if each rank moved its pieces by its own unreduced gradient.

    ``owned`` has for each piece of ``place`` the gradient of the rank that owns it, or None if the rank has none and
    must not have moved the piece. One factor, at most 1, has to explain all pieces of ``update``.
    """
    if comparison.mismatch is None or not is_unexplained(comparison.mismatch):
        return comparison
    owner_grads = torch.zeros_like(update).flatten()
    for piece, grad in zip(place.pieces, owned, strict=True):
        if grad is not None:
            owner_grads[piece.start : piece.stop] = grad.flatten()[piece.start : piece.stop]
    factor = fit_scale(update.flatten(), [owner_grads])
    if factor is None or not 0 < factor <= 1:
        return comparison
    return add_hint(comparison, f"each rank's part of the weight moved by {factor:.7g} x that rank's own gradient")


def hint_used_gradient(
    comparison: Comparison, before: Tensor, after: Tensor, grad: BoundedTensor, rank_grads: Sequence[Tensor | None]
) -> Comparison:
    """Add a hint to a mismatch of a weight if the step used a multiple of the right gradient, or of one rank's."""
    if comparison.mismatch is None:
        return comparison
    update = before.double() - after.double()
    if (factor := fit_scale(update, [grad.value])) is not None:
        return add_hint(comparison, f"the step used {factor:.7g} x the right gradient")
    for rank, rank_grad in enumerate(rank_grads):
        factor = fit_scale(update, [rank_grad]) if rank_grad is not None else None
        if factor is not None:
            return add_hint(comparison, f"the step used {factor:.7g} x the gradient of rank {rank} alone")
    return hint_became_nan(hint_unmoved(comparison, before, after))
