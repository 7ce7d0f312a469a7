"""FSDP1 does not reduce the gradient of a group that only the backwards in no_sync used.

id: fsdp1-unused-after-no-sync
engine: fsdp1
symptom: a step uses the local gradient of a weight that only micro-batches in no_sync used, or backward raises
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: window.partly_used
signature: gradient is
ok: repro: a group used in no_sync alone OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp1_noreport_unused_after_no_sync.py

The backward in no_sync sets _post_backward_called on the group's FlatParameter, and _finalize_params returns before it
resets _post_backward_called. The synchronized backward does not use the group, so its hook reduces nothing.
prepare_gradient_for_optim then reads the old _post_backward_called and treats the local gradient as reduced. NO_SHARD
steps with the local gradient of each rank without an error. SHARD_GRAD_OP and FULL_SHARD raise "All sharded parameters
that received a gradient in the post-backward should use `_saved_grad_shard`". If the synchronized backward uses the
group, all strategies are right.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

OK = "repro: a group used in no_sync alone OK."
CPU = torch.device("cpu")  # the script shows the bug on gloo


class Layers(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
        for layer in layers:
            nn.init.ones_(layer.weight)
        self.first, self.second = map(wrap, layers)

    def forward(self, x, both):
        return self.second(self.first(x)) if both else self.first(x)


def train_window(rank, strategy, last_uses_both):
    def wrap(module):
        return FullyShardedDataParallel(module, use_orig_params=True, device_id=CPU, sharding_strategy=strategy)

    engine = wrap(Layers(wrap))
    with engine.no_sync():
        engine(torch.full((1, 1), 2.0 * (rank + 1)), True).sum().backward()  # gradients 2 and 4, mean 3
    engine(torch.zeros(1, 1), last_uses_both).sum().backward()  # adds a gradient of 0
    with FullyShardedDataParallel.summon_full_params(engine, with_grads=True):
        return float(engine.module.second.module.weight.grad)


def observe(rank):
    problems = []
    for strategy in (ShardingStrategy.NO_SHARD, ShardingStrategy.FULL_SHARD):
        if (control := train_window(rank, strategy, True)) != 3:
            raise RuntimeError(f"the control with {strategy.name} is wrong too: {control:g}, expected 3")
        try:
            got = f"{train_window(rank, strategy, False):g}"
        except AssertionError as error:
            got = f"never computed ({error})"
        if got != "3":
            problems.append(f"with {strategy.name}, the gradient is {got}, expected 3")
    return "; ".join(problems)


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
