"""Define functions that several laws of precision use: dtypes, local gradients, and numbers of sent elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines.protocol import Absent, Engine, Feature, OptimizerSpec
from zharness.errors import EngineContractError
from zharness.law_kit.hints import hint_unreduced_parts
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.mesh import DATA_SHARD, REPLICATE
from zharness.parity import Comparison, Part, Tier, compare_bitwise, compare_ranks, compare_within_bound
from zharness.parity.attribution import GradientTerms
from zharness.parity.baseline import Baseline, LocalResult
from zharness.parity.bounds import mean_and_bound
from zharness.workload import ModelSpec

LOW_DTYPE, WIDE_DTYPE = torch.bfloat16, torch.float32

RECORDED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)

SAFE_MODULES: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

AUTOCAST_OPTIONS: Mapping[str, Any] = {"torch_autocast": {"enabled": True, "dtype": "bf16"}}

SGD = OptimizerSpec(name="sgd", args={"lr": 0.05, "momentum": 0.5})


def dtype_index(tensor: Tensor) -> Tensor:
    """Return the dtype of ``tensor`` as a number that can be recorded and compared."""
    return scalar(RECORDED_DTYPES.index(tensor.dtype))


def compare_values_and_dtypes(
    ctx: JudgeContext, name: str, part: Part, expected: Tensor, actual: Tensor, rank: int
) -> Iterator[Comparison]:
    """Check that a tensor has the expected dtype and is bitwise equal to the expected tensor."""
    yield compare_bitwise(ctx.location(name, part, rank=rank), dtype_index(expected), dtype_index(actual))
    wide = actual if actual.is_floating_point() else actual.double()
    yield compare_bitwise(ctx.location(name, part, rank=rank), expected, wide)


def compute_baseline_local(
    ctx: JudgeContext,
    rank: int,
    forward: bool = True,
    backward: bool = False,
    micro: int = 0,
    params: Mapping[str, Tensor] | None = None,
) -> LocalResult:
    """Run the plain model on a micro-batch, with forward and backward inside or outside torch.autocast.

    The loss is always computed outside torch.autocast.
    """
    plain = replace(
        ctx.baseline, autocast=LOW_DTYPE if forward else None, autocast_backward=LOW_DTYPE if backward else None
    )
    return plain.run_rank(rank, micro, params)


def compute_baseline_locals(ctx: JudgeContext, forward: bool = True, backward: bool = False) -> list[LocalResult]:
    """Return the baseline's loss and local gradients on micro-batch 0, for each rank."""
    return [compute_baseline_local(ctx, rank, forward, backward) for rank in range(ctx.data_size)]


def low_precision_parameters(baseline: Baseline, safe_modules: tuple[type[nn.Module], ...]) -> set[str]:
    """Return the names of the trainable parameters that belong to modules of the classes in ``safe_modules``."""
    model = baseline.spec.model(baseline.seed)
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(p)]
        for module in model.modules()
        for p in module.parameters(recurse=False)
        if type(module) in safe_modules and p.requires_grad
    }


def judge_reduced_gradients(
    ctx: JudgeContext, label: str, locals_by_rank: Sequence[LocalResult], low_names: set[str]
) -> Iterator[Comparison]:
    """Compare gradients with the mean over ranks, within the rounding of each gradient's reduce dtype.

    The gradients of the parameters in ``low_names`` are reduced in bf16, and all others in fp32.
    """
    records = ctx.rank_records(label)
    for name in locals_by_rank[0].grads:
        dtype = LOW_DTYPE if name in low_names else WIDE_DTYPE
        rank_grads = [record[name] for record in records]
        terms = [[local.grads[name]] for local in locals_by_rank]
        grad = replace(ctx, declared_reduce_dtype=dtype).build_reduced_grad(name, terms, rank_grads)
        yield from grad.match_in_pieces() or judge_whole_gradient(ctx, name, terms, rank_grads, dtype)
        yield from compare_ranks(ctx.location(name, Part.REDUCTION), rank_grads)


def judge_whole_gradient(
    ctx: JudgeContext, name: str, terms: GradientTerms, records: Sequence[Tensor], dtype: torch.dtype
) -> Iterator[Comparison]:
    """Compare one gradient on every rank with the mean of ``terms``, within the rounding of ``dtype``.

    ``dtype`` is the dtype in which the gradient is reduced.
    """
    mean, bound = mean_and_bound([term.double() for (term,) in terms], dtype)
    rank_grads = [terms[ctx.data_coordinate(rank)][0] for rank in range(ctx.world_size)]
    for rank, record in enumerate(records):
        comparison = compare_within_bound(ctx.location(name, Part.REDUCTION, rank=rank), mean, record, bound)
        yield hint_unreduced_parts(comparison, record, rank_grads, dtype)


