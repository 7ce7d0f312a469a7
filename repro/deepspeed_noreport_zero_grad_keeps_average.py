"""At ZeRO stages 1 and 2, zero_grad keeps the reduced gradients, and the next step uses them.

id: zero-grad-keeps-average
engine: deepspeed
symptom: at stages 1 and 2 a step adds the gradient that zero_grad discarded, or the next backward raises
reported: no report known
affects: <=0.18.2
fixed: 0.18.3
broken: 0.17.5
ranks: 1
law: double_backward.retained_then_zero_grad
signature: zero_grad has not discarded the first backward
ok: repro: the step uses the gradient of the last backward alone at ZeRO stages 1 and 2 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_zero_grad_keeps_average.py

The end of a backward adds the averaged gradients to the existing ones (`averaged_gradients`,
`runtime/zero/stage_1_and_2.py`). Neither the engine's zero_grad nor the optimizer's clears these gradients: only a step
does. In 0.17.6 to 0.18.2 the next backward raises instead: it adds to `all_grad_tensors`, which the first backward has
cleared.

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

SIGNATURE = "zero_grad has not discarded the first backward"
OK = "repro: the step uses the gradient of the last backward alone at ZeRO stages 1 and 2 OK."


def config(stage):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }


def observe(stage):
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = nn.Linear(1, 1, bias=False).to(device)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config(stage))[0]
    engine.backward(engine(torch.full((1, 1), 16.0, device=device)).sum())
    engine.optimizer.zero_grad()
    engine.zero_grad()
    try:
        engine.backward(engine(torch.ones(1, 1, device=device)).sum())
    except TypeError as error:
        if str(error) != "'NoneType' object is not iterable":
            raise
        return f"{SIGNATURE}: {error}, at stage {stage}"
    engine.step()
    moved = model.weight.item()
    if moved not in (-1.0, -17.0):
        raise RuntimeError(f"the weight moved by {moved}, neither by -1.0 nor by -17.0, at stage {stage}")
    return "" if moved == -1.0 else f"{SIGNATURE}: the weight moved by {moved}, not by -1.0, at stage {stage}"


def main():
    deepspeed.init_distributed()
    problem = observe(1) or observe(2)
    if problem:
        print(f"repro: REPRODUCED: {problem}\n", end="", flush=True)
        return 1
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
