"""Define the law precision.buffers_keep_dtype: buffers and frozen parameters keep their dtypes and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines.protocol import Feature, require_full_state_dict
from zharness.law_kit.dtypes import DTYPES
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.precision.common import (
    AUTOCAST_OPTIONS,
    LOW_DTYPE,
    SGD,
    WIDE_DTYPE,
    compare_values_and_dtypes,
    plan_inner_modules,
    precision_law,
)
from zharness.laws.precision.master_weights import BF16_OPTIONS
from zharness.parity import Comparison, Part, compare_bitwise

PRECISION_MODES: Mapping[str, tuple[Mapping[str, Any], torch.dtype, Feature]] = {
    "bf16": ({"bf16": BF16_OPTIONS}, LOW_DTYPE, Feature.MASTERS),
    "fp16": ({"fp16": {"enabled": True, "loss_scale": 16}}, torch.float16, Feature.LOSS_SCALER),
    "autocast": (AUTOCAST_OPTIONS, WIDE_DTYPE, Feature.AUTOCAST),
}


DECLARED, INPUTS = "declared", "inputs"  # these variants run in every dtype that the engine claims
# Inputs with values that no narrow floating-point dtype holds exactly.
INTEGERS = {"indices": torch.tensor([257, 2**24 + 1, 2**53 - 1]), "mask": torch.tensor([True, False])}


class IntegerInputsModel(nn.Module):
    """A model with two further inputs, which it passes to ``note`` by name and does not use."""

    def __init__(self, inner: nn.Module, note: Callable[[dict[str, Tensor]], None]) -> None:
        super().__init__()
        self.inner = inner
        self.note = note

    def forward(self, x: Tensor, indices: Tensor, mask: Tensor) -> Any:
        """Call ``note`` with the further inputs, and return the output of the module ``inner`` for ``x``."""
        self.note({"indices": indices.clone(), "mask": mask.clone()})
        return self.inner(x)


def write_into(seen: dict[str, Tensor]) -> Callable[[dict[str, Tensor]], None]:
    """Return a function that writes into ``seen``, even if an engine copies the model that calls the function."""
    return lambda tensors: seen.update(tensors)


def describe_integers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values in exact float64, and for each tensor whether its dtype equals that in INTEGERS."""
    dtypes = {f"dtype of {name}": scalar(tensor.dtype == INTEGERS[name].dtype) for name, tensor in tensors.items()}
    return {name: tensor.double() for name, tensor in tensors.items()} | dtypes


def observe_buffers(ctx: RankContext) -> None:
    """Train two steps with the precision options that the law variant names, and record the buffers and weights."""
    if ctx.variant in (DECLARED, INPUTS):
        observe_declared_dtypes(ctx)
        return
    options, dtype, _ = PRECISION_MODES[ctx.variant]
    engine, batch = ctx.build_engine(optimizer=SGD, options=options), ctx.batch(0).to(dtype)
    for _ in range(2):
        engine.backward(ctx.spec.loss(engine(batch.inputs), batch.target))
        engine.step()
        engine.zero_grad()
    ctx.record("buffers", dict(engine.module.named_buffers()))
    ctx.record("params", engine.full_params())
    engine.close()


def observe_declared_dtypes(ctx: RankContext) -> None:
    """Train one step in every claimed dtype, and record the buffers of the engine and of its full state dict.

    In the variant ``inputs``, pass further inputs of integers, and record the inputs that the model receives.
    """
    for at, (dtype, torch_dtype) in enumerate(DTYPES.items()):
        options = [ctx.capabilities.engine_options[name] for name in ctx.setting.options]
        can_set = not any(option.explain_cell_limit(ctx.world_size, dtype, ctx.config.mesh) for option in options)
        if dtype not in ctx.capabilities.dtypes or not can_set:
            continue
        if ctx.variant == INPUTS:
            seen: dict[str, Tensor] = {}
            model = IntegerInputsModel(ctx.spec.model(ctx.seed), write_into(seen))
            engine = ctx.build_engine_around(model, optimizer=SGD, dtype=dtype, **plan_inner_modules(ctx))
            engine(ctx.batch(0).inputs.to(torch_dtype), INTEGERS["indices"].clone(), mask=INTEGERS["mask"].clone())
            ctx.record("inputs", describe_integers(seen), at)
            engine.close()
        else:
            engine, batch = ctx.build_engine(optimizer=SGD, dtype=dtype), ctx.batch(0).to(torch_dtype)
            engine.backward(ctx.spec.loss(engine(batch.inputs), batch.target))
            engine.step()
            buffers = dict(engine.module.named_buffers())
            ctx.record("buffers", buffers, at)
            if ctx.capabilities.refusal(Feature.CHECKPOINT) is None:
                full = require_full_state_dict(engine).full_state_dict()
                ctx.record("full", {name: full[name] for name in buffers if name in full}, at)
            engine.close()


def judge_declared_dtypes(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that buffers of engine and full state dict equal those of the original model in each claimed dtype."""
    wanted = dict(ctx.baseline.spec.model(ctx.baseline.seed).named_buffers())
    steps = [snapshot.step for snapshot in ctx.evidence[0].snapshots if snapshot.label == "buffers"]
    for step, rank in product(steps, range(ctx.world_size)):
        buffers = ctx.rank_records("buffers", step)[rank]
        for name, tensor in wanted.items():
            yield from compare_values_and_dtypes(ctx, name, Part.OPTIMIZER, tensor, buffers[name], rank)
        for name, tensor in ctx.rank_records("full", step)[rank].items() if ctx.has_record("full") else ():
            yield from compare_values_and_dtypes(ctx, name, Part.GATHER, wanted[name], tensor, rank)


def judge_inputs(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that inputs of integers reached the model, in each claimed dtype, with their dtypes and values."""
    for snapshot in ctx.evidence[0].snapshots:
        for rank, record in enumerate(ctx.rank_records("inputs", snapshot.step)):
            for name, value in describe_integers(INTEGERS).items():
                yield compare_bitwise(ctx.location(name, Part.FORWARD, 0, rank), value, record[name])


def judge_buffers(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that buffers and frozen parameters equal those of the original model in dtype and value."""
    if ctx.variant in (DECLARED, INPUTS):
        yield from judge_inputs(ctx) if ctx.variant == INPUTS else judge_declared_dtypes(ctx)
        return
    model = ctx.baseline.spec.model(ctx.baseline.seed)
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    for label, expected in (("buffers", dict(model.named_buffers())), ("params", frozen)):
        for rank, record in enumerate(ctx.rank_records(label)):
            for name, tensor in expected.items():
                yield from compare_values_and_dtypes(ctx, name, Part.OPTIMIZER, tensor, record[name], rank)


LAWS = (
    precision_law(
        "buffers_keep_dtype",
        "buffers, frozen parameters and integer inputs keep dtype and value",
        observe_buffers,
        judge_buffers,
        features=(),
        variants=(
            *(
                Variant(mode, (feature,), compares_engine_with_itself=True)
                for mode, (_, _, feature) in PRECISION_MODES.items()
            ),
            *(Variant(name, compares_engine_with_itself=True) for name in (DECLARED, INPUTS)),
        ),
        kept_because="the only law that compares buffers and frozen parameters after a cast",
    ),
)
