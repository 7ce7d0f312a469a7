"""Define the law training.caller_modes: no call of the engine changes the modes that its caller has set."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import torch
from torch import Tensor

from zharness.device import compute_device_type
from zharness.device.float32_products import keep_precision
from zharness.engines.protocol import Engine, Feature, OptimizerSpec, require_full_state_dict, require_gathered
from zharness.engines.tensor_access import require_read_out
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
    deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with keep_precision(), torch.autograd.set_multithreading_enabled(False):
            torch.set_float32_matmul_precision("high")
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=only_warns)


def bf16_autocast() -> AbstractContextManager[object]:
    """Return a torch.autocast context in bf16 with its cache turned off."""
    return torch.autocast(compute_device_type(), torch.bfloat16, cache_enabled=False)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turn the garbage collector off while the ``with`` block runs."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


NO_GRAD = "no_grad"  # calls that need no autograd graph run under torch.no_grad
CLIPPED = "clipped"  # the step clips gradients
READ_OUT = "read_out"  # also read tensors by name, with the garbage collector off, with and without gradients
EVALUATING = "evaluating"  # all modules except the first are in evaluation mode, as in Monte-Carlo dropout
EDITED = "edited"  # also edit full weights, while the default dtype is float64

MODES: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "": nullcontext,
    "float64": wide_default_dtype,
    "deterministic": strict_algorithms,
    "autocast": bf16_autocast,
    READ_OUT: no_garbage_collection,
    EDITED: wide_default_dtype,
}
OWN_MODES = tuple(name for name in MODES if name not in (READ_OUT, EDITED))  # these variants need no feature

CLIP = 2.0**-6  # far below the norm of the gradients, so that it clips


def observe_caller_modes(ctx: RankContext) -> None:
    """Call every method of the engine once, and record the modes before and after each call."""
    calls_mode = torch.no_grad if ctx.variant == NO_GRAD else nullcontext
    model, batch = ctx.spec.model(ctx.seed), ctx.batch(0)
    with shared_folder() as folder, MODES.get(ctx.variant, nullcontext)():
        before = read_process_state()
        engine = ctx.build_engine_around(model, optimizer=ADAMW, clip=CLIP if ctx.variant == CLIPPED else None)
        record_modes(ctx, 0, before, read_process_state())
        engine.module.train(ctx.variant != EVALUATING)
        next(engine.module.children()).train(ctx.variant == EVALUATING)
        calls = make_calls(engine, folder, batch.inputs)
        for number, name in enumerate(list_calls(ctx.variant), start=1):
            plain_name = name.removesuffix(UNDER_NO_GRAD)
            mode = torch.no_grad if name != plain_name else nullcontext if name in NEED_GRAPH else calls_mode
            with mode():
                before = read_modes(engine)
                calls[plain_name]()
                record_modes(ctx, number, before, read_modes(engine))
        torch.rand(())  # undone by an engine that restores the generator's state from construction
        before = read_process_state()
        engine.close()
        record_modes(ctx, len(list_calls(ctx.variant)) + 1, before, read_process_state())


# The calls between building and closing an engine, in order.
CALLS = (
    "forward",
    "backward",
    "full_grads",
    "step",
    "zero_grad",
    "full_params",
    "full_optimizer_state",
    "observe",
    "full_state_dict",
    "save",
    "load",
    "forward under no_grad",
    "a forward that raises",
)
UNDER_NO_GRAD = " under no_grad"  # the end of the names of calls that run under torch.no_grad in every variant


def in_both_gradient_modes(*calls: str) -> tuple[str, ...]:
    """Return each of the names ``calls``, followed by the name of the same call under torch.no_grad."""
    return tuple(name for call in calls for name in (call, call + UNDER_NO_GRAD))


FURTHER_CALLS = {
    READ_OUT: (
        *CALLS[:3],
        *in_both_gradient_modes("read_grad"),
        "step",
        *in_both_gradient_modes("read_param", "read_optimizer_state"),
        *CALLS[4:],
    ),
    EDITED: (*CALLS[:5], "gathered", *CALLS[5:]),
}
NEED_GRAPH = ("forward", "backward")


def list_calls(variant: str) -> tuple[str, ...]:
    """Return the names of the calls that the law variant makes between building and closing an engine, in order."""
    return FURTHER_CALLS.get(variant, CALLS)


def make_calls(engine: Engine, folder: Path, inputs: Tensor) -> Mapping[str, Callable[[], object]]:
    """Return, for the name of each call, a function that makes the call."""
    outputs: list[Tensor] = []
    name = next(name for name, parameter in engine.module.named_parameters() if parameter.requires_grad)
    return {
        "forward": lambda: outputs.append(engine(inputs)),
        "backward": lambda: engine.backward(outputs.pop().sum()),
        "full_grads": engine.full_grads,
        "step": engine.step,
        "read_grad": lambda: require_read_out(engine).read_grad(name),
        "gathered": lambda: edit(engine, name),
        "read_param": lambda: require_read_out(engine).read_param(name),
        "read_optimizer_state": lambda: require_read_out(engine).read_optimizer_state(name, "exp_avg"),
        "zero_grad": engine.zero_grad,
        "full_params": engine.full_params,
        "full_optimizer_state": engine.full_optimizer_state,
        "observe": engine.observe,
        "full_state_dict": lambda: require_full_state_dict(engine).full_state_dict(),
        "save": lambda: engine.save(folder),
        "load": lambda: engine.load(folder),
        "a forward that raises": lambda: raise_in_forward(engine, inputs),
    }


@torch.no_grad()
def edit(engine: Engine, name: str) -> None:
    """Negate one full weight."""
    with require_gathered(engine).gathered([name]) as weights:
        weights[name].neg_()


class ForwardError(Exception):
    """The error that a module of the model raises in its forward."""


def raise_in_forward(engine: Engine, inputs: Tensor) -> None:
    """Run a forward in which the last module of the model raises an error on every rank."""

    def fail(*_: object) -> None:
        """Raise the error in place of the module's forward."""
        raise ForwardError

    hook = list(engine.module.children())[-1].register_forward_pre_hook(fail)
    with suppress(ForwardError):
        engine(inputs)
    hook.remove()


def read_modes(engine: Engine) -> dict[str, Tensor]:
    """Return the process state, and the training flag of every module."""
    flags = {f"training flag of {name!r}": scalar(module.training) for name, module in engine.module.named_modules()}
    return read_process_state() | flags


def record_modes(ctx: RankContext, number: int, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Record the modes before and after call number ``number``."""
    ctx.record("before", before, number)
    ctx.record("after", after, number)


def judge_caller_modes(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that no call changed any mode."""
    for number, call in enumerate(("building the engine", *list_calls(ctx.variant), "close")):
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
        variants=(
            *(Variant(name, compares_engine_with_itself=True) for name in (*OWN_MODES, NO_GRAD, EVALUATING)),
            Variant(CLIPPED, (Feature.CLIP,), compares_engine_with_itself=True),
            Variant(READ_OUT, (Feature.READ_OUT,), compares_engine_with_itself=True),
            Variant(EDITED, (Feature.EDITS,), compares_engine_with_itself=True),
        ),
        kept_because="the only law that sets modes away from their defaults, and that checks modes after a load",
        needs_fresh_ranks=True,
    ),
)
