"""The backward of an FSDP2 model that returns a dataclass ends in a segmentation fault.

id: unseen-output-freed
engine: fsdp2
symptom: with reshard_after_forward=True, SIGSEGV ends the backward of a model that returns a dataclass
reported: no report known
affects: ==2.8.0
fixed: 2.13.0
broken: 2.8.0
ranks: 1
law: backward.outputs
signature: SIGSEGV in backward
ok: repro: backward of a model that returns a dataclass OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/fsdp2_noreport_unseen_output_freed.py

The root's forward frees its weights, and hooks on the outputs gather them for the backward. FSDP2 2.8 finds no outputs
in a dataclass, so the backward reads factor, a weight of the root itself, from freed memory. The segmentation fault
ends the process, so the script runs the backward in a process of its own.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import dataclasses
import os
import signal
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

SIGNATURE = "SIGSEGV in backward"
OK = "repro: backward of a model that returns a dataclass OK."


@dataclasses.dataclass
class Output:
    value: torch.Tensor


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        self.factor = nn.Parameter(torch.ones(1))
        nn.init.ones_(self.layer.weight)

    def forward(self, x):
        return Output(self.layer(x) * self.factor)


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def train():
    rank = start()
    model = Scaled()
    fully_shard(model.layer)
    fully_shard(model, reshard_after_forward=True)
    model(torch.ones(1, 2)).value.sum().backward()
    torch.testing.assert_close(model.layer.weight.grad.full_tensor(), torch.ones(2, 2))
    if rank == 0:
        print(OK, flush=True)
    dist.destroy_process_group()


def main():
    # faulthandler prints where the process was when the signal came.
    command = [sys.executable, "-X", "faulthandler", __file__, "train"]
    child = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if child.returncode == -signal.SIGSEGV and "in _engine_run_backward" in child.stdout:
        print(f"repro: REPRODUCED: {SIGNATURE}\n", end="", flush=True)
        return 1
    if child.returncode == 0 and OK in child.stdout.splitlines():
        print(OK, flush=True)
        return 0
    raise AssertionError(f"ended with {child.returncode}: {child.stdout}")


if __name__ == "__main__":
    sys.exit(train() if sys.argv[1:] == ["train"] else main())
