"""Define the dtypes in which engines are tested, and the loss scale for each dtype."""

from __future__ import annotations

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# A power of two changes no significand. 16 is large enough to be noticed if it is lost, and too small to overflow.
LOSS_SCALES = {"fp32": 1.0, "bf16": 1.0, "fp16": 16.0}
