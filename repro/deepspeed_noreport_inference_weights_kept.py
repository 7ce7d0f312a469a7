"""At ZeRO stage 3, a weight that two modules share stays an inference tensor after torch.inference_mode() gathered it.

id: inference-weights-kept
engine: deepspeed
symptom: after an evaluation under inference_mode, a forward raises "Inference tensors cannot be saved for backward"
reported: no report known
affects: >=0.19.8
fixed: not yet
ranks: 2
law: training.forward_alone
signature: Inference tensors cannot be saved for backward
ok: repro: a forward after inference_mode at ZeRO stage 3 OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_inference_weights_kept.py

The model reads a weight outside the weight's own module, as with tied embeddings, and the evaluation runs after a
training step began. ZeRO-3 does not free the tensor that it gathered under inference_mode, and the next forward uses
this inference tensor. With torch.no_grad() the forward is right, and on one rank too, where nothing is gathered.

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

SIGNATURE = "Inference tensors cannot be saved for backward"
OK = "repro: a forward after inference_mode at ZeRO stage 3 OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    # Without this threshold, every rank keeps all weights of so small a model unsharded, and nothing is freed.
    # DeepSpeed's own linear function does not save a weight by save_for_backward.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "memory_efficient_linear": False},
}


class TiedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(2, 2)

    def forward(self, tokens):
        return nn.functional.linear(self.embedding(tokens), self.embedding.weight)


def main():
    deepspeed.init_distributed()
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    model = TiedModel().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    tokens = torch.tensor([[0, 1]], device=device)
    engine.backward(engine(tokens).sum())
    with torch.inference_mode():
        engine(tokens)
    try:
        engine(tokens)
    except RuntimeError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {SIGNATURE}\n", end="", flush=True)
        return 1
    if torch.distributed.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
