"""gloo returns wrong numbers if one coalescing manager gathers tensors of two dtypes.

id: 35671
engine: fsdp2
symptom: if fp32 and bf16 weights are gathered together, the fp32 weight has wrong numbers on every rank
reported: https://github.com/pytorch/pytorch/issues/35671
affects: >=2.13
fixed: not yet
ranks: 2
law: precision.weights_of_two_dtypes
signature: the gather in fp32 after one in bf16 returned
ok: repro: coalesced gathers of two dtypes return what the ranks have OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp2_35671_coalesced_gather_two_dtypes.py

torch.distributed's _coalescing_manager turns several all-gathers into one call of the backend. The wrong numbers are
those of a gloo that reads all tensors in the dtype of the first one. Megatron-FSDP gathers the weights of a unit in
this way. With the fp32 tensor first both gathers are right, and single gathers are right too. The bug was observed on
gloo; nccl was not tried.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

SIGNATURE = "the gather in fp32 after one in bf16 returned"
OK = "repro: coalesced gathers of two dtypes return what the ranks have OK."


def main():
    warnings.simplefilter("ignore")  # all_gather_into_tensor is deprecated
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [torch.full((3,), rank + 1.0, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    wholes = [torch.zeros(3 * size, dtype=part.dtype) for part in parts]
    with _coalescing_manager():
        for whole, part in zip(wholes, parts, strict=True):
            dist.all_gather_into_tensor(whole, part)
    right = torch.arange(1.0, size + 1).repeat_interleave(3)
    is_wrong = not torch.equal(wholes[1], right)
    if rank == 0:
        if is_wrong:
            found = f"{wholes[1].tolist()}, expected {right.tolist()}"
            print(f"repro: REPRODUCED: {SIGNATURE} {found}\n", end="", flush=True)
        else:
            print(OK, flush=True)
    dist.destroy_process_group()
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
