"""The all-reduce over tensor parallelism runs in the dtype of the weights and ignores FSDP2's reduce_dtype.

id: 190626
engine: fsdp2
symptom: under MixedPrecisionPolicy(bf16, reduce_dtype=fp32), gradients of sequence-parallel norms are summed in bf16
reported: https://github.com/pytorch/pytorch/issues/190626
affects: ==2.13.0
fixed: not yet
ranks: 2
law: mesh.wire
signature: was summed over tp in bfloat16
ok: repro: the gradient was summed over tp in float32 OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp2_190626_reduce_dtype_over_tp.py

The sequence of two tokens is split over two ranks of tp. One rank's part of the bias's gradient is 1, the other rank's
part is 2**-10. Their sum has 11 bits: float32 can hold it, and bfloat16 rounds it to 1.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

OK = "repro: the gradient was summed over tp in float32 OK."
PARTS = (1.0, 2.0**-10)


def main() -> int:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.LayerNorm(4))
    parallelize_module(model, mesh["tp"], {"0": SequenceParallel(use_local_output=True)})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    output = model(torch.randn(1, 1, 4))  # this rank's token
    (output * PARTS[rank]).sum().backward()
    grad = model[0].bias.grad.full_tensor()
    expected = torch.full((4,), sum(PARTS))
    if torch.equal(grad, expected.bfloat16().float()):
        print(f"repro: REPRODUCED: {sum(PARTS)} was summed over tp in bfloat16: {grad[0]}\n", end="", flush=True)
        return 1
    if not torch.equal(grad, expected):
        raise AssertionError(f"expected {expected}, got {grad}")
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
