"""At stage 0 of ZeRO, a pipeline clips all gradients by the norm of its first stage alone.

id: pipeline-norm-of-first-stage
engine: deepspeed_pp
symptom: in fp32 without ZeRO, a pipeline clips its gradients by the norm of the first stage alone
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 2
law: pipeline.clip
signature: clipped by the norm
ok: repro: the norm over two stages OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_pp_noreport_pipeline_clips_by_first_stage.py

clip_grad_norm_ of deepspeed.runtime.utils counts a parameter if mpu.get_model_parallel_rank() is 0, or if the parameter
has the mark of Megatron's split layers, because other tensor-parallel ranks have copies. For a PipelineModule the mpu
is its grid, whose get_model_parallel_rank() is the number of the stage, so no parameter of a later stage counts.
DeepSpeed therefore clips by too small a norm and makes too large a step.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import importlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed
from deepspeed.pipe import PipelineModule

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

OK = "repro: the norm over two stages OK."
CLIP = 1.0
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": CLIP,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 0},
}


def main():
    deepspeed.init_distributed()
    layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    module = PipelineModule(
        layers, num_stages=2, loss_fn=lambda output, target: (output - target).sum(), partition_method="uniform"
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=CONFIG)[0]
    engine.train_batch(iter([(torch.full((1, 1), 3.0), torch.zeros(1, 1))]))

    # The output is the input times both weights, so each of the two gradients is 3.
    norm = 18.0**0.5
    weight = next(module.parameters()).item()
    used = CLIP * 3.0 / (1.0 - weight)
    is_right = abs(used / norm - 1) < 1e-3
    dist.barrier()
    if not is_right:
        if dist.get_rank() == 0:
            line = f"the gradients were clipped by the norm {used:.6g}, and their norm is {norm:.6g}"
            print(f"repro: REPRODUCED: {line}\n", end="", flush=True)
    elif dist.get_rank() == 0:
        print(OK, flush=True)
    dist.destroy_process_group()
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
