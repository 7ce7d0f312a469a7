"""FSDP1 raises in autograd.grad with respect to the input of a frozen layer.

id: input-gradient-of-frozen
engine: fsdp1
symptom: torch.autograd.grad(model(x).sum(), x) raises "A leaf node was passed to _will_engine_execute_node"
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: training.any_order
signature: A leaf node was passed to _will_engine_execute_node
ok: repro: the gradient of the input of a frozen layer OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp1_noreport_input_gradient_of_frozen.py

FSDP1 reshards a frozen FlatParameter by a hook on those inputs of the group that require a gradient
(_register_post_backward_reshard_only_hook, by register_multi_grad_hook). register_multi_grad_hook asks autograd whether
it will compute the gradients of these inputs. During autograd.grad, autograd refuses this question for a leaf.
backward() is right, and a trained layer is right too. In torch.utils.flop_counter the same hook raises the same error
(pytorch/pytorch#131753).

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

SIGNATURE = "A leaf node was passed to _will_engine_execute_node"
OK = "repro: the gradient of the input of a frozen layer OK."
CPU = torch.device("cpu")  # the script shows the bug on gloo


def compute_input_gradient(rank, *, frozen, by_backward):
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 3.0)
    model.requires_grad_(not frozen)
    engine = FullyShardedDataParallel(model, use_orig_params=True, device_id=CPU)
    x = torch.full((1, 1), 2.0 * (rank + 1), requires_grad=True)
    if by_backward:
        engine(x).sum().backward()
        return float(x.grad)
    return float(torch.autograd.grad(engine(x).sum(), x)[0])


def observe(rank):
    controls = [
        compute_input_gradient(rank, frozen=True, by_backward=True),
        compute_input_gradient(rank, frozen=False, by_backward=False),
    ]
    if controls != [3, 3]:
        raise RuntimeError(f"the controls, by backward and trained, are wrong too: {controls}, expected 3")
    try:
        got = compute_input_gradient(rank, frozen=True, by_backward=False)
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        return str(error)
    return "" if got == 3 else f"the gradient is {got:g}, expected 3"


def main():
    dist.init_process_group("gloo")
    problem = observe(dist.get_rank())
    if problem:
        print(f"repro: REPRODUCED: {problem}\n", end="", flush=True)
        return 1
    if dist.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
