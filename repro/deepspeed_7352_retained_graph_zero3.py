"""Under ZeRO-3 a second backward on a retained graph finds that its weights were freed.

id: 7352
engine: deepspeed
symptom: the second of two engine.backward calls on one forward raises a size mismatch
reported: https://github.com/deepspeedai/DeepSpeed/issues/7352
affects: >=0.16.4
fixed: not yet
ranks: 1
law: double_backward.retained_then_zero_grad
signature: The size of tensor a (0) must match the size of tensor b
ok: repro: two losses on one forward, two backwards, at ZeRO stage 3 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_7352_retained_graph_zero3.py

ZeRO-3 frees the gathered weights, which autograd saved in the forward, after the first backward, although
retain_graph=True says that they are needed again. Open pull requests: #8045, #8135. These laws also show the bug at
stage 3: backward.auxiliary_loss, double_backward.retained_same_loss and double_backward.retain_leaks_nothing.

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
from deepspeed.utils import safe_get_full_grad

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "The size of tensor a (0) must match the size of tensor b"
OK = "repro: two losses on one forward, two backwards, at ZeRO stage 3 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    # Without this threshold, every rank keeps all weights of so small a model unsharded, and nothing is freed.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def two_losses(output):
    return output.sum(), output.square().sum()


def wanted_gradients(model, inputs):
    """Return the gradients of the second loss in plain PyTorch, averaged over the ranks' inputs."""
    grads = [torch.autograd.grad(two_losses(model(each))[1], list(model.parameters())) for each in inputs]
    return [torch.stack(same).mean(0) for same in zip(*grads, strict=True)]


def main():
    deepspeed.init_distributed()
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
    inputs = [torch.randn(4, 8).to(device) for _ in range(world)]
    wanted = wanted_gradients(model, inputs)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    first, second = two_losses(engine(inputs[rank]))
    engine.backward(first, retain_graph=True)
    engine.optimizer.zero_grad()
    try:
        engine.backward(second)
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\n", end="", flush=True)
        return 1
    torch.testing.assert_close([safe_get_full_grad(param) for param in model.parameters()], wanted)
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
