"""What a comparison finds, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from zharness.engines.protocol import Piece


class Tier(Enum):
    """The tiers of tolerance, the tightest first."""

    EXACT = "X"
    STAGED = "S"
    CALIBRATED = "C"


class Part(Enum):
    """The parts of a training step, in the order in which an error enters them."""

    FORWARD = "forward"
    LOCAL_GRADIENT = "local gradient"
    REDUCTION = "reduction"
    ACCUMULATION = "accumulation"
    OPTIMIZER = "optimizer"
    GATHER = "gather"


@dataclass(frozen=True)
class TensorLocation:
    """What is compared: which tensor, at which step, as the outcome of which part, as seen on which rank."""

    name: str
    part: Part
    step: int = 0
    seen_on: int = 0
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Mismatch:
    """The worst wrong element of the first wrong tensor.

    ``owner`` is the rank that holds the element (None: every rank holds it whole) and ``offset`` its place in that
    rank's piece. ``index`` is its place in the original tensor, ``ulps`` the distance in units of the last place of the
    tensor's dtype, ``wrong`` of ``total`` elements are outside the bound. ``seen_on`` is the rank whose copy was
    compared. ``hint`` says what the numbers look like, when they look like something.
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
        """One sentence that a person can act on."""
        place = f"{self.parameter}{list(self.index)}" if self.index else self.parameter
        where = "whole on every rank" if self.owner is None else f"owned by rank {self.owner}, element {self.offset}"
        sentence = (
            f"step {self.step}, {self.part.value}: {place} ({where}; seen on rank {self.seen_on}) "
            f"expected {self.expected:.9g}, got {self.actual:.9g} "
            f"(bound {self.bound:.3g}, {self.ulps} ULP apart, {self.wrong} of {self.total} elements wrong)"
        )
        return f"{sentence}; {self.hint}" if self.hint else sentence


@dataclass(frozen=True)
class MismatchTensors:
    """The numbers of a mismatch, all of one shape: what was expected in float64, what the engine holds, error / bound.

    ``plain()`` is what plain torch gives there in a dtype of its own, where the judge can tell; called only to show it.
    ``group`` are the largest ratios of all parameters, where they are compared as one.
    """

    expected: Tensor
    actual: Tensor
    ratio: Tensor
    compute_plain: Callable[[], Tensor] | None = None
    ratios_by_parameter: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """One tensor, or one group of tensors, held against what it should be.

    ``ratio`` is the largest error over its bound (0 when bitwise equal, infinite when a bound of 0 is left).
    ``smallest`` is the smallest relative scale error of the whole tensor that would have been caught. ``undetermined``
    of ``elements`` are smaller than their bound: one of those could be lost unseen, so more wrong elements than that
    are caught for certain. ``note`` says why the tier is not the one that the law promises. ``place`` is what was
    compared, and ``witness`` holds its numbers where they are a mismatch: one that passes keeps no tensor alive.
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
