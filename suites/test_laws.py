"""Every law on every engine: one test for each cell, with the cell's own id."""

import pytest

from zharness.laws import LAWS
from zharness.run.pytest_cells import describe_problem
from zharness.run.record import Record

# Long programs, whose cells cost the most, so they run at the stages that differ most.
ANY_ORDER = tuple(name for name in LAWS if name.endswith(".any_order"))


def select_laws(*groups: str) -> tuple[str, ...]:
    """Return the names of the laws of these groups, without the long programs."""
    return tuple(name for name in LAWS if name.partition(".")[0] in groups and name not in ANY_ORDER)


# A sample of the whole matrix, which `zharness check --world-size 1,2,3,4 --dtype fp32,bf16,fp16` runs, and
# `scripts/soak.py cells` with thousands of seeds, without the long programs. Laws of arithmetic run at every world size
# on one model, because models differ by kernels and not by world size. The other laws differ by stage.
TRAINING = select_laws("training")
ARITHMETIC = (*TRAINING, "double_backward.retained_then_zero_grad", "torch_func.grad", "torch_func.vmap_grad")
WIDE = ("training.grads", "training.trajectory")
# Laws that master weights and a narrow reduce dtype change.
ROUNDED = tuple(
    f"training.{name}" for name in ("grads", "one_hot_rank", "trajectory", "accumulation", "clip_and_norm", "sgd_step")
)
OTHERS = select_laws(
    *("backward", "double_backward", "torch_func", "checkpointing", "precision", "parameters", "state", "resources")
)
THIRDS = ("backward", "state.resume", "state.reshard", *select_laws("parameters"))
FEW = ("training.grads", "training.one_hot_rank", "training.clip_and_norm")
# Engines whose cells cost the most train two models here: a small one and a transformer.
COSTLY = ("mlp", "transformer")


# Three ranks divide nothing evenly, which shows where gradients are sharded.
@pytest.mark.cells("reference", stages=(3,), world_sizes=(3,), checks=ARITHMETIC, models=("mlp",))
@pytest.mark.cells("reference", stages=(1, 3), world_sizes=(1, 4), checks=WIDE, models=("exact",))
# At eight ranks, some own no element of the last bias.
@pytest.mark.cells("reference", stages=(3,), world_sizes=(8,), checks=WIDE, models=("mlp",))
@pytest.mark.cells("reference", stages=(1, 3), world_sizes=(3,), checks=THIRDS)
@pytest.mark.cells("reference", stages=(1, 3), dtypes=("bf16", "fp16"), checks=ROUNDED, models=("mlp",))
@pytest.mark.cells("reference", dtypes=("bf16",), checks=("state.reshard",))
@pytest.mark.cells("reference", stages=(0, 2), checks=(*TRAINING, "state"), models=("mlp",))
# Stages 0 and 1 reduce in one way, 2 and 3 in another; stages 1 and 3 differ in what is whole and what is sharded.
@pytest.mark.cells("reference", stages=(1, 3))
@pytest.mark.cells("ddp")
# Its other code is DDP's.
@pytest.mark.cells("zero1", checks=(*TRAINING, "state"))
# Stage 2 is stage 3 with weights that stay gathered.
@pytest.mark.cells("fsdp2", checks=TRAINING, models=("mlp",))
@pytest.mark.cells("fsdp2", stages=(3,), checks=(*ANY_ORDER, *OTHERS))
# Its failures are not listed as expected yet, so these are laws that hold.
@pytest.mark.cells("fsdp1", checks=FEW, models=("mlp",))
@pytest.mark.cells("deepspeed", stages=(0, 2), checks=TRAINING, models=("mlp",))
@pytest.mark.cells("deepspeed", stages=(1, 3), checks=TRAINING, models=COSTLY)
@pytest.mark.cells("deepspeed", stages=(1,), checks=ANY_ORDER)
# DeepSpeed's stages 1 and 2 share their code, except for when gradients are reduced; stage 0 refuses most laws.
@pytest.mark.cells("deepspeed", stages=(1, 3), checks=OTHERS)
def test_the_law_holds(record: Record) -> None:
    assert not describe_problem(record), describe_problem(record)
