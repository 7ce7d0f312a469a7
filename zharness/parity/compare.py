"""Compare two tensors element by element and report the worst wrong element."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zharness.engines.protocol import Piece
from zharness.errors import EngineContractError
from zharness.parity.bounds import unit_roundoff
from zharness.parity.comparison import Comparison, Mismatch, MismatchTensors, TensorLocation, Tier
from zharness.parity.ulps import ulp_distances

CHUNK_ELEMENTS = 1 << 15  # elements compared at a time, so that temporaries stay in the cache
PROBE_ELEMENTS = 64  # elements that ``has_finite_nonzero`` tests before the rest


def compare_bitwise(location: TensorLocation, expected: Tensor, actual: Tensor) -> Comparison:
    """Compare two tensors bitwise (tier X), except that NaN equals NaN and 0 equals -0."""
    actual = actual if actual.is_floating_point() else actual.double()  # integers: indices and counts
    expected = expected.to(actual.device)  # constants of a law are on the CPU
    wanted, got = (expected, actual) if expected.dtype == actual.dtype else (expected.double(), actual.double())
    if wanted.shape != got.shape or not torch.equal(wanted, got):
        return compare_within_bound(
            location, expected.double(), actual, torch.zeros((), dtype=torch.float64), Tier.EXACT
        )
    # ``compare_within_bound`` gives equal tensors this value: a scaling of any nonzero number by 1 + u is detected.
    smallest = unit_roundoff(actual.dtype) if has_finite_nonzero(wanted) else math.inf
    return Comparison(Tier.EXACT, 0.0, smallest, None, elements=wanted.numel(), location=location)


def has_finite_nonzero(numbers: Tensor) -> bool:
    """Return whether any element is finite and not zero.

    The first elements are tested before the rest, because usually one of them is finite and not zero.
    """
    flat = numbers.flatten()
    if flat.numel() and 0.0 < abs(float(flat[0])) < math.inf:
        return True
    return any(bool((part.isfinite() & (part != 0)).any()) for part in (flat[:PROBE_ELEMENTS], flat[PROBE_ELEMENTS:]))


def is_bitwise_equal(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and numbers, and contain no NaN. 0 and -0 are equal."""
    return first.dtype == second.dtype and torch.equal(first, second)


def compare_in_chunks(compare: Callable[[slice], list[Comparison]], count: int) -> list[Comparison]:
    """Compare ``count`` elements of flat tensors in chunks; return an empty list if any element is wrong.

    ``compare(chunk)`` returns the comparisons of the elements in the slice ``chunk``, one for each tensor name. Chunks
    are faster, because the temporaries of a chunk stay in a core's cache, while each operation on a large tensor
    allocates new memory. After an empty list the caller has to compare the whole tensors, because a mismatch describes
    a whole tensor.
    """
    found: dict[str, list[Comparison]] = {}
    for start in range(0, count, CHUNK_ELEMENTS):
        for comparison in compare(slice(start, start + CHUNK_ELEMENTS)):
            if comparison.mismatch is not None:
                return []
            assert comparison.location is not None, "every comparison of this module has one"
            found.setdefault(comparison.location.name, []).append(comparison)
    return [merge_comparisons(pieces) for pieces in found.values()]


def match_equal_tensors(
    rank_tensors: Sequence[Tensor], compare: Callable[[slice, Tensor], list[Comparison]]
) -> list[Comparison]:
    """Compare a large tensor that is equal on all ranks once, piece by piece, and return the matches for every rank.

    ``compare(piece, values)`` compares the elements ``values`` of rank 0's tensor. Returns an empty list if the tensor
    is small, differs between ranks, or is wrong.
    """
    values = rank_tensors[0].flatten()
    if values.numel() <= CHUNK_ELEMENTS or not all(
        is_bitwise_equal(rank_tensors[0], record) for record in rank_tensors[1:]
    ):
        return []
    comparisons = compare_in_chunks(lambda piece: compare(piece, values[piece]), values.numel())
    places = [comparison.location for comparison in comparisons if comparison.location is not None]
    return [
        replace(comparison, location=replace(place, seen_on=rank))
        for comparison, place in zip(comparisons, places, strict=True)
        for rank in range(len(rank_tensors))
    ]


def merge_comparisons(chunks: Sequence[Comparison]) -> Comparison:
    """Merge the comparisons of one tensor's chunks, all of which passed, into one comparison of the tensor."""
    tiers = list(Tier)
    return replace(
        chunks[0],
        tier=max((piece.tier for piece in chunks), key=tiers.index),
        ratio=max(piece.ratio for piece in chunks),
        smallest_detectable=min(piece.smallest_detectable for piece in chunks),
        elements=sum(piece.elements for piece in chunks),
        undetermined=sum(piece.undetermined for piece in chunks),
    )


