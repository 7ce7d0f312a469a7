"""FSDP1 adds the gradient of a backward that raised to the gradient of the next iteration.

id: exception-adds-gradient
engine: fsdp1
symptom: after an exception in backward the next gradient is twice as large
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: training.any_order
signature: gradient is
ok: repro: gradients after an exception OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp1_noreport_exception_adds_gradient.py

FSDP1 keeps the gradients that it reduced before the exception in a private attribute of their groups. zero_grad does
not see this attribute, and the next backward adds to it. FSDP1 has no function that resets it; FSDP2 has
reset_iter_state.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

OK = "repro: gradients after an exception OK."
CPU = torch.device("cpu")  # the script shows the bug on gloo


class RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("in backward")


def observe(_rank):
    layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    engine = FullyShardedDataParallel(
        nn.Sequential(*(FullyShardedDataParallel(layer, use_orig_params=True, device_id=CPU) for layer in layers)),
        use_orig_params=True,
        device_id=CPU,
    )
    x = torch.ones(1, 1)
    hook = layers[0].register_forward_hook(lambda module, args, output: RaiseInBackward.apply(output))
    try:
        engine(x).sum().backward()
    except ValueError:
        hook.remove()
    engine.zero_grad(set_to_none=True)
    engine(x).sum().backward()
    with FullyShardedDataParallel.summon_full_params(engine, with_grads=True):
        got = float(layers[1].weight.grad)
    return "" if got == 1 else f"gradient is {got:g}, expected 1"


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
