"""A pipeline divides the gradient of a weight that two stages of one rank share by the micro-batches twice.

id: tied-stages-divided-twice
engine: torch_pp
symptom: if several stages of a rank share a weight, the weight trains with a gradient that is too small
reported: no report known
affects: ==2.13.0
fixed: not yet
ranks: 1
law: pipeline.training
signature: the gradient of the tied weight
ok: repro: the gradient of the tied weight OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/torch_pp_noreport_tied_stages_divided_twice.py

After its last micro-batch each stage divides the gradients of its parameters by the number of micro-batches
(_PipelineStageBase.scale_grads). A weight that two stages of a rank share has one .grad, and both stages divide it. In
ScheduleZBVZeroBubble and ScheduleDualPipeV the first and the last stage are on one rank, as tied embeddings need. With
scale_grads=False the caller can divide once.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

SIGNATURE = "the gradient of the tied weight"
OK = "repro: the gradient of the tied weight OK."
MICRO_BATCHES = 2


def main() -> int:
    dist.init_process_group("gloo")
    parts = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    nn.init.ones_(parts[0].weight)
    parts[1].weight = parts[0].weight
    stages = [PipelineStage(part, number, 2, torch.device("cpu")) for number, part in enumerate(parts)]
    schedule = ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss_fn=lambda output, _: output.mean())
    inputs = torch.ones(MICRO_BATCHES, 1)
    schedule.step(inputs, target=inputs, losses=[])
    got = parts[0].weight.grad.item()
    expected = 2.0  # the output is the weight squared
    if got != expected:
        print(f"repro: REPRODUCED: {SIGNATURE} is {got}, not {expected}\n", end="", flush=True)
        return 1
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
