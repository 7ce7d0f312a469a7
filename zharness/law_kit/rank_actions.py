"""Define actions that several laws perform on a rank."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zharness.engines.protocol import Engine
from zharness.law_kit.rank_context import RankContext
from zharness.world.current_rank import current_rank, is_rank


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Create a folder that every rank can use, and remove the folder after the ``with`` block.

    Every rank has to enter this context manager. If a rank raises, the folder stays until rank 0 ends, because another
    rank that still reads it would otherwise report a missing file.
    """
    paths = [create_scratch_folder() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(paths)
    yield Path(paths[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(paths[0], ignore_errors=True)


def create_scratch_folder() -> str:
    """Create a folder that is removed when this process ends. Returns its path.

    The folder of a rank that the harness started is removed even if the rank is killed.
    """
    if is_rank():
        return tempfile.mkdtemp(prefix="zharness-", dir=current_rank().scratch_dir)
    folder = tempfile.mkdtemp(prefix="zharness-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def train_and_record_step(ctx: RankContext, engine: Engine, step: int = 0) -> None:
    """Train one step and record everything that ``judge_step`` compares."""
    ctx.record_training_state(engine, step)
    ctx.train(engine, step)
    ctx.record("grads", engine.full_grads(), step)
    engine.step()
    engine.zero_grad()
    ctx.record_training_state(engine, step + 1)


@contextmanager
def eval_mode(engine: Engine) -> Iterator[None]:
    """Put the engine's module into eval mode while the ``with`` block runs, and into train mode afterwards."""
    engine.module.eval()
    try:
        yield
    finally:
        engine.module.train()


def second_loss(output: Tensor) -> Tensor:
    """Return a loss of ``output`` other than the loss of the model.

    The loss is linear in the output with integer factors, so it is exact on the exact model.
    """
    return 2 * output.sum(dim=-1).mean()


def run_on_rank_0(action: Callable[[], Any]) -> None:
    """Run ``action`` on rank 0 between two barriers, so that no other rank reads files while ``action`` changes them.

    Every rank has to call this function.
    """
    dist.barrier()
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def load_raises(load: Callable[[], None]) -> Tensor:
    """Return 1 if ``load`` raises an exception, and otherwise 0.

    A NotImplementedError is raised again, because a method that is not implemented does not refuse a checkpoint.
    """
    try:
        load()
    except NotImplementedError:
        raise
    except Exception:  # noqa: BLE001 - an exception of any type is a refusal
        return torch.tensor(1.0)
    return torch.tensor(0.0)


def collect_training_state(engine: Engine) -> dict[str, Tensor]:
    """Return the engine's weights and optimizer state in one dictionary."""
    state = engine.full_optimizer_state()
    return {**engine.full_params(), **{f"{n}/{k}": value for n, entry in state.items() for k, value in entry.items()}}
