"""DDP raises if a gradient accumulated under no_sync was discarded and the rest of the window does not use its weight.

id: discarded-in-no-sync
engine: ddp
symptom: a backward raises "undefined, but still allreduced" if it does not use a weight that was used before zero_grad
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: values.discarded
signature: Encountered gradient which is undefined, but still allreduced by DDP reducer
ok: repro: a discarded micro-batch changes nothing OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/ddp_noreport_discarded_in_no_sync.py

With find_unused_parameters=True DDP keeps a map of the weights that were used since the last reduction, over all
backwards inside no_sync. zero_grad sets the gradients to None, but does not reset this map. The next synchronized
backward finds the weight marked as used, and its gradient undefined. zero_grad(set_to_none=False) hides the bug: the
weight then has a gradient of zeros, and an optimizer with weight decay moves the weight.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIGNATURE = "Encountered gradient which is undefined, but still allreduced by DDP reducer"
OK = "repro: a discarded micro-batch changes nothing OK."


class TwoWeights(nn.Module):
    """Two weights; a forward uses the second weight only on request."""

    def __init__(self):
        super().__init__()
        self.always = nn.Linear(1, 1, bias=False)
        self.sometimes = nn.Linear(1, 1, bias=False)

    def forward(self, x, uses_both):
        return self.always(x) + self.sometimes(x) if uses_both else self.always(x)


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def main():
    rank = start()
    model = TwoWeights()
    engine = DistributedDataParallel(model, find_unused_parameters=True)
    x = torch.full((1, 1), rank + 1.0)
    with engine.no_sync():
        engine(x, uses_both=True).sum().backward()
        engine.zero_grad()
        engine(x, uses_both=False).sum().backward()
    try:
        engine(x, uses_both=False).sum().backward()
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {SIGNATURE}\n", end="", flush=True)
        return 1
    mean = sum(range(1, dist.get_world_size() + 1)) / dist.get_world_size()
    torch.testing.assert_close(model.always.weight.grad, torch.full((1, 1), 2 * mean))
    assert model.sometimes.weight.grad is None, f"a weight that was not used has {model.sometimes.weight.grad}"
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
