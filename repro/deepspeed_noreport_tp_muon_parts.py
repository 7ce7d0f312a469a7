"""With AutoTP, Muon orthogonalizes each rank's part of a matrix instead of the whole matrix.

id: tp-muon-parts
engine: deepspeed
symptom: silent: with AutoTP, Muon steps by each rank's part of a matrix, not by the whole matrix
reported: no report known
affects: >=0.19.5
fixed: not yet
broken: 0.19.8
ranks: 2
law: training.muon
signature: the step of a split matrix
ok: repro: the step of a split matrix OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=2 repro/deepspeed_noreport_tp_muon_parts.py

Newton-Schulz divides a matrix by its norm, so small vectors grow little beside large ones. Here the second half of the
rows is 2048 times smaller than the first half. A rank that has only the second half divides it by that half's own norm,
and moves it by about 1. torch.optim.Muon moves it by a sixth of that. DeepSpeed raises nothing.

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
torch.compiler.set_stance("force_eager")  # to compile Muon would take a minute

SIGNATURE = "the step of a split matrix"
OK = "repro: the step of a split matrix OK."
SPECS = [{"patterns": [r"^layer\.weight$"], "partition_type": "column"}]
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "Muon", "params": {"lr": 1.0, "momentum": 0.5, "weight_decay": 0.0, "ns_method": "standard"}},
    "zero_optimization": {"stage": 1},
    "tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": SPECS}},
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.layer(x)


def main():
    deepspeed.init_distributed()
    model, rank = Model(), torch.distributed.get_rank()
    nn.init.zeros_(model.layer.weight)
    gradient = torch.diag(torch.tensor([2048.0, 2048.0, 1.0, 1.0]))
    plain = nn.Parameter(torch.zeros(4, 4))
    plain.grad = gradient.clone()
    torch.optim.Muon([plain], lr=1.0, momentum=0.5, weight_decay=0.0).step()
    wanted = plain.detach().diag().chunk(2)[rank]

    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    output = engine(torch.eye(4, device=engine.device))
    part = gradient[:, 2 * rank : 2 * rank + 2] if output.shape[-1] == 2 else gradient
    engine.backward((output * part.to(output.device)).sum())
    engine.step()
    got = model.layer.weight.detach().cpu().diag(2 * rank)
    is_wrong = torch.tensor([float((got - wanted).abs().max() > 0.1)], device=engine.device)
    torch.distributed.all_reduce(is_wrong)
    if is_wrong:
        if rank == 1:
            print(f"repro: REPRODUCED: {SIGNATURE}: {got.tolist()}, not {wanted.tolist()}\n", end="", flush=True)
        return 1
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
