"""On gloo, FSDP2 sums the gradients of the ranks instead of computing the documented mean.

id: 162338
engine: fsdp2
symptom: on gloo every gradient of fully_shard is silently the sum over the ranks instead of the mean
reported: https://github.com/pytorch/pytorch/issues/162338
affects: <=2.8.0
fixed: 2.13.0
broken: 2.8.0
ranks: 2
law: training.grads
signature: on gloo the gradient is [4.0], and the mean of the ranks' gradients is 2.0
ok: repro: on gloo the gradient of fully_shard is the mean over the ranks OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp2_162338_gloo_mean_summed.py

fully_shard reduces by dist.reduce_scatter_tensor(..., op=ReduceOp.AVG). gloo's reduce-scatter accepted AVG and computed
the sum. set_force_sum_reduction_for_comms(True) of torch 2.8 avoids the bug.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

SIGNATURE = "on gloo the gradient is [4.0], and the mean of the ranks' gradients is 2.0"
OK = "repro: on gloo the gradient of fully_shard is the mean over the ranks OK."


def main():
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2, "this shows on 2 ranks"
    rank = dist.get_rank()
    # The script builds the mesh itself, because fully_shard would use GPUs if there are some, and gloo does not.
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    model = nn.Linear(2, 2, bias=False)
    fully_shard(model, mesh=mesh)

    # The gradient of each weight is the rank's input: 1 on rank 0, 3 on rank 1.
    model(torch.full((1, 2), 1.0 + 2.0 * rank)).sum().backward()
    seen = model.weight.grad.full_tensor().unique().tolist()
    told = f"on gloo the gradient is {seen}, and the mean of the ranks' gradients is 2.0"
    if SIGNATURE in told:
        print(f"repro: REPRODUCED: {told}\n", end="", flush=True)
        return 1
    assert seen == [2.0], told
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
