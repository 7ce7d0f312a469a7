"""Compare the tensors that an engine recorded in a scenario with those of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from zharness.engines.protocol import Reduction
from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.recorded_gradients import RecordedGradients, has_split_gradients, sum_tensors
from zharness.law_kit.scenario_baseline import ScenarioResult, run_scenario_on_all_ranks
from zharness.law_kit.scenarios import NamedTensors, Scenario
from zharness.mesh import REPLICATE
from zharness.parity import Comparison, Part, compare_bitwise
from zharness.parity.attribution import is_unexplained
from zharness.parity.baseline import LocalResult
from zharness.parity.certificate import division_exactness
from zharness.parity.compare import is_bitwise_equal

DISCARDED_GRADS_KEPT_HINT = "the sum with the gradients that zero_grad() discarded"
ZERO_GRADIENT_HINT = "it is 0 x the right gradient"
AS_EVERY_GRADIENT = ", as is every other gradient"
MAX_TERMS = 8  # of a sum; the hint about terms tries each subset of them
# The hint about terms allows an engine this many roundings, each of one eps of the largest element: a reduced term, the
# sum over terms, the multiplication by the scale, and the division by the ranks.
ROUNDINGS = 4
OLD_GRADIENT_KEPT_HINT = "it is the gradient from before zero_grad()"
REDUCED_AGAIN_HINT = "each end of a backward reduced again what the earlier ones had left"
SUMMED_AGAIN_HINT = "each end of a backward summed again over the copies what the earlier ones had left"
LAST_DISCARDED_GRAD_KEPT_HINT = "the sum with the last gradient that zero_grad() discarded"


def make_scenario_judge(scenario: Scenario) -> Callable[[JudgeContext], Iterator[Comparison]]:
    """Return a judge that compares values bitwise on each rank, and gradients with the exact sum over ranks."""

    def judge(ctx: JudgeContext) -> Iterator[Comparison]:
        """Compare values and gradients of every engine, in the scenario and in the micro-batch trained after it."""
        results = run_scenario_on_all_ranks(ctx, scenario)
        for repeat in range(ctx.setting.accumulation_steps):
            yield from ctx.compare_values("values", [result.values[repeat] for result in results], repeat)
        for number in range(scenario.engine_count):
            yield from compare_scenario_grads(ctx, results, "grads", number)
            yield from judge_after_effects(ctx, results, number)

    return judge


def compare_scenario_grads(
    ctx: JudgeContext, results: Sequence[ScenarioResult], label: str, engine_index: int
) -> Iterator[Comparison]:
    """Compare the gradients that an engine recorded under ``label`` with the exact sum or the mean over ranks."""
    summed, setting = ctx.has_record(Reduction.SUM.value), ctx.rank_records("setting")[0]
    scale = (ctx.data_size if summed else 1) / int(setting["divisor"])
    exact = summed or division_exactness(ctx.data_size)
    rank_grads = [getattr(result, label)[engine_index] for result in results]
    if setting["zeros"]:
        rank_grads = [{**zeros_for_unused_params(ctx, label, engine_index), **grads} for grads in rank_grads]
    suspects = make_backward_suspects(results, engine_index, scale) if label == "grads" else {}
    backward_grads = [
        (result.backward_grads if label == "grads" else result.backward_grads_after)[engine_index] for result in results
    ]
    whole = exact or (label == "after" and not any(has_split_gradients(gradients) for gradients in backward_grads))
    rows = [rank_grads] if whole else split_reduction_terms(rank_grads, backward_grads)
    micros = [[LocalResult(torch.zeros(()), grads) for grads in row] for row in rows]
    for comparison in ctx.compare_reduced_grads(label, micros, engine_index, exact, scale * len(rows), suspects):
        yield hint_counted_term(ctx, comparison, rank_grads, backward_grads, label, engine_index, scale)


def judge_after_effects(
    ctx: JudgeContext, results: Sequence[ScenarioResult], engine_index: int
) -> Iterator[Comparison]:
    """Compare the gradients of the micro-batch after the scenario, and check that no weight is still gathered."""
    for comparison in compare_scenario_grads(ctx, results, "after", engine_index):
        yield hint_old_gradient(ctx, comparison, engine_index)
    for rank, counts in enumerate(ctx.rank_records("gathered", engine_index)):
        for name, count in counts.items():
            yield compare_bitwise(ctx.location(name, Part.GATHER, engine_index, rank), torch.zeros_like(count), count)


def hint_old_gradient(ctx: JudgeContext, comparison: Comparison, engine_index: int) -> Comparison:
    """Add a hint to a mismatch after the scenario if the gradient equals the gradient that the scenario left.

    If the mismatch already has a hint that names a cause, this hint is kept.
    """
    mismatch = comparison.mismatch
    if mismatch is None or not is_unexplained(mismatch):
        return comparison
    left, found = (ctx.rank_records(label, engine_index)[mismatch.seen_on] for label in ("grads", "after"))
    name = mismatch.parameter
    is_old = name in left and name in found and is_bitwise_equal(left[name], found[name])
    return add_hint(comparison, OLD_GRADIENT_KEPT_HINT) if is_old else comparison


def hint_counted_term(
    ctx: JudgeContext,
    comparison: Comparison,
    rank_grads: Sequence[NamedTensors],
    backward_grads: Sequence[RecordedGradients],
    label: str,
    engine_index: int,
    scale: float,
) -> Comparison:
    """Add a hint to an unexplained mismatch of a gradient in which some terms of the sum count more or less than once.

    The hint of a gradient that is zero says whether all gradients are zero. ``rank_grads`` are the gradients of each
    rank, and ``backward_grads`` are the terms that each backward of the rank added.
    """
    mismatch = comparison.mismatch
    if mismatch is not None and mismatch.hint == ZERO_GRADIENT_HINT:
        found_grads = [grad for grads in ctx.rank_records(label, engine_index) for grad in grads.values()]
        is_alone = any(bool(grad.any()) for grad in found_grads)
        return comparison if is_alone else add_hint(comparison, f"{ZERO_GRADIENT_HINT}{AS_EVERY_GRADIENT}")
    if mismatch is None or not is_unexplained(mismatch):
        return comparison
    name = mismatch.parameter
    rank_terms = [[term for terms in grads.get(name, ()) for term in terms] for grads in backward_grads]
    found = ctx.rank_records(label, engine_index)[mismatch.seen_on].get(name)
    if found is None or any(name not in grads for grads in rank_grads):
        return comparison
    right = scale * torch.stack([grads[name].double() for grads in rank_grads]).mean(dim=0)
    means = [torch.stack([term.double() for term in terms]).mean(dim=0) for terms in zip(*rank_terms, strict=False)]
    sums = [scale * torch.stack(alike).sum(dim=0) for alike in group_equal_terms(means)]
    hint = describe_counted_terms(found.double(), right, sums)
    if not hint and comparison.location is not None:
        owned = [(ctx.data_coordinate(piece.rank), piece.start, piece.stop) for piece in comparison.location.pieces]
        factor, copies = scale / len(rank_terms), ctx.mesh.size(REPLICATE)
        if copies == 1:
            again = reduce_at_each_end(rank_terms, owned, factor, ctx.setting.accumulation_steps)
        else:
            again = reduce_on_copies(rank_terms, owned, factor, copies)
        is_again = bool(again.any()) and torch.equal(again, found.double().flatten())
        hint = (REDUCED_AGAIN_HINT if copies == 1 else SUMMED_AGAIN_HINT) if is_again else ""
    return add_hint(comparison, hint) if hint else comparison


def describe_counted_terms(found: Tensor, right: Tensor, terms: Sequence[Tensor]) -> str:
    """Return a hint that says how often each of ``terms`` counts in ``found``, or '' if ``found`` is not such a sum.

    Each term counts once in ``right``. All tensors are float64. The result is '' if rounding explains the error. A term
    with one element gives no hint, because every error is a multiple of such a term.
    """
    if len(terms) > MAX_TERMS or not all(bool(tensor.isfinite().all()) for tensor in (found, *terms)):
        return ""
    error, rounding = found - right, ROUNDINGS * torch.finfo(torch.float32).eps * float(found.abs().max())
    if bool((error.abs() <= rounding).all()):
        return ""
    for size in range(1, len(terms)):
        for chosen in combinations(terms, size):
            factor = fit_multiple(error, torch.stack(chosen).sum(dim=0), rounding)
            if factor is not None:
                return f"it is the sum in which {size} of {len(terms)} terms count {1 + factor:.7g} times"
    factors = fit_factors(error, terms, rounding)
    if not factors:
        return ""
    counts = ", ".join(f"{1 + factor:.5g}" for factor in factors)
    return f"it is the sum in which {len(terms)} terms count {counts} times"


def reduce_at_each_end(
    rank_terms: Sequence[Sequence[Tensor]],
    owned: Sequence[tuple[int, int, int]],
    factor: float,
    micro_batch_count: int,
) -> Tensor:
    """Return the flat gradient of an engine that reduces its buffer over ranks, and adds it, at each end of a backward.

    ``rank_terms`` has for each rank the term of each backward, and ``factor`` multiplies sums over ranks. After a
    reduction, the part of the buffer that a rank owns holds the reduced gradient, and the rest still holds the
    unreduced gradient. ``owned`` has the rank, start and stop of each part. So the next end of the same micro-batch
    reduces both again. Each micro-batch has the same number of ends; otherwise the gradient is zero.
    """
    buffers = [torch.zeros(terms[0].numel(), dtype=torch.float64) for terms in rank_terms if terms]
    total = torch.zeros_like(buffers[0]) if buffers else torch.zeros(0)
    ends = list(zip(*rank_terms, strict=False))
    if len(ends) % micro_batch_count:
        return total
    for index, terms in enumerate(ends):
        if index % (len(ends) // micro_batch_count) == 0:
            buffers = [torch.zeros_like(buffer) for buffer in buffers]
        buffers = [buffer + term.double().flatten() for buffer, term in zip(buffers, terms, strict=True)]
        reduced = factor * torch.stack(buffers).sum(dim=0)
        total = total + reduced
        for rank, start, stop in owned:
            buffers[rank][start:stop] = reduced[start:stop]
    return total


def reduce_on_copies(
    rank_terms: Sequence[Sequence[Tensor]], owned: Sequence[tuple[int, int, int]], factor: float, copies: int
) -> Tensor:
    """Return the flat gradient of an engine in which each reduction sums earlier results over the copies again.

    The arguments are those of ``reduce_at_each_end``, for one micro-batch and ranks that have several copies of the
    shards. ``factor`` multiplies the whole buffer before each reduction. Each end of a backward inside a forward makes
    two reductions: first the term, then the rest of the buffer, which is zero except at the first end. The end of the
    caller's backward makes one more reduction.
    """
    if not all(rank_terms):
        return torch.zeros(0)
    shards = len(rank_terms) // copies
    first, *later = ([term.double().flatten() for term in terms] for terms in zip(*rank_terms, strict=False))
    nothing = [torch.zeros_like(term) for term in first]
    scaled = [factor * term for term in first]
    left = list(scaled)
    for rank, start, stop in owned:
        of_copy = range(rank // shards * shards, (rank // shards + 1) * shards)
        left[rank] = left[rank].clone()
        left[rank][start:stop] = torch.stack([scaled[other][start:stop] for other in of_copy]).sum(dim=0)
    total = torch.zeros_like(first[0])  # equal on all copies
    for buffers in (first, left, *(each for terms in later for each in (terms, nothing)), nothing):
        total = copies * total + factor * torch.stack(buffers).sum(dim=0)
    return total


def group_equal_terms(terms: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return lists of equal terms, without those that are zero."""
    groups: list[list[Tensor]] = []
    for term in terms:
        group = next((group for group in groups if torch.equal(group[0], term)), None)
        if group is not None:
            group.append(term)
        elif bool(term.any()):
            groups.append([term])
    return groups


