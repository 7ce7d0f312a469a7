"""Loading a distributed checkpoint runs any code that is in its .metadata file.

id: 189308
engine: fsdp2
symptom: torch.distributed.checkpoint.load unpickles .metadata without restriction, so a planted command runs
reported: https://github.com/pytorch/pytorch/issues/189308
affects: >=2.8.0
fixed: not yet
ranks: 1
law: state.refuse_pickle
signature: a command in .metadata ran
ok: repro: a .metadata that carries a command is refused OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/fsdp2_189308_metadata_runs_code.py

FileSystemReader.read_metadata calls pickle.load; tensors are read with weights_only=True. The command in this script
makes an empty folder in a temporary one.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import pickle
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.fsdp import fully_shard

SIGNATURE = "a command in .metadata ran"
OK = "repro: a .metadata that carries a command is refused OK."


class Command:
    """An object whose unpickling calls os.mkdir with ``path``."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


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
    fully_shard(model)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, made = Path(folder) / "checkpoint", Path(folder) / "made"
        dcp.save(model.state_dict(), checkpoint_id=checkpoint)
        (checkpoint / ".metadata").write_bytes(pickle.dumps(Command(made)))
        try:
            dcp.load(model.state_dict(), checkpoint_id=checkpoint)
        except CheckpointException:
            refused = True
        else:
            refused = False
        if made.exists():
            print(f"repro: REPRODUCED: {SIGNATURE}; refused afterwards: {refused}\n", end="", flush=True)
            return 1
        assert refused, "no command ran, and what is no checkpoint was loaded"
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
