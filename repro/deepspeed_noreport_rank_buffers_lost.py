"""load_checkpoint gives every rank the buffers of rank 0.

id: rank-buffers-lost
engine: deepspeed
symptom: after a save and a load, all ranks have rank 0's value of a buffer that each rank had written for itself
reported: no report known
affects: >=0.16.4
fixed: not yet
ranks: 2
law: state.resume
signature: the buffer is 1.0 after load_checkpoint
ok: repro: each rank gets its own buffer back from a checkpoint at ZeRO stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_rank_buffers_lost.py

Below stage 3 the first data-parallel rank saves the module for all ranks, including its buffers (`_save_checkpoint` in
`runtime/engine.py`). Running statistics, for example of a batch norm, are such buffers. So resumed training differs
from uninterrupted training on every rank but one.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import importlib
import os
import sys
import tempfile

import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "the buffer is 1.0 after load_checkpoint"
OK = "repro: each rank gets its own buffer back from a checkpoint at ZeRO stage 1 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


def saved_and_loaded(value, folder):
    """Save an engine whose buffer is ``value``, load it, and return the buffer of the loaded engine."""
    model = nn.Linear(1, 1).to(deepspeed.accelerator.get_accelerator().current_device_name())
    model.register_buffer("seen", torch.zeros(1).to(model.weight.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    model.seen.fill_(value)
    engine.save_checkpoint(folder)
    model.seen.fill_(0.0)
    engine.load_checkpoint(folder)
    return model.seen.item()


def main():
    deepspeed.init_distributed()
    assert torch.distributed.get_world_size() > 1, "one rank has no buffers but its own"
    rank = torch.distributed.get_rank()
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        torch.distributed.broadcast_object_list(folder)  # all ranks use rank 0's folder
        found = saved_and_loaded(rank + 1.0, folder[0])
        torch.distributed.barrier()  # before rank 0 removes its folder
    told = f"the buffer is {found} after load_checkpoint on rank {rank}; it was {rank + 1.0} when saved"
    if rank > 0 and SIGNATURE in told:
        print(f"repro: REPRODUCED: {told}\n", end="", flush=True)
        return 1
    assert found == rank + 1.0, told
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
