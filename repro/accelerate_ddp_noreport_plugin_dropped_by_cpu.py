"""With cpu=True accelerate drops a DeepSpeedPlugin or an FSDP2 plugin without a warning and prepares plain DDP.

id: plugin-dropped-by-cpu
engine: accelerate_ddp
symptom: with cpu=True an Accelerator with a DeepSpeedPlugin or an FSDP2 plugin prepares DistributedDataParallel
reported: no report known
affects: ==1.15.0
fixed: not yet
ranks: 2
law: loop.training
signature: prepared
ok: repro: both plugins were used or refused OK.

Run it with nothing but torch, deepspeed and accelerate installed:

    torchrun --standalone --nproc_per_node=2 repro/accelerate_ddp_noreport_plugin_dropped_by_cpu.py

AcceleratorState reads the DeepSpeed plugin only under the condition "and not cpu", and the FSDP plugin only in the
branches for accelerators (state.py). On a CPU the distributed_type stays MULTI_CPU, for which prepare wraps the model
in DDP: nothing is sharded, and the settings of the plugin have no effect.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from torch import nn

SIGNATURE = "prepared"
OK = "repro: both plugins were used or refused OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


def prepare(**plugin):
    """Return the class name of the model that an Accelerator on CPUs prepares, or of the error that it raises."""
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        model = nn.Linear(1, 1)
        accelerator = Accelerator(cpu=True, **plugin)
        return type(accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))[0]).__name__
    except (ValueError, RuntimeError) as error:
        return type(error).__name__


def main() -> int:
    # The constructor of each plugin sets an environment variable.
    found = {
        "an FSDP2 plugin": prepare(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)),
        "a DeepSpeedPlugin": prepare(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG)),
    }
    dropped = [plugin for plugin, prepared in found.items() if prepared == "DistributedDataParallel"]
    if dropped:
        print(f"repro: REPRODUCED: {SIGNATURE} DDP with {' and with '.join(dropped)}\n", end="", flush=True)
        return 1
    if dist.get_rank() == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
