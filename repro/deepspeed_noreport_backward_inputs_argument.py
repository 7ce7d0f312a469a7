"""loss.backward(inputs=[x]) raises under ZeRO-1 and 2.

id: backward-inputs-argument
engine: deepspeed
symptom: backward(inputs=[x]) of a loss over the engine raises IndexError
reported: no report known
affects: >=0.18.5
fixed: not yet
ranks: 1
law: backward.backward_inputs
signature: list index out of range
ok: repro: backward(inputs=[x]) at ZeRO stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_backward_inputs_argument.py

At the end of the backward DeepSpeed looks for gradients of parameters, and this backward makes none. Stage 3 is right
for one such backward; a second one on the retained graph raises the error of #7352. Releases up to 0.18.4 are right.

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

SIGNATURE = "list index out of range"
OK = "repro: backward(inputs=[x]) at ZeRO stage 1 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = nn.Linear(2, 1, bias=False).to(device)
    nn.init.constant_(model.weight, 4.0)
    x = torch.tensor([[1.0, 3.0]], device=device, requires_grad=True)
    (wanted,) = torch.autograd.grad(model(x).sum(), x)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    try:
        engine(x).sum().backward(inputs=[x])
    except IndexError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: IndexError: {error}\n", end="", flush=True)
        return 1
    torch.testing.assert_close(x.grad, wanted)
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
