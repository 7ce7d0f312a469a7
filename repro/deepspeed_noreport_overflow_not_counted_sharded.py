"""At ZeRO 1 and 2 under torch_autocast in fp16, DeepSpeed counts a step as made that its scaler skipped.

id: overflow-not-counted-sharded
engine: deepspeed
symptom: skipped_steps stays 0 after a step that torch's GradScaler skipped at ZeRO stages 1 and 2
reported: no report known
affects: >=0.18.0,<=0.19.7
fixed: 0.19.8
broken: 0.19.5
ranks: 1
law: precision.grad_scaler
signature: skipped_steps is 0 after a skipped step
ok: repro: a step skipped for an overflow is counted as skipped at ZeRO stages 1 and 2 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_overflow_not_counted_sharded.py

The optimizer of ZeRO leaves the step to torch's GradScaler (`_optimizer_step`, `runtime/zero/stage_1_and_2.py`), which
skips it. The optimizer itself does not look for an overflow, so DeepSpeed counts none, and a learning rate schedule
advances.

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
OK = "repro: a step skipped for an overflow is counted as skipped at ZeRO stages 1 and 2 OK."


def config(stage):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "torch_autocast": {"enabled": True, "dtype": "float16"},
        "zero_optimization": {"stage": stage},
    }


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    for stage in (1, 2):
        model, inputs = nn.Linear(2, 1).to(device), torch.ones(1, 2).to(device)
        before = model.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config(stage))[0]
        engine.backward(engine(inputs).sum() * float("inf"))
        engine.step()
        assert torch.equal(model.weight.detach(), before), "the step was made with infinite gradients"
        if engine.skipped_steps == 0:
            print(f"repro: REPRODUCED: {SIGNATURE}, at stage {stage}\n", end="", flush=True)
            return 1
        assert engine.skipped_steps == 1, engine.skipped_steps
        engine.destroy()
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
