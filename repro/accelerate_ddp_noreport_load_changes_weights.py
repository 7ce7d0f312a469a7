"""accelerate's load_state overwrites the weights before it raises for a damaged checkpoint.

id: refused-load-changes-weights
engine: accelerate_ddp
symptom: if the optimizer's file of a checkpoint is damaged, load_state raises after it has loaded the weights
reported: no report known
affects: >=1.15.0
fixed: not yet
ranks: 2
law: state.refuse_damaged
signature: the load raised, and had changed the weights
ok: repro: a load that raises keeps the weights OK.

Run it with nothing but torch and accelerate installed:

    torchrun --standalone --nproc_per_node=2 repro/accelerate_ddp_noreport_load_changes_weights.py

load_accelerator_state loads the model before it reads the file of the optimizer. A training that continues after the
error has the weights of the checkpoint and the optimizer state from before the load.

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

SIGNATURE = "the load raised, and had changed the weights"
OK = "repro: a load that raises keeps the weights OK."


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = nn.Linear(2, 1)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        accelerator.save_state(folders[0])
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (Path(folders[0]) / "optimizer.bin").write_bytes(b"damaged")
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(1.0)
        before = [weight.detach().clone() for weight in model.parameters()]
        accelerator.wait_for_everyone()
        try:
            accelerator.load_state(folders[0])
        except (OSError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
            print(f"rank {accelerator.process_index}: {type(error).__name__}", file=sys.stderr, flush=True)
        else:
            raise RuntimeError("the damaged file was loaded")
        accelerator.wait_for_everyone()
    if all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)):
        if accelerator.is_main_process:
            print(OK, flush=True)
        return 0
    print(f"repro: REPRODUCED: {SIGNATURE} on rank {accelerator.process_index}\n", end="", flush=True)
    return 1


if __name__ == "__main__":
    code = main()
    dist.destroy_process_group()
    sys.exit(code)
