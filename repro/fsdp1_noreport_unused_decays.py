"""With FSDP1, weight decay moves a parameter that no forward used.

id: fsdp1-unused-decays
engine: fsdp1
symptom: weight decay moves an unused parameter, whose gradient is None in plain PyTorch
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 1
law: parameters.stay_put
signature: unused parameter is
ok: repro: an unused parameter OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/fsdp1_noreport_unused_decays.py

The gradient of a FlatParameter is one tensor, so a parameter that no forward used has a gradient of zeros if it shares
the FlatParameter with a used one. torch.optim skips a parameter without a gradient, but not a parameter with a gradient
of zeros.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

OK = "repro: an unused parameter OK."


CPU = torch.device("cpu")  # the script shows the bug on gloo


def observe(_rank):
    model = nn.Linear(2, 2, bias=False)
    nn.init.ones_(model.weight)
    model.unused = nn.Parameter(torch.ones(2))
    engine = FullyShardedDataParallel(model, use_orig_params=True, device_id=CPU)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.5, weight_decay=0.5)
    engine(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with FullyShardedDataParallel.summon_full_params(engine, writeback=False):
        got = model.unused.tolist()
    return "" if got == [1, 1] else f"unused parameter is {got} after a step, expected ones"


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
