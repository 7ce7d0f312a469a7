"""With a reduce_dtype, FSDP2 keeps unreduced gradients that zero_grad does not drop and the next backward adds.

id: unreduced-survive-zero-grad
engine: fsdp2
symptom: zero_grad after set_requires_gradient_sync(False) leaves gradients that the next backward adds
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: training.no_sync
signature: gradient is
ok: repro: dropped unreduced gradients OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp2_noreport_unreduced_survive_zero_grad.py

With a reduce_dtype other than the parameter's dtype, unreduced gradients are not in .grad of the unsharded parameters
but in a private attribute (FSDPParam.unsharded_accumulated_grad). zero_grad on shards and on unsharded parameters does
not drop them. reset_iter_state(), which is documented to discard gradients of an iteration, does not drop them either.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

OK = "repro: dropped unreduced gradients OK."


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False)
        self.second = nn.Linear(1, 1, bias=False)
        for layer in (self.first, self.second):
            nn.init.ones_(layer.weight)

    def forward(self, x, both=True):
        return self.second(self.first(x)) if both else self.first(x)


def shard(**options):
    model = Layers()
    for module in (model.first, model.second, model):
        fully_shard(module, **options)
    return model


def observe(_rank):
    model = shard(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    x = torch.ones(1, 1)
    model.set_requires_gradient_sync(False)
    model(x).sum().backward()
    model.set_requires_gradient_sync(True)
    model.reset_iter_state()
    modules = (model.first, model.second, model)
    for module in modules:
        module.unshard()
    model.zero_grad()
    for module in modules:
        module.reshard()
    model(x).sum().backward()
    got = float(model.first.weight.grad.full_tensor())
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