def fit_multiple(error: Tensor, term: Tensor, rounding: float) -> float | None:
    """Return the factor f for which ``error`` is f times ``term``, up to ``rounding``, or None if there is none."""
    if int(term.count_nonzero()) < 2:
        return None
    factor = float((error * term).sum() / (term * term).sum())
    return factor if factor and bool(((error - factor * term).abs() <= rounding).all()) else None


def fit_factors(error: Tensor, terms: Sequence[Tensor], rounding: float) -> list[float]:
    """Return the factors by which ``error`` is a sum of several ``terms``, up to ``rounding``.

    The list is empty if ``error`` is no such sum, or if linearly dependent terms do not determine the factors.
    """
    if len(terms) < 2:
        return []
    columns = torch.stack([term.flatten() for term in terms], dim=1)
    if len(columns) <= len(terms) or int(torch.linalg.matrix_rank(columns)) < len(terms):
        return []
    factors = torch.linalg.lstsq(columns, error.flatten()).solution
    return factors.tolist() if bool(((columns @ factors - error.flatten()).abs() <= rounding).all()) else []


def split_reduction_terms(
    rank_grads: Sequence[NamedTensors], backward_grads: Sequence[RecordedGradients]
) -> list[list[NamedTensors]]:
    """Split ``rank_grads`` into rows, one for each entry of each backward. The sum of all rows is ``rank_grads``.

    An engine may reduce and round each entry separately, so the rounding error depends on the size of the entries,
    which may be large although their sum is small. The last row subtracts the gradients that the scenario zeroed.
    """
    entries_by_rank = [
        {name: [entry for grad in grads for entry in grad] for name, grads in rank_backwards.items()}
        for rank_backwards in backward_grads
    ]
    most = max((len(entries) for rank_entries in entries_by_rank for entries in rank_entries.values()), default=0)
    rows: list[list[NamedTensors]] = [[] for _ in range(most + 1)]
    for whole, rank_entries in zip(rank_grads, entries_by_rank, strict=True):
        for at, row in enumerate(rows[:most]):
            row.append(
                {name: entries[at] for name, entries in rank_entries.items() if at < len(entries) and name in whole}
            )
        sums = {name: sum(rank_entries.get(name, ()), torch.zeros_like(grad)) for name, grad in whole.items()}
        rows[most].append({name: grad - sums[name] for name, grad in whole.items()})
    return rows


