"""FSDP1 with SHARD_GRAD_OP adds an old gradient that zero_grad dropped between forward and backward.

id: zero-grad-after-forward
engine: fsdp1
symptom: zero_grad between forward and backward does not drop the last layer's gradient
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: training.trajectory
signature: gradient is
ok: repro: gradients after zero_grad OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp1_noreport_zero_grad_after_forward.py

The root resets the gradients of its groups at the first pre-backward hook of a backward. The group whose output is the
model's own output registered its hook earlier, so this group has already saved its old gradient, and the backward adds
the new gradient to it. FULL_SHARD and NO_SHARD are right.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

OK = "repro: gradients after zero_grad OK."
CPU = torch.device("cpu")  # the script shows the bug on gloo


def observe(_rank):
    def wrap(module):
        return FullyShardedDataParallel(
            module, use_orig_params=True, device_id=CPU, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP
        )

    layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    engine = wrap(nn.Sequential(*map(wrap, layers)))
    for factor in (2.0, 4.0):
        loss = engine(torch.full((1, 1), factor)).sum()
        engine.zero_grad(set_to_none=True)
        loss.backward()
    with FullyShardedDataParallel.summon_full_params(engine, with_grads=True):
        got = float(layers[1].weight.grad)
    return "" if got == 4 else f"gradient is {got:g}, expected 4; the gradient before zero_grad was 2"


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
