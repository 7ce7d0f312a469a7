"""Define the law state.consolidate: a plain PyTorch model can load the full state dict that an engine returns."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zharness.engines.protocol import Feature, require_full_state_dict
from zharness.law_kit.integer_steps import SIGN_STEPS
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, ModelScope, Variant
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.setting import SettingSupport
from zharness.law_kit.split_sums import require_exact_sums
from zharness.laws.state.common import RESHARD_OPTIMIZER, train_steps
from zharness.parity import Comparison, Part, Tier, compare_bitwise
from zharness.parity.compare import check_names


def observe_consolidate(ctx: RankContext) -> None:
    """Train one step, record the full state dict, overwrite the returned tensors with zeros, and run a forward."""
    engine = ctx.build_engine(optimizer=SIGN_STEPS if ctx.spec.exact else RESHARD_OPTIMIZER)
    train_steps(ctx, engine, range(1), "before")
    ctx.record_weights(engine, step=0)
    full = require_full_state_dict(engine).full_state_dict()
    ctx.record("full", full)
    ctx.record("tied", index_shared_memory(full))
    for tensor in full.values():
        tensor.zero_()  # the caller owns the state dict, and the engine must not use its tensors
    ctx.loss(engine, 1)
    engine.close()


def index_shared_memory(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return, for each tensor of ``state``, the position in name order of the first tensor that shares its memory."""
    first_positions: dict[int, int] = {}
    return {
        name: torch.tensor(
            float(first_positions.setdefault(tensor.data_ptr() if tensor.numel() else -position - 1, position))
        )
        for position, (name, tensor) in enumerate(sorted(state.items()))
    }


def judge_consolidate(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check names, shapes, tied weights and values of the state dict, and the loss of a plain model that loads it."""
    plain = ctx.baseline.build_module().state_dict()
    for rank, full in enumerate(ctx.rank_records("full")):
        check_names("full_state_dict", plain, full)
        # A state dict may hold master weights, which a model in the narrow dtype rounds when it loads them.
        params, masters = ctx.rank_records("params")[rank], ctx.rank_records("masters")[rank]
        for name, tensor in plain.items():
            place = ctx.location(name, Part.GATHER, rank=rank)
            yield compare_bitwise(place, torch.zeros(tensor.shape), torch.zeros(full[name].shape))
            if name in params:
                expected = params if full[name].dtype == params[name].dtype else masters
                yield compare_bitwise(place, expected[name], full[name])
        for name, first in index_shared_memory(plain).items():
            yield compare_bitwise(
                ctx.location(name, Part.GATHER, rank=rank), first, ctx.rank_records("tied")[rank][name]
            )
    require_exact_sums(ctx, range(1, 2), ctx.rank_records("params")[0])
    losses = ctx.baseline.run_ranks(partial(compute_loaded_loss, ctx))
    for rank, record in enumerate(ctx.rank_records("loss", 1)):
        place = ctx.location("loss", Part.FORWARD, 1, rank)
        yield compare_bitwise(place, losses[ctx.data_coordinate(rank)], record["loss"])


def compute_loaded_loss(ctx: JudgeContext, coordinate: int) -> Tensor:
    """Load the state dict of a data coordinate's first rank into a plain model, and return its second loss there."""
    module, batch = ctx.baseline.build_module(), ctx.baseline.batch(coordinate, 1)
    first, *_ = ctx.mesh.list_ranks(coordinate, ctx.world_size)
    module.load_state_dict(dict(ctx.rank_records("full")[first]))
    return ctx.baseline.objective(ctx.baseline.compute_output(module, batch), batch).detach()


LAWS = (
    Law(
        name="state.consolidate",
        statement="the full state dict has plain names and shapes, with tied weights once, and a plain model loads it",
        tier=Tier.EXACT,
        models=("transformer", "mixed"),
        observe=observe_consolidate,
        judge=judge_consolidate,
        features=(Feature.CHECKPOINT,),
        compares_later_forwards=True,
        variants=(Variant(model_scope=ModelScope.ANY),),
        setting_support=SettingSupport.WINDOWS_AND_CALLS,
        kept_because="the only law that loads an engine's weights into a plain model",
    ),
)