def make_backward_suspects(
    results: Sequence[ScenarioResult], engine_index: int, scale: float
) -> Mapping[str, Sequence[Sequence[LocalResult]]]:
    """Return the gradients of four wrong engines.

    The first engine keeps only the last backward's gradients, and the second engine drops these gradients. The other
    two also keep gradients that ``zero_grad`` discarded: all of them, or only the last one, as after a backward that
    raised.
    """
    alone, without = [], []
    for result in results:
        last = {name: scale * sum_tensors(grads[-1]) for name, grads in result.backward_grads[engine_index].items()}
        grads = result.grads[engine_index]
        alone.append(LocalResult(torch.zeros(()), last))
        earlier = {name: scale * grad - last[name] for name, grad in grads.items() if name in last}
        # The gradient is zero if only one backward reached a parameter; such a parameter gives no evidence.
        without.append(LocalResult(torch.zeros(()), {name: grad for name, grad in earlier.items() if bool(grad.any())}))
    return {
        "the gradient of the last backward alone": [alone],
        "the gradient without the last backward": [without],
        DISCARDED_GRADS_KEPT_HINT: [sum_backwards(results, engine_index, scale)],
        LAST_DISCARDED_GRAD_KEPT_HINT: [sum_backwards(results, engine_index, scale, last=2)],
    }


