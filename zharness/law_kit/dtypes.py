"""Define the dtypes in which engines are tested, the loss scale for each, and the cells that multiply in TF32."""

from __future__ import annotations

import torch

from zharness.cell import TF32
from zharness.device.float32_products import Float32Products

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The dtypes that a command may name. A covering array contains TF32 only if the command names it.
KNOWN_DTYPES = (*DTYPES, TF32)
# A power of two changes no significand. 16 is large enough to be noticed if it is lost, and too small to overflow.
LOSS_SCALES = {"fp32": 1.0, "bf16": 1.0, "fp16": 16.0}


def choose_products(dtype: str) -> Float32Products:
    """Return how GPUs multiply float32 in cells of ``dtype``."""
    return Float32Products.TF32 if dtype == TF32 else Float32Products.FULL
