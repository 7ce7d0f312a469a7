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
from zharness.parity.facts import Comparison, Mismatch, Place, Tier, Witness
from zharness.parity.ulps import apart

PIECE = 1 << 15  # elements
FIRST = 64  # elements


def identical(place: Place, expected: Tensor, actual: Tensor) -> Comparison:
    """Bitwise equality, NaN equal to NaN and 0 to -0: tier X."""
    actual = actual if actual.is_floating_point() else actual.double()  # indices and counts
    wanted, got = (expected, actual) if expected.dtype == actual.dtype else (expected.double(), actual.double())
    if wanted.shape != got.shape or not torch.equal(wanted, got):
        return within(place, expected.double(), actual, torch.zeros((), dtype=torch.float64), Tier.EXACT)
    # What ``within`` comes to where nothing differs, which is nearly always: any scaling of any number would show.
    shows = shows_scaling(wanted)
    smallest = unit_roundoff(actual.dtype) if shows else math.inf
    return Comparison(Tier.EXACT, 0.0, smallest, None, elements=wanted.numel(), place=place)


def shows_scaling(numbers: Tensor) -> bool:
    """Whether any of ``numbers`` is finite and not zero; nearly always the first is, or one of those behind it."""
    flat = numbers.flatten()
    if flat.numel() and 0.0 < abs(float(flat[0])) < math.inf:
        return True
    return any(bool((part.isfinite() & (part != 0)).any()) for part in (flat[:FIRST], flat[FIRST:]))


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same numbers, none of which is NaN."""
    return one.dtype == other.dtype and torch.equal(one, other)


def in_pieces(compare: Callable[[slice], list[Comparison]], count: int) -> list[Comparison]:
    """``compare`` of all ``count`` elements of flat tensors, computed piece by piece where all is right.

    ``compare(piece)`` are the comparisons of these elements, one for each name, of every piece for the same names.
    Temporaries of a piece stay in a core's cache, where those of a large tensor are new memory for each operation.
    Where anything is wrong the answer is empty: a mismatch has to be told of the whole tensor.
    """
    found: dict[str, list[Comparison]] = {}
    for start in range(0, count, PIECE):
        for comparison in compare(slice(start, start + PIECE)):
            if comparison.mismatch is not None:
                return []
            assert comparison.place is not None, "every comparison of this module has one"
            found.setdefault(comparison.place.name, []).append(comparison)
    return [merged(pieces) for pieces in found.values()]


def merged(pieces: Sequence[Comparison]) -> Comparison:
    """The comparison of a tensor from those of its pieces, in none of which anything is wrong."""
    tiers = list(Tier)
    return replace(
        pieces[0],
        tier=max((piece.tier for piece in pieces), key=tiers.index),
        ratio=max(piece.ratio for piece in pieces),
        smallest=min(piece.smallest for piece in pieces),
        elements=sum(piece.elements for piece in pieces),
        undetermined=sum(piece.undetermined for piece in pieces),
    )


def same_as_torch(place: Place, actual: Tensor, bound: Tensor, signal: Tensor | None = None) -> Comparison:
    """What ``within`` comes to where ``actual`` is bitwise what plain torch makes of the same numbers: nothing wrong.

    What rounds apart would pass within its bound, so this is no tier X. ``bound`` is no less than that one, and so says
    no more than is true of what would have been seen; ``signal`` is as in ``within``.
    """
    size = (actual if signal is None else signal).abs().float()
    found = small(place, torch.zeros_like(size), bound, size, actual.dtype, Tier.STAGED)
    if found is not None:
        return found
    wide = None if signal is None else signal.double()
    return within(place, actual.double(), actual, bound.double(), signal=wide)


def within(
    place: Place,
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
            f"{place.name}: the engine returned shape {tuple(actual.shape)}, expected {tuple(expected.shape)}; "
            "full_grads, full_params and full_optimizer_state use the shapes of the original model"
        )
    got = actual.double()
    bound = bound.expand_as(expected)
    size = (expected if signal is None else signal).abs()
    found = small(place, (got - expected).abs(), bound, size, actual.dtype, tier)
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
        mismatch(place, expected, actual, bound, error, wrong) if failed else None,
        elements=expected.numel(),
        undetermined=int((known & (size > 0) & (bound >= size)).sum()),
        place=place,
        witness=Witness(expected, actual, ratio) if failed else None,
    )


def small(
    place: Place, error: Tensor, bound: Tensor, size: Tensor, dtype: torch.dtype, tier: Tier
) -> Comparison | None:
    """What ``within`` comes to where all numbers are finite and within their bounds, which is nearly always; else None.

    ``error`` and ``size``, of one shape, are not negative. A third of the operations, and to be right it may give None
    wherever it likes.
    """
    if not error.numel() or not math.isfinite(float((error + bound + size).sum())):
        return None
    ratio = float((error / bound).nan_to_num_(0.0).max())  # 0 / 0: no error where none is allowed
    if not ratio < 1 or bool((bound < error).any()):  # the second where a bound is negative, and with it its ratio
        return None
    share = (bound / size).nan_to_num_(math.inf, math.inf)  # 0 / 0: nothing that could be scaled
    zeros = size.numel() - int(size.count_nonzero())  # which are within any bound, and tell nothing
    return Comparison(
        tier,
        ratio,
        max(unit_roundoff(dtype), float(share.min())),
        elements=error.numel(),
        undetermined=int((bound >= size).count_nonzero()) - zeros,
        place=place,
    )


def beside(comparison: Comparison, plain: Callable[[], Tensor]) -> Comparison:
    """``comparison`` with what plain torch gives there, where it is a mismatch."""
    if comparison.witness is None:
        return comparison
    return replace(comparison, witness=replace(comparison.witness, plain=plain))


def between(place: Place, least: Tensor, actual: Tensor, most: Tensor) -> Comparison:
    """least <= actual <= most: a range that is allowed, no rounding, so that nothing in it is undetermined."""
    middle, room = (most.double() + least.double()) / 2, (most.double() - least.double()) / 2
    return within(place, middle, actual, room, signal=torch.zeros_like(middle))


def smallest_scale_error(size: Tensor, bound: Tensor, dtype: torch.dtype) -> float:
    """The smallest s for which an error of s x ``size`` would have left the bound somewhere; at least u."""
    used = (size > 0) & size.isfinite()
    if not bool(used.any()):
        return math.inf
    return max(unit_roundoff(dtype), float((bound[used] / size[used]).min()))


def mismatch(place: Place, expected: Tensor, actual: Tensor, bound: Tensor, error: Tensor, wrong: Tensor) -> Mismatch:
    """The element with the largest error among the wrong ones."""
    flat = int(torch.where(wrong, error, -1.0).argmax())
    owner, offset = owner_of(place.pieces, flat)
    want, got = float(expected.flatten()[flat]), float(actual.flatten()[flat])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), expected.shape)) if expected.dim() else ()
    return Mismatch(
        step=place.step,
        part=place.part,
        parameter=place.name,
        index=index,
        owner=owner,
        offset=offset,
        seen_on=place.seen_on,
        expected=want,
        actual=got,
        bound=float(bound.flatten()[flat]),
        ulps=ulps(want, got, actual.dtype),
        wrong=int(wrong.sum()),
        total=wrong.numel(),
    )


def owner_of(pieces: Sequence[Piece], flat: int) -> tuple[int | None, int]:
    """The rank that holds element ``flat``, and the element's place in that rank's piece."""
    for piece in pieces:
        if piece.start <= flat < piece.stop:
            return piece.rank, flat - piece.start
    return None, flat


def ulps(expected: float, actual: float, dtype: torch.dtype) -> int:
    """How many values of ``dtype`` lie between the two, once ``expected`` is rounded to it; -1 if one is not finite."""
    if not (math.isfinite(expected) and math.isfinite(actual)):
        return -1
    first, second = (torch.tensor([value], dtype=torch.float64).to(dtype) for value in (expected, actual))
    return int(apart(first, second))


def ranks_agree(place: Place, copies: Sequence[Tensor]) -> list[Comparison]:
    """Every rank's copy against rank 0's, bitwise."""
    found = []
    for rank, copy in enumerate(copies[1:], start=1):
        here = Place(place.name, place.part, place.step, rank, place.pieces)
        found.append(identical(here, copies[0], copy))
    return found


def check_names(what: str, expected: Mapping[str, object], actual: Mapping[str, object]) -> None:
    """Raises EngineContractError unless both have the same names."""
    missing, extra = sorted(set(expected) - set(actual)), sorted(set(actual) - set(expected))
    if missing or extra:
        raise EngineContractError(
            f"{what} has the wrong names: missing {missing or 'none'}, unknown {extra or 'none'}; "
            "expected the names of the original model's named_parameters()"
        )
