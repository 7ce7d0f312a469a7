"""accelerate's load_state ignores a damaged file of random states and continues without restoring them.

id: 4283
engine: accelerate_ddp
symptom: load_state does not raise if the file of the random states is damaged, and later random numbers differ
reported: https://github.com/huggingface/accelerate/issues/4283
affects: ==1.15.0
fixed: not yet
ranks: 2
law: state.refuse_pickle
signature: a damaged file of random states was ignored
ok: repro: a damaged file of random states is refused OK.

Run it with nothing but torch and accelerate installed:

    torchrun --standalone --nproc_per_node=2 repro/accelerate_ddp_4283_random_states_ignored.py

load_accelerator_state (accelerate/checkpointing.py) reads and sets the random states in one try block. Its "except
Exception" logs "Could not load random states" at the level INFO, which is not shown by default.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import pickle
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

SIGNATURE = "a damaged file of random states was ignored"
OK = "repro: a damaged file of random states is refused OK."


def load_damaged(accelerator, folder):
    rank = accelerator.process_index
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    (Path(folder) / f"random_states_{rank}.pkl").write_bytes(b"damaged")
    drawn = torch.rand(1)
    try:
        accelerator.load_state(folder)
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        print(f"{OK} (rank {rank}: {type(error).__name__})")
        return 0
    continued = not torch.equal(torch.rand(1), drawn)
    effect = f"on rank {rank}; its generator continued as it was: {continued}"
    print(f"repro: REPRODUCED: {SIGNATURE} {effect}\n", end="", flush=True)
    return 1


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    accelerator.prepare(nn.Linear(1, 1))
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        status = load_damaged(accelerator, folders[0])
        accelerator.wait_for_everyone()
    return status


if __name__ == "__main__":
    code = main()
    dist.destroy_process_group()
    sys.exit(code)
