"""Data types for the results of comparisons: tiers, parts of a training step, tensor locations and mismatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from zharness.engines.protocol import Piece

MAX_STATED_ULPS = 2**32  # float32 numbers are never further apart; float64 numbers, such as norms, easily are


class Tier(Enum):
    """The tiers (ways to bound an error), the strictest first: bitwise equality, rounding bound, calibrated bound."""

    EXACT = "X"
    STAGED = "S"
    CALIBRATED = "C"


class Part(Enum):
    """The parts of a training step, in the order in which an error can enter."""

    FORWARD = "forward"
    LOCAL_GRADIENT = "local gradient"
    REDUCTION = "reduction"
    ACCUMULATION = "accumulation"
    OPTIMIZER = "optimizer"
    GATHER = "gather"


@dataclass(frozen=True)
class TensorLocation:
    """The origin of a compared tensor: its name, its step, the part of the step, and the rank that recorded it.

    ``seen_on`` is the rank that recorded the tensor. ``pieces`` lists the ranges of the parameter's elements that each
    rank owns, and ``list_pieces`` the ranges of the tensor's elements.
    """

    name: str
    part: Part
    step: int = 0
    seen_on: int = 0
    pieces: tuple[Piece, ...] = ()

    def list_pieces(self, elements: int) -> tuple[Piece, ...]:
        """Return the ranges that each rank owns of the tensor, which has ``elements`` elements.

        A step count, and state with fewer elements than its parameter, has no owner.
        """
        is_split = not self.name.endswith("/step") and all(piece.stop <= elements for piece in self.pieces)
        return self.pieces if is_split else ()


@dataclass(frozen=True)
class Mismatch:
    """The worst wrong element of the first wrong tensor.

    ``index`` locates the element in the original tensor. ``owner`` is the rank that holds the element (None: every rank
    holds the whole tensor), and ``offset`` is the element's index in that rank's piece. ``seen_on`` is the rank whose
    record was compared. ``ulps`` is the distance between ``expected`` and ``actual`` in ULPs of the tensor's dtype.
    ``wrong`` is the number of elements that exceed the bound, out of ``total``. ``hint`` describes a fault that would
    give these numbers; it is empty if no such fault is known.
    """

    step: int
    part: Part
    parameter: str
    index: tuple[int, ...]
    owner: int | None
    offset: int
    seen_on: int
    expected: float
    actual: float
    bound: float
    ulps: int
    wrong: int
    total: int
    hint: str = ""

    def describe(self) -> str:
        """Return one sentence with the location, the expected and the actual number, the bound and the hint."""
        element = f"{self.parameter}{list(self.index)}" if self.index else self.parameter
        where = "whole on every rank" if self.owner is None else f"owned by rank {self.owner}, element {self.offset}"
        sentence = (
            f"step {self.step}, {self.part.value}: {element} ({where}; seen on rank {self.seen_on}) "
            f"expected {self.expected:.9g}, got {self.actual:.9g} "
            f"(bound {self.bound:.3g}, {self._describe_distance()}{self.wrong} of {self.total} elements wrong)"
        )
        return f"{sentence}; {self.hint}" if self.hint else sentence

    def _describe_distance(self) -> str:
        """Return the distance in ULPs, or '' if a number is not finite or no two float32 numbers are so far apart."""
        return f"{self.ulps} ULP apart, " if 0 <= self.ulps <= MAX_STATED_ULPS else ""


@dataclass(frozen=True)
class MismatchTensors:
    """The tensors of a mismatch, all of one shape: expected numbers (float64), the engine's numbers, and error / bound.

    ``compute_plain()`` returns the numbers that plain PyTorch computes in its own dtype (None: unknown); it is called
    only if they are displayed. ``ratios_by_parameter`` contains the largest ratio of each parameter, if several
    parameters were compared as one group.
    """

    expected: Tensor
    actual: Tensor
    ratio: Tensor
    compute_plain: Callable[[], Tensor] | None = None
    ratios_by_parameter: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """The result of comparing one tensor, or one group of tensors, with its expected value.

    ``ratio`` is the largest error divided by its bound (0 if bitwise equal, infinite if a bound of 0 is exceeded).
    ``smallest_detectable`` is the smallest relative scale error of the whole tensor that would have been detected.
    ``undetermined`` is the number of elements, out of ``elements``, that are smaller than their bound; the loss of such
    an element would not be noticed. ``note`` explains why the tier is not the tier that the law promises.
    ``mismatch_tensors`` is set only for a mismatch, so that a passed comparison keeps no tensor alive.
    """

    tier: Tier
    ratio: float
    smallest_detectable: float
    mismatch: Mismatch | None = None
    elements: int = 0
    undetermined: int = 0
    note: str = ""
    location: TensorLocation | None = None
    mismatch_tensors: MismatchTensors | None = field(default=None, repr=False, compare=False)
