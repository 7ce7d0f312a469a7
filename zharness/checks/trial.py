"""The judge's side of a check: every rank's evidence beside the baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from zharness.checks.usual import AS_USUAL, Training
from zharness.parity import Comparison, Evidence, Part, identical, ranks_agree, within
from zharness.parity.attribution import Suspects, Terms, attribute, scale_of
from zharness.parity.baseline import Baseline, Local, Objective, Weigh
from zharness.parity.bounds import (
    Bounded,
    mean_and_bound,
    mean_bound_at_most,
    mean_of,
    torchs_means,
    unit_roundoff,
)
from zharness.parity.certificate import Exactness, certified
from zharness.parity.compare import PIECE, alike, beside, check_names, in_pieces, same_as_torch
from zharness.parity.facts import Place

Means = Mapping[str, Bounded]  # gradients by parameter, with how far an engine's may be off


@dataclass(frozen=True)
class Trial:
    """What is judged: ``evidence[rank]``, and the baseline it has to match.

    ``wire`` is the dtype in which the engine declares that it reduces gradients; None: that of the cell. ``training``
    is what a user's configuration says of it.
    """

    baseline: Baseline
    evidence: tuple[Evidence, ...]
    dtype: torch.dtype
    variant: str = ""
    wire: torch.dtype | None = None
    training: Training = AS_USUAL

    @property
    def reduced_in(self) -> torch.dtype:
        return self.wire or self.dtype

    def wire_of(self, name: str, held: torch.dtype) -> torch.dtype:
        """In which dtype gradients of a parameter are reduced, which come in ``held``.

        In its own, where the model has that narrower than the cell and the engine has left it so.
        """
        narrow = held == self.narrowest(name) != self.dtype
        return max(self.reduced_in, held, key=unit_roundoff) if narrow else self.reduced_in

    def narrowest(self, name: str) -> torch.dtype:
        """In which dtype an engine may hold a parameter: the cell's, or the model's own where that is narrower."""
        return max(self.dtype, self.baseline.dtypes[name], key=unit_roundoff)

    @property
    def world_size(self) -> int:
        return self.baseline.world_size

    def copies(self, label: str, step: int = 0) -> list[Mapping[str, Tensor]]:
        """What each rank recorded under ``label`` at ``step``."""
        return [evidence.get(label, step) for evidence in self.evidence]

    def recorded(self, label: str) -> bool:
        """Whether rank 0 recorded anything under ``label``; another rank that did not is told when it is asked."""
        return any(snapshot.label == label for snapshot in self.evidence[0].snapshots)

    def place(self, name: str, part: Part, step: int = 0, seen_on: int = 0) -> Place:
        """Where a tensor of that name is, with the owners that the engine declared."""
        return Place(name, part, step, seen_on, tuple(self.evidence[seen_on].layout.get(name, ())))

    def same_loss(self, step: int, expected: Sequence[Local], label: str = "loss") -> Iterator[Comparison]:
        """Every rank's loss equals the baseline's of its own micro-batch, bitwise."""
        for rank, copy in enumerate(self.copies(label, step)):
            local = expected[rank].loss
            found = identical(self.place("loss", Part.FORWARD, step, rank), local, copy["loss"])
            yield beside(found, partial(torch.clone, local))

    def same_value(self, label: str, expected: Sequence[Mapping[str, Tensor]], step: int = 0) -> Iterator[Comparison]:
        """Every rank's tensors equal the baseline's for that rank, bitwise; they are rank-local."""
        for rank, copy in enumerate(self.copies(label, step)):
            check_names(label, expected[rank], copy)
            for name, tensor in expected[rank].items():
                found = identical(self.place(name, Part.LOCAL_GRADIENT, step, rank), tensor, copy[name])
                yield beside(scaled(found, tensor, copy[name]), partial(torch.clone, tensor))

    def reduced(
        self,
        label: str,
        micros: Sequence[Sequence[Local]],
        step: int = 0,
        exact: bool | Exactness = False,
        scale: float = 1.0,
        suspects: Mapping[str, Sequence[Sequence[Local]]] | None = None,
        explained: bool = True,
    ) -> Iterator[Comparison]:
        """Every rank's full gradients equal the mean of the local ones, times ``scale``, and each other.

        ``micros[m][rank]`` are the local results of micro-step m. ``exact``: bitwise, else by the reduction's bound,
        and a reason why not is noted.
        ``suspects[what][loss]`` are other local gradients, to be recognised when their sum over losses comes instead.
        Where it is not to be ``explained``, a mismatch comes without the hint of how the gradient came to be wrong, for
        which a large one is held against many others.
        """
        copies = self.copies(label, step)
        expected = {name for row in micros for local in row for name in local.grads}
        for copy in copies:
            check_names("full_grads", dict.fromkeys(expected), copy)
        for name in self.baseline.names:
            if name in expected:
                known = {
                    what: [[local.grads[name] for local in row if name in local.grads] for row in losses]
                    for what, losses in (suspects or {}).items()
                }
                yield from self._reduced(name, copies, micros, step, exact, scale, known if explained else None)

    def means(self, micros: Sequence[Sequence[Local]], scale: float, held: Mapping[str, torch.dtype]) -> Means:
        """What ``reduced`` expects of every gradient, and how far it allows it to be off; ``held`` in these dtypes.

        For a step of whose gradients nothing was recorded. What ``held`` does not name may be as narrow as it gets.
        """
        found = {}
        for name in self.baseline.names:
            if any(name in local.grads for row in micros for local in row):
                dtype = held.get(name, self.narrowest(name))
                terms = [scale * term.double() for row in self._known(name, micros) for term in row]
                found[name] = Bounded(*mean_and_bound(terms, self.wire_of(name, dtype), dtype), dtype)
        return found

    def _known(self, name: str, micros: Sequence[Sequence[Local]]) -> list[list[Tensor]]:
        """Local gradients of one parameter by rank and micro-step; a rank on which it was not used counts as zero."""
        return [[grad_of(row[rank], name, micros) for row in micros] for rank in range(self.world_size)]

    def _reduced(
        self,
        name: str,
        copies: Sequence[Mapping[str, Tensor]],
        micros: Sequence[Sequence[Local]],
        step: int,
        exact: bool | Exactness,
        scale: float,
        suspects: Suspects | None,
    ) -> Iterator[Comparison]:
        """``reduced`` for one parameter."""
        known = self._known(name, micros)
        everyone = [copy[name] for copy in copies]
        yield from self.right_in_pieces(name, known, everyone, step, exact, scale) or self._whole(
            name, known, everyone, step, exact, scale, suspects
        )
        yield from ranks_agree(self.place(name, Part.REDUCTION, step), everyone)

    def right_in_pieces(
        self,
        name: str,
        grads: Terms,
        everyone: Sequence[Tensor],
        step: int = 0,
        exact: bool | Exactness = False,
        scale: float = 1.0,
    ) -> list[Comparison]:
        """Every rank's copy of one large gradient against the mean of ``grads``; nothing where anything is wrong.

        Ranks that agree are compared once, and a bound is computed where the numbers are not torch's own.
        """
        first = everyone[0]
        if first.numel() <= PIECE or any(term.shape != first.shape for row in grads for term in row):
            return []
        flat, wire = [[term.flatten() for term in row] for row in grads], self.wire_of(name, first.dtype)

        def compare(piece: slice, held: Tensor) -> list[Comparison]:
            terms = [[term[piece] for term in row] for row in flat]
            if self.baseline.loss_scale == 1 and any(
                torch.equal(mean.to(held.dtype), held) for mean in torchs_means(terms, scale, wire)
            ):
                place = self.place(name, Part.REDUCTION, step)
                if exact:
                    return [identical(place, held, held)]
                flat_terms = [term for row in terms for term in row]
                return [same_as_torch(place, held, mean_bound_at_most(flat_terms, scale, wire, held))]
            return list(self._whole(name, terms, [held], step, exact, scale, None))

        return self.once_for_all(everyone, compare)

    def once_for_all(
        self, everyone: Sequence[Tensor], compare: Callable[[slice, Tensor], list[Comparison]]
    ) -> list[Comparison]:
        """``compare`` of every piece of the ranks' copies of one tensor, where it is large, and nothing is wrong.

        ``compare(piece, held)`` is of rank 0's elements of that piece; every other rank's copy equals that bitwise.
        Else nothing.
        """
        held = everyone[0].flatten()
        if held.numel() <= PIECE or not all(alike(everyone[0], copy) for copy in everyone[1:]):
            return []
        found = in_pieces(lambda piece: compare(piece, held[piece]), held.numel())
        places = [one.place for one in found if one.place is not None]
        return [
            replace(one, place=replace(place, seen_on=rank))
            for one, place in zip(found, places, strict=True)
            for rank in range(len(everyone))
        ]

    def _whole(
        self,
        name: str,
        grads: Terms,
        everyone: Sequence[Tensor],
        step: int,
        exact: bool | Exactness,
        scale: float,
        suspects: Suspects | None,
    ) -> Iterator[Comparison]:
        """Every rank's copy of one gradient against the mean of ``grads[rank][micro-step]``, times ``scale``.

        A mismatch is explained, by ``suspects`` or otherwise; None: it is not.
        """
        terms = [[scale * grad.double() for grad in row] for row in grads]
        flat, wire = [term for row in terms for term in row], self.wire_of(name, everyone[0].dtype)
        mean, bound = mean_and_bound(flat, wire, everyone[0].dtype) if not exact else (mean_of(flat), None)
        reason = exact.reason if isinstance(exact, Exactness) else ""
        note = f"tier S by the bound of the reduction, not X: {reason}" if reason else ""
        right: Comparison | None = None
        for rank, actual in enumerate(everyone):
            place = self.place(name, Part.REDUCTION, step, rank)
            if right is not None and alike(everyone[0], actual):  # the same numbers: nothing else would come of it
                yield replace(right, place=place)
                continue
            found = identical(place, mean, actual) if bound is None else within(place, mean, actual, bound)
            found = replace(found, note=note) if note else found
            told = found if suspects is None else attribute(found, actual, terms, everyone, suspects, wire)
            right = told if rank == 0 and told.mismatch is None else right
            yield beside(told, partial(self._plain_mean, terms, wire, actual.dtype))

    def _plain_mean(self, terms: Terms, wire: torch.dtype, held: torch.dtype) -> Tensor:
        """The mean of all terms as plain torch computes it in the dtype of the reduction, under the loss scale."""
        scale = self.baseline.loss_scale
        stack = torch.stack([(scale * term).to(wire) for row in terms for term in row])
        return stack.mean(0).to(held) / scale

    def exact(self, steps: range, objective: Objective | None = None) -> Exactness:
        """Whether tier X applies to the mean over these micro-steps, and why not."""
        return certified(self.baseline, steps, self.dtype, objective)

    def in_one_order(self) -> bool:
        """Whether the mean over ranks has one value: of two terms, or exact; the order of more is the engine's own."""
        return self.world_size <= 2 or bool(self.exact(range(1)))

    def locals(
        self,
        step: int = 0,
        params: Mapping[str, Tensor] | None = None,
        objective: Objective | None = None,
        weigh: Weigh | None = None,
    ) -> list[Local]:
        """The baseline's local results at micro-step ``step``, by rank."""
        return self.baseline.locals(step, params, objective, weigh)


def until_wrong(comparisons: Iterable[Comparison]) -> Iterator[Comparison]:
    """Up to the first mismatch: what comes after it follows from it."""
    for comparison in comparisons:
        yield comparison
        if comparison.mismatch is not None:
            return


def grad_of(local: Local, name: str, micros: Sequence[Sequence[Local]]) -> Tensor:
    """One rank's gradient of ``name``; zeros where this rank did not use it and another did."""
    if name in local.grads:
        return local.grads[name]
    other = next(peer.grads[name] for row in micros for peer in row if name in peer.grads)
    return torch.zeros_like(other)


def scaled(comparison: Comparison, expected: Tensor, actual: Tensor) -> Comparison:
    """Say so when wrong values are the right ones times a factor."""
    if comparison.mismatch is None or expected.numel() == 1 or not actual.is_floating_point():
        return comparison
    factor = scale_of(actual, [expected])
    hint = "" if factor is None else f"it is {factor:.7g} x the right value"
    return replace(comparison, mismatch=replace(comparison.mismatch, hint=hint))


def divided_by(divisor: int) -> Weigh:
    """A loss over ``divisor``, as a user writes it."""
    return lambda loss, _rank: loss / divisor
