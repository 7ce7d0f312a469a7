"""A mutant as data: an engine broken on purpose in one way, and what a check has to say of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from inspect import getdoc

from zharness import engines
from zharness.engines import Capabilities
from zharness.errors import HarnessFault
from zharness.mutants.around import Around
from zharness.parity import Mismatch, Part

PATH = "zharness.mutants:"  # before a mutant's name: an engine for every command that takes one


class Kind(Enum):
    """What is wrong with a mutant."""

    SCALE = "a wrong factor"
    CONTRIBUTION = "lost, doubled or late"
    WIRE = "wrong dtype on the wire"
    SHARDS = "order, edge or padding of shards"
    STALE = "stale or unwritten memory"
    CLIPPING = "wrong norm or clipping"
    OPTIMIZER = "wrong optimizer"
    AUTOCAST = "autocast state, masters, buffers"
    LOSS_SCALE = "loss scale"
    GRAPH = "autograd's graph and transforms"
    PARAMETERS = "tied, frozen and unused parameters"
    STATE = "saved state"
    RESOURCES = "memory, traffic, bookkeeping"
    RANKS = "ranks that disagree"


@dataclass(frozen=True)
class Target:
    """A cell in which a mutant has to be killed, and what the first divergence has to name there.

    ``stage`` is the mutant's first where it is None. ``parameter`` is a glob. Where a mutant breaks the engine's
    contract or raises, there is no divergence: ``part`` is None, and ``words`` is a part of the record's cause.
    """

    check: str
    part: Part | None = Part.REDUCTION
    model: str = "mlp"
    variant: str = ""
    dtype: str = "fp32"
    stage: int | None = None
    parameter: str = "*"
    words: str = ""
    world_size: int = 2

    def named_by(self, divergence: Mismatch | None, cause: str) -> bool:
        """Whether a killed cell's record says what is wrong, and where."""
        if self.part is None or divergence is None:
            return self.part is None and divergence is None and self.words in cause
        return divergence.part is self.part and fnmatchcase(divergence.parameter, self.parameter)


@dataclass(frozen=True)
class Mutant:
    """``build`` is the broken engine's class, whose docstring says what is wrong; ``imitates`` the real bug's address.

    The first of ``targets`` is the cell that is meant to kill it. ``equivalent`` says why no cell can, as it changes
    nothing or nothing that a law of all engines can be about: then there are no targets.
    """

    build: type[Around]
    kind: Kind
    targets: tuple[Target, ...]
    imitates: str = ""
    equivalent: str = ""

    @property
    def name(self) -> str:
        """The class's name in lower case, with underscores."""
        return re.sub(r"(?<=.)(?=[A-Z])", "_", self.build.__name__).lower()

    @property
    def engine(self) -> str:
        """The name under which a command takes it for an engine."""
        return PATH + self.name

    @property
    def description(self) -> str:
        """One sentence."""
        return " ".join((getdoc(self.build) or "").split())

    @property
    def over(self) -> str:
        """The right engine that it is built around."""
        return self.build.over

    @property
    def stages(self) -> tuple[int, ...]:
        """Where it is broken."""
        return self.build.stages

    @property
    def named_checks(self) -> frozenset[str]:
        """The checks of its targets."""
        return frozenset(target.check for target in self.targets)

    def claims(self, stage: int) -> Capabilities:
        """What it claims, without building it. Raises HarnessFault where the right engine cannot tell that."""
        right = engines.capabilities(self.over, stage)
        if right is None:
            raise HarnessFault(f"mutant {self.name}: what {self.over!r} claims is known only when it is built")
        return self.build.claims(right)


def deepspeed(number: int) -> str:
    """The address of an issue, or a pull request, of DeepSpeed."""
    return f"https://github.com/deepspeedai/DeepSpeed/issues/{number}"


def pytorch(number: int) -> str:
    """The address of an issue of PyTorch."""
    return f"https://github.com/pytorch/pytorch/issues/{number}"
