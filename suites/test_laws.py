"""Every law on every engine: one test for each cell, with the cell's own id."""

import pytest

from zharness.run.record import Record
from zharness.run.session import problem

# A sample of the whole matrix, which `zharness check --world-size 1,2,3,4 --dtype fp32,bf16,fp16` runs and
# `scripts/soak.py cells` has run with thousands of seeds. The laws of arithmetic at every world size: models differ by
# kernels, not by the number of ranks. Those of what a caller may do differ by stage, not by it.
# Long programs, whose cells cost the most: at the stages that differ most.
ANY_ORDER = ("*.any_order",)
TRAINING = ("training.[!a]*", "training.accumulation")
ARITHMETIC = (*TRAINING, "double_backward.retained_then_zero_grad", "torch_func.grad", "torch_func.vmap_grad")
WIDE = ("training.grads", "training.trajectory")
# Those that masters and a narrow wire change.
ROUNDED = tuple(
    f"training.{name}" for name in ("grads", "one_hot_rank", "trajectory", "accumulation", "clip_and_norm", "sgd_step")
)
OTHERS = (
    *("backward", "double_backward", "torch_func", "checkpointing"),
    *("precision", "parameters.[!a]*", "state", "resources"),
)
# Engines whose cells cost the most train two models here: a small one, and one of the kind that people train.
COSTLY = ("mlp", "transformer")


# Three ranks divide nothing evenly, which tells where gradients are sharded.
@pytest.mark.cells("reference", stages=(3,), world_sizes=(3,), checks=ARITHMETIC, models=("mlp",))
@pytest.mark.cells("reference", world_sizes=(1, 4), checks=WIDE, models=("exact",))
# Here some ranks own nothing of the last bias.
@pytest.mark.cells("reference", world_sizes=(8,), checks=WIDE, models=("mlp",))
@pytest.mark.cells("reference", world_sizes=(3,), checks=("backward", "state.resume", "state.reshard"))
@pytest.mark.cells("reference", world_sizes=(3,), checks=("parameters.[!a]*",))
@pytest.mark.cells("reference", dtypes=("bf16", "fp16"), checks=ROUNDED, models=("mlp",))
@pytest.mark.cells("reference", dtypes=("bf16",), checks=("state.reshard",))
@pytest.mark.cells("reference", checks=(*TRAINING, "state"))
# Stages 0 and 1 reduce in one way, 2 and 3 in another; what is whole and what is sharded differs between these two.
@pytest.mark.cells("reference", stages=(1, 3), checks=(*ANY_ORDER, *OTHERS))
@pytest.mark.cells("ddp")
# The rest of it is DDP's.
@pytest.mark.cells("zero1", checks=(*TRAINING, "state"))
# Stage 2 is stage 3 that keeps its weights gathered.
@pytest.mark.cells("fsdp2", checks=TRAINING, models=("mlp",))
@pytest.mark.cells("fsdp2", stages=(3,), checks=(*ANY_ORDER, *OTHERS))
@pytest.mark.cells("deepspeed", checks=TRAINING, models=COSTLY)
@pytest.mark.cells("deepspeed", stages=(1,), checks=ANY_ORDER)
# Stages 1 and 2 share their code in DeepSpeed, but for when gradients are reduced; stage 0 refuses most of it.
@pytest.mark.cells("deepspeed", stages=(1, 3), checks=OTHERS)
def test_the_law_holds(record: Record) -> None:
    assert not problem(record), problem(record)