def build_plain_match(
    location: TensorLocation, actual: Tensor, bound: Tensor, signal: Tensor | None = None
) -> Comparison:
    """Return the passed comparison of ``actual``, which is bitwise equal to the result of plain PyTorch.

    The tier is S and not X, because the results of other summation orders would also pass within the bound. ``bound``
    may be an upper limit of the real bound; the reported sensitivity is then lower than the real one. ``signal`` has
    the same meaning as in ``compare_within_bound``.
    """
    size = (actual if signal is None else signal).abs().float()
    if size.numel() and math.isfinite(float((bound + size).sum())) and float(bound.min()) >= 0:
        return build_match(location, 0.0, bound, size, actual.dtype, Tier.STAGED)
    wide = None if signal is None else signal.double()
    return compare_within_bound(location, actual.double(), actual, bound.double(), signal=wide)


def compare_within_bound(
    location: TensorLocation,
    expected: Tensor,
    actual: Tensor,
    bound: Tensor,
    tier: Tier = Tier.STAGED,
    signal: Tensor | None = None,
) -> Comparison:
    """Compare ``actual`` with ``expected``: each element passes if |actual - expected| <= bound.

    If the expected value or the bound of an element is not finite, the element passes only if it equals its expected
    value. ``expected`` and ``bound`` are float64, and ``actual`` has the engine's dtype; ``bound`` is broadcast.
    ``signal`` is the part of ``expected`` that an error would scale or lose, such as the update of a weight (None:
    ``expected`` itself). Raises EngineContractError if the shapes differ.
    """
    if expected.shape != actual.shape:
        raise EngineContractError(
            f"{location.name}: the engine returned the shape {tuple(actual.shape)}; expected {tuple(expected.shape)}: "
            "full_grads, full_params and full_optimizer_state have to return the shapes of the original model"
        )
    got = actual.double()
    bound = bound.expand_as(expected)
    size = (expected if signal is None else signal).abs()
    found = compare_fast_path(location, (got - expected).abs(), bound, size, actual.dtype, tier)
    if found is not None:
        return found
    same = (got == expected) | (got.isnan() & expected.isnan())
    # A bound that is NaN or infinite allows nothing: there, only the same value passes.
    known = expected.isfinite() & bound.isfinite()
    error = torch.where(same, 0.0, torch.where(known, (got - expected).abs().nan_to_num(nan=math.inf), math.inf))
    wrong = torch.where(known, error > bound, ~same)
    ratio = torch.where(error == 0, 0.0, torch.where(known, error / bound, math.inf))
    worst = float(ratio.max()) if ratio.numel() else 0.0
    failed = bool(wrong.any())
    return Comparison(
        tier,
        worst,
        smallest_scale_error(size, bound, actual.dtype),
        build_mismatch(location, expected, actual, bound, error, wrong) if failed else None,
        elements=expected.numel(),
        undetermined=int((known & (size > 0) & (bound >= size)).sum()),
        location=location,
        mismatch_tensors=MismatchTensors(expected, actual, ratio) if failed else None,
    )


def compare_fast_path(
    location: TensorLocation, error: Tensor, bound: Tensor, magnitude: Tensor, dtype: torch.dtype, tier: Tier
) -> Comparison | None:
    """Return the passed comparison if all numbers are finite and clearly within their bounds, else None.

    ``error`` and ``magnitude`` have the same shape, and their elements are not negative. This function needs a third of
    the operations of ``compare_within_bound``. If it returns None, ``compare_within_bound`` decides the comparison.
    """
    if not error.numel() or not math.isfinite(float((error + bound + magnitude).sum())):
        return None
    ratio = float((error / bound).nan_to_num_(0.0).max())  # 0 / 0: no error and none allowed
    if not ratio < 1 or bool((bound < error).any()):  # a negative bound makes its ratio negative too
        return None
    return build_match(location, ratio, bound, magnitude, dtype, tier)


