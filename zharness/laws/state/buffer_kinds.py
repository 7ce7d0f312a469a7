"""Define the law state.buffer_kinds: buffers of every dtype keep their values in training and in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from zharness.engines.protocol import Engine, Feature, require_full_state_dict
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.optimizers import UNIT_LR_SGD
from zharness.law_kit.rank_actions import shared_folder
from zharness.law_kit.rank_context import RankContext, scalar
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
SHARED = "shared"  # two modules have the buffer
NOT_PERSISTENT = "not_persistent"  # a state dict, and so a checkpoint, does not contain the buffer
KINDS: Mapping[str, Tensor] = {**BUFFERS, SHARED: BUFFERS["int64"], NOT_PERSISTENT: BUFFERS["float32"]}
NAME = "kept"
SHARING_MODULE = "sharing"  # a further module, which has the buffer too, in the variant SHARED
STATES = ("built", "trained", "loaded", "in full_state_dict")


def build_engine(ctx: RankContext, buffer: Tensor) -> Engine:
    """Build an engine around a model that has a copy of ``buffer``."""
    model, buffer_copy = ctx.spec.model(ctx.seed), buffer.clone()
    model.register_buffer(NAME, buffer_copy, persistent=ctx.variant != NOT_PERSISTENT)
    if ctx.variant == SHARED:
        model.register_module(SHARING_MODULE, nn.Module())
        model.get_submodule(SHARING_MODULE).register_buffer(NAME, buffer_copy)
    return ctx.build_engine_around(model, optimizer=UNIT_LR_SGD)


def observe_buffer_kinds(ctx: RankContext) -> None:
    """Train an engine, save a checkpoint, load it into another engine, and record the buffer in each state.

    A buffer that is not persistent has other values in the engine that is saved. In the engine that loads, the buffer
    gets its values after construction, and the load must not change them.
    """
    buffer = KINDS[ctx.variant]
    saved, loaded = build_engine(ctx, buffer), build_engine(ctx, torch.zeros_like(buffer))
    record_buffer(ctx, saved, 0)
    saved.backward(ctx.loss(saved, 0))
    saved.step()
    record_buffer(ctx, saved, 1)
    if ctx.variant == NOT_PERSISTENT:
        saved.module.get_buffer(NAME).zero_()
        loaded.module.get_buffer(NAME).copy_(buffer)
    with shared_folder() as folder:
        saved.save(folder)
        loaded.load(folder)
    record_buffer(ctx, loaded, 2)
    full = require_full_state_dict(loaded).full_state_dict()
    ctx.record("listed", {NAME: scalar(NAME in full)})
    if ctx.variant != NOT_PERSISTENT:
        ctx.record(NAME, describe_buffer(full[NAME]), 3)
    saved.close()
    loaded.close()


def record_buffer(ctx: RankContext, engine: Engine, state: int) -> None:
    """Record the engine's buffer in state number ``state`` of STATES, and whether modules still share the buffer."""
    buffer = engine.module.get_buffer(NAME)
    ctx.record(NAME, describe_buffer(buffer), state)
    if ctx.variant == SHARED:  # an engine may have put a wrapper around the other module
        owned = [dict(module.named_buffers(recurse=False)) for module in engine.module.modules()]
        places = {buffers[NAME].data_ptr() for buffers in owned if NAME in buffers}
        ctx.record("shared", {NAME: scalar(places == {buffer.data_ptr()})}, state)


def describe_buffer(buffer: Tensor) -> dict[str, Tensor]:
    """Return the values of a buffer in float64, which represents them exactly, and the number of the buffer's dtype."""
    dtypes = [kind.dtype for kind in BUFFERS.values()]
    number = dtypes.index(buffer.dtype) if buffer.dtype in dtypes else -1
    return {"values": buffer.double(), "dtype": torch.tensor(float(number))}


def judge_buffer_kinds(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the buffer of every rank, in every state, with the buffer with which the model was built."""
    expected, is_listed = describe_buffer(KINDS[ctx.variant]), ctx.variant != NOT_PERSISTENT
    for state, description in enumerate(STATES if is_listed else STATES[:-1]):
        for rank, record in enumerate(ctx.rank_records(NAME, state)):
            for name, value in expected.items():
                place = ctx.location(f"{name} of the buffer, {description}", Part.GATHER, 0, rank)
                yield compare_bitwise(place, value, record[name])
    for rank, record in enumerate(ctx.rank_records("listed")):
        yield compare_bitwise(
            ctx.location("buffer in full_state_dict", Part.GATHER, 0, rank), scalar(is_listed), record[NAME]
        )
    for state, description in enumerate(STATES[:-1] if ctx.variant == SHARED else ()):
        for rank, record in enumerate(ctx.rank_records("shared", state)):
            place = ctx.location(f"sharing of the buffer, {description}", Part.GATHER, 0, rank)
            yield compare_bitwise(place, scalar(True), record[NAME])


LAWS = (
    Law(
        name="state.buffer_kinds",
        statement="buffers of every dtype keep dtype, value and sharing in construction, training, saving and loading",
        tier=Tier.EXACT,
        models=("mlp",),
        observe=observe_buffer_kinds,
        judge=judge_buffer_kinds,
        features=(Feature.CHECKPOINT,),
        variants=tuple(Variant(name, compares_engine_with_itself=True) for name in KINDS),
        kept_because="the only buffers of float64, of integers beyond float32's, of bool, without elements, or shared",
    ),
)
