"""On gloo FSDP2 sums the gradients of the ranks, where it documents their mean.

id: 162338
engine: fsdp2
symptom: on gloo every gradient of fully_shard is the sum over the ranks instead of the mean, without a word
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

fully_shard reduces with dist.reduce_scatter_tensor(..., op=ReduceOp.AVG), and gloo's reduce-scatter took AVG and added.
set_force_sum_reduction_for_comms(True) of torch 2.8 goes around it.

It ends with the line above under "ok" and exit code 0 where the bug is absent; with a line that starts with
"repro: REPRODUCED" and exit code 1 where it is present. Anything else (a traceback without that line, which also exits
with 1, or a signal) says nothing about the bug.
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
    # Here and not by fully_shard, which would take the GPUs where there are some, and those are not gloo's.
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
