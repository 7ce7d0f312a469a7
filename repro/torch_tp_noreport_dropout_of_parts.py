"""On a CPU, tensor-parallel ranks with one seed drop the same elements of their different parts of a sequence.

id: dropout-of-parts
engine: torch_tp
symptom: SequenceParallel on a dropout drops the same elements of each rank's part of the sequence and only warns
reported: no report known
affects: ==2.13.0
fixed: not yet
ranks: 2
law: mesh.dropout
signature: all parts have one mask
ok: repro: each part has a mask of its own OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/torch_tp_noreport_dropout_of_parts.py

Tensor-parallel ranks use one seed, because they have to drop the same elements of activations that all of them have. On
a GPU DTensor gives the shards of one tensor different random numbers. On a CPU is_rng_supported_mesh is false, and each
rank draws from its unchanged generator.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

SIGNATURE = "all parts have one mask"
OK = "repro: each part has a mask of its own OK."
ELEMENTS = 64  # of one part; two parts are equal by chance in 1 of 2^64 runs


def main() -> int:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # one seed for all ranks of tensor parallelism
    warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(nn.Sequential(nn.Dropout(0.5)), mesh["tp"], {"0": SequenceParallel()})
    part = model(torch.ones(1, ELEMENTS, 1)).to_local()
    parts = [torch.empty_like(part) for _ in range(2)]
    dist.all_gather(parts, part.contiguous())
    if torch.equal(*parts):
        print(f"repro: REPRODUCED: {SIGNATURE}: {int((part == 0).sum())} of {ELEMENTS} elements\n", end="", flush=True)
        return 1
    if dist.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
