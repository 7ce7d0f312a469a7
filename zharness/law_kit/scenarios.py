"""Plays: what a caller does with a model, told once, played on the engine and on the plain model, and compared.

Every play is exact: weights, inputs and losses are integers over powers of two, gradients are summed over ranks, and
the judge plays it in float64 too. (Where an engine averages, a number of ranks that is a power of two keeps them exact,
and another is judged by the bound of the reduction.) Where both precisions agree bitwise no bit was rounded away, so
the engine has to agree bitwise as well, in whatever order it sums. After the play the engine takes a step that moves
nothing and trains one ordinary micro-batch: that has to come out right too, and nothing may stay gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zharness.engines.protocol import (
    AccumulationOwner,
    Capabilities,
    Engine,
    Feature,
    Reduction,
    supports_gathered,
    supports_uneven,
)
from zharness.errors import HarnessFault
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.recorded_gradients import (
    RecordedGradients,
    densify,
    drain_gradients,
    has_split_gradients,
    record_gradients,
    sum_tensors,
)
from zharness.laws.training_accumulation import ZERO_LR_SGD
from zharness.parity import Comparison, Part, Tier, compare_bitwise
from zharness.parity.baseline import Baseline, LocalResult
from zharness.parity.certificate import division_exactness, is_power_of_two
from zharness.workload import Batch, ModelSpec

FOLLOW_UP_MICRO = 1  # the micro-batch of the ordinary training after a play; plays use others


NamedTensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Participant:
    """The engine, or the plain model, so that one play drives either. ``rank`` is this micro-batch's.

    ``uneven()`` is a block in which ranks may use other parameters than their peers, where an engine wants to be told.
    ``gathered(names)`` is one in which full weights may be edited by name; ``edits`` says whether this side's edits are
    to last: the plain model's do, and rank 0's. ``recompute`` is torch.utils.checkpoint.checkpoint on the engine, and
    just calls on the plain model: gradients have to be the same without it. ``other`` is a second engine (model) in the
    same initial weights, where the law asks for one.
    """

    call: Callable[..., Any]
    module: Any  # an nn.Module; its attributes are the model's own
    rank: int
    variant: str
    spec: ModelSpec
    get_batch: Callable[[int], Batch]
    backward: Callable[..., None]
    zero_grad: Callable[[], None]
    step: Callable[[], None]
    allow_uneven_use: Callable[[], AbstractContextManager[Any]]
    gather_weights: Callable[[Sequence[str]], AbstractContextManager[NamedTensors]]
    keeps_edits: bool
    recompute: Callable[..., Any]
    partner: Participant | None = None

    def inputs(self, step: int = 0) -> Tensor:
        """The inputs of micro-step ``step``."""
        inputs: Tensor = self.get_batch(step).inputs
        return inputs

    def leaf_inputs(self, step: int = 0) -> Tensor:
        """The same, as a leaf that requires a gradient."""
        return self.inputs(step).clone().requires_grad_()

    def loss(self, output: Tensor, step: int = 0) -> Tensor:
        """The workload's loss of an output."""
        return self.spec.loss(output, self.get_batch(step).target)

    def training_loss(self, step: int = 0) -> Tensor:
        """Forward and loss of micro-step ``step``."""
        return self.loss(self.call(self.inputs(step)), step)


ScenarioScript = Callable[[Participant], NamedTensors | None]


def train_follow_up(participant: Participant) -> None:
    """One micro-batch, as anybody trains it."""
    participant.backward(participant.training_loss(FOLLOW_UP_MICRO))


class UnusedGrads(Enum):
    """What an engine may report as the gradient of a parameter that no rank used, of which vanilla has none."""

    NONE_IF_CLAIMED = "none, as vanilla, where Feature.NO_GRADIENT is claimed; else zeros will do"
    ALWAYS_NONE = "none, as vanilla, whatever is claimed"


@dataclass(frozen=True)
class Scenario:
    """A play and its setting: how many engines it needs, and over how many micro-batches those divide gradients.

    An engine that leaves accumulation to its caller divides nothing.
    """

    script: ScenarioScript
    engine_count: int = 1
    accumulation_steps: int = 1
    unused_grads: UnusedGrads = UnusedGrads.NONE_IF_CLAIMED
    reduction: Reduction = Reduction.SUM


