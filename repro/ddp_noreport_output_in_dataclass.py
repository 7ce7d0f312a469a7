"""DDP does not finish its reduction if the model returns a dataclass with an output that the loss does not use.

id: output-in-dataclass
engine: ddp
symptom: with find_unused_parameters=True, a dataclass with an output outside the loss makes the next forward raise
reported: no report known
affects: >=2.8.0
fixed: not yet
ranks: 1
law: backward.outputs
signature: Expected to have finished reduction in the prior iteration
ok: repro: a dataclass with an output that the loss does not use OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/ddp_noreport_output_in_dataclass.py

DDP finds outputs inside dataclasses when it searches the graph, so the parameters of the unused output count as used.
But _DDPSink, which passes unused outputs on, treats a dataclass as one opaque value. With a tuple DDP is right.
pytorch#106690 has the same cause, but there the failure is silent.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIGNATURE = "Expected to have finished reduction in the prior iteration"
OK = "repro: a dataclass with an output that the loss does not use OK."


@dataclass
class Outputs:
    used: torch.Tensor
    left: torch.Tensor


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(1, 1, bias=False)
        self.left = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return Outputs(self.used(x), self.left(x))


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
    inputs = [torch.full((1, 1), each + 1.0) for each in range(dist.get_world_size())]
    wanted = torch.stack([torch.autograd.grad(model(x).used.sum(), model.used.weight)[0] for x in inputs]).mean(0)

    engine = DistributedDataParallel(model, find_unused_parameters=True)
    try:
        for _ in range(2):
            engine.zero_grad()
            engine(inputs[rank]).used.sum().backward()
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        line = str(error).splitlines()[0]
        print(f"repro: REPRODUCED: {line}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(model.used.weight.grad, wanted)
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
