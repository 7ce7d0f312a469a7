"""Draw programs with settings; the n-th draw depends on the seed and on earlier draws, but not on their outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from zharness.engines.protocol import AccumulationOwner, Capabilities, Feature
from zharness.hunt.space import (
    MAX_OPTIONS,
    NO_OPTION,
    Pair,
    Repertoire,
    Space,
    Value,
    list_program_pairs,
    list_program_values,
    list_setting_values,
    option_values,
)
from zharness.law_kit.program_features import explain_unsupported
from zharness.law_kit.setting import Setting
from zharness.run.covering import pair_kind
from zharness.workload.legal_programs import legal_layers, legal_verbs
from zharness.workload.programs import (
    ALLOWED_MARKS,
    SIZE_COUNTS,
    SOURCE_KINDS,
    TRAINED_KINDS,
    Act,
    Layer,
    LayerKind,
    Mark,
    Program,
    Verb,
)

ATTEMPTS = 40  # the number of attempts to draw a program that has the wanted pair of values
MAX_SIZE = 5  # inputs or outputs of a layer
MAX_CHANNELS = 2
MAX_LAYERS = 3  # per model and per block, not counting the first layer
MAX_DEPTH = 2
MAX_PHRASES = 4
OPTIMIZERS = ("sgd", "adamw", "adam", "nesterov")
CLIPS = (0.05, 0.2, 1.0)
MARK_PROBABILITY = 0.12
PARENT_PERIOD = 3  # every third draw has the setting of a parent
MAX_NAMED_PAIRS = 5


@dataclass(frozen=True)
class Draw:
    """A random program, and its number in the hunt, which counts from 1.

    ``wanted`` is the pair of values, such as an option and a dtype, that the program was drawn to cover; it is None if
    all pairs were covered already, or if the program has the setting of a parent.
    """

    number: int
    program: Program
    wanted: Pair | None


@dataclass
class PairCoverage:
    """The pairs of values that the engine claims: pairs not drawn yet, covered pairs, and pairs that no draw can have.

    A pair is an option, or no option, and another value (``Space.list_claimed_pairs``). ``undrawable`` has the pairs
    that ATTEMPTS draws did not produce, for example because the engine refuses them for another reason.
    """

    missing: set[Pair]
    covered: set[Pair] = field(default_factory=set)
    undrawable: set[Pair] = field(default_factory=set)

    def add(self, program: Program) -> None:
        """Count the pairs of ``program`` as covered."""
        pairs = list_program_pairs(program) & (self.missing | self.covered | self.undrawable)
        self.covered |= pairs
        self.missing -= pairs
        self.undrawable -= pairs

    def give_up(self, pair: Pair) -> None:
        """Count ``pair`` as a pair that no draw can have."""
        self.missing.discard(pair)
        self.undrawable.add(pair)

    @property
    def claimed(self) -> set[Pair]:
        """All pairs that the engine claims."""
        return self.missing | self.covered | self.undrawable

    def describe(self) -> str:
        """Describe in one line how many claimed pairs of each kind are covered, and name some that cannot be drawn."""
        covered, claimed = (Counter(map(pair_kind, map(frozenset, pairs))) for pairs in (self.covered, self.claimed))
        kinds = ", ".join(f"{kind} {covered[kind]} of {count}" for kind, count in sorted(claimed.items()))
        text = f"{len(self.covered)} of {len(self.claimed)} claimed pairs covered: {kinds}"
        if not self.undrawable:
            return text
        named = [" with ".join(value or "no option" for _, value in pair) for pair in sorted(self.undrawable)]
        more = f" and {len(named) - MAX_NAMED_PAIRS} more" if len(named) > MAX_NAMED_PAIRS else ""
        return f"{text}; no draw has {', '.join(named[:MAX_NAMED_PAIRS])}{more}"


def iter_draws(space: Space, seed: int, coverage: PairCoverage, parents: Sequence[Program] = ()) -> Iterator[Draw]:
    """Yield draws without end. While pairs are missing in ``coverage``, each draw has one of the missing pairs.

    The caller may append to ``parents`` between draws. If there are parents, every PARENT_PERIOD-th draw has the
    setting of a parent instead, with a new model and new verbs. Later parents are preferred.
    """
    number = 0
    while True:
        number += 1
        random = Random(f"{seed} {number}")  # noqa: S311 - draws examples
        program = wanted = None
        if parents and number % PARENT_PERIOD == 0:
            # The larger of two random numbers prefers parents late in the list.
            parent = parents[max(random.randrange(len(parents)) for _ in range(2))]
            program = draw_program(space, random, tuple(list_setting_values(parent)))
        while program is None:
            wanted = random.choice(sorted(coverage.missing)) if coverage.missing else None
            program = draw_program(space, random, wanted or ())
            if program is None and wanted is not None:
                coverage.give_up(wanted)
        coverage.add(program)
        yield Draw(number, program, wanted)


def draw_program(space: Space, random: Random, wanted: tuple[Value, ...]) -> Program | None:
    """Draw a program that has the ``wanted`` values; return None if no attempt gives one."""
    for _ in range(ATTEMPTS):
        program = attempt_program(space, random, wanted)
        if program is None or explain_unsupported(program, space.claims_at[program.stage]):
            continue
        if {*wanted} <= {*option_values(program.options), *list_program_values(program)}:
            return program
    return None


def attempt_program(space: Space, random: Random, wanted: tuple[Value, ...]) -> Program | None:
    """Draw a setting and a program in it. The result may lack a wanted verb or layer; it is None if no stage fits."""
    required = [name for axis, name in wanted if axis == "option" and name]
    fixed = {axis: text for axis, text in wanted if axis != "option"}
    stages = [int(fixed["stage"])] if "stage" in fixed else list(space.stages)
    random.shuffle(stages)
    found = ((stage, space.complete_options(stage, required)) for stage in stages)
    stage, options = next(((stage, names) for stage, names in found if names is not None), (0, None))
    if options is None:
        return None
    if NO_OPTION not in wanted:
        options = add_options(space, random, stage, options, len(required))
    repertoire = space.get_repertoire(stage, options)
    if not repertoire.dtypes:
        return None
    window = draw_window(random, repertoire, fixed.get("window"))
    world_size = random.choice(space.world_sizes)
    kind = LayerKind(fixed["layer"]) if "layer" in fixed else None
    layers = tuple(draw_model(random, repertoire, kind))
    act = Act(fixed["verb"]) if "verb" in fixed else None
    verbs = draw_verbs(random, repertoire, window, act)
    owner = window.owner.value if window.accumulation_steps > 1 else AccumulationOwner.ENGINE.value
    steps = window.accumulation_steps
    claims = repertoire.claims
    return Program(
        layers=layers,
        verbs=legal_verbs(layers, verbs, repertoire.limits, steps, owner),
        stage=stage,
        world_size=world_size,
        dtype=draw_dtype(random, repertoire, fixed.get("dtype")),
        optimizer=random.choice(OPTIMIZERS),
        clip=random.choice(CLIPS) if claims.refusal(Feature.CLIP) is None and random.random() < 1 / 4 else None,
        window=steps,
        reduction="sum" if may_sum(claims, world_size) and random.random() < 1 / 8 else "mean",
        window_owner=owner,
        options=options,
        mesh=space.mesh,
    )


def add_options(
    space: Space, random: Random, stage: int, options: tuple[str, ...], required_count: int
) -> tuple[str, ...]:
    """Return ``options``, to which compatible ones may be added, so that at most MAX_OPTIONS are drawn or required."""
    for _ in range(random.randint(0, max(0, MAX_OPTIONS - required_count))):
        others = [name for name in space.list_options(stage) if name not in options]
        candidate = space.complete_options(stage, (*options, random.choice(others))) if others else None
        options = candidate or options
    return options


def draw_window(random: Random, repertoire: Repertoire, wanted: str | None) -> Setting:
    """Return the wanted window; if none is wanted, return the window of one micro-batch half of the time."""
    if wanted is not None:
        return next(window for window in repertoire.windows if window.window == wanted)
    return repertoire.windows[0] if random.random() < 1 / 2 else random.choice(repertoire.windows)


def draw_dtype(random: Random, repertoire: Repertoire, wanted: str | None) -> str:
    """Return the wanted dtype; if none is wanted, return fp32 most of the time."""
    return wanted or (repertoire.dtypes[0] if random.random() < 2 / 3 else random.choice(repertoire.dtypes))


def may_sum(claims: Capabilities, world_size: int) -> bool:
    """Return whether the engine can sum gradients over ranks without rounding the sum again."""
    is_exact = not claims.scaled_sum or world_size & (world_size - 1) == 0
    return claims.refusal(Feature.SUM) is None and is_exact


def draw_model(random: Random, repertoire: Repertoire, wanted: LayerKind | None) -> list[Layer]:
    """Return the layers of a legal model, with a layer of the ``wanted`` kind if it fits at its random position."""
    source = wanted if wanted in SOURCE_KINDS else random.choice(repertoire.sources)
    assert source is not None
    layers = draw_layers(random, repertoire, MAX_DEPTH)
    if wanted is not None and wanted not in SOURCE_KINDS:
        layers.insert(random.randint(0, len(layers)), draw_layer(random, repertoire, wanted, MAX_DEPTH))
    drawn = legal_layers([draw_layer(random, repertoire, source, 0), *layers])
    # A layer that is always used keeps every micro-batch differentiable.
    return drawn if drawn[-1].kind in TRAINED_KINDS else [*drawn, Layer(LayerKind.LINEAR, (random.randint(1, 3),))]


def draw_layers(random: Random, repertoire: Repertoire, depth: int) -> list[Layer]:
    """Return one to MAX_LAYERS layers, in which blocks are nested at most ``depth`` deep."""
    kinds = repertoire.leaves + (repertoire.blocks if depth else ())
    return [draw_layer(random, repertoire, random.choice(kinds), depth) for _ in range(random.randint(1, MAX_LAYERS))]


def draw_layer(random: Random, repertoire: Repertoire, kind: LayerKind, depth: int) -> Layer:
    """Return a layer of ``kind`` with drawn sizes and inner layers."""
    if kind in repertoire.blocks:
        return Layer(kind, (), tuple(draw_layers(random, repertoire, max(0, depth - 1))))
    largest = MAX_CHANNELS if kind is LayerKind.CONV else MAX_SIZE
    return Layer(kind, tuple(random.randint(1, largest) for _ in range(SIZE_COUNTS.get(kind, 0))))


def draw_verbs(random: Random, repertoire: Repertoire, window: Setting, wanted: Act | None) -> list[Verb]:
    """Return verbs, not all legal, that end with a whole window; the ``wanted`` act is at a random place before it."""
    phrases = [draw_phrase(random, repertoire, window) for _ in range(random.randint(1, MAX_PHRASES))]
    if wanted is not None:
        act = make_verb(random, repertoire, wanted)
        before = [Verb(Act.SAVE)] if wanted is Act.LOAD and Act.SAVE in repertoire.acts else []
        phrases.insert(random.randint(0, len(phrases)), [*before, act])
    return [verb for phrase in [*phrases, list(window_verbs(window))] for verb in phrase]


def draw_phrase(random: Random, repertoire: Repertoire, window: Setting) -> list[Verb]:
    """Return the verbs of a window with some marks, or a single verb."""
    if random.random() < 3 / 5:
        return [make_verb(random, repertoire, verb.act) for verb in window_verbs(window)]
    return [make_verb(random, repertoire, random.choice(repertoire.acts))]


def window_verbs(window: Setting) -> Iterator[Verb]:
    """Yield the verbs that train on one window: an engine that owns the window gets a step after each micro-batch.

    A caller that owns the window makes one step at its end.
    """
    is_by_engine = window.owner is AccumulationOwner.ENGINE
    for micro in range(window.accumulation_steps):
        yield Verb(Act.FORWARD)
        yield Verb(Act.BACKWARD)
        if is_by_engine or micro == window.accumulation_steps - 1:
            yield Verb(Act.STEP)


def make_verb(random: Random, repertoire: Repertoire, act: Act) -> Verb:
    """Return a verb of ``act`` with a few drawn marks."""
    allowed = ALLOWED_MARKS.get(act, ())
    marks = {mark for mark in allowed if mark in repertoire.marks and random.random() < MARK_PROBABILITY}
    if Mark.TENSOR in marks:
        marks.discard(Mark.SCALE)
    return Verb(act, tuple(mark for mark in Mark if mark in marks))
