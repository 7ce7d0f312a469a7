"""On a CPU, FSDP1's optim_state_dict returns one tensor for all optimizer states of a parameter.

id: optimizer-states-aliased
engine: fsdp1
symptom: exp_avg and exp_avg_sq of a full optimizer state dict are equal
reported: no report known
affects: >=2.13.0
fixed: not yet
ranks: 2
law: training.trajectory
signature: exp_avg is
ok: repro: full optimizer states OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp1_noreport_optimizer_states_aliased.py

FullOptimStateDictConfig has offload_to_cpu=True by default. FSDP1 gathers all states of a FlatParameter into one
buffer, one after the other, and "offloads" each by Tensor.cpu(), which copies nothing on the CPU. So all states are
views of the last one. A training that resumes from this checkpoint of Adam has squares in place of means. With
offload_to_cpu=False FSDP1 clones each state.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

OK = "repro: full optimizer states OK."
CPU = torch.device("cpu")  # the script shows the bug on gloo


def observe(_rank):
    model = nn.Linear(2, 2, bias=False)
    engine = FullyShardedDataParallel(model, use_orig_params=True, device_id=CPU)
    optimizer = torch.optim.Adam(engine.parameters(), betas=(0.5, 0.75))
    engine(torch.full((1, 2), 4.0)).sum().backward()
    optimizer.step()  # the gradient is 4: exp_avg = 0.5 x 4, exp_avg_sq = 0.25 x 16
    with FullyShardedDataParallel.state_dict_type(engine, StateDictType.FULL_STATE_DICT):
        state = FullyShardedDataParallel.optim_state_dict(engine, optimizer)["state"]["weight"]
    mean, square = (float(state[key].flatten()[0]) for key in ("exp_avg", "exp_avg_sq"))
    return "" if (mean, square) == (2, 4) else f"exp_avg is {mean:g} and exp_avg_sq {square:g}, expected 2 and 4"


def main():
    dist.init_process_group("gloo")
    problem = observe(dist.get_rank())
    if problem:
        print(f"repro: REPRODUCED: {problem}\n", end="", flush=True)
        return 1
    if dist.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
