"""Every law on every engine: one test for each cell, with the cell's own id."""

import pytest

from zharness.run.record import Record
from zharness.run.session import problem

# The laws of arithmetic at every world size, on two models: the others differ by kernels, not by the number of ranks
# (`zharness check --world-size 1,2,3,4` runs them all). Those of what a caller may do differ by stage, not by it.
ARITHMETIC = ("training", "double_backward.retained_then_zero_grad", "torch_func.grad", "torch_func.vmap_grad")
WIDE = ("training.grads", "training.trajectory")
# Those that masters and a narrow wire change.
ROUNDED = tuple(
    f"training.{name}" for name in ("grads", "one_hot_rank", "trajectory", "accumulation", "clip_and_norm", "sgd_step")
)


@pytest.mark.cells("reference", world_sizes=(1, 3, 4), checks=ARITHMETIC, models=("mlp", "exact"))
# Here some ranks own nothing of the last bias.
@pytest.mark.cells("reference", world_sizes=(8,), checks=WIDE, models=("mlp",))
@pytest.mark.cells("reference", world_sizes=(3,), checks=("backward", "state.resume", "state.reshard"))
@pytest.mark.cells("reference", world_sizes=(1, 3, 4), checks=("parameters",))
@pytest.mark.cells("reference", dtypes=("bf16", "fp16"), checks=ROUNDED, models=("mlp",))
@pytest.mark.cells("reference", dtypes=("bf16",), checks=("state.reshard",))
@pytest.mark.cells("reference")
@pytest.mark.cells("ddp")
@pytest.mark.cells("fsdp2")
@pytest.mark.cells("deepspeed")
def test_the_law_holds(record: Record) -> None:
    assert not problem(record), problem(record)
