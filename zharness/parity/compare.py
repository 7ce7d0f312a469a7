"""Two tensors held against each other, and the worst element named."""

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

CHUNK_ELEMENTS = 1 << 15  # elements
PROBE_ELEMENTS = 64  # elements


def compare_bitwise(location: TensorLocation, expected: Tensor, actual: Tensor) -> Comparison:
    """Bitwise equality, NaN equal to NaN and 0 to -0: tier X."""
    actual = actual if actual.is_floating_point() else actual.double()  # indices and counts
    wanted, got = (expected, actual) if expected.dtype == actual.dtype else (expected.double(), actual.double())
    if wanted.shape != got.shape or not torch.equal(wanted, got):
        return compare_within_bound(
            location, expected.double(), actual, torch.zeros((), dtype=torch.float64), Tier.EXACT
        )
    # What ``within`` comes to where nothing differs, which is nearly always: any scaling of any number would show.
    shows = has_finite_nonzero(wanted)
    smallest = unit_roundoff(actual.dtype) if shows else math.inf
    return Comparison(Tier.EXACT, 0.0, smallest, None, elements=wanted.numel(), location=location)


def has_finite_nonzero(numbers: Tensor) -> bool:
    """Whether any of ``numbers`` is finite and not zero; nearly always the first is, or one of those behind it."""
    flat = numbers.flatten()
    if flat.numel() and 0.0 < abs(float(flat[0])) < math.inf:
        return True
    return any(bool((part.isfinite() & (part != 0)).any()) for part in (flat[:PROBE_ELEMENTS], flat[PROBE_ELEMENTS:]))


