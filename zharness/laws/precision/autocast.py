"""Define laws of the configuration section torch_autocast: it has the same effect as torch.autocast.

Outputs, losses and gradients equal those under torch.autocast. The laws also run a forward or a backward of the engine
inside the user's own autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from zharness.device import compute_device_type
from zharness.engines.protocol import Engine, Feature
from zharness.law_kit.integer_steps import SIGN_STEPS
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import ModelScope, Variant
from zharness.law_kit.optimizers import ZERO_LR_SGD
from zharness.law_kit.process_state import compare_process_state, read_process_state
from zharness.law_kit.rank_actions import eval_mode
from zharness.law_kit.rank_context import RankContext
from zharness.laws.precision.common import (
    AUTOCAST_OPTIONS,
    LOW_DTYPE,
    SAFE_MODULES,
    SGD,
    WIDE_DTYPE,
    compare_values_and_dtypes,
    compute_baseline_local,
    compute_baseline_locals,
    dtype_index,
    judge_reduced_gradients,
    low_precision_parameters,
    precision_law,
)
from zharness.parity import Comparison, Part, compare_bitwise
from zharness.workload import Batch, ModelSpec
from zharness.workload.user_model import is_user_model


@contextmanager
def capture_output_dtypes(module: nn.Module, spec: ModelSpec) -> Iterator[dict[str, Tensor]]:
    """Yield a dictionary to which every forward in the ``with`` block adds the output dtype of each module of ``spec``.

    Attention modules and layers of experts are left out, because an engine may replace them by its own modules.
    """
    seen: dict[str, Tensor] = {}

    def make_hook(name: str) -> Any:
        """Return the forward hook that records the output dtype of the module ``name``."""

        def save_output_dtype(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            """Record the dtype of the module's output."""
            seen[name] = dtype_index(output)

        return save_output_dtype

    # An engine may replace the submodules of attention and of layers of experts.
    replaced = tuple(f"{name}." for name in (*spec.cp_plan, *spec.ep_plan))
    kept = {name: child for name, child in module.named_modules() if not name.startswith(replaced)}
    hooks = [child.register_forward_hook(make_hook(name)) for name, child in kept.items()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


TRANSFORMED = "transformed"  # torch.func.grad transforms the forward


def transform(call: Callable[[Tensor], Tensor], spec: ModelSpec, batch: Batch) -> dict[str, Tensor]:
    """Return the output of ``call``, and the gradient of the loss with respect to the inputs, by torch.func.grad."""

    def loss_and_output(inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, which is computed outside of the forward, and the output."""
        output = call(inputs)
        return spec.loss(output, batch.target), output

    transformed: Callable[[Tensor], tuple[Tensor, Tensor]] = torch.func.grad(loss_and_output, has_aux=True)
    gradient, output = transformed(batch.inputs)
    return {"input": gradient, "output": output}


def observe_policy(ctx: RankContext) -> None:
    """Train a step under torch_autocast between two evaluations, and record dtypes of outputs, weights and state.

    In the variant ``transformed``, record the output and the gradient of a forward that torch.func transforms instead.
    """
    optimizer = SIGN_STEPS if ctx.spec.exact else SGD  # weights stay integers that bf16 holds exactly
    engine = ctx.build_engine(optimizer=optimizer, options=AUTOCAST_OPTIONS)
    if ctx.variant == TRANSFORMED:
        ctx.record(TRANSFORMED, transform(engine, ctx.spec, ctx.batch(0)))
        engine.close()
        return
    evaluate(ctx, engine, MICRO_BEFORE_STEP)
    with capture_output_dtypes(engine.module, ctx.spec) as dtypes:
        loss = ctx.loss(engine, 0)
    ctx.record("dtypes", dtypes)
    engine.backward(loss)
    ctx.record("grads", engine.full_grads())
    engine.step()
    state = {f"{name}/{key}": t for name, entry in engine.full_optimizer_state().items() for key, t in entry.items()}
    tensors = {**engine.full_params(), **state}
    ctx.record("kept", {name: dtype_index(tensor) for name, tensor in tensors.items() if tensor.is_floating_point()})
    engine.zero_grad()
    ctx.record("params", engine.full_params())
    evaluate(ctx, engine, MICRO_AFTER_STEP)
    ctx.loss(engine, MICRO_AFTER_STEP + 1)
    engine.close()


MICRO_BEFORE_STEP, MICRO_AFTER_STEP = 1, 2  # micro-batches of the evaluations before and after the step


def evaluate(ctx: RankContext, engine: Engine, micro: int) -> None:
    """Run a forward in eval mode without gradients, and record its loss and the dtypes of the modules' outputs."""
    with eval_mode(engine), torch.no_grad(), capture_output_dtypes(engine.module, ctx.spec) as dtypes:
        ctx.loss(engine, micro)
    ctx.record("dtypes", dtypes, micro)


def judge_policy(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare output dtypes, losses and gradients with torch.autocast, and check that weights and state are fp32."""
    if ctx.variant == TRANSFORMED:
        yield from judge_transformed(ctx)
        return
    model, batch = ctx.baseline.build_module(), ctx.baseline.batch(0, 0)
    with capture_output_dtypes(model, ctx.baseline.spec) as dtypes, torch.autocast(compute_device_type(), LOW_DTYPE):
        model(batch.inputs)
    ranks = range(ctx.data_size)
    for micro in (MICRO_BEFORE_STEP, 0):
        yield from ctx.compare_values("dtypes", [dtypes for _ in ranks], micro)
    yield from ctx.compare_losses(
        MICRO_BEFORE_STEP, [compute_baseline_local(ctx, rank, micro=MICRO_BEFORE_STEP) for rank in ranks]
    )
    expected = compute_baseline_locals(ctx)
    yield from ctx.compare_losses(0, expected)
    yield from judge_reduced_gradients(ctx, "grads", expected, low_precision_parameters(ctx.baseline, SAFE_MODULES))
    for rank, record in enumerate(ctx.rank_records("kept")):
        for name, dtype in record.items():
            yield compare_bitwise(
                ctx.location(name, Part.OPTIMIZER, rank=rank), dtype_index(torch.zeros((), dtype=WIDE_DTYPE)), dtype
            )
    yield from ctx.compare_values("dtypes", [dtypes for _ in ranks], MICRO_AFTER_STEP)
    for micro in (MICRO_AFTER_STEP, MICRO_AFTER_STEP + 1):
        stepped = [
            compute_baseline_local(ctx, rank, micro=micro, params=ctx.rank_records("params")[rank]) for rank in ranks
        ]
        yield from ctx.compare_losses(micro, stepped)


def judge_transformed(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare output and gradient of torch.func.grad, and their dtypes, with those of plain PyTorch under autocast."""
    model = ctx.baseline.build_module()

    def call(inputs: Tensor) -> Tensor:
        """Run the forward under torch.autocast."""
        with torch.autocast(compute_device_type(), LOW_DTYPE):
            output: Tensor = model(inputs)
            return output

    for rank, record in enumerate(ctx.rank_records(TRANSFORMED)):
        expected = transform(call, ctx.baseline.spec, ctx.baseline.batch(ctx.data_coordinate(rank), 0))
        for name, part in (("output", Part.FORWARD), ("input", Part.LOCAL_GRADIENT)):
            yield from compare_values_and_dtypes(ctx, name, part, expected[name].detach(), record[name], rank)


AUTOCAST_STATES = [(forward, backward) for forward in (True, False) for backward in (True, False)]


def list_autocast_states(spec: ModelSpec) -> Sequence[tuple[bool, bool]]:
    """Return pairs of booleans that say whether the forward and the backward run under autocast.

    For a user's model, the pair without autocast is left out: its forward may take minutes, and the law training.grads
    covers this pair.
    """
    return [state for state in AUTOCAST_STATES if any(state) or not is_user_model(spec.name)]


def observe_states(ctx: RankContext) -> None:
    """Run forward and backward inside and outside autocast in every combination, and record losses and gradients."""
    for forward, backward in list_autocast_states(ctx.spec):
        engine = ctx.build_engine(optimizer=ZERO_LR_SGD, options=AUTOCAST_OPTIONS if forward else {})
        loss = ctx.loss(engine, 0, f"loss-{forward}-{backward}")
        with torch.autocast(ctx.device.type, LOW_DTYPE, enabled=backward):
            engine.backward(loss)
        ctx.record(f"grads-{forward}-{backward}", engine.full_grads())
        engine.close()


def judge_states(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare losses and gradients with those of plain PyTorch under the same combinations of autocast."""
    safe = low_precision_parameters(ctx.baseline, SAFE_MODULES)
    for forward, backward in list_autocast_states(ctx.baseline.spec):
        expected = compute_baseline_locals(ctx, forward, backward)
        yield from ctx.compare_losses(0, expected, f"loss-{forward}-{backward}")
        yield from judge_reduced_gradients(ctx, f"grads-{forward}-{backward}", expected, safe if forward else set())


def observe_nested(ctx: RankContext) -> None:
    """Call the engine inside the user's own autocast: with another dtype, disabled, or on an engine without autocast.

    At the end, raise an exception in a forward and record the process's global settings before and after it.
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
        engine(inputs, transform=raise_interrupted)
    ctx.record("switches", read_process_state(), 1)
    engine.close()


def raise_interrupted(hidden: Tensor) -> Tensor:
    """Raise InterruptedError in the middle of a forward."""
    raise InterruptedError


def judge_nested(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare outputs and their dtypes with bf16 autocast, and check that an exception changed no global setting."""
    for rank in range(ctx.world_size):
        with torch.autocast(compute_device_type(), LOW_DTYPE):
            expected = ctx.baseline.build_module()(ctx.baseline.batch(ctx.data_coordinate(rank), 0).inputs).detach()
        for label in ("other", "off", "alone"):
            output = ctx.rank_records(label)[rank]["output"]
            yield from compare_values_and_dtypes(ctx, "loss", Part.FORWARD, expected, output, rank)
    yield from compare_process_state(ctx, "switches", range(2))


TWO_DTYPES_STEPS = 3  # an engine may prefetch weights from the second step on, when it knows their order


def observe_two_dtypes(ctx: RankContext) -> None:
    """Train steps of a model with weights of two dtypes under torch_autocast, and record losses and gradients."""
    engine = ctx.build_engine(optimizer=ZERO_LR_SGD, options=AUTOCAST_OPTIONS)
    for step in range(TWO_DTYPES_STEPS):
        engine.backward(ctx.loss(engine, step))
        ctx.record(f"grads-{step}", engine.full_grads())
        engine.step()
        engine.zero_grad()
    engine.close()


def judge_two_dtypes(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the losses and gradients of each step with those of plain PyTorch under torch.autocast."""
    safe = low_precision_parameters(ctx.baseline, SAFE_MODULES)
    for step in range(TWO_DTYPES_STEPS):
        expected = [compute_baseline_local(ctx, rank, micro=step) for rank in range(ctx.data_size)]
        yield from ctx.compare_losses(step, expected)
        yield from judge_reduced_gradients(ctx, f"grads-{step}", expected, safe)


LAWS = (
    precision_law(
        "autocast_policy",
        "with torch_autocast all forwards run in torch.autocast's dtypes; weights, gradients and state stay fp32",
        observe_policy,
        judge_policy,
        variants=(Variant(), Variant(TRANSFORMED, (Feature.TORCH_FUNC,))),
        sets_autocast=True,
        kept_because="the only law that records the dtype of every operation",
        weights_stay_integers=True,
    ),
    precision_law(
        "autocast_states",
        "gradients are plain PyTorch's with and without torch_autocast, and with backward inside a user's autocast",
        observe_states,
        judge_states,
        models=("mixed", "recomputed"),
        variants=(Variant(model_scope=ModelScope.ANY),),
        sets_autocast=True,
        kept_because="forward and backward run in different autocast states, which shows a state that leaks",
        weights_stay_integers=True,
    ),
    precision_law(
        "weights_of_two_dtypes",
        "frozen bf16 and trained fp32 weights give the losses and gradients of torch.autocast under torch_autocast",
        observe_two_dtypes,
        judge_two_dtypes,
        models=("adapted",),
        sets_autocast=True,
        kept_because="the only law that all-gathers weights of two dtypes together",
        weights_stay_integers=True,
    ),
    precision_law(
        "autocast_nested",
        "torch_autocast overrides a user's autocast; without it the user's applies; no autocast stays on afterwards",
        observe_nested,
        judge_nested,
        sets_autocast=True,
        kept_because="the only law that calls the engine inside a user's own autocast",
        weights_stay_integers=True,
    ),
)
