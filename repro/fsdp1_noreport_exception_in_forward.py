"""With nothing sharded, FSDP1 stops training all weights after a forward that raised.

id: exception-in-forward
engine: fsdp1
symptom: after an exception in a forward, model.parameters() is empty, and later steps change nothing (NO_SHARD)
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: training.any_order
signature: the step left the weight at
ok: repro: a step after an exception in a forward OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp1_noreport_exception_in_forward.py

During a forward the module has plain views instead of its parameters. The end of the forward puts the parameters back,
but does not run after an exception. With NO_SHARD, which every strategy becomes on one rank, the next forward treats
these views as new parameters (_writeback_orig_params) and forgets the old ones. The optimizer has the old parameters,
which get no gradient any more. FSDP1 raises nothing. With sharded weights training is right. zero_grad between the two
forwards does not help.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

OK = "repro: a step after an exception in a forward OK."
CPU = torch.device("cpu")  # the script shows the bug on gloo


def raise_error(*_):
    raise ValueError("in forward")


def train(rank, strategy, *, interrupted):
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    nn.init.ones_(model[0].weight)
    engine = FullyShardedDataParallel(model, use_orig_params=True, device_id=CPU, sharding_strategy=strategy)
    optimizer = torch.optim.SGD(engine.parameters(), lr=1.0)
    x = torch.full((1, 1), 2.0 * (rank + 1))  # gradients 2 and 4, mean 3
    if interrupted:
        hook = model[0].register_forward_hook(raise_error)
        try:
            engine(x)
        except ValueError:
            hook.remove()
    optimizer.zero_grad()
    engine(x).sum().backward()
    optimizer.step()
    count = len(list(engine.parameters()))
    if count != 1:  # then summon_full_params has nothing to gather either
        return float(model[0].weight.detach())
    with FullyShardedDataParallel.summon_full_params(engine):
        return float(model[0].weight.detach())


def observe(rank):
    strategies = ShardingStrategy
    controls = [
        train(rank, strategies.NO_SHARD, interrupted=False),
        train(rank, strategies.FULL_SHARD, interrupted=True),
    ]
    if controls != [-2, -2]:
        raise RuntimeError(f"the controls, without an exception and sharded, are wrong too: {controls}, expected -2")
    got = train(rank, strategies.NO_SHARD, interrupted=True)
    return "" if got == -2 else f"the step left the weight at {got:g}, expected -2"


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
