"""load_checkpoint runs a command that an attacker has put into a checkpoint's file.

id: 6751
engine: deepspeed
symptom: loading a checkpoint executes code from its files
reported: https://github.com/deepspeedai/DeepSpeed/pull/6751
affects: >=0.16.4
fixed: not yet
ranks: 1
law: state.refuse_pickle
signature: a command from the checkpoint ran
ok: repro: load_checkpoint refuses a file that carries a command OK.

Run it with nothing but torch and deepspeed installed:

    torchrun --standalone --nproc_per_node=1 repro/deepspeed_6751_checkpoint_runs_code.py

load_checkpoint reads files by `torch.load(..., weights_only=False)`
(`runtime/checkpoint_engine/torch_checkpoint_engine.py`), which unpickles any object in them. #6751 wrote this argument
explicitly and left setting it to True as work to do. The command here makes a folder.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import importlib
import os
import pickle
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator asks for it

import deepspeed

# Skip DeepSpeed's all-reduce in shared memory: the ranks would race to compile it, and plain gloo is enough here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

SIGNATURE = "a command from the checkpoint ran"
OK = "repro: load_checkpoint refuses a file that carries a command OK."
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


class Command:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.makedirs, (self.path, 0o777, True)  # load_checkpoint may read a file twice


def main():
    deepspeed.init_distributed()
    model = nn.Linear(1, 1).to(deepspeed.accelerator.get_accelerator().current_device_name())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder, tag="saved")
        file, made = Path(folder) / "saved" / "mp_rank_00_model_states.pt", Path(folder) / "made"
        state = torch.load(file, weights_only=False)  # our own checkpoint
        torch.save({**state, "command": Command(str(made))}, file)
        try:
            engine.load_checkpoint(folder, tag="saved")
        except pickle.UnpicklingError:
            print(OK, flush=True)
            return 0
        assert made.is_dir(), "the checkpoint was loaded, and the command did not run"
    print(f"repro: REPRODUCED: {SIGNATURE}: os.makedirs, in mp_rank_00_model_states.pt\n", end="", flush=True)
    return 1


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized() and status == 0:
        torch.distributed.destroy_process_group()
    sys.exit(status)
