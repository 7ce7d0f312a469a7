"""In an accumulation window of accelerate, only the first forward uses the same buffers on all ranks.

id: window-buffers
engine: accelerate_ddp
symptom: under accumulate() the running statistics of a batch norm on rank 1 start from rank 1's own, not from rank 0's
reported: no report known
affects: ==1.15.0
fixed: not yet
ranks: 2
law: training.buffers
signature: own running mean
ok: repro: each forward of a window began with the buffers of rank 0 OK.

Run it with nothing but torch and accelerate installed:

    torchrun --standalone --nproc_per_node=2 repro/accelerate_ddp_noreport_window_buffers.py

accumulate() enters no_sync() in all forwards of a window but the last one. DistributedDataParallel does not broadcast
buffers in a forward that follows a forward under no_sync() (require_forward_param_sync). So only the first forward of a
window uses the buffers of rank 0, although broadcast_buffers is on.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

SIGNATURE = "own running mean"
OK = "repro: each forward of a window began with the buffers of rank 0 OK."


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    model = nn.BatchNorm1d(1)
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    rank = dist.get_rank()
    for _ in range(2):
        with accelerator.accumulate(wrapped):
            inputs = torch.tensor([[1.0], [-1.0]], device=accelerator.device) + rank
            accelerator.backward(wrapped(inputs).sum())
            optimizer.step()
            optimizer.zero_grad()
    # The mean of rank 0's inputs is 0, the mean of rank 1's inputs is 1, and the momentum of a batch norm is 0.1.
    means = [torch.zeros(1, device=accelerator.device) for _ in range(2)]
    dist.all_gather(means, wrapped.module.running_mean)
    if abs(means[1].item() - 0.1) < abs(means[1].item() - 0.19):
        print(OK, flush=True)
        return 0
    line = f"rank 1 began the second forward of a window with its {SIGNATURE}, and ended it with {means[1].item():g}"
    print(f"repro: REPRODUCED: {line}\n", end="", flush=True)
    return 1


if __name__ == "__main__":
    code = main()
    dist.destroy_process_group()
    sys.exit(code)
