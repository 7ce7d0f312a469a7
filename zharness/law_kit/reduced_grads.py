"""Compare one parameter's reduced gradient on every rank with the mean of the local gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from zharness.parity import Comparison, compare_bitwise, compare_within_bound
from zharness.parity.attribution import GradientTerms, SuspectedGradients, attribute_mismatch
from zharness.parity.bounds import float64_mean, mean_and_bound, means_in_torch_orders, upper_mean_bound
from zharness.parity.certificate import NOT_EXACT, Exactness
from zharness.parity.compare import (
    CHUNK_ELEMENTS,
    attach_plain_values,
    build_plain_match,
    is_bitwise_equal,
    match_equal_tensors,
)
from zharness.parity.comparison import TensorLocation


@dataclass(frozen=True)
class ReducedGrad:
    """One parameter's gradient on every rank, and the local gradients whose mean, times ``scale``, it has to be.

    - ``locate(rank)`` returns the location of the gradient that was recorded on a rank.
    - ``local_grads[rank][micro-batch]`` are plain PyTorch's gradients.
    - ``rank_grads[rank]`` are the engine's gradients.
    - ``reduce_dtype`` is the dtype in which the engine reduces the gradient.
    - ``exactness`` says whether the mean is exact. An exact mean is compared bitwise, and any other within the bound of
      the reduction's rounding errors.
    - ``loss_scale`` is the factor that the loss had in backward, by which the gradients were divided afterwards.
    """

    locate: Callable[[int], TensorLocation]
    local_grads: GradientTerms
    rank_grads: Sequence[Tensor]
    reduce_dtype: torch.dtype
    exactness: Exactness = NOT_EXACT
    scale: float = 1.0
    loss_scale: float = 1.0

    def compare(self, suspects: SuspectedGradients | None, order_error: Tensor | float) -> Iterator[Comparison]:
        """Compare the gradient on every rank with the mean of the local gradients.

        A mismatch gets a hint about its cause; ``suspects`` holds gradients that may explain it. If ``suspects`` is
        None, mismatches get no hint. ``order_error`` is added to the bound.
        """
        matches = self.match_in_pieces()
        if matches:
            yield from matches
        else:  # a mismatch and its hints are about a whole gradient, so a wrong gradient is compared again as a whole
            yield from self._compare_whole(suspects, order_error)

    def match_in_pieces(self) -> list[Comparison]:
        """Compare a large gradient piece by piece, which needs little memory, and return a match for every rank.

        Returns an empty list if the gradient is small, differs between ranks or is wrong. A bound is computed only for
        the pieces that differ from torch's own mean.
        """
        first = self.rank_grads[0]
        shapes = {term.shape for row in self.local_grads for term in row}
        if first.numel() <= CHUNK_ELEMENTS or shapes != {first.shape}:
            return []
        flat = [[term.flatten() for term in row] for row in self.local_grads]
        return match_equal_tensors(self.rank_grads, partial(self._compare_piece, flat))

    def _compare_piece(self, flat: GradientTerms, piece: slice, values: Tensor) -> list[Comparison]:
        """Compare a piece of rank 0's gradient with the mean of that piece of the ``flat`` local gradients."""
        terms, place = [[term[piece] for term in row] for row in flat], self.locate(0)
        means = means_in_torch_orders(terms, self.scale, self.reduce_dtype) if self.loss_scale == 1 else ()
        if not any(torch.equal(mean.to(values.dtype), values) for mean in means):
            return list(replace(self, local_grads=terms, rank_grads=[values])._compare_whole(None, 0.0))
        if self.exactness:
            return [compare_bitwise(place, values, values)]
        flat_terms = [term for row in terms for term in row]
        bound = upper_mean_bound(flat_terms, self.scale, self.reduce_dtype, values)
        return [build_plain_match(place, values, bound)]

    def _compare_whole(self, suspects: SuspectedGradients | None, order_error: Tensor | float) -> Iterator[Comparison]:
        """Compare the whole gradient of every rank with the mean; see ``compare`` for the arguments."""
        terms = [[self.scale * grad.double() for grad in row] for row in self.local_grads]
        flat, reason = [term for row in terms for term in row], self.exactness.reason
        mean, bound = (
            (float64_mean(flat), None)
            if self.exactness
            else mean_and_bound(flat, self.reduce_dtype, self.rank_grads[0].dtype)
        )
        note = f"compared within the bound of the reduction (tier S), not bitwise (tier X): {reason}" if reason else ""
        rank_0_match: Comparison | None = None
        for rank, actual in enumerate(self.rank_grads):
            place = self.locate(rank)
            if rank_0_match is not None and is_bitwise_equal(self.rank_grads[0], actual):
                yield replace(rank_0_match, location=place)  # equal to rank 0's gradient, which matched
                continue
            comparison = (
                compare_bitwise(place, mean, actual)
                if bound is None
                else compare_within_bound(place, mean, actual, bound + order_error)
            )
            comparison = replace(comparison, note=note) if note else comparison
            explained = (
                comparison
                if suspects is None
                else attribute_mismatch(comparison, actual, terms, self.rank_grads, suspects, self.reduce_dtype)
            )
            rank_0_match = explained if rank == 0 and explained.mismatch is None else rank_0_match
            yield attach_plain_values(explained, partial(self._compute_plain_mean, terms, actual.dtype))

    def _compute_plain_mean(self, terms: GradientTerms, grad_dtype: torch.dtype) -> Tensor:
        """Return the mean of all terms as plain PyTorch computes it in the reduce dtype and with the loss scale."""
        stack = torch.stack([(self.loss_scale * term).to(self.reduce_dtype) for row in terms for term in row])
        return stack.mean(0).to(grad_dtype) / self.loss_scale
