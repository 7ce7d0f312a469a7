"""FSDP1 with SHARD_GRAD_OP uses old weights in the forward after an evaluation and a step.

id: evaluation-keeps-old-weights
engine: fsdp1
symptom: after a forward without backward and a step, the next forward does not use the new weights
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: training.forward_alone
signature: output is
ok: repro: a forward after evaluation and step OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp1_noreport_evaluation_keeps_weights.py

A forward without a backward leaves the weights unsharded. The next forward finds them unsharded and does not gather the
weights that the step has written.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

OK = "repro: a forward after evaluation and step OK."
CPU = torch.device("cpu")  # the script shows the bug on gloo


def observe(_rank):
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    engine = FullyShardedDataParallel(
        layer, use_orig_params=True, device_id=CPU, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP
    )
    optimizer = torch.optim.SGD(engine.parameters(), lr=1.0)
    x = torch.ones(1, 1)
    engine(x).sum().backward()
    with torch.no_grad():
        engine(x)
    optimizer.step()  # this step sets the weight to 0
    got = float(engine(x))
    return "" if got == 0 else f"output is {got:g}, expected 0"


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
