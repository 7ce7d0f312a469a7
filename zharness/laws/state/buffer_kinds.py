"""Define the law state.buffer_kinds: buffers of every dtype keep their values in training and in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from zharness.engines.protocol import Engine, Feature, require_full_state_dict
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, MeshSupport, Variant
from zharness.law_kit.optimizers import UNIT_LR_SGD
from zharness.law_kit.rank_actions import shared_folder
from zharness.law_kit.rank_context import RankContext
from zharness.parity import Comparison, Part, Tier, compare_bitwise

# One buffer of each kind, with values that no narrower dtype holds.
BUFFERS: Mapping[str, Tensor] = {
    "int64": torch.tensor([2**53 - 1, -(2**31), 0]),
    "float32": torch.tensor([1 / 3, -1e30, 1e-30]),
    "float64": torch.tensor([1 / 3, 1e300, -1e-300], dtype=torch.float64),
    "bfloat16": torch.tensor([1.5, -0.0078125], dtype=torch.bfloat16),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(7, dtype=torch.uint8),
    "empty": torch.zeros(0, 3, dtype=torch.int32),
}
NAME = "kept"
STATES = ("built", "trained", "loaded", "in full_state_dict")


def build_engine(ctx: RankContext, buffer: Tensor) -> Engine:
    """Build an engine around a model that has ``buffer``."""
    model = ctx.spec.model(ctx.seed)
    model.register_buffer(NAME, buffer.clone())
    return ctx.build_engine_around(model, optimizer=UNIT_LR_SGD)


def observe_buffer_kinds(ctx: RankContext) -> None:
    """Train an engine, save a checkpoint, load it into another engine, and record the buffer in each state."""
    buffer = BUFFERS[ctx.variant]
    saved, loaded = build_engine(ctx, buffer), build_engine(ctx, torch.zeros_like(buffer))
    record_buffer(ctx, saved, 0)
    saved.backward(ctx.loss(saved, 0))
    saved.step()
    record_buffer(ctx, saved, 1)
    with shared_folder() as folder:
        saved.save(folder)
        loaded.load(folder)
    record_buffer(ctx, loaded, 2)
    full = require_full_state_dict(loaded).full_state_dict()[NAME]
    ctx.record(NAME, describe_buffer(full), 3)
    saved.close()
    loaded.close()


def record_buffer(ctx: RankContext, engine: Engine, state: int) -> None:
    """Record the engine's buffer in state number ``state`` of STATES."""
    ctx.record(NAME, describe_buffer(engine.module.state_dict()[NAME]), state)


def describe_buffer(buffer: Tensor) -> dict[str, Tensor]:
    """Return the values of a buffer in float64, which represents them exactly, and the number of the buffer's dtype."""
    dtypes = [kind.dtype for kind in BUFFERS.values()]
    number = dtypes.index(buffer.dtype) if buffer.dtype in dtypes else -1
    return {"values": buffer.double(), "dtype": torch.tensor(float(number))}


def judge_buffer_kinds(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the buffer of every rank, in every state, with the buffer with which the model was built."""
    expected = describe_buffer(BUFFERS[ctx.variant])
    for state, description in enumerate(STATES):
        for rank, record in enumerate(ctx.rank_records(NAME, state)):
            for name, value in expected.items():
                place = ctx.location(f"{name} of the buffer, {description}", Part.GATHER, 0, rank)
                yield compare_bitwise(place, value, record[name])


LAWS = (
    Law(
        name="state.buffer_kinds",
        statement="buffers of every dtype keep dtype and value while an engine is built, trains, saves and loads",
        tier=Tier.EXACT,
        models=("mlp",),
        observe=observe_buffer_kinds,
        judge=judge_buffer_kinds,
        features=(Feature.CHECKPOINT,),
        variants=tuple(Variant(name, compares_engine_with_itself=True) for name in BUFFERS),
        kept_because="the only buffers of float64, of integers beyond float32's, of bool and without elements",
        mesh_support=MeshSupport.ANY,
    ),
)