def is_bitwise_equal(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same numbers, none of which is NaN."""
    return first.dtype == second.dtype and torch.equal(first, second)


def compare_in_chunks(compare: Callable[[slice], list[Comparison]], count: int) -> list[Comparison]:
    """``compare`` of all ``count`` elements of flat tensors, computed piece by piece where all is right.

    ``compare(piece)`` are the comparisons of these elements, one for each name, of every piece for the same names.
    Temporaries of a piece stay in a core's cache, where those of a large tensor are new memory for each operation.
    Where anything is wrong the answer is empty: a mismatch has to be told of the whole tensor.
    """
    found: dict[str, list[Comparison]] = {}
    for start in range(0, count, CHUNK_ELEMENTS):
        for comparison in compare(slice(start, start + CHUNK_ELEMENTS)):
            if comparison.mismatch is not None:
                return []
            assert comparison.location is not None, "every comparison of this module has one"
            found.setdefault(comparison.location.name, []).append(comparison)
    return [merge_comparisons(pieces) for pieces in found.values()]


def merge_comparisons(chunks: Sequence[Comparison]) -> Comparison:
    """The comparison of a tensor from those of its pieces, in none of which anything is wrong."""
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
    """What ``within`` comes to where ``actual`` is bitwise what plain torch makes of the same numbers: nothing wrong.

    What rounds apart would pass within its bound, so this is no tier X. ``bound`` is no less than that one, and so says
    no more than is true of what would have been seen; ``signal`` is as in ``within``.
    """
    size = (actual if signal is None else signal).abs().float()
    found = compare_fast_path(location, torch.zeros_like(size), bound, size, actual.dtype, Tier.STAGED)
    if found is not None:
        return found
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
    """|actual - expected| <= bound, element by element; bitwise where one of the two is not finite.

    ``expected`` and ``bound`` are float64, ``actual`` is what the engine holds; ``bound`` broadcasts. ``signal`` is the
    part of ``expected`` that an error would scale or lose: the update of a weight; where None, ``expected`` itself.
    Raises EngineContractError when the shapes differ.
    """
    if expected.shape != actual.shape:
        raise EngineContractError(
            f"{location.name}: the engine returned shape {tuple(actual.shape)}, expected {tuple(expected.shape)}; "
            "full_grads, full_params and full_optimizer_state use the shapes of the original model"
        )
    got = actual.double()
    bound = bound.expand_as(expected)
    size = (expected if signal is None else signal).abs()
    found = compare_fast_path(location, (got - expected).abs(), bound, size, actual.dtype, tier)
    if found is not None:
        return found
    same = (got == expected) | (got.isnan() & expected.isnan())
    # Nothing is within a bound that is not a number or has no end: there, only the same value will do.
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
    """What ``within`` comes to where all numbers are finite and within their bounds, which is nearly always; else None.

    ``error`` and ``size``, of one shape, are not negative. A third of the operations, and to be right it may give None
    wherever it likes.
    """
    if not error.numel() or not math.isfinite(float((error + bound + magnitude).sum())):
        return None
    ratio = float((error / bound).nan_to_num_(0.0).max())  # 0 / 0: no error where none is allowed
    if not ratio < 1 or bool((bound < error).any()):  # the second where a bound is negative, and with it its ratio
        return None
    share = (bound / magnitude).nan_to_num_(math.inf, math.inf)  # 0 / 0: nothing that could be scaled
    zeros = magnitude.numel() - int(magnitude.count_nonzero())  # which are within any bound, and tell nothing
    return Comparison(
        tier,
        ratio,
        max(unit_roundoff(dtype), float(share.min())),
        elements=error.numel(),
        undetermined=int((bound >= magnitude).count_nonzero()) - zeros,
        location=location,
    )


def attach_plain_values(comparison: Comparison, compute_plain: Callable[[], Tensor]) -> Comparison:
    """``comparison`` with what plain torch gives there, where it is a mismatch."""
    if comparison.mismatch_tensors is None:
        return comparison
    return replace(comparison, mismatch_tensors=replace(comparison.mismatch_tensors, compute_plain=compute_plain))


def compare_within_range(location: TensorLocation, lower: Tensor, actual: Tensor, upper: Tensor) -> Comparison:
    """least <= actual <= most: a range that is allowed, no rounding, so that nothing in it is undetermined."""
    middle, room = (upper.double() + lower.double()) / 2, (upper.double() - lower.double()) / 2
    return compare_within_bound(location, middle, actual, room, signal=torch.zeros_like(middle))


def smallest_scale_error(magnitude: Tensor, bound: Tensor, dtype: torch.dtype) -> float:
    """The smallest s for which an error of s x ``size`` would have left the bound somewhere; at least u."""
    used = (magnitude > 0) & magnitude.isfinite()
    if not bool(used.any()):
        return math.inf
    return max(unit_roundoff(dtype), float((bound[used] / magnitude[used]).min()))


def build_mismatch(
    location: TensorLocation, expected: Tensor, actual: Tensor, bound: Tensor, error: Tensor, wrong: Tensor
) -> Mismatch:
    """The element with the largest error among the wrong ones."""
    flat = int(torch.where(wrong, error, -1.0).argmax())
    owner, offset = find_owner(location.pieces, flat)
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
    """The rank that holds element ``flat``, and the element's place in that rank's piece."""
    for piece in pieces:
        if piece.start <= flat_index < piece.stop:
            return piece.rank, flat_index - piece.start
    return None, flat_index


def ulp_distance(expected: float, actual: float, dtype: torch.dtype) -> int:
    """How many values of ``dtype`` lie between the two, once ``expected`` is rounded to it; -1 if one is not finite."""
    if not (math.isfinite(expected) and math.isfinite(actual)):
        return -1
    first, second = (torch.tensor([value], dtype=torch.float64).to(dtype) for value in (expected, actual))
    return int(ulp_distances(first, second))


def compare_ranks(location: TensorLocation, copies: Sequence[Tensor]) -> list[Comparison]:
    """Every rank's copy against rank 0's, bitwise."""
    found = []
    for rank, copy in enumerate(copies[1:], start=1):
        here = TensorLocation(location.name, location.part, location.step, rank, location.pieces)
        found.append(compare_bitwise(here, copies[0], copy))
    return found


def check_names(subject: str, expected: Mapping[str, object], actual: Mapping[str, object]) -> None:
    """Raises EngineContractError unless both have the same names."""
    missing, extra = sorted(set(expected) - set(actual)), sorted(set(actual) - set(expected))
    if missing or extra:
        raise EngineContractError(
            f"{subject} has the wrong names: missing {missing or 'none'}, unknown {extra or 'none'}; "
            "expected the names of the original model's named_parameters()"
        )
