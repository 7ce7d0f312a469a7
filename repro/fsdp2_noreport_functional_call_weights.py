"""torch.func.functional_call with full weights raises in FSDP2's hooks.

id: functional-call-weights
engine: fsdp2
symptom: functional_call of a sharded model with plain tensors as weights raises an AttributeError
reported: no report known
affects: >=2.8.0
fixed: not yet
ranks: 1
law: torch_func.functional_call
signature: has no attribute '_local_tensor'
ok: repro: functional_call of a sharded model with full weights OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/fsdp2_noreport_functional_call_weights.py

FSDP2's hooks treat the tensors that are registered on the module as FSDP2's own shards.

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

SIGNATURE = "has no attribute '_local_tensor'"
OK = "repro: functional_call of a sharded model with full weights OK."


def start():
    """Initialize the process group, with one GPU per rank if there are GPUs; return the rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def main():
    rank = start()
    model = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    weights = {name: torch.ones(param.shape) for name, param in model.named_parameters()}
    wanted = torch.func.functional_call(model, weights, (x,))

    fully_shard(model)
    try:
        got = torch.func.functional_call(model, weights, (x,))
    except AttributeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(got, wanted)
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
