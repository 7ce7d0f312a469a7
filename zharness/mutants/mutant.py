"""Define the data of a mutant (an engine broken on purpose), and the decorators that register mutants."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from inspect import getdoc
from typing import ClassVar, TypeVar

from torch import nn

from zharness import engines
from zharness.engines import Capabilities, EngineConfig, EngineFactory
from zharness.errors import HarnessFault
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Mismatch, Part

MutantClass = TypeVar("MutantClass", bound=type[EngineWrapper])
Factory = TypeVar("Factory", bound=EngineFactory)

PATH = "zharness.mutants:"  # the prefix that makes a mutant's name an engine name
ALL_STAGES, SHARDED_STAGES = (0, 1, 2, 3), (1, 2, 3)


class FaultKind(Enum):
    """The kinds of faults that mutants have."""

    SCALE = "a wrong factor"
    CONTRIBUTION = "lost, doubled or late"
    REDUCE_DTYPE = "gradients reduced in a wrong dtype"
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


class Origin(Enum):
    """The series to which a mutant belongs, in the order in which the series were written.

    Authors of the laws wrote the first thirteen series, each for a group of faults. Twelve other authors, who knew only
    the Engine protocol, the adapters and the reference engine, wrote one blind set each. The laws were run on each set,
    and were made stricter until they killed its survivors, before the next set was written. Mutants of a blind set that
    repeat an earlier mutant are left out.
    """

    SCALE = "gradients wrong by a factor"
    CONTRIBUTIONS = "contributions to a gradient that are lost, doubled or late"
    SHARDS = "shards, stale weights, norms and clipping"
    OPTIMIZERS = "optimizer steps, groups and schedules"
    PRECISION = "dtypes and loss scales"
    GRAPHS = "autograd graphs, torch.func and unusual parameters"
    STATE = "saved and loaded state"
    RESOURCES = "memory, traffic and bookkeeping"
    CIRCUMSTANCES = "faults that show only in an evaluation, after an exception or a checkpoint, or when observed"
    ONLOOKERS = "faults that show only to an observer: of gradients, modes, buffers, memory or hooks"
    ORDERS = "faults that show only in some order of calls, or beside another setting"
    MESH = "faults of one axis of a mesh"
    STREAMS = "collectives and copies that are not waited for"
    BLIND_1 = "blind 1"
    BLIND_2 = "blind 2"
    BLIND_3 = "blind 3"  # without mean_over_users and strided_in_memory_order, which blind 1 has
    BLIND_4 = "blind 4"  # without tied_twice_in_norm, sum_forgets_accumulation and stale_graph_accepted
    BLIND_5 = "blind 5"  # without mean_over_users, backward_under_autocast and masters_from_weights (blind 3)
    BLIND_6 = "blind 6"  # without load_unties, which only an engine variant of DDP shows and no target can name
    BLIND_7 = "blind 7"  # only those that the laws did not kill at first
    BLIND_8 = "blind 8"  # only those that the laws did not kill at first
    BLIND_9 = "blind 9"  # only those that the laws did not kill at first
    BLIND_10 = "blind 10"  # only those that the laws did not kill at first
    BLIND_11 = "blind 11"  # only those that the laws did not kill at first
    BLIND_12 = "blind 12"  # only those that the laws did not kill at first

    @property
    def is_blind(self) -> bool:
        """Return whether the authors wrote this series without having seen the laws."""
        return self.name.startswith("BLIND_")


@dataclass(frozen=True)
class Target:
    """A cell in which a mutant has to be killed, and the first divergence that this cell has to report.

    If ``stage`` is None, the cell is at the mutant's first stage. ``part`` is the part of the step with the first wrong
    number, and ``parameter`` is a glob pattern for the name of its parameter. A mutant that raises or breaks the
    protocol causes no divergence; then ``part`` is None. ``cause`` is a substring of the cause in the cell's record,
    such as the hint of a divergence.
    """

    law: str
    part: Part | None = Part.REDUCTION
    model: str = "mlp"
    variant: str = ""
    dtype: str = "fp32"
    stage: int | None = None
    parameter: str = "*"
    cause: str = ""
    world_size: int = 2
    mesh: str = ""
    setting: str = ""  # the engine's options, window and call of backward, as in a cell's id

    def named_by(self, divergence: Mismatch | None, cause: str) -> bool:
        """Return whether a killed cell has the first divergence that this target expects, and the expected cause."""
        if self.part is None or divergence is None:
            return self.part is None and divergence is None and self.cause in cause
        is_place = divergence.part is self.part and fnmatchcase(divergence.parameter, self.parameter)
        return is_place and self.cause in cause


@dataclass(frozen=True)
class Mutant:
    """An engine that is broken on purpose in one way.

    ``build`` is the mutant's class, whose docstring says what is wrong. ``kind`` is the kind of its fault. ``targets``
    are the cells that have to kill the mutant; the first target is the cell for which the mutant was written.
    ``origin`` is the series to which the mutant belongs. ``imitates`` is the address of the real bug that the mutant
    imitates, if there is one. ``equivalent`` is the reason why no cell can kill the mutant: the mutant changes nothing,
    or nothing that a law can demand of every engine. An equivalent mutant has no targets. ``device`` is the type of the
    only device on which it is broken, or ``""``: a mutant of streams is right on a CPU, because a CPU has no streams.
    """

    build: type[EngineWrapper]
    kind: FaultKind
    targets: tuple[Target, ...]
    origin: Origin
    imitates: str = ""
    equivalent: str = ""
    device: str = ""

    @property
    def name(self) -> str:
        """The name of the mutant's class, in lower case with underscores."""
        return re.sub(r"(?<=.)(?=[A-Z])", "_", self.build.__name__).lower()

    @property
    def engine(self) -> str:
        """The engine name that selects the mutant in commands."""
        return PATH + self.name

    @property
    def description(self) -> str:
        """The docstring of the mutant's class, joined to one line."""
        return " ".join((getdoc(self.build) or "").split())

    @property
    def wraps(self) -> str:
        """The name of the correct engine (the engine without the fault) around which the mutant is built."""
        return self.build.wraps

    @property
    def stages(self) -> tuple[int, ...]:
        """The ZeRO stages at which the mutant is broken."""
        return self.build.stages

    def is_broken_on(self, device: str) -> bool:
        """Return whether the mutant is broken on devices of the type ``device``."""
        return self.device in ("", device)

    @property
    def named_laws(self) -> frozenset[str]:
        """The names of the laws in the mutant's targets."""
        return frozenset(target.law for target in self.targets)

    def claims(self, stage: int) -> Capabilities:
        """Return the capabilities that the mutant claims at ``stage``, without building the mutant.

        Raises HarnessFault if the correct engine's claim is not known before that engine is built.
        """
        base = engines.capabilities(self.wraps, stage)
        if base is None:
            raise HarnessFault(
                f"mutant {self.name} cannot be planned: the capabilities of {self.wraps!r} are known once it is built"
            )
        return self.build.claims(base)


