"""Compute the gradients that wrong engines would have in a program, to explain wrong numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from zharness.engines.protocol import Piece
from zharness.mesh import CONTEXT, EXPERT, Mesh
from zharness.parity.baseline import LocalResult
from zharness.workload.programs import ENGINE, Program

SUMMED_AGAIN_HINT = "the sum of all backwards, those before the last summed over the ranks once more"

UNREDUCED_GRADS_KEPT_HINT = "the sum with the unreduced gradients that zero_grad() discarded"

FAILED_GRADS_KEPT_HINT = "the sum with the backwards that raised"

LAST_FAILED_GRADS_KEPT_HINT = "the sum with the last backward that raised"

SUCCEEDED_GRADS_KEPT_HINT = "the sum with the backwards that zero_grad forgot, without those that raised"

FAILED_GRADS_ALONE_HINT = "the gradient of the backwards that raised, without those after them"

ZEROED_GRADS_ALONE_HINT = "the gradient of the backwards that zero_grad forgot, without those after them"

ZEROED_GRADS_KEPT_HINT = "the backwards that zero_grad forgot are still in it"

UNDIVIDED_HINT = "the sum in which backwards in no_sync() are not divided by the number of micro-batches"

ADDED_AGAIN_HINT = "the sum in which a second backward of one forward adds the first one's gradient once more"

DIVIDED_AGAIN_HINT = "the sum of all backwards, those before the last divided by the ranks of experts once more"

SUMMED_OVER_SEQUENCE_AGAIN_HINT = (
    "the sum of all backwards, those before the last summed over the ranks of a sequence once more"
)

LAST_UNREDUCED_HINT = "the sum whose last backward is the owner's alone, not reduced"


def make_summed_again_suspects(
    micros: Sequence[Sequence[LocalResult]], world_size: int
) -> dict[str, list[list[LocalResult]]]:
    """Return, by hint, the gradients of a wrong engine that, in every backward, sums earlier ones over ranks again.

    The result is empty if there is only one backward or one rank.
    """
    if world_size == 1 or len(micros) == 1:
        return {}
    pairs = [(float(world_size) ** (len(micros) - at), micro) for at, micro in enumerate(micros)]
    return {SUMMED_AGAIN_HINT: [row for factor, micro in pairs for row in scale_local_grads([micro], factor)]}


@dataclass
class WindowBackwards:
    """The local gradients of the backwards since the last step, one row of ranks for each backward."""

    rows: list[list[LocalResult]] = field(default_factory=list)
    micros: list[int] = field(default_factory=list)  # the micro-batch of each row
    discarded: list[list[LocalResult]] = field(default_factory=list)  # rows that zero_grad discarded
    unreduced: list[list[LocalResult]] = field(default_factory=list)  # rows of both lists that ran in no_sync
    failed: list[list[LocalResult]] = field(default_factory=list)  # discarded rows of backwards that raised

    def add(self, row: list[LocalResult], micro: int) -> None:
        """Add the gradients of a backward of micro-batch number ``micro``."""
        self.rows.append(row)
        self.micros.append(micro)

    def add_failed(self, row: list[LocalResult], micro: int) -> None:
        """Add the gradients that a backward which raised would have had."""
        self.add(row, micro)
        self.failed.append(row)

    def make_suspects(self, mesh: Mesh, program: Program, ranks: int) -> dict[str, list[list[LocalResult]]]:
        """Return, by hint, the gradients that wrong engines would have after these backwards.

        ``ranks`` is the world size if the engine sums gradients over ranks, or 1 if it averages them.
        """
        factor = ranks / program.window
        return {
            **make_summed_again_suspects(self.rows, ranks),
            **self.list_reduced_again(mesh, program, ranks),
            **make_kept_suspects(self.list_kept_by_hint(), self.rows, factor),
            **make_alone_suspects(self.failed, self.discarded, factor),
            **make_added_again_suspects(self.micros, self.rows, factor),
            **make_undivided_suspects(self.unreduced, self.rows, program.window, factor),
        }

    def list_reduced_again(self, mesh: Mesh, program: Program, ranks: float) -> dict[str, list[list[LocalResult]]]:
        """Return the suspects of ``make_reduced_again_suspects`` for a window of ``program``.

        An engine that counts micro-batches counts the calls of ``step``; a micro-batch may have several backwards.
        """
        first = program.window - 1
        if first and program.window_owner == ENGINE:
            first = self.micros.index(self.micros[-1])
        return make_reduced_again_suspects(mesh, self.rows, first, ranks / program.window, ranks)

    def discard(self) -> None:
        """Discard all rows, as ``zero_grad`` does."""
        self.discarded += self.rows
        self.rows, self.micros = [], []

    def list_kept_by_hint(self) -> dict[str, list[list[LocalResult]]]:
        """Return the discarded rows that a wrong engine may keep, by hint."""
        succeeded = [row for row in self.discarded if all(row is not other for other in self.failed)]
        discarded_unreduced = [row for row in self.discarded if any(row is other for other in self.unreduced)]
        return {
            UNREDUCED_GRADS_KEPT_HINT: discarded_unreduced,
            FAILED_GRADS_KEPT_HINT: self.failed,
            LAST_FAILED_GRADS_KEPT_HINT: self.failed[-1:],
            SUCCEEDED_GRADS_KEPT_HINT: succeeded if self.failed else [],
            ZEROED_GRADS_KEPT_HINT: self.discarded,
        }


def make_kept_suspects(
    kept_by_hint: Mapping[str, list[list[LocalResult]]], window: list[list[LocalResult]], factor: float
) -> dict[str, list[list[LocalResult]]]:
    """Return, by hint, the gradients of wrong engines that add discarded backwards to those of ``window``.

    Every gradient is multiplied by ``factor``.
    """
    return {hint: scale_local_grads([*kept, *window], factor) for hint, kept in kept_by_hint.items() if kept}


def make_alone_suspects(
    failed: Sequence[list[LocalResult]], discarded: Sequence[list[LocalResult]], factor: float
) -> dict[str, list[list[LocalResult]]]:
    """Return, by hint, the gradients of wrong engines that have only gradients of discarded backwards.

    ``failed`` has the rows of the ``discarded`` backwards that raised. Every gradient is multiplied by ``factor``.
    """
    alone_by_hint = {FAILED_GRADS_ALONE_HINT: failed, ZEROED_GRADS_ALONE_HINT: discarded}
    return {hint: scale_local_grads(rows, factor) for hint, rows in alone_by_hint.items() if rows}


def make_undivided_suspects(
    unreduced: Sequence[list[LocalResult]], rows: Sequence[list[LocalResult]], window: int, factor: float
) -> dict[str, list[list[LocalResult]]]:
    """Return, by hint, the gradients of a wrong engine that does not divide backwards in no_sync by ``window``.

    ``unreduced`` has those of the ``rows`` that ran in no_sync. Every other gradient is multiplied by ``factor``.
    """
    if window == 1 or not any(row is other for row in rows for other in unreduced):
        return {}
    factors = (factor * (window if any(row is other for other in unreduced) else 1) for row in rows)
    return {UNDIVIDED_HINT: [scale_local_grads([row], each)[0] for row, each in zip(rows, factors, strict=True)]}


def make_added_again_suspects(
    micros: Sequence[int], window: Sequence[list[LocalResult]], factor: float
) -> dict[str, list[list[LocalResult]]]:
    """Return, by hint, the gradients of a wrong engine that clears param.grad once for each forward.

    Backward number i uses micro-batch ``micros[i]`` and has the local gradients ``window[i]``. After each backward the
    engine adds all of param.grad to its accumulated gradient. Every gradient is multiplied by ``factor``. The result is
    empty if no forward has a second backward.
    """
    added: list[list[LocalResult]] = []
    param_grad: list[list[LocalResult]] = []
    for number, (micro, row) in enumerate(zip(micros, window, strict=True)):
        param_grad = [*param_grad, row] if micro in micros[:number] else [row]
        added += param_grad
    return {ADDED_AGAIN_HINT: scale_local_grads(added, factor)} if len(added) > len(window) else {}


def make_reduced_again_suspects(
    mesh: Mesh, rows: Sequence[list[LocalResult]], first: int, factor: float, ranks: float = 1
) -> dict[str, list[list[LocalResult]]]:
    """Return, by hint, the gradients of wrong engines whose reductions reduce earlier gradients again over an axis.

    Backward number ``first`` is the first one that reduces; it also reduces the gradients of the backwards before it. A
    reduced gradient is equal on all ranks of a sequence, so that a second sum over these ranks multiplies it by their
    number. An expert is on one rank of its group, so that a second reduction divides its gradient by the size of the
    group. The reduction over data parallelism gives ``ranks`` times the mean. Every gradient is multiplied by
    ``factor``.
    """
    again = [len(rows) - 1 - max(at, first) for at in range(len(rows))]
    axes = {DIVIDED_AGAIN_HINT: (EXPERT, -1), SUMMED_OVER_SEQUENCE_AGAIN_HINT: (CONTEXT, 1)}
    return {
        hint: [
            scale_local_grads([row], factor * (ranks * mesh.size(axis) ** power) ** times)[0]
            for row, times in zip(rows, again, strict=True)
        ]
        for hint, (axis, power) in axes.items()
        if mesh.size(axis) > 1 and any(again)
    }


def make_unreduced_suspects(
    layout: Mapping[str, Sequence[Piece]], rows: Sequence[list[LocalResult]], ranks: float, window: int
) -> dict[str, list[list[LocalResult]]]:
    """Return, by hint, the gradients of a wrong engine that does not reduce the last backward, which is the last row.

    In the last backward, the owner of an element (by ``layout``) adds its own local gradient for this element. The
    gradients of all other backwards are reduced to ``ranks`` times their mean. All gradients are divided by ``window``.
    The result is empty if there are no owners.
    """
    last = rows[-1]
    owner_grads = {
        name: scatter_by_owner([local.grads[name] for local in last], pieces)
        for name, pieces in layout.items()
        if pieces and all(name in local.grads for local in last)
    }
    row = scale_local_grads([[replace(local, grads=owner_grads) for local in last]], 1 / window)
    return {LAST_UNREDUCED_HINT: [*scale_local_grads(rows[:-1], ranks / window), *row]} if owner_grads else {}


def scatter_by_owner(grads: Sequence[torch.Tensor], pieces: Sequence[Piece]) -> torch.Tensor:
    """Return a tensor in which each element comes from the tensor of ``grads`` of the rank that owns the element."""
    result = torch.zeros_like(grads[0]).flatten()
    for piece in pieces:
        result[piece.start : piece.stop] = grads[piece.rank].flatten()[piece.start : piece.stop]
    return result.view_as(grads[0])


def scale_local_grads(micros: Sequence[Sequence[LocalResult]], factor: float) -> list[list[LocalResult]]:
    """Return the local results with every gradient multiplied by ``factor``."""
    return [
        [replace(local, grads={name: factor * grad for name, grad in local.grads.items()}) for local in row]
        for row in micros
    ]
