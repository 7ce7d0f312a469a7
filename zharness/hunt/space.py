"""Define the values that draws may take for one engine, and the pairs of values that draws should cover."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

from zharness.engines import Capabilities
from zharness.engines.options import find_exclusion
from zharness.law_kit.setting import OWNER_FEATURES, Setting
from zharness.mesh import DEFAULT_MESH, Mesh
from zharness.run.covering_axes import WINDOWS
from zharness.run.program_search import SearchOptions, repertoire_fields
from zharness.workload.legal_programs import UNLIMITED_OUTPUTS, CallerLimits
from zharness.workload.programs import BLOCK_KINDS, SOURCE_KINDS, Act, LayerKind, Mark, Program

Value = tuple[str, str]  # the name of an axis, and a value on it as text
Pair = tuple[Value, Value]  # sorted

NO_OPTION = ("option", "")  # the value of a program that sets no option
MAX_OPTIONS = 2  # per draw


@dataclass(frozen=True)
class Repertoire:
    """The layers, acts, marks and windows that an engine with certain options claims."""

    sources: tuple[LayerKind, ...]
    leaves: tuple[LayerKind, ...]
    blocks: tuple[LayerKind, ...]
    acts: tuple[Act, ...]
    marks: tuple[Mark, ...]
    windows: tuple[Setting, ...]
    dtypes: tuple[str, ...]
    limits: CallerLimits
    claims: Capabilities


@dataclass(frozen=True)
class Space:
    """The values that draws may take for one engine on ``mesh``.

    ``claims_at`` maps each stage to the claims of the engine on the mesh. ``excluded_names`` are layers, verbs, marks
    and options to leave out, and ``max_outputs`` limits the outputs that a program keeps for later backwards.
    """

    engine: str
    claims_at: Mapping[int, Capabilities]
    world_sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    excluded_names: tuple[str, ...] = ()
    max_outputs: int = UNLIMITED_OUTPUTS
    mesh: Mesh = DEFAULT_MESH
    _repertoires: dict[tuple[int, tuple[str, ...]], Repertoire] = field(default_factory=dict, compare=False)

    def list_options(self, stage: int) -> list[str]:
        """Return the options at ``stage`` that this machine can run, without excluded options and options of some laws.

        A program is judged by its gradients after each backward, and by steps that are replayed. So an option that is
        restricted to some laws cannot be drawn: it affects things that programs do not have, such as a schedule, moves
        the reduction into the step, has an optimizer whose operations are not torch's, or breaks all programs;
        docs/hunt.md names each.
        """
        return [
            name
            for name, option in self.claims_at[stage].engine_options.items()
            if not option.absent and not option.laws and name not in self.excluded_names
        ]

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The stages at which programs can be judged: those with torch's kernels, by default or under an option."""
        return tuple(stage for stage in sorted(self.claims_at) if self.get_kernel_options(stage) is not None)

    def get_kernel_options(self, stage: int) -> tuple[str, ...] | None:
        """Return the options that every program at ``stage`` needs to be judged; None if no option allows it."""
        if stage not in self.claims_at[stage].own_kernels:
            return ()
        known = self.claims_at[stage].engine_options
        return next(((name,) for name in self.list_options(stage) if known[name].has_torch_kernels), None)

    def complete_options(self, stage: int, names: Iterable[str]) -> tuple[str, ...] | None:
        """Return ``names`` with the options that ``stage`` needs; None if the engine cannot set all these options."""
        if stage not in self.stages:
            return None
        needed = self.get_kernel_options(stage) or ()
        complete = (*needed, *(name for name in names if name not in needed))
        if not set(complete) <= set(self.list_options(stage)):
            return None
        known = self.claims_at[stage].engine_options
        return None if find_exclusion({name: known[name] for name in complete}) else complete

    def get_repertoire(self, stage: int, options: tuple[str, ...]) -> Repertoire:
        """Return the repertoire that the engine claims at ``stage`` with ``options``."""
        if (stage, options) not in self._repertoires:
            claims = self.claims_at[stage]
            dtypes = [claims.engine_options[name].dtypes or claims.dtypes for name in options]
            self._repertoires[stage, options] = self._build_repertoire(claims.with_options(options), dtypes)
        return self._repertoires[stage, options]

    def _build_repertoire(self, claims: Capabilities, option_dtypes: Sequence[frozenset[str]]) -> Repertoire:
        """Build the repertoire of an engine with these claims, without the excluded names.

        ``option_dtypes`` are the dtypes in which each option can be set.
        """
        known = {member.value for axis in (LayerKind, Act, Mark) for member in axis}
        excluded = tuple(name for name in self.excluded_names if name in known)
        options = SearchOptions((), dtypes=self.dtypes, excluded_names=excluded, max_outputs=self.max_outputs)
        fields = repertoire_fields(options, claims)
        kinds = fields["kinds"]
        return Repertoire(
            sources=tuple(kind for kind in kinds if kind in SOURCE_KINDS),
            leaves=tuple(kind for kind in kinds if kind not in (*SOURCE_KINDS, *BLOCK_KINDS)),
            blocks=tuple(kind for kind in kinds if kind in BLOCK_KINDS),
            acts=fields["acts"],
            marks=fields["marks"],
            windows=tuple(
                Setting((), steps, owner)
                for steps, owner in WINDOWS
                if steps == 1 or claims.refusal(OWNER_FEATURES[owner]) is None
            ),
            dtypes=tuple(dtype for dtype in fields["dtypes"] if all(dtype in allowed for allowed in option_dtypes)),
            limits=fields["limits"],
            claims=claims,
        )

    def list_claimed_pairs(self) -> set[Pair]:
        """Return all pairs of an option, or no option, and another value that the engine claims at some stage.

        The other values are stages, windows, dtypes, verbs, layers and other options.
        """
        found: set[Pair] = set()
        for stage in self.stages:
            names = self.list_options(stage)
            for chosen in [(), *((name,) for name in names)]:
                options = self.complete_options(stage, chosen)
                if options is None:
                    continue
                repertoire = self.get_repertoire(stage, options)
                axes = {
                    "stage": [str(stage)],
                    "window": [window.window for window in repertoire.windows],
                    "dtype": repertoire.dtypes,
                    "verb": [act.value for act in repertoire.acts],
                    "layer": [kind.value for kind in (*repertoire.sources, *repertoire.leaves, *repertoire.blocks)],
                }
                own = option_values(options if chosen or options else ())
                found |= {make_pair(one, (axis, text)) for one in own for axis, texts in axes.items() for text in texts}
            for two in combinations(names, 2):
                if self.complete_options(stage, two) is not None:
                    found.add(make_pair(("option", two[0]), ("option", two[1])))
        return found