def sum_backwards(
    results: Sequence[ScenarioResult], engine_index: int, scale: float, last: int = 0
) -> list[LocalResult]:
    """Return, for each rank, the sum of the ``last`` backwards of each parameter, or of all of them if ``last`` is 0.

    A parameter is left out if no rank's ``zero_grad`` discarded a gradient of it, because its sum is right.
    """
    rank_sums = [
        {
            name: sum_tensors([entry for entries in backwards[-last:] for entry in entries])
            for name, backwards in result.backward_grads[engine_index].items()
        }
        for result in results
    ]
    discarded = {
        name
        for result, sums in zip(results, rank_sums, strict=True)
        for name, grad in result.grads[engine_index].items()
        if name in sums and not torch.equal(grad, sums[name])
    }
    return [
        LocalResult(torch.zeros(()), {name: scale * grad for name, grad in sums.items() if name in discarded})
        for sums in rank_sums
    ]


def zeros_for_unused_params(ctx: JudgeContext, label: str, engine_index: int) -> NamedTensors:
    """Return zeros for every trainable parameter whose gradient rank 0 reports.

    If no rank used a parameter but the engine reports its gradient, the gradient has to be zero.
    """
    reported = ctx.rank_records(label, engine_index)[0]
    parameters = ctx.baseline.build_module().named_parameters()
    return {name: torch.zeros_like(p) for name, p in parameters if p.requires_grad and name in reported}