def choose_exact_reduction(preferred: Reduction, world_size: int, capabilities: Capabilities) -> Reduction:
    """Sum or mean, of what an engine claims the exact one: a mean of three is not, nor is a sum made of such means."""
    if capabilities.refusal(Feature.SUM) is not None:
        return Reduction.MEAN
    if is_power_of_two(world_size):
        return preferred
    return Reduction.MEAN if capabilities.scaled_sum else Reduction.SUM


def make_scenario_observer(scenario: Scenario) -> Callable[[RankContext], None]:
    """Play on the engine, on every rank."""

    def observe(ctx: RankContext) -> None:
        owns = scenario.accumulation_steps > 1 and AccumulationOwner.ENGINE in ctx.accumulation_owners()
        owner = AccumulationOwner.ENGINE if owns else AccumulationOwner.CALLER
        divisor = scenario.accumulation_steps if owns else 1
        reduction = choose_exact_reduction(scenario.reduction, ctx.world_size, ctx.capabilities)
        ctx.record(reduction.value, {})
        engines = [
            ctx.build_engine(
                optimizer=ZERO_LR_SGD,
                reduction=reduction,
                accumulation_steps=divisor,
                accumulation_owner=owner,
            )
            for _ in range(scenario.engine_count)
        ]
        # The engine's own word, which an option may have changed.
        refused = engines[0].capabilities.refusal(Feature.NO_GRADIENT) is not None
        zeros = scenario.unused_grads is UnusedGrads.NONE_IF_CLAIMED and refused
        ctx.record("setting", {"divisor": torch.tensor(divisor), "zeros": torch.tensor(zeros)})
        side: Participant | None = None
        for engine in reversed(engines):
            side = make_engine_participant(ctx, engine, side)
        assert side is not None
        ctx.record("values", scenario.script(side) or {})
        for number, engine in enumerate(engines):
            ctx.record("grads", engine.full_grads(), number)
            engine.step()
            engine.zero_grad()
            train_follow_up(make_engine_participant(ctx, engine, None))
            ctx.record("after", engine.full_grads(), number)
            held = engine.observe().gathered_bytes
            ctx.record("held", {"gathered_bytes": torch.tensor(held)} if isinstance(held, int) else {}, number)
        for engine in engines:
            engine.close()

    return observe


def make_engine_participant(ctx: RankContext, engine: Engine, partner: Participant | None) -> Participant:
    return Participant(
        call=engine,
        module=engine.module,
        rank=ctx.rank,
        variant=ctx.variant,
        spec=ctx.spec,
        get_batch=ctx.batch,
        backward=engine.backward,
        zero_grad=engine.zero_grad,
        step=engine.step,
        allow_uneven_use=engine.uneven if supports_uneven(engine) else nullcontext,
        gather_weights=(
            engine.gathered
            if supports_gathered(engine)
            else lambda names: nullcontext(get_detached_weights(engine.module, names))
        ),
        keeps_edits=ctx.rank == 0,
        recompute=checkpoint,
        partner=partner,
    )


def make_plain_participant(
    baseline: Baseline, variant: str, rank: int, dtype: torch.dtype, partner: Participant | None
) -> Participant:
    module = baseline.build_module().to(dtype)

    def get_batch(step: int) -> Batch:
        batch = baseline.batch(rank, step)
        return Batch(batch.inputs.to(dtype), batch.target.to(dtype))

    def backward(loss: Tensor, *, retain_graph: bool = False) -> None:
        torch.autograd.backward(loss, retain_graph=retain_graph)

    @torch.no_grad()
    def step() -> None:
        """A step that moves nothing: what it leaves behind is that the weights were written."""
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(torch.zeros_like(parameter))

    def recompute(function: Callable[..., Any], *args: Any, use_reentrant: bool) -> Any:
        return function(*args)

    return Participant(
        call=module,
        module=module,
        rank=rank,
        variant=variant,
        spec=baseline.spec,
        get_batch=get_batch,
        backward=backward,
        zero_grad=module.zero_grad,
        step=step,
        allow_uneven_use=nullcontext,
        gather_weights=lambda names: nullcontext(get_detached_weights(module, names)),
        keeps_edits=True,
        recompute=recompute,
        partner=partner,
    )


def get_detached_weights(module: nn.Module, names: Sequence[str]) -> NamedTensors:
    weights = dict(module.named_parameters())
    return {name: weights[name].detach() for name in names}


