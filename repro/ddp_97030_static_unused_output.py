"""DDP with a static graph raises in the third forward if the loss does not use one of the outputs.

id: 97030
engine: ddp
symptom: with static_graph=True and a second output that is not in the loss, the third forward raises
reported: https://github.com/pytorch/pytorch/issues/97030
affects: >=2.8.0
fixed: not yet
ranks: 1
law: backward.outputs
signature: Expected to have finished reduction in the prior iteration
ok: repro: an output that the loss does not use, with a static graph OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/ddp_97030_static_unused_output.py

The graph is the same in every iteration, as static_graph=True demands: the loss leaves out one of two outputs each
time. In the first iteration a hook runs for the gradient of the unused output. The second iteration therefore waits for
this gradient and ends without a reduction, and the third forward raises.

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

SIGNATURE = "Expected to have finished reduction in the prior iteration"
OK = "repro: an output that the loss does not use, with a static graph OK."


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(1, 1, bias=False)
        self.left = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return self.used(x), self.left(x)


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
    wanted = torch.stack([torch.autograd.grad(model(x)[0].sum(), model.used.weight)[0] for x in inputs]).mean(0)

    engine = DistributedDataParallel(model, static_graph=True)
    try:
        for _ in range(3):
            engine.zero_grad()
            engine(inputs[rank])[0].sum().backward()
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