class BuiltByFactory(EngineWrapper):
    """The base class of mutants whose broken engine is built by a factory function."""

    factory: ClassVar[EngineFactory]

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        self.config = config
        self.base = type(self).factory(model, config)
        self.module = self.base.module
        self.capabilities = self.claims(self.base.capabilities)


REGISTERED: list[Mutant] = []  # the decorators below append to this list when the files of mutants are imported


def mutant(
    kind: FaultKind, *targets: Target, origin: Origin, imitates: str = "", equivalent: str = "", device: str = ""
) -> Callable[[MutantClass], MutantClass]:
    """Return a decorator that registers a class as a mutant with the given fields of Mutant."""

    def register(build: MutantClass) -> MutantClass:
        """Register the class ``build`` and return it unchanged."""
        REGISTERED.append(Mutant(build, kind, targets, origin, imitates, equivalent, device))
        return build

    return register


def mutant_factory(
    kind: FaultKind,
    *targets: Target,
    wraps: str,
    stages: tuple[int, ...],
    origin: Origin,
    imitates: str = "",
    equivalent: str = "",
) -> Callable[[Factory], Factory]:
    """Return a decorator that registers a function as the factory of a mutant.

    ``wraps`` is the name of the correct engine, and ``stages`` are the stages at which the mutant is broken. The other
    arguments are fields of Mutant.
    """

    def register(factory: Factory) -> Factory:
        """Register a class that calls ``factory``, and return ``factory`` unchanged."""
        name = "".join(word[0].upper() + word[1:] for word in factory.__name__.split("_"))
        body = {"factory": staticmethod(factory), "wraps": wraps, "stages": stages, "__doc__": factory.__doc__}
        build = type(name, (BuiltByFactory,), body)
        REGISTERED.append(Mutant(build, kind, targets, origin, imitates, equivalent))
        return factory

    return register


def deepspeed(number: int) -> str:
    """Return the address of the DeepSpeed issue or pull request with this number."""
    return f"https://github.com/deepspeedai/DeepSpeed/issues/{number}"


def pytorch(number: int) -> str:
    """Return the address of the PyTorch issue with this number."""
    return f"https://github.com/pytorch/pytorch/issues/{number}"
