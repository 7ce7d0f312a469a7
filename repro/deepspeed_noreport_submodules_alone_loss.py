"""DeepSpeed never reduces a loss over an engine's submodules alone, and step() raises KeyError: 0.

id: submodules-alone-loss
engine: deepspeed
symptom: after engine.module.layer(x).sum().backward(), step() raises KeyError: 0
reported: no report known
affects: >=0.18.3
fixed: not yet
ranks: 1
law: checkpointing.plain_inputs
signature: KeyError: 0
ok: repro: a loss over a submodule of the engine alone at ZeRO stage 1 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_noreport_submodules_alone_loss.py

Stages 1 to 3 have the bug. Only an output of the engine begins a backward of the engine. Since #8245 DeepSpeed finds a
branch of a loss that bypasses such an output, but not a loss that bypasses it as a whole. Releases up to 0.18.2 reduced
no loss.backward() at all (#7665).

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

SIGNATURE = "KeyError: 0"
OK = "repro: a loss over a submodule of the engine alone at ZeRO stage 1 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = nn.Sequential(nn.Linear(2, 1, bias=False)).to(device)
    weight = model[0].weight
    nn.init.ones_(weight)
    x = torch.tensor([[1.0, 3.0]], device=device)
    (wanted,) = torch.autograd.grad(model[0](x).sum(), weight)
    before = weight.detach().clone()

    # At a learning rate of 1 SGD moves the weight by its gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    engine.module[0](x).sum().backward()
    try:
        engine.step()
    except KeyError as error:
        if f"KeyError: {error}" != SIGNATURE:
            raise
        print(f"repro: REPRODUCED: {SIGNATURE} in engine.step()\n", end="", flush=True)
        return 1
    torch.testing.assert_close(before - weight.detach(), wanted)
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
