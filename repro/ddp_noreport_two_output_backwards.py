"""DDP with find_unused_parameters=True raises in the second of two backwards, one for each of two outputs.

id: two-output-backwards
engine: ddp
symptom: with find_unused_parameters=True and two outputs of disjoint graphs, the second output's backward raises
reported: no report known
affects: >=2.8.0
fixed: not yet
ranks: 1
law: backward.two_outputs_two_backwards
signature: Trying to backward through the graph a second time
ok: repro: a backward for each of two outputs OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/ddp_noreport_two_output_backwards.py

One autograd function (_DDPSink) joins all outputs, and the first backward frees the graph of this function. The same
happens with static_graph=True. Without either option both gradients are right.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIGNATURE = "Trying to backward through the graph a second time"
OK = "repro: a backward for each of two outputs OK."


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False)
        self.second = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return self.first(x), self.second(x)


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def main():
    rank = start()
    model = TwoOutputs()
    weights = list(model.parameters())
    inputs = [torch.full((1, 1), each + 1.0) for each in range(dist.get_world_size())]
    alone = [torch.autograd.grad(sum(model(x)).sum(), weights) for x in inputs]
    wanted = [torch.stack(same).mean(0) for same in zip(*alone, strict=True)]

    engine = DistributedDataParallel(model, find_unused_parameters=True)
    first, second = engine(inputs[rank])
    second.sum().backward()
    try:
        first.sum().backward()
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    torch.testing.assert_close([weight.grad for weight in weights], wanted)
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
