"""In bf16 without ZeRO, a step silently undoes the caller's in-place edit of a weight.

id: edit-in-place-undone
engine: deepspeed
symptom: weights that the caller tied or averaged in place have their values from before the edit after the next step
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 1
law: parameters.edited_in_place
signature: the weight after the step is -1.0 as if nobody had edited it
ok: repro: under bf16 without ZeRO a step starts from the edited weight OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_edit_in_place_undone.py

The step works on an fp32 copy of the weight, which an edit of the weight does not reach, and copies the result over the
weight. Stages 1 and 2 do the same, in fp32 too. There safe_set_full_fp32_param edits the copy, which is documented.
Without ZeRO this function does nothing.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import importlib
import os
import sys

import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "the weight after the step is -1.0 as if nobody had edited it"
OK = "repro: under bf16 without ZeRO a step starts from the edited weight OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 0},
}
INITIAL, EDITED, GRADIENT = 1.0, 8.0, 2.0


def main():
    deepspeed.init_distributed()
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, INITIAL)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    weight = engine.module.weight
    with torch.no_grad():
        weight.fill_(EDITED)
    inputs = torch.full((1, 1), GRADIENT, dtype=torch.bfloat16, device=engine.device)
    output = engine(inputs)
    assert output.item() == EDITED * GRADIENT, f"the forward used another weight: {output.item()}"
    engine.backward(output.sum())
    engine.step()
    if weight.item() == INITIAL - GRADIENT:
        message = f"the weight after the step is {weight.item()} as if nobody had edited it"
        print(f"repro: REPRODUCED: {message}\n", end="", flush=True)
        return 1
    assert weight.item() == EDITED - GRADIENT, weight.item()
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
