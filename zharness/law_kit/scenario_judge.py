"""Compare what an engine recorded in a scenario with plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from zharness.engines.protocol import Reduction
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.recorded_gradients import RecordedGradients, has_split_gradients, sum_tensors
from zharness.law_kit.scenario_baseline import ScenarioResult, run_scenario_on_all_ranks
from zharness.law_kit.scenarios import NamedTensors, Scenario
from zharness.parity import Comparison, Part, compare_bitwise
from zharness.parity.baseline import LocalResult
from zharness.parity.certificate import division_exactness


def make_scenario_judge(scenario: Scenario) -> Callable[[JudgeContext], Iterator[Comparison]]:
    """Values bitwise on each rank; gradients the exact sum over ranks; the training after it likewise."""

    def judge(ctx: JudgeContext) -> Iterator[Comparison]:
        everyone = run_scenario_on_all_ranks(ctx, scenario)
        yield from ctx.compare_values("values", [played.values for played in everyone])
        for number in range(scenario.engine_count):
            yield from compare_scenario_grads(ctx, everyone, "grads", number)
            yield from judge_after_effects(ctx, everyone, number)

    return judge


def compare_scenario_grads(
    ctx: JudgeContext, results: Sequence[ScenarioResult], label: str, engine_index: int
) -> Iterator[Comparison]:
    """The gradients that an engine recorded under ``label`` are the exact sum, or the mean, over ranks."""
    summed, setting = ctx.has_record(Reduction.SUM.value), ctx.rank_records("setting")[0]
    scale = (ctx.world_size if summed else 1) / int(setting["divisor"])
    exact = summed or division_exactness(ctx.world_size)
    found = [getattr(played, label)[engine_index] for played in results]
    if setting["zeros"]:
        found = [{**zeros_for_unused_params(ctx, label, engine_index), **grads} for grads in found]
    suspects = make_backward_suspects(results, engine_index, scale) if label == "grads" else {}
    given = [
        (played.backward_grads if label == "grads" else played.backward_grads_after)[engine_index] for played in results
    ]
    whole = exact or (label == "after" and not any(has_split_gradients(each) for each in given))
    rows = [found] if whole else split_reduction_terms(found, given)
    micros = [[LocalResult(torch.zeros(()), grads) for grads in row] for row in rows]
    yield from ctx.compare_reduced_grads(label, micros, engine_index, exact, scale * len(rows), suspects)


def judge_after_effects(
    ctx: JudgeContext, results: Sequence[ScenarioResult], engine_index: int
) -> Iterator[Comparison]:
    """The training after a play is as ever, and nothing stays gathered."""
    yield from compare_scenario_grads(ctx, results, "after", engine_index)
    for rank, held in enumerate(ctx.rank_records("held", engine_index)):
        for name, count in held.items():
            yield compare_bitwise(ctx.location(name, Part.GATHER, engine_index, rank), torch.zeros_like(count), count)


def split_reduction_terms(
    rank_grads: Sequence[NamedTensors], backward_grads: Sequence[RecordedGradients]
) -> list[list[NamedTensors]]:
    """Rows, each with one gradient for every rank, whose sum is ``found``: one row for each entry of each backward.

    An engine may reduce, and round, each by itself, so it is their sizes that bound the error: the sum of large ones
    may be small. What a play has zeroed meanwhile is taken off again in a row of its own.
    """
    parts = [
        {name: [part for grad in grads for part in grad] for name, grads in each.items()} for each in backward_grads
    ]
    most = max((len(grads) for each in parts for grads in each.values()), default=0)
    rows: list[list[NamedTensors]] = [[] for _ in range(most + 1)]
    for whole, each in zip(rank_grads, parts, strict=True):
        for at, row in enumerate(rows[:most]):
            row.append({name: grads[at] for name, grads in each.items() if at < len(grads) and name in whole})
        kept = {name: sum(each.get(name, ()), torch.zeros_like(grad)) for name, grad in whole.items()}
        rows[most].append({name: grad - kept[name] for name, grad in whole.items()})
    return rows


def make_backward_suspects(
    results: Sequence[ScenarioResult], engine_index: int, scale: float
) -> Mapping[str, Sequence[Sequence[LocalResult]]]:
    """What is left where an engine keeps one of several backwards, or drops one: the gradients to recognise it by."""
    alone, without = [], []
    for played in results:
        last = {name: scale * sum_tensors(grads[-1]) for name, grads in played.backward_grads[engine_index].items()}
        grads = played.grads[engine_index]
        alone.append(LocalResult(torch.zeros(()), last))
        rest = {name: scale * grad - last[name] for name, grad in grads.items() if name in last}
        # Nothing but zeros is left where only one backward reached a parameter: then none was dropped of several.
        without.append(LocalResult(torch.zeros(()), {name: grad for name, grad in rest.items() if bool(grad.any())}))
    return {"the gradient of the last backward alone": [alone], "the gradient without the last backward": [without]}


def zeros_for_unused_params(ctx: JudgeContext, label: str, engine_index: int) -> NamedTensors:
    """Zeros for every trained parameter that rank 0 reports a gradient of: what it has to be where no rank used it."""
    reported = ctx.rank_records(label, engine_index)[0]
    parameters = ctx.baseline.build_module().named_parameters()
    return {name: torch.zeros_like(p) for name, p in parameters if p.requires_grad and name in reported}
