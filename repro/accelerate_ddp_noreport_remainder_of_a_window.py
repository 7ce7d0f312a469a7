"""accelerate divides the losses of a shorter last window by the number of micro-batches of a full window.

id: remainder-of-a-window
engine: accelerate_ddp
symptom: in an epoch of 3 micro-batches in windows of 2, the last step uses half of the mean gradient
reported: no report known
affects: ==1.15.0
fixed: not yet
ranks: 2
law: loop.training
signature: the last gradient is
ok: repro: the last step has the mean gradient OK.

Run it with nothing but torch and accelerate installed:

    torchrun --standalone --nproc_per_node=2 repro/accelerate_ddp_noreport_remainder_of_a_window.py

``accumulate`` ends the last window at the end of the data loader, but ``backward`` still divides each loss by
gradient_accumulation_steps (accelerator.py). With a DeepSpeedPlugin DeepSpeed divides by this number.
huggingface/transformers#39659 fixed the same bug in transformers.Trainer.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

SIGNATURE = "the last gradient is"
OK = "repro: the last step has the mean gradient OK."
WINDOW = 2


def main() -> int:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    samples = (WINDOW + 1) * accelerator.num_processes  # micro-batches of one sample
    loader = DataLoader(torch.ones(samples, 1), batch_size=1)
    layer = nn.Linear(1, 1, bias=False)
    model, loader = accelerator.prepare(layer, loader)
    gradients = []
    for inputs in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).mean())
            if accelerator.sync_gradients:
                gradients.append(float(layer.weight.grad))
                layer.weight.grad = None
    if gradients != [1.0, 1.0]:
        right = f"{gradients[-1]:g} x the mean over its micro-batches"
        print(f"repro: REPRODUCED: {SIGNATURE} {right}\n", end="", flush=True)
        return 1
    if dist.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
