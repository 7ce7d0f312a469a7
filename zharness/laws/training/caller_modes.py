"""Define the law training.caller_modes: no call of the engine changes the modes that its caller has set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from zharness.engines.protocol import Engine, Feature, OptimizerSpec
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.process_state import read_process_state
from zharness.law_kit.rank_actions import shared_folder
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.training.common import variation_law
from zharness.parity import Comparison, Part, Tier, compare_bitwise

ADAMW = OptimizerSpec(name="adamw", args={"lr": 1e-2})


@contextmanager
def wide_default_dtype() -> Iterator[None]:
    """Make float64 the default dtype while the ``with`` block runs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def strict_algorithms() -> Iterator[None]:
    """Turn on deterministic algorithms, faster matrix products and single-threaded backwards in the ``with`` block."""
    deterministic, precision = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_float32_matmul_precision(precision)


def bf16_autocast() -> AbstractContextManager[object]:
    """Return a torch.autocast context in bf16 with its cache turned off."""
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


MODES: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "": nullcontext,
    "float64": wide_default_dtype,
    "deterministic": strict_algorithms,
    "autocast": bf16_autocast,
}
NO_GRAD = "no_grad"  # the calls that need no graph run under torch.no_grad


def observe_caller_modes(ctx: RankContext) -> None:
    """Call every method of the engine once, and record the modes before and after each call."""
    calls_mode = torch.no_grad if ctx.variant == NO_GRAD else nullcontext
    model, batch = ctx.spec.model(ctx.seed), ctx.batch(0)
    with shared_folder() as folder, MODES.get(ctx.variant, nullcontext)():
        before = read_process_state()
        engine = ctx.build_engine_around(model, optimizer=ADAMW)
        record_modes(ctx, 0, before, read_process_state())
        next(engine.module.children()).eval()
        for number, (call, needs_graph) in enumerate(list_calls(engine, folder, batch.inputs), start=1):
            with nullcontext() if needs_graph else calls_mode():
                before = read_modes(engine)
                call()
                record_modes(ctx, number, before, read_modes(engine))
        before = read_process_state()
        engine.close()
        record_modes(ctx, len(CALLS) + 1, before, read_process_state())


# The calls between building and closing an engine, in order.
CALLS = (
    "forward",
    "backward",
    "full_grads",
    "step",
    "zero_grad",
    "full_params",
    "full_optimizer_state",
    "save",
    "load",
)


def list_calls(engine: Engine, folder: Path, inputs: Tensor) -> Iterator[tuple[Callable[[], object], bool]]:
    """Yield, for each of CALLS, a function that makes the call, and whether the call needs an autograd graph."""
    outputs: list[Tensor] = []
    yield lambda: outputs.append(engine(inputs)), True
    yield lambda: engine.backward(outputs.pop().sum()), True
    for method in (engine.full_grads, engine.step, engine.zero_grad, engine.full_params, engine.full_optimizer_state):
        yield method, False
    yield lambda: engine.save(folder), False
    yield lambda: engine.load(folder), False


def read_modes(engine: Engine) -> dict[str, Tensor]:
    """Return the process state, and the training flag of every module."""
    flags = {f"training flag of {name!r}": scalar(module.training) for name, module in engine.module.named_modules()}
    return read_process_state() | flags


def record_modes(ctx: RankContext, number: int, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Record the modes before and after call number ``number``."""
    ctx.record("before", before, number)
    ctx.record("after", after, number)


def judge_caller_modes(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that every call left every mode as it was."""
    for number, call in enumerate(("building the engine", *CALLS, "close")):
        for rank, before in enumerate(ctx.rank_records("before", number)):
            after = ctx.rank_records("after", number)[rank]
            for name, value in before.items():
                place = ctx.location(f"{name} after {call}", Part.FORWARD, 0, rank)
                yield compare_bitwise(place, value, after[name])


LAWS = (
    variation_law(
        "caller_modes",
        "no call changes the caller's gradient mode, training flags, default dtype, autocast or random generators",
        observe_caller_modes,
        judge_caller_modes,
        tier=Tier.EXACT,
        weights_stay_integers=False,
        dtypes=("fp32",),
        features=(Feature.CHECKPOINT, Feature.STEADINESS),
        variants=tuple(Variant(name, compares_engine_with_itself=True) for name in (*MODES, NO_GRAD)),
        kept_because="the only law that sets modes away from their defaults, and that looks at them after a load",
    ),
)