def option_values(options: Sequence[str]) -> list[Value]:
    """Return the values on the axis of options; a program without options has the value ''."""
    return [("option", name) for name in options] or [NO_OPTION]


def make_pair(one: Value, other: Value) -> Pair:
    """Return the pair of two values, sorted."""
    return (one, other) if one <= other else (other, one)


def window_name(program: Program) -> str:
    """Return the name of the program's window, as in ``2_by_engine``."""
    return f"{program.window}_by_{program.window_owner}" if program.window > 1 else "1"


def list_program_pairs(program: Program) -> set[Pair]:
    """Return the pairs that ``program`` covers."""
    own = option_values(program.options)
    return {make_pair(one, other) for one in own for other in list_program_values(program)} | {
        make_pair(one, other) for one, other in combinations(own, 2)
    }


def list_setting_values(program: Program) -> list[Value]:
    """Return the program's options, stage, window and dtype."""
    axes = [("stage", str(program.stage)), ("window", window_name(program)), ("dtype", program.dtype)]
    return [*option_values(program.options), *axes]


def list_program_values(program: Program) -> Iterator[Value]:
    """Yield the program's stage, window, dtype, verbs and layers."""
    yield from (value for value in list_setting_values(program) if value[0] != "option")
    yield from {("verb", verb.act.value) for verb in program.verbs}
    yield from {("layer", layer.kind.value) for layer in program.walk()}
