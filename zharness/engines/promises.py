"""Define an engine's promises beside features: how it is called, what buffers hold, how often it gathers weights."""

from __future__ import annotations

from enum import Enum


class CallForm(Enum):
    """Who runs the forwards and backwards of a step: the form in which an engine is called."""

    FORWARD_AND_BACKWARD = "a forward and a backward for each micro-batch, which the caller calls"
    WHOLE_BATCH = "train_batch, which runs the forwards and backwards of all micro-batches of a step"
    WHOLE_TRAINING = "train, which runs all batches and steps of a training"


class BufferPromise(Enum):
    """The engine's promise about the buffers that a training forward writes, such as running statistics.

    The laws compare the buffers of each rank with those of plain PyTorch under the same promise: bitwise, or, if the
    engine has its own kernels, floating-point buffers within the error of torch's kernels.
    """

    LOCAL = "each rank keeps the buffers that its own forwards wrote"
    FROM_RANK_0 = "before each training forward, every rank takes the buffers of rank 0"


class WeightGathers(Enum):
    """How often a pipeline gathers the weights of a stage whose ranks have shards of them."""

    ONCE = "once for each batch"
    EACH_CALL = "once for each forward and each backward of a micro-batch"