def build_match(
    location: TensorLocation, ratio: float, bound: Tensor, magnitude: Tensor, dtype: torch.dtype, tier: Tier
) -> Comparison:
    """Return the passed comparison of numbers within their bounds, the largest error being ``ratio`` of its bound.

    ``bound`` and ``magnitude`` are finite, have the same shape and no negative element.
    """
    share = (bound / magnitude).nan_to_num_(math.inf, math.inf)  # 0 / 0: a zero cannot be scaled
    zeros = magnitude.numel() - int(magnitude.count_nonzero())  # within any bound; not counted as undetermined
    return Comparison(
        tier,
        ratio,
        max(unit_roundoff(dtype), float(share.min())),
        elements=magnitude.numel(),
        undetermined=int((bound >= magnitude).count_nonzero()) - zeros,
        location=location,
    )


def attach_plain_values(comparison: Comparison, compute_plain: Callable[[], Tensor]) -> Comparison:
    """Attach ``compute_plain`` to the mismatch of ``comparison``, if it has one, and return the comparison.

    ``compute_plain()`` returns the numbers that plain PyTorch computes.
    """
    if comparison.mismatch_tensors is None:
        return comparison
    return replace(comparison, mismatch_tensors=replace(comparison.mismatch_tensors, compute_plain=compute_plain))


def compare_within_range(location: TensorLocation, lower: Tensor, actual: Tensor, upper: Tensor) -> Comparison:
    """Check lower <= actual <= upper for each element.

    No element counts as undetermined, because every number in the range is right.
    """
    middle, room = (upper.double() + lower.double()) / 2, (upper.double() - lower.double()) / 2
    return compare_within_bound(location, middle, actual, room, signal=torch.zeros_like(middle))


def smallest_scale_error(magnitude: Tensor, bound: Tensor, dtype: torch.dtype) -> float:
    """Return the smallest s for which an error of s times ``magnitude`` exceeds the bound in some element.

    The result is at least u, the unit roundoff of ``dtype``, and infinite if no element is finite and nonzero.
    """
    used = (magnitude > 0) & magnitude.isfinite()
    if not bool(used.any()):
        return math.inf
    return max(unit_roundoff(dtype), float((bound[used] / magnitude[used]).min()))


def build_mismatch(
    location: TensorLocation, expected: Tensor, actual: Tensor, bound: Tensor, error: Tensor, wrong: Tensor
) -> Mismatch:
    """Return the description of the worst wrong element, the one with the largest error where ``wrong`` is true."""
    flat = int(torch.where(wrong, error, -1.0).argmax())
    owner, offset = find_owner(location.list_pieces(wrong.numel()), flat)
    want, got = float(expected.flatten()[flat]), float(actual.flatten()[flat])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), expected.shape)) if expected.dim() else ()
    return Mismatch(
        step=location.step,
        part=location.part,
        parameter=location.name,
        index=index,
        owner=owner,
        offset=offset,
        seen_on=location.seen_on,
        expected=want,
        actual=got,
        bound=float(bound.flatten()[flat]),
        ulps=ulp_distance(want, got, actual.dtype),
        wrong=int(wrong.sum()),
        total=wrong.numel(),
    )


def find_owner(pieces: Sequence[Piece], flat_index: int) -> tuple[int | None, int]:
    """Return the rank that holds element ``flat_index``, and the element's index in that rank's piece.

    If no rank's piece contains the element, return None and ``flat_index``.
    """
    for piece in pieces:
        if piece.start <= flat_index < piece.stop:
            return piece.rank, flat_index - piece.start
    return None, flat_index


def ulp_distance(expected: float, actual: float, dtype: torch.dtype) -> int:
    """Return the distance in ULPs of ``dtype`` from ``expected`` to ``actual``, or -1 if one of them is not finite."""
    if not (math.isfinite(expected) and math.isfinite(actual)):
        return -1
    first, second = (torch.tensor([value], dtype=torch.float64).to(dtype) for value in (expected, actual))
    return int(ulp_distances(first, second))


def compare_ranks(location: TensorLocation, copies: Sequence[Tensor]) -> list[Comparison]:
    """Compare the copy of a tensor on each rank bitwise with the copy on rank 0."""
    found = []
    for rank, copy in enumerate(copies[1:], start=1):
        here = TensorLocation(location.name, location.part, location.step, rank, location.pieces)
        found.append(compare_bitwise(here, copies[0], copy))
    return found


def check_names(subject: str, expected: Mapping[str, object], actual: Mapping[str, object]) -> None:
    """Raise EngineContractError unless ``expected`` and ``actual`` have the same keys.

    The message begins with ``subject``.
    """
    missing, extra = sorted(set(expected) - set(actual)), sorted(set(actual) - set(expected))
    if missing or extra:
        raise EngineContractError(
            f"{subject} has the wrong names: missing {missing or 'none'}, unknown {extra or 'none'}; "
            "expected the names of the original model's named_parameters()"
        )
