"""The workload of every engine: a transformer, its batches, and one training step through the engine's verbs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness import engines
from zharness.device import rank_device
from zharness.engines import Engine, EngineConfig, OptimizerSpec
from zharness.workload.nets import TransformerBlock


@dataclass(frozen=True)
class Size:
    """The size of a transformer with about 8 width^2 depth + 2 x vocabulary x width parameters."""

    width: int
    depth: int
    heads: int
    vocabulary: int


SIZES: Mapping[str, Size] = {
    "tiny": Size(width=32, depth=2, heads=2, vocabulary=64),
    "5M": Size(width=256, depth=9, heads=4, vocabulary=1024),
    "50M": Size(width=768, depth=9, heads=12, vocabulary=4096),
    "100M": Size(width=768, depth=12, heads=12, vocabulary=32768),
}


class Model(nn.Module):
    """A transformer from token ids (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(TransformerBlock(size.width, size.heads) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


def model(size: Size) -> Model:
    """Build the model with the same initial weights on every rank, on the rank's device: a GPU draws them at once."""
    torch.manual_seed(0)
    with this_device():
        return Model(size)


def batch(size: Size, samples: int, length: int) -> Tensor:
    """Return random token ids (samples, length + 1), which are the inputs and, shifted by one, the targets."""
    return torch.randint(size.vocabulary, (samples, length + 1))


def loss(call: Callable[..., Any], ids: Tensor) -> Tensor:
    """Return the cross-entropy of the next tokens."""
    return nn.functional.cross_entropy(call(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def train(engine: Engine, ids: Tensor) -> None:
    """Run forward, backward, ``step`` and ``zero_grad`` of one micro-batch."""
    engine.backward(loss(engine, ids))
    engine.step()
    engine.zero_grad()


# The adapter's buckets are small, because DeepSpeed's own take 2 GB of every rank. A large model needs those.
GPU_OPTIONS = {"deepspeed": {"zero_optimization": {"reduce_bucket_size": 500_000_000}}}
# Engines without low-precision weights of their own: they run forwards under torch.autocast, with weights in fp32.
UNDER_AUTOCAST = ("plain", "ddp")


def precision(name: str, dtype: str) -> dict[str, Any]:
    """Return the arguments of EngineConfig with which the engine ``name`` computes in ``dtype``."""
    if dtype != "fp32" and name in UNDER_AUTOCAST:
        return {"options": {"torch_autocast": {"enabled": True, "dtype": dtype}}}
    return {"dtype": dtype}


def build(name: str, stage: int, size: Size, samples: int, fused: bool = False, **config: Any) -> Engine:
    """Build an engine around the model in its initial weights, with torch's AdamW, on the device of this rank."""
    adamw = OptimizerSpec("adamw", {"lr": 1e-4, **({"fused": True} if fused else {})})
    if this_device().type == "cuda":
        config = {"options": GPU_OPTIONS.get(name, {}), **config}
    engine_config = EngineConfig(stage=stage, micro_batch_size=samples, optimizer=adamw, **config)
    return engines.get(name)(model(size), engine_config)


def this_device() -> torch.device:
    """Return the device of this rank."""
    return rank_device(dist.get_rank() if dist.is_initialized() else 0)
