"""FSDP1 with forward_prefetch and NO_SHARD stops training layers if the whole model is checkpointed.

id: fsdp1-prefetch-recomputed
engine: fsdp1
symptom: layers stop training, and model.parameters() lacks them, after a checkpoint of the whole model (NO_SHARD)
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: checkpointing.whole_model
signature: weights did not move
ok: repro: prefetching in a recomputation OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp1_noreport_prefetch_in_recomputation.py

The recomputation runs the forward of the wrapped model again within backward. There forward_prefetch=True unshards the
next layer, as in a forward, and replaces its parameters by views. NO_SHARD frees nothing, so it has no reshard that
would put the parameters back, and the optimizer's parameters get no gradient. FSDP1 raises nothing. On one rank every
strategy becomes NO_SHARD.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.utils.checkpoint import checkpoint

OK = "repro: prefetching in a recomputation OK."
CPU = torch.device("cpu")  # the script shows the bug on gloo
LAYERS = 3


def wrap(module):
    return FullyShardedDataParallel(
        module,
        sharding_strategy=ShardingStrategy.NO_SHARD,
        forward_prefetch=True,
        use_orig_params=True,
        device_id=CPU,
    )


def observe(_rank):
    layers = [nn.Linear(1, 1, bias=False) for _ in range(LAYERS)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    engine = wrap(nn.Sequential(*(wrap(layer) for layer in layers)))
    weights = list(engine.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.5)
    x = torch.ones(1, 1, requires_grad=True)
    checkpoint(engine, x, use_reentrant=False).sum().backward()
    optimizer.step()
    still = sum(float(weight.detach()) == 1 for weight in weights)
    return f"{still} of {LAYERS} weights did not move" if still else ""


def main():
    dist.init_process_group("gloo")
    problem = observe(dist.get_rank())
    if problem:
        print(f"repro: REPRODUCED: {problem}\n", end="", flush=True)
        return 1
    if dist.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
