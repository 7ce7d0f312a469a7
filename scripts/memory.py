"""Measure the bytes that each rank of the reference engine holds and compare them with the ZeRO paper's formula."""

from __future__ import annotations

import argparse

import torch
from tabulate import tabulate
from torch import Tensor, nn

from zharness.reference import initialize
from zharness.reference.layout import STAGES, ShardPlacement
from zharness.world import run

VOCABULARY, SEQUENCE, BATCH = 512, 16, 2


class Block(nn.Module):
    """A transformer block without the attention product over positions, which has no parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        h = h + self.out(torch.sigmoid(q * k) * v)
        return torch.add(h, self.down(torch.relu(self.up(h))))


def model(width: int, depth: int) -> nn.Module:
    """Build the model whose bytes are measured."""
    blocks = [Block(width) for _ in range(depth)]
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY))


def measure(stage: int, width: int, depth: int) -> dict[str, int]:
    """Return this rank's bytes by kind: gradients after the second backward, the rest after the second step.

    ``gathered peak`` is the most bytes of unsharded parameters at one time.
    """
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine, *_ = initialize(model=model(width, depth), config=config)
    gradients = 0
    for _ in range(2):
        engine.backward(engine(torch.randint(VOCABULARY, (BATCH, SEQUENCE))).pow(2).mean())
        gradients = engine.allocated_bytes()["gradients"]
        engine.step()
    return engine.allocated_bytes() | {"gradients": gradients, "gathered peak": engine.peak_gathered_bytes()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=4, help="ranks (default 4)")
    parser.add_argument("--width", type=int, default=192, help="width of the model (default 192)")
    parser.add_argument("--depth", type=int, default=6, help="blocks of the model (default 6)")
    arguments = parser.parse_args()
    sizes = [p.numel() for p in model(arguments.width, arguments.depth).parameters()]
    psi = sum(sizes)
    rows = []
    for stage, owners in STAGES.items():
        ranks = run(measure, stage, arguments.width, arguments.depth, world_size=arguments.world_size, timeout=300)
        for kind, bytes_each, owner in (
            ("parameters", 4, owners.parameters),
            ("gradients", 4, owners.gradients),
            ("optimizer_state", 8, owners.optimizer_state),
        ):
            measured = max(rank_bytes[kind] for rank_bytes in ranks)
            formula = bytes_each * psi / (arguments.world_size if owner is ShardPlacement.SHARDED else 1)
            rows.append([stage, kind.replace("_", " "), owner.value, measured, formula, measured / formula])
        rows.append(
            [stage, "gathered, at the peak", "", max(rank_bytes["gathered peak"] for rank_bytes in ranks), None, None]
        )
    print(f"{psi:,} parameters in {len(sizes)} tensors, {arguments.world_size} ranks, fp32, AdamW; largest of any rank")
    headers = ["stage", "what", "owner", "measured bytes", "formula bytes", "ratio"]
    print(tabulate(rows, headers, floatfmt=("", "", "", ",.0f", ",.0f", ".4f"), intfmt=",", missingval="-"))


if __name__ == "__main__":
    main()
