"""Compute the shape of a program's model layer by layer, and reject layers that do not fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zharness.errors import UsageError
from zharness.workload.programs import (
    BLOCK_KINDS,
    SIZE_COUNTS,
    SOURCE_KINDS,
    TRAINED_KINDS,
    WIDTH_PRESERVING_KINDS,
    Layer,
    LayerKind,
)

WeightShape = tuple[int, int]  # (outputs, inputs)


@dataclass(frozen=True)
class ModelShape:
    """The properties of a sequence of layers that decide which layers may follow.

    ``width`` is the output width. ``weights`` are the shapes of the weights that may be tied. ``trained_count`` is the
    number of layers that are trained in every micro-batch.
    """

    width: int = 0
    weights: tuple[WeightShape, ...] = ()
    trained_count: int = 0

    def find_tieable_weight(self) -> WeightShape | None:
        """Return the shape of the nearest earlier weight that a tied layer could use, or None if there is none."""
        return next((shape for shape in reversed(self.weights) if shape[1] == self.width), None)


def shape_after_layer(model_shape: ModelShape, layer: Layer) -> ModelShape:
    """Return the shape of the model with ``layer`` appended. Raises UsageError if the layer does not fit."""
    kind, sizes, width = layer.kind, layer.sizes, model_shape.width
    if len(sizes) != SIZE_COUNTS.get(kind, 0) or not all(size > 0 for size in sizes):
        raise UsageError(f"layer {layer}: expected {SIZE_COUNTS.get(kind, 0)} sizes above 0 for {kind.value}")
    if (kind in SOURCE_KINDS) != (width == 0):
        raise UsageError(
            f"layer {layer}: expected {' or '.join(k.value for k in SOURCE_KINDS)} as the first layer, and only there"
        )
    after = replace(model_shape, trained_count=model_shape.trained_count + (kind in TRAINED_KINDS))
    if kind in BLOCK_KINDS:
        return shape_after_block(model_shape, layer)
    if kind is LayerKind.INPUTS:
        return replace(after, width=sizes[0])
    if kind is LayerKind.TOKENS:
        return replace(after, width=sizes[1], weights=((sizes[0], sizes[1]),))
    if kind in (LayerKind.LINEAR, LayerKind.MATRIX):
        return replace(after, width=sizes[0], weights=(*model_shape.weights, (sizes[0], width)))
    if kind in (LayerKind.FROZEN, LayerKind.READ):
        return replace(after, width=sizes[0])
    if kind is LayerKind.CONV:
        return replace(after, width=sizes[0] * width)
    if kind is LayerKind.TIED:
        shape = model_shape.find_tieable_weight()
        if shape is None:
            raise UsageError(
                f"layer tied: no earlier layer linear, matrix or tokens has a weight with {width} inputs to share"
            )
        return replace(after, width=shape[0])
    return after


def shape_after_block(model_shape: ModelShape, block: Layer) -> ModelShape:
    """Return the shape of the model with ``block`` appended. Raises UsageError if the block does not fit."""
    after = model_shape
    for layer in block.inner:
        after = shape_after_layer(after, layer)
    if block.kind in WIDTH_PRESERVING_KINDS and after.width != model_shape.width:
        raise UsageError(
            f"block {block} ends with width {after.width}; expected {model_shape.width}, the width of its input"
        )
    if block.kind is LayerKind.REENTRANT and not model_shape.trained_count:
        raise UsageError(
            f"block {block}: no layer before it is trained, so torch's reentrant checkpoint gives it no gradients"
        )
    # Layers that only every second micro-batch uses do not count, because the other micro-batches would have no
    # gradient.
    return replace(after, trained_count=model_shape.trained_count) if block.kind is LayerKind.SOMETIMES else after
