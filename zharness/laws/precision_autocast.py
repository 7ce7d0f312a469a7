"""The laws of torch_autocast, and what all laws of precision look at: dtypes, local gradients, the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines.protocol import Absent, Engine, Feature, OptimizerSpec
from zharness.errors import EngineContractError
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law
from zharness.law_kit.optimizer_step import hint_missing_norm
from zharness.law_kit.process_state import compare_process_state, read_process_state
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.training_accumulation import ZERO_LR_SGD
from zharness.laws.training_sgd_step import eval_mode
from zharness.parity import Comparison, Part, Tier, compare_bitwise, compare_ranks, compare_within_bound
from zharness.parity.attribution import GradientTerms
from zharness.parity.baseline import Baseline, LocalResult
from zharness.parity.bounds import mean_and_bound, unit_roundoff
from zharness.workload import ModelSpec
from zharness.workload.user_model import is_user_model

LOW_DTYPE, WIDE_DTYPE = torch.bfloat16, torch.float32
RECORDED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)
SAFE_MODULES: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
AUTOCAST_OPTIONS: Mapping[str, Any] = {"torch_autocast": {"enabled": True, "dtype": "bf16"}}
SGD = OptimizerSpec(name="sgd", args={"lr": 0.05, "momentum": 0.5})


def dtype_index(tensor: Tensor) -> Tensor:
    """A tensor's dtype as a number that can be recorded and compared."""
    return scalar(RECORDED_DTYPES.index(tensor.dtype))


def compare_values_and_dtypes(
    ctx: JudgeContext, name: str, part: Part, expected: Tensor, actual: Tensor, rank: int
) -> Iterator[Comparison]:
    """Bitwise, and of the same dtype."""
    yield compare_bitwise(ctx.location(name, part, rank=rank), dtype_index(expected), dtype_index(actual))
    found = actual if actual.is_floating_point() else actual.double()
    yield compare_bitwise(ctx.location(name, part, rank=rank), expected, found)


