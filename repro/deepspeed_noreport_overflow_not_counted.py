"""At stage 0 under torch_autocast in fp16, DeepSpeed counts a step as made that its scaler skipped for an overflow.

id: overflow-not-counted
engine: deepspeed
symptom: skipped_steps stays 0 and was_step_applied() is True after a step that torch's GradScaler skipped
reported: no report known
affects: >=0.18.0
fixed: not yet
ranks: 1
law: precision.grad_scaler
signature: skipped_steps is 0 after a skipped step
ok: repro: a step skipped for an overflow is counted as skipped at stage 0 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_overflow_not_counted.py

The scaler skips the step. The engine asks only its own optimizer for overflows (`_take_model_step` in
`runtime/engine.py`) and does not notice. So the engine counts no skipped step, and a learning rate schedule advances.

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

SIGNATURE = "skipped_steps is 0 after a skipped step"
OK = "repro: a step skipped for an overflow is counted as skipped at stage 0 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "torch_autocast": {"enabled": True, "dtype": "float16"},
    "zero_optimization": {"stage": 0},
}


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model, inputs = nn.Linear(2, 1).to(device), torch.ones(1, 2).to(device)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    engine.backward(engine(inputs).sum() * float("inf"))
    engine.step()
    assert torch.equal(model.weight.detach(), before), "the step was made with infinite gradients"
    told = f"skipped_steps is {engine.skipped_steps} after a skipped step; was_step_applied() is "
    told += f"{engine.was_step_applied()}"
    if SIGNATURE in told:
        print(f"repro: REPRODUCED: {told}\n", end="", flush=True)
        return 1
    assert (engine.skipped_steps, engine.was_step_applied()) == (1, False), told
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
