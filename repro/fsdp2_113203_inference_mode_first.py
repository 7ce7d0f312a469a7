"""FSDP2 cannot train if its first forward runs under torch.inference_mode().

id: 113203
engine: fsdp2
symptom: training after a forward under torch.inference_mode() raises, or leaves every parameter without a gradient
reported: https://github.com/pytorch/pytorch/issues/113203
affects: >=2.8.0
fixed: not yet
ranks: 2
law: training.forward_alone
signature: Inplace update to inference tensor outside InferenceMode is not allowed
ok: repro: training after a forward in inference mode OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp2_113203_inference_mode_first.py

The first forward allocates the buffers for gathered weights, and later forwards reuse them. Under inference_mode these
buffers are inference tensors, and they stay so. On one rank the error is "Inference tensors do not track version
counter", with reshard_after_forward=False "Inference tensors cannot be saved for backward". The report is about FSDP1,
and closed.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

SIGNATURE = "Inplace update to inference tensor outside InferenceMode is not allowed"
OK = "repro: training after a forward in inference mode OK."


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def main():
    rank = start()
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    x = torch.ones(1, 2)
    wanted = torch.autograd.grad(model(x).sum(), list(model.parameters()))

    fully_shard(model, reshard_after_forward=True)
    with torch.inference_mode():
        model(x)
    try:
        model(x).sum().backward()
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    torch.testing.assert_close([param.grad.full_tensor() for param in model.parameters()], list(wanted))
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