@contextmanager
def capture_output_dtypes(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The dtype of every module's output, by its path, in the forwards of the block; its hooks are called there."""
    seen: dict[str, Tensor] = {}

    def make_hook(name: str) -> Any:
        def save_output_dtype(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            seen[name] = dtype_index(output)

        return save_output_dtype

    hooks = [each.register_forward_hook(make_hook(name)) for name, each in module.named_modules()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def compute_baseline_local(
    ctx: JudgeContext,
    rank: int,
    forward: bool = True,
    backward: bool = False,
    micro: int = 0,
    params: Mapping[str, Tensor] | None = None,
) -> LocalResult:
    """The plain model's micro-batch ``micro``: forward and backward inside torch.autocast or not, the loss never."""
    plain = replace(
        ctx.baseline, autocast=LOW_DTYPE if forward else None, autocast_backward=LOW_DTYPE if backward else None
    )
    return plain.run_rank(rank, micro, params)


def compute_baseline_locals(ctx: JudgeContext, forward: bool = True, backward: bool = False) -> list[LocalResult]:
    return [compute_baseline_local(ctx, rank, forward, backward) for rank in range(ctx.world_size)]


def low_precision_parameters(baseline: Baseline, safe_modules: tuple[type[nn.Module], ...]) -> set[str]:
    """The trained parameters that lie in modules of the classes ``safe``, if under another name as well."""
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
    """Gradients are the mean over ranks within the rounding of their own wire: bf16 for those in ``low``, else fp32."""
    copies = ctx.rank_records(label)
    for name in locals_by_rank[0].grads:
        dtype = LOW_DTYPE if name in low_names else WIDE_DTYPE
        held, terms = [copy[name] for copy in copies], [[one.grads[name]] for one in locals_by_rank]
        right = replace(ctx, declared_reduce_dtype=dtype).compare_grad_in_pieces(name, terms, held)
        yield from right or judge_whole_gradient(ctx, name, terms, held, dtype)
        yield from compare_ranks(ctx.location(name, Part.REDUCTION), held)


def judge_whole_gradient(
    ctx: JudgeContext, name: str, terms: GradientTerms, copies: Sequence[Tensor], dtype: torch.dtype
) -> Iterator[Comparison]:
    """Every rank's copy of one gradient against the mean of ``terms``, reduced in ``dtype``."""
    mean, bound = mean_and_bound([term.double() for (term,) in terms], dtype)
    for rank, copy in enumerate(copies):
        yield compare_within_bound(ctx.location(name, Part.REDUCTION, rank=rank), mean, copy, bound)


def observe_policy(ctx: RankContext) -> None:
    engine = ctx.build_engine(optimizer=SGD, options=AUTOCAST_OPTIONS)
    evaluate(ctx, engine, MICRO_BEFORE_STEP)
    with capture_output_dtypes(engine.module) as dtypes:
        loss = ctx.loss(engine, 0)
    ctx.record("dtypes", dtypes)
    engine.backward(loss)
    ctx.record("grads", engine.full_grads())
    engine.step()
    state = {f"{name}/{key}": t for name, kept in engine.full_optimizer_state().items() for key, t in kept.items()}
    kept = {**engine.full_params(), **state}
    ctx.record("kept", {name: dtype_index(tensor) for name, tensor in kept.items() if tensor.is_floating_point()})
    engine.zero_grad()
    ctx.record("params", engine.full_params())
    evaluate(ctx, engine, MICRO_AFTER_STEP)
    ctx.loss(engine, MICRO_AFTER_STEP + 1)
    engine.close()


MICRO_BEFORE_STEP, MICRO_AFTER_STEP = 1, 2  # the micro-batches of evaluations before a step and after it


def evaluate(ctx: RankContext, engine: Engine, micro: int) -> None:
    """A forward that trains nothing, and the dtypes of what its modules gave."""
    with eval_mode(engine), torch.no_grad(), capture_output_dtypes(engine.module) as dtypes:
        ctx.loss(engine, micro)
    ctx.record("dtypes", dtypes, micro)


def judge_policy(ctx: JudgeContext) -> Iterator[Comparison]:
    model, batch = ctx.baseline.build_module(), ctx.baseline.batch(0, 0)
    with capture_output_dtypes(model) as dtypes, torch.autocast("cpu", LOW_DTYPE):
        model(batch.inputs)
    ranks = range(ctx.world_size)
    for micro in (MICRO_BEFORE_STEP, 0):
        yield from ctx.compare_values("dtypes", [dtypes for _ in ranks], micro)
    yield from ctx.compare_losses(
        MICRO_BEFORE_STEP, [compute_baseline_local(ctx, rank, micro=MICRO_BEFORE_STEP) for rank in ranks]
    )
    expected = compute_baseline_locals(ctx)
    yield from ctx.compare_losses(0, expected)
    yield from judge_reduced_gradients(ctx, "grads", expected, low_precision_parameters(ctx.baseline, SAFE_MODULES))
    for rank, copy in enumerate(ctx.rank_records("kept")):
        for name, found in copy.items():
            yield compare_bitwise(
                ctx.location(name, Part.OPTIMIZER, rank=rank), dtype_index(torch.zeros((), dtype=WIDE_DTYPE)), found
            )
    yield from ctx.compare_values("dtypes", [dtypes for _ in ranks], MICRO_AFTER_STEP)
    for micro in (MICRO_AFTER_STEP, MICRO_AFTER_STEP + 1):
        stepped = [
            compute_baseline_local(ctx, rank, micro=micro, params=ctx.rank_records("params")[rank]) for rank in ranks
        ]
        yield from ctx.compare_losses(micro, stepped)


AUTOCAST_STATES = [(forward, backward) for forward in (True, False) for backward in (True, False)]


def list_autocast_states(spec: ModelSpec) -> Sequence[tuple[bool, bool]]:
    """Whether forward and backward run under autocast.

    Of anyone's model, of which a pass may take minutes, without the state that training.grads has: neither.
    """
    return [state for state in AUTOCAST_STATES if any(state) or not is_user_model(spec.name)]


def observe_states(ctx: RankContext) -> None:
    for forward, backward in list_autocast_states(ctx.spec):
        engine = ctx.build_engine(optimizer=ZERO_LR_SGD, options=AUTOCAST_OPTIONS if forward else {})
        loss = ctx.loss(engine, 0, f"loss-{forward}-{backward}")
        with torch.autocast(ctx.device.type, LOW_DTYPE, enabled=backward):
            engine.backward(loss)
        ctx.record(f"grads-{forward}-{backward}", engine.full_grads())
        engine.close()


def judge_states(ctx: JudgeContext) -> Iterator[Comparison]:
    safe = low_precision_parameters(ctx.baseline, SAFE_MODULES)
    for forward, backward in list_autocast_states(ctx.baseline.spec):
        expected = compute_baseline_locals(ctx, forward, backward)
        yield from ctx.compare_losses(0, expected, f"loss-{forward}-{backward}")
        yield from judge_reduced_gradients(ctx, f"grads-{forward}-{backward}", expected, safe if forward else set())


def observe_nested(ctx: RankContext) -> None:
    """A user's block around the engine's call: another dtype, none at all, and one where the engine has no section.

    At last a forward that raises.
    """
    device, inputs = ctx.device.type, ctx.batch(0).inputs
    engine = ctx.build_engine(options=AUTOCAST_OPTIONS)
    with torch.autocast(device, torch.float16):
        ctx.record("other", {"output": engine(inputs)})
    with torch.autocast(device, enabled=False):
        ctx.record("off", {"output": engine(inputs)})
    engine.close()
    engine = ctx.build_engine()
    with torch.autocast(device, LOW_DTYPE):
        ctx.record("alone", {"output": engine(inputs)})
    engine.close()
    engine = ctx.build_engine(options=AUTOCAST_OPTIONS)
    ctx.record("switches", read_process_state(), 0)
    with suppress(InterruptedError):
        engine(inputs, through=raise_interrupted)
    ctx.record("switches", read_process_state(), 1)
    engine.close()


def raise_interrupted(hidden: Tensor) -> Tensor:
    """In the middle of a forward: raises."""
    raise InterruptedError


def judge_nested(ctx: JudgeContext) -> Iterator[Comparison]:
    for rank in range(ctx.world_size):
        with torch.autocast("cpu", LOW_DTYPE):
            expected = ctx.baseline.build_module()(ctx.baseline.batch(rank, 0).inputs).detach()
        for label in ("other", "off", "alone"):
            found = ctx.rank_records(label)[rank]["output"]
            yield from compare_values_and_dtypes(ctx, "loss", Part.FORWARD, expected, found, rank)
    yield from compare_process_state(ctx, "switches", range(2))


def get_sent_elements(engine: Engine) -> Mapping[str, int]:
    """Elements that the engine sent. Raises EngineContractError where it claims to count them and does not."""
    wire = engine.observe().wire
    if isinstance(wire, Absent):
        raise EngineContractError(f"observe().wire: {wire.reason}; expected elements by collective and dtype")
    return wire


def count_sent_elements(engine: Engine, collectives: tuple[str, ...]) -> dict[str, Tensor]:
    """Elements sent so far by the collectives ``kinds``, in bf16, in fp32, and in any other dtype of fp16's width."""
    found = dict.fromkeys(("bfloat16", "float32", "float16"), 0)
    for key, elements in get_sent_elements(engine).items():
        collective, _, dtype = key.partition(" ")
        if collective in collectives and dtype in found:
            found[dtype] += elements
    return {name: scalar(count) for name, count in found.items()}


REDUCE_COLLECTIVES = ("all_reduce", "reduce_scatter")
CUSTOM_SAFE_MODULE_OPTIONS = {
    "torch_autocast": {**AUTOCAST_OPTIONS["torch_autocast"], "lower_precision_safe_modules": ["torch.nn.LayerNorm"]}
}
SAFE_MODULE_LISTS: Mapping[str, tuple[Mapping[str, Any], tuple[type[nn.Module], ...]]] = {
    "": (AUTOCAST_OPTIONS, SAFE_MODULES),
    "custom": (CUSTOM_SAFE_MODULE_OPTIONS, (nn.LayerNorm,)),
}


def observe_safe_modules(ctx: RankContext) -> None:
    options, _ = SAFE_MODULE_LISTS[ctx.variant]
    engine = ctx.build_engine(optimizer=ZERO_LR_SGD, options=options)
    before = count_sent_elements(engine, REDUCE_COLLECTIVES)
    engine.backward(ctx.loss(engine, 0))
    if ctx.config.stage == 3:
        ctx.record("gathered", count_sent_elements(engine, ("all_gather",)))
    engine.step()
    after = count_sent_elements(engine, REDUCE_COLLECTIVES)
    ctx.record("reduced", {name: after[name] - before[name] for name in after})
    engine.close()


def judge_safe_modules(ctx: JudgeContext) -> Iterator[Comparison]:
    _, safe = SAFE_MODULE_LISTS[ctx.variant]
    spec = ctx.baseline.spec
    low = low_precision_parameters(ctx.baseline, safe)
    sizes = {name: p.numel() for name, p in spec.model(0).named_parameters()}
    trained = {name for name, p in spec.model(0).named_parameters() if p.requires_grad}
    yield from judge_sent_once(ctx, "reduced", sizes, {"bfloat16": low, "float32": trained - low, "float16": set()})
    if ctx.has_record("gathered"):
        for rank, copy in enumerate(ctx.rank_records("gathered")):
            place = ctx.location("input", Part.GATHER, rank=rank)
            least = scalar(sum(sizes[name] for name in low & parameters_inside_autocast(spec)))
            yield compare_bitwise(place, torch.maximum(least, copy["bfloat16"]), copy["bfloat16"])


def parameters_inside_autocast(spec: ModelSpec) -> set[str]:
    """What a forward under torch.autocast reads inside of it: not the layer that leaves it."""
    return {name for name, _ in spec.model(0).named_parameters() if not name.startswith("inner.")}


def judge_sent_once(
    ctx: JudgeContext, label: str, sizes: Mapping[str, int], names_by_dtype: Mapping[str, set[str]]
) -> Iterator[Comparison]:
    """In each dtype exactly the parameters named crossed the wire, each once, but for the padding of shards."""
    for rank, copy in enumerate(ctx.rank_records(label)):
        for dtype, names in names_by_dtype.items():
            least = sum(sizes[name] for name in names)
            most = least + len(names) * (ctx.world_size - 1)
            name = min(names, default="input")
            place = ctx.location(name, Part.REDUCTION, rank=rank)
            yield compare_bitwise(place, copy[dtype].clamp(least, most), copy[dtype])


def observe_norm(ctx: RankContext) -> None:
    engine = ctx.build_engine(optimizer=ZERO_LR_SGD, options=AUTOCAST_OPTIONS, clip=0.5)
    engine.backward(ctx.loss(engine, 0))
    ctx.record("grads", engine.full_grads())
    engine.step()
    norm = engine.grad_norm()
    ctx.record("norm", {"norm": torch.tensor(float("nan") if norm is None else norm, dtype=torch.float64)})
    engine.close()


def judge_norm(ctx: JudgeContext) -> Iterator[Comparison]:
    """The triangle inequality: norms differ by no more than the norm of the difference, which is bounded by element."""
    expected, low = compute_baseline_locals(ctx), low_precision_parameters(ctx.baseline, SAFE_MODULES)
    yield from judge_reduced_gradients(ctx, "grads", expected, low)
    means, bounds = [], []
    for name in expected[0].grads:
        mean, bound = mean_and_bound(
            [one.grads[name].double() for one in expected], LOW_DTYPE if name in low else WIDE_DTYPE
        )
        means.append(mean.flatten())
        bounds.append(bound.flatten())
    norm = torch.cat(means).norm()
    # The norm itself is a sum of squares in fp32 or wider, and a root.
    bound = torch.cat(bounds).norm() + norm * len(torch.cat(means)) * unit_roundoff(WIDE_DTYPE)
    for rank, copy in enumerate(ctx.rank_records("norm")):
        yield hint_missing_norm(
            compare_within_bound(ctx.location("norm", Part.OPTIMIZER, rank=rank), norm, copy["norm"], bound)
        )


def precision_law(
    name: str,
    statement: str,
    observe: Callable[[RankContext], None],
    judge: Callable[[JudgeContext], Iterator[Comparison]],
    *variants: str,
    needs: Feature = Feature.AUTOCAST,
    user_model_variants: tuple[str, ...] = (),
) -> Law:
    """A law of precision, on the model made for them."""
    return Law(
        name=f"precision.{name}",
        statement=statement,
        tier=Tier.STAGED,
        models=("mixed",),
        observe=observe,
        judge=judge,
        needs=(needs,),
        weights_stay_integers=False,
        dtypes=("fp32",),  # the checks choose the sections of precision themselves
        variants=tuple((variant, ()) for variant in variants) or (("", ()),),
        user_model_variants=user_model_variants,
    )


LAWS = (
    precision_law(
        "autocast_policy",
        "with torch_autocast all forwards run in torch.autocast's dtypes; weights, gradients and state stay fp32",
        observe_policy,
        judge_policy,
    ),
    precision_law(
        "autocast_states",
        "forward with and without torch_autocast, backward inside and outside an outer one: the plain gradients",
        observe_states,
        judge_states,
        user_model_variants=("",),
    ),
    precision_law(
        "autocast_nested",
        "a user's torch.autocast around the engine yields to the section, works where there is none; none is left on",
        observe_nested,
        judge_nested,
    ),
    precision_law(
        "safe_modules",
        "only parameters of lower_precision_safe_modules travel in the low dtype, each gradient once",
        observe_safe_modules,
        judge_safe_modules,
        *SAFE_MODULE_LISTS,
        needs=Feature.WIRES,
    ),
    precision_law(
        "autocast_norm",
        "the reported norm is that of the plain gradients under torch.autocast: bf16 has no loss scale",
        observe_norm,
        judge_norm,
        user_model_variants=("",),
    ),
)
