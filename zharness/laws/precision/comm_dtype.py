"""Define the law precision.comm_dtype: gradients are reduced in exactly the dtype that is configured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from zharness.engines.protocol import Feature
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.optimizers import ZERO_LR_SGD
from zharness.law_kit.rank_context import RankContext
from zharness.laws.precision.common import (
    LOW_DTYPE,
    REDUCE_COLLECTIVES,
    WIDE_DTYPE,
    compute_baseline_locals,
    count_sent_elements,
    judge_reduced_gradients,
    judge_sent_once,
    precision_law,
)
from zharness.parity import Comparison

COMM_DTYPES: Mapping[str, tuple[Mapping[str, Any], torch.dtype]] = {
    "first": ({"communication_data_type": "bf16"}, LOW_DTYPE),
    "second": ({}, WIDE_DTYPE),
}


def observe_comm_dtype(ctx: RankContext) -> None:
    """Run backward on two engines with different reduce dtypes, and record gradients and counts of sent elements."""
    engines = {
        name: ctx.build_engine(optimizer=ZERO_LR_SGD, options=options) for name, (options, _) in COMM_DTYPES.items()
    }
    before = {name: count_sent_elements(engine, REDUCE_COLLECTIVES) for name, engine in engines.items()}
    for name, engine in engines.items():
        engine.backward(ctx.loss(engine, 0, f"loss-{name}"))
    for name, engine in engines.items():
        ctx.record(f"grads-{name}", engine.full_grads())
        after = count_sent_elements(engine, REDUCE_COLLECTIVES)
        ctx.record(f"reduced-{name}", {dtype: after[dtype] - before[name][dtype] for dtype in after})
        engine.close()


def judge_comm_dtype(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that each engine sent every gradient once in its reduce dtype, and compare the gradients."""
    parameters = dict(ctx.baseline.spec.model(0).named_parameters())
    sizes = {name: p.numel() for name, p in parameters.items()}
    trained, no_names = {name for name, p in parameters.items() if p.requires_grad}, set[str]()
    expected = compute_baseline_locals(ctx, forward=False)
    for name, (_, dtype) in COMM_DTYPES.items():
        by_dtype = {"bfloat16": no_names, "float32": no_names, "float16": no_names}
        by_dtype[str(dtype).removeprefix("torch.")] = trained
        yield from judge_sent_once(ctx, f"reduced-{name}", sizes, by_dtype)
        yield from judge_reduced_gradients(ctx, f"grads-{name}", expected, trained if dtype == LOW_DTYPE else no_names)


LAWS = (
    precision_law(
        "comm_dtype",
        "gradients are reduced in exactly the configured dtype, also by two engines of different dtypes in one process",
        observe_comm_dtype,
        judge_comm_dtype,
        features=(Feature.REDUCE_DTYPES,),
        kept_because="two engines with different dtypes in one process, which shows process-wide state",
    ),
)