@dataclass(frozen=True)
class ScenarioResult:
    """What a play on the plain model leaves: values, each model's gradients, and those of the training after it.

    ``given`` is what each backward that reached a parameter gave it, in their order, each by its entries: a sparse one
    has several of a row, a dense one is its only one. The last backward's are all that is left of its gradient in an
    engine that drops the others, which is worth a hint. ``given_after`` is the same of the training after it.
    """

    values: NamedTensors
    grads: tuple[NamedTensors, ...]
    after: tuple[NamedTensors, ...]
    backward_grads: tuple[RecordedGradients, ...]
    backward_grads_after: tuple[RecordedGradients, ...]

    def flatten(self) -> dict[str, Tensor]:
        """Everything, by a name of its own."""
        parts = [self.values, *self.grads, *self.after]
        return {f"{number}/{name}": tensor for number, part in enumerate(parts) for name, tensor in part.items()}


def run_plain_scenario(
    baseline: Baseline, variant: str, scenario: Scenario, rank: int, dtype: torch.dtype
) -> ScenarioResult:
    sides: list[Participant] = []
    for _ in range(scenario.engine_count):
        sides.insert(0, make_plain_participant(baseline, variant, rank, dtype, sides[0] if sides else None))
    watched = [record_gradients(side.module) for side in sides]
    values = {name: tensor.detach() for name, tensor in (scenario.script(sides[0]) or {}).items()}
    given = tuple(drain_gradients(each) for each in watched)
    grads, after = [], []
    for side in sides:
        grads.append(collect_grads(side.module))
        side.zero_grad()
        train_follow_up(side)
        after.append(collect_grads(side.module))
    return ScenarioResult(values, tuple(grads), tuple(after), given, tuple(drain_gradients(each) for each in watched))


def collect_grads(module: nn.Module) -> NamedTensors:
    return {name: densify(p.grad) for name, p in module.named_parameters() if p.grad is not None}


@lru_cache(maxsize=1024)
def run_exact_scenario(
    baseline: Baseline, variant: str, scenario: Scenario, rank: int, dtype: torch.dtype
) -> ScenarioResult:
    """The play in the cell's dtype. Raises HarnessFault when float64 says that a bit was rounded away.

    The same for every engine and stage, so a process plays it once; what it holds is some 20 KB.
    """
    played, wide = (run_plain_scenario(baseline, variant, scenario, rank, each) for each in (dtype, torch.float64))
    double = wide.flatten()
    for name, tensor in played.flatten().items():
        if not torch.equal(tensor.double(), double[name].double()):
            raise HarnessFault(f"the play is not exact: {name} is rounded on rank {rank}, so it can judge no engine")
    return played


def make_scenario_judge(scenario: Scenario) -> Callable[[JudgeContext], Iterator[Comparison]]:
    """Values bitwise on each rank; gradients the exact sum over ranks; the training after it likewise."""

    def judge(ctx: JudgeContext) -> Iterator[Comparison]:
        everyone = run_scenario_on_all_ranks(ctx, scenario)
        yield from ctx.compare_values("values", [played.values for played in everyone])
        for number in range(scenario.engine_count):
            yield from compare_scenario_grads(ctx, everyone, "grads", number)
            yield from judge_after_effects(ctx, everyone, number)

    return judge


def run_scenario_on_all_ranks(ctx: JudgeContext, scenario: Scenario) -> list[ScenarioResult]:
    """What the play leaves on every rank's plain model, in rank order."""
    return [run_exact_scenario(ctx.baseline, ctx.variant, scenario, rank, ctx.dtype) for rank in range(ctx.world_size)]


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


def scenario_law(
    name: str,
    statement: str,
    scenario: Scenario,
    needs: tuple[Feature, ...],
    model: str = "blocks",
    variants: tuple[tuple[str, tuple[Feature, ...]], ...] = (("", ()),),
) -> Law:
    """The check of one play."""
    return Law(
        name=name,
        statement=statement,
        tier=Tier.EXACT,
        models=(model,),
        observe=make_scenario_observer(scenario),
        judge=make_scenario_judge(scenario),
        needs=needs,
        variants=variants,
        dtypes=("fp32",),  # its models mix dtypes of their own, and hold more than a narrow significand does
    )
