"""In mixed precision, FSDP1 loses all gradients if no backward follows its first forward.

id: 94857
engine: fsdp1
symptom: in mixed precision, after a forward with autograd and without a backward, the next backward leaves no gradients
reported: https://github.com/pytorch/pytorch/issues/94857
affects: >=2.13.0
fixed: not yet
ranks: 2
law: training.forward_alone
signature: the step left the weight at
ok: repro: a step after a forward without a backward OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp1_94857_forward_without_backward.py

FSDP reduces gradients in a hook of the AccumulateGrad node of its FlatParameter, and registers this hook once, in the
first forward. In mixed precision the FlatParameter changes its dtype with each forward, and each forward has its own
AccumulateGrad node. If the first forward has no backward (an evaluation without no_grad, a teacher's pass, a forward
that raised), the hook never runs: FSDP reduces no gradient, every param.grad is None, and a step changes nothing. FSDP
raises nothing. In fp32, and with the forward under no_grad, the same step is right. The issue shows the bug by a
teacher and a student that share a head; the issue is closed.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

OK = "repro: a step after a forward without a backward OK."
CPU = torch.device("cpu")  # the script shows the bug on gloo
BF16 = MixedPrecision(param_dtype=torch.bfloat16)


def train(rank, mixed_precision, *, records_graph):
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    engine = FullyShardedDataParallel(model, use_orig_params=True, device_id=CPU, mixed_precision=mixed_precision)
    optimizer = torch.optim.SGD(engine.parameters(), lr=1.0)
    x = torch.full((1, 1), 2.0 * (rank + 1))  # gradients 2 and 4, mean 3
    with torch.set_grad_enabled(records_graph):
        engine(x)
    engine(x).sum().backward()
    optimizer.step()
    with FullyShardedDataParallel.summon_full_params(engine):
        return float(model.weight.detach())


def observe(rank):
    controls = [train(rank, None, records_graph=True), train(rank, BF16, records_graph=False)]
    if controls != [-2, -2]:
        raise RuntimeError(f"the controls, fp32 and no_grad, are wrong too: {controls}, expected -2")
    got = train(rank, BF16, records_graph=True)
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
