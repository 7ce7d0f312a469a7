"""Define the laws of the group ``batches``: micro-batches of changing size and shape, and modules in changing order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from zharness.law_kit.scenarios import Participant
from zharness.law_kit.window_law import window_law
from zharness.law_kit.window_scenarios import WindowScenario, WindowScript
from zharness.laws.circumstances.common import make_accumulated, sum_loss, train_route
from zharness.workload import Batch
from zharness.workload.models import SAMPLES

WINDOWS = 3
ROW_DIMS = 2  # the dimensions of inputs whose samples are rows
ORDERS = ((0, 1, 2), (2, 0, 1), (1, 1, 0, 2))  # orders of the experts; the last order uses one expert twice


def count_rows(rank: int, window: int, micro: int) -> int:
    """Return a number of rows from 1 to SAMPLES that differs between ranks, accumulation windows and micro-batches."""
    return 1 + (rank + window + 2 * micro) % SAMPLES


def select_rows(batch: Batch, rank: int, window: int, micro: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of the first rows of a micro-batch."""
    rows = count_rows(rank, window, micro)
    return batch.inputs[:rows], batch.target[:rows]


def select_equal_rows(batch: Batch, _rank: int, window: int, micro: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of the first rows of a micro-batch, equally many rows on every rank.

    This also tests engines that need equal batch sizes on all ranks.
    """
    return select_rows(batch, 0, window, micro)


def select_no_rows_on_rank_0(batch: Batch, rank: int, window: int, micro: int) -> tuple[Tensor, Tensor]:
    """Return an empty micro-batch on rank 0, and the whole micro-batch on other ranks."""
    rows = 0 if rank == 0 else SAMPLES
    return batch.inputs[:rows], batch.target[:rows]


def select_sequence(batch: Batch, rank: int, window: int, micro: int) -> tuple[Tensor, Tensor]:
    """Return one sequence of several rows, of shape (1, rows, features).

    The number of rows differs between accumulation windows. If the inputs are sequences, some keep half of their
    tokens.
    """
    rows = count_rows(rank, window, micro)
    if batch.inputs.dim() > ROW_DIMS:
        tokens = batch.inputs.shape[1] // (1 + rows % 2)
        return batch.inputs[:1, :tokens], batch.target[:1, :tokens]
    return batch.inputs[None, :rows], batch.target[None, :rows]


RowSelection = Callable[[Batch, int, int, int], tuple[Tensor, Tensor]]

SELECTIONS: Mapping[str, RowSelection] = {
    "rows": select_rows,
    "empty": select_no_rows_on_rank_0,
    "sequences": select_sequence,
    "equal_rows": select_equal_rows,
}


def make_shape_script(select: RowSelection) -> WindowScript:
    """Return a script that trains the part of each micro-batch that ``select`` returns."""

    def train(participant: Participant, window: int, micro: int) -> None:
        """Train a part of one micro-batch."""
        batch = participant.get_batch(window + WINDOWS * micro)
        inputs, target = select(batch, participant.rank, window, micro)
        participant.backward(sum_loss(participant.call(inputs), target))

    return train


def make_shape_scenarios() -> dict[str, WindowScenario]:
    """Return a scenario for each selection of rows.

    One further scenario has micro-batches of different sizes in one accumulation window.
    """
    scenarios = {name: WindowScenario(make_shape_script(select), WINDOWS) for name, select in SELECTIONS.items()}
    return scenarios | {"rows_2_by_engine": make_accumulated(scenarios["rows"], "2_by_engine")}


def train_in_order(participant: Participant, window: int, micro: int) -> None:
    """Train one micro-batch with the experts in an order that depends on the window and the micro-batch."""
    train_route(participant, window + WINDOWS * micro, ORDERS[(window + micro) % len(ORDERS)])


IN_CHANGING_ORDER = WindowScenario(train_in_order, WINDOWS)

LAWS = (
    window_law(
        "batches.shapes",
        make_shape_scenarios(),
        "gradients of micro-batches of different sizes and shapes, also of empty ones, add up as in plain PyTorch",
        kept_because="the only micro-batches whose shapes differ between steps and between ranks",
    ),
    window_law(
        "batches.module_order",
        {"": IN_CHANGING_ORDER, "2_by_engine": make_accumulated(IN_CHANGING_ORDER, "2_by_engine")},
        "gradients are right if modules run in a different order in each forward, and one module several times",
        kept_because="the only changing module order: catches an engine that prefetches in the previous step's order",
    ),
)