INNER = "inner."  # the start of the names of modules and parameters in a model that wraps another


def plan_inner_modules(ctx: RankContext) -> dict[str, Any]:
    """Return how tp, cp and ep split a model that has the cell's model as its module ``inner``."""
    config = ctx.config
    return {
        "tp_plan": {INNER + name: word for name, word in config.tp_plan.items()},
        "cp_plan": tuple(INNER + name for name in config.cp_plan),
        "ep_plan": tuple(INNER + name for name in config.ep_plan),
    }


REDUCED = "reduced"  # the label, or its beginning, of the elements that were reduced


def get_sent_elements(engine: Engine) -> Mapping[str, int]:
    """Return the number of elements that the engine sent, by collective and dtype.

    Raise EngineContractError if the engine claims that it counts the elements but does not report the numbers.
    """
    sent = engine.observe().sent_elements
    if isinstance(sent, Absent):
        raise EngineContractError(
            f"engine.observe() did not report sent_elements: {sent.reason}; "
            "expected the number of elements that this rank sent, by collective and dtype"
        )
    return sent


def count_sent_elements(engine: Engine, collectives: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the numbers of elements that ``collectives`` have sent so far in bf16, in fp32 and in fp16."""
    counts = dict.fromkeys(("bfloat16", "float32", "float16"), 0)
    for key, elements in get_sent_elements(engine).items():
        collective, _, dtype = key.partition(" ")
        if collective in collectives and dtype in counts:
            counts[dtype] += elements
    return {name: scalar(count) for name, count in counts.items()}


REDUCE_COLLECTIVES = ("all_reduce", "reduce_scatter")


def parameters_inside_autocast(spec: ModelSpec) -> set[str]:
    """Return the names of the parameters that a forward uses under autocast: all except those of the module ``inner``.

    The model disables autocast while it calls ``inner``.
    """
    return {name for name, _ in spec.model(0).named_parameters() if not name.startswith("inner.")}


def judge_sent_once(
    ctx: JudgeContext, label: str, sizes: Mapping[str, int], names_by_dtype: Mapping[str, set[str]]
) -> Iterator[Comparison]:
    """Check that the parameters listed for a dtype were sent once in that dtype, for every dtype.

    The number of sent elements may exceed the number of parameters' elements by the padding. If ranks hold copies of
    the weights, REDUCED elements are sent within a copy, and each shard is sent once more across the copies.
    """
    shape = ctx.mesh.shape(ctx.world_size)
    across = 1 / shape[DATA_SHARD] if label.startswith(REDUCED) and shape[REPLICATE] > 1 else 0.0
    for rank, record in enumerate(ctx.rank_records(label)):
        for dtype, names in names_by_dtype.items():
            elements = sum(sizes[name] for name in names)
            least, most = elements * (1 + across), (elements + len(names) * (ctx.world_size - 1)) * (1 + across)
            name = min(names, default="input")
            place = ctx.location(name, Part.REDUCTION, rank=rank)
            yield compare_bitwise(place, record[dtype].clamp(least, most), record[dtype])


def precision_law(
    name: str,
    statement: str,
    observe: Callable[[RankContext], None],
    judge: Callable[[JudgeContext], Iterator[Comparison]],
    *,
    kept_because: str,
    features: tuple[Feature, ...] = (Feature.AUTOCAST,),
    variants: tuple[Variant, ...] = (Variant(),),
    sets_autocast: bool = False,
    models: tuple[str, ...] = ("mixed",),
    weights_stay_integers: bool = False,
) -> Law:
    """Build a law of the group ``precision``, by default on the model ``mixed``.

    ``weights_stay_integers`` says that the weights of an exact model are still integers whenever numbers are compared,
    so an engine's own kernels have to give the same sums.
    """
    return Law(
        name=f"precision.{name}",
        statement=statement,
        tier=Tier.STAGED,
        models=models,
        observe=observe,
        judge=judge,
        kept_because=kept_because,
        features=features,
        weights_stay_integers=weights_stay_integers,
        dtypes=("fp32",),  # these laws set the engine's precision options themselves
        variants=variants,
        sets_autocast=sets_autocast,
    )
