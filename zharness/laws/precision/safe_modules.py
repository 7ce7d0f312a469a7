"""Define the law precision.safe_modules: only parameters of the modules listed as safe are reduced in bf16.

The engine option lower_precision_safe_modules lists the classes of these modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zharness.engines.protocol import Feature
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.optimizers import ZERO_LR_SGD
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.precision.common import (
    AUTOCAST_OPTIONS,
    REDUCE_COLLECTIVES,
    SAFE_MODULES,
    count_sent_elements,
    judge_sent_once,
    low_precision_parameters,
    parameters_inside_autocast,
    precision_law,
)
from zharness.parity import Comparison, Part, compare_bitwise

CUSTOM_SAFE_MODULE_OPTIONS = {
    "torch_autocast": {**AUTOCAST_OPTIONS["torch_autocast"], "lower_precision_safe_modules": ["torch.nn.LayerNorm"]}
}

SAFE_MODULE_LISTS: Mapping[str, tuple[Mapping[str, Any], tuple[type[nn.Module], ...]]] = {
    "": (AUTOCAST_OPTIONS, SAFE_MODULES),
    "custom": (CUSTOM_SAFE_MODULE_OPTIONS, (nn.LayerNorm,)),
}


def observe_safe_modules(ctx: RankContext) -> None:
    """Train one step under torch_autocast, and record the number of elements that were sent in each dtype."""
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
    """Check that only the safe modules' parameters were reduced, and at stage 3 also gathered, in bf16."""
    _, safe = SAFE_MODULE_LISTS[ctx.variant]
    spec = ctx.baseline.spec
    low = low_precision_parameters(ctx.baseline, safe)
    sizes = {name: p.numel() for name, p in spec.model(0).named_parameters()}
    trained = {name for name, p in spec.model(0).named_parameters() if p.requires_grad}
    yield from judge_sent_once(ctx, "reduced", sizes, {"bfloat16": low, "float32": trained - low, "float16": set()})
    if ctx.has_record("gathered"):
        for rank, record in enumerate(ctx.rank_records("gathered")):
            place = ctx.location("input", Part.GATHER, rank=rank)
            least = scalar(sum(sizes[name] for name in low & parameters_inside_autocast(spec)))
            yield compare_bitwise(place, torch.maximum(least, record["bfloat16"]), record["bfloat16"])


LAWS = (
    precision_law(
        "safe_modules",
        "only gradients of lower_precision_safe_modules are reduced in low precision, each exactly once",
        observe_safe_modules,
        judge_safe_modules,
        features=(Feature.REDUCE_DTYPES,),
        variants=tuple(map(Variant, SAFE_MODULE_LISTS)),
        kept_because="the only law that counts sent elements by dtype for lists of safe modules",
    ),
)
