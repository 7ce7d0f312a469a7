"""Define Hypothesis strategies that draw programs.

A strategy draws arbitrary layers and verbs and keeps those that are legal after the earlier ones, so no example is
rejected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from zharness.mesh import DEFAULT_MESH, Mesh
from zharness.workload.legal_programs import NO_LIMITS, CallerLimits, legal_layers, legal_verbs
from zharness.workload.programs import (
    ALLOWED_MARKS,
    BLOCK_KINDS,
    SIZE_COUNTS,
    SIZED_KINDS,
    SOURCE_KINDS,
    Act,
    Layer,
    LayerKind,
    Mark,
    Program,
    Verb,
)

MAX_WIDTH = 9  # inputs or outputs of a layer; often not a multiple of the world size, or below it
MAX_CHANNELS = 2
MAX_LAYERS = 5  # per model, not counting the first layer and the inner layers of blocks
MAX_PHRASES = 10
MAX_DEPTH = 2  # depth to which blocks are nested


@dataclass(frozen=True)
class Repertoire:
    """The layers, calls (acts), call options (marks) and settings that programs for one engine may use at one stage.

    If an example fails, Hypothesis replaces values by earlier members of these tuples, so the simplest member comes
    first. ``limits`` are the engine's limits on kept outputs and on several backwards per step.
    """

    kinds: tuple[LayerKind, ...] = tuple(LayerKind)
    acts: tuple[Act, ...] = tuple(Act)
    marks: tuple[Mark, ...] = tuple(Mark)
    dtypes: tuple[str, ...] = ("fp32",)
    optimizers: tuple[str, ...] = ("sgd", "adamw")
    limits: CallerLimits = NO_LIMITS


@st.composite
def program_batches(
    draw: st.DrawFn,
    repertoires: Mapping[int, Repertoire],
    world_sizes: Sequence[int],
    programs: int,
    mesh: Mesh = DEFAULT_MESH,
) -> tuple[Program, ...]:
    """Draw a batch of programs that the same ranks run, all with the same stage, world size, dtype and optimizer.

    ``repertoires`` maps each stage to its repertoire on ``mesh``. ``programs`` is the number of programs.
    """
    stage = draw(st.sampled_from(sorted(repertoires)))
    world_size = draw(st.sampled_from(list(world_sizes)))
    repertoire = repertoires[stage]
    setting = draw(st.tuples(st.sampled_from(repertoire.dtypes), st.sampled_from(repertoire.optimizers)))
    models_and_verbs = st.tuples(
        legal_models(repertoire),
        st.lists(verb_phrases(repertoire), min_size=2, max_size=MAX_PHRASES).map(flatten_phrases),
    )
    return tuple(
        Program(tuple(layers), legal_verbs(layers, verbs, repertoire.limits), stage, world_size, *setting, mesh=mesh)
        for layers, verbs in draw(st.lists(models_and_verbs, min_size=programs, max_size=programs))
    )


def legal_models(repertoire: Repertoire) -> st.SearchStrategy[list[Layer]]:
    """Return a strategy that draws legal models, which begin with ``x`` or ``tokens`` and have a trained layer."""
    sources = [leaf_layer(kind) for kind in SOURCE_KINDS if kind in repertoire.kinds]
    inner = st.lists(any_layer(repertoire, MAX_DEPTH), min_size=1, max_size=MAX_LAYERS)
    return st.tuples(st.one_of(sources), inner).map(lambda drawn: legal_layers([drawn[0], *drawn[1]]))


def any_layer(repertoire: Repertoire, depth: int) -> st.SearchStrategy[Layer]:
    """Return a strategy that draws any layer except ``x`` and ``tokens``, with blocks nested at most ``depth`` deep."""
    leaves = [
        leaf_layer(kind) for kind in LayerKind if kind in repertoire.kinds and kind not in (*SOURCE_KINDS, *BLOCK_KINDS)
    ]
    kinds = [kind for kind in BLOCK_KINDS if kind in repertoire.kinds]
    if depth == 0 or not kinds:
        return st.one_of(leaves)
    inner = st.lists(any_layer(repertoire, depth - 1), min_size=1, max_size=MAX_LAYERS - 2)
    block = st.builds(lambda kind, layers: Layer(kind, (), tuple(layers)), st.sampled_from(kinds), inner)
    return st.one_of(*leaves, block)


def leaf_layer(kind: LayerKind) -> st.SearchStrategy[Layer]:
    """Return a strategy that draws a layer of ``kind`` with its sizes; ``kind`` must not be a block."""
    if kind is LayerKind.TIED or kind not in (*SIZED_KINDS, *SOURCE_KINDS):
        return st.just(Layer(kind))
    size = st.integers(1, MAX_CHANNELS if kind is LayerKind.CONV else MAX_WIDTH)
    return st.tuples(*[size] * SIZE_COUNTS[kind]).map(lambda sizes: Layer(kind, sizes))


FORWARD_TO_STEP = (Act.FORWARD, Act.BACKWARD, Act.STEP)
# Common sequences of verbs. If programs were drawn verb by verb, few of them would reach a second step.
VERB_PHRASES = (
    (Act.FORWARD,),
    (Act.BACKWARD,),
    (Act.FORWARD, Act.BACKWARD),
    FORWARD_TO_STEP,
    (Act.SAVE, *FORWARD_TO_STEP, Act.LOAD),
)


def verb_phrases(repertoire: Repertoire) -> st.SearchStrategy[list[Verb]]:
    """Return a strategy that draws a verb with any of its options, or one of VERB_PHRASES, within ``repertoire``."""
    phrases = [list(map(Verb, acts)) for acts in VERB_PHRASES if set(acts) <= set(repertoire.acts)]
    marked = [act for act in ALLOWED_MARKS if act in repertoire.acts]
    rest = [[Verb(act)] for act in repertoire.acts if act not in (*FORWARD_TO_STEP, *marked)]
    marks = st.sets(st.sampled_from(repertoire.marks), max_size=3) if repertoire.marks else st.just(set())
    options = [st.sampled_from(phrases), st.builds(make_verb, st.sampled_from(marked), marks).map(lambda verb: [verb])]
    return st.one_of(*options, st.sampled_from(rest)) if rest else st.one_of(options)


def flatten_phrases(parts: Sequence[list[Verb]]) -> list[Verb]:
    """Return the verbs of all phrases in one list, in order."""
    return [verb for part in parts for verb in part]


def make_verb(act: Act, marks: set[Mark]) -> Verb:
    """Build a verb of a program. Order its marks as in Mark, and leave out marks that this act does not allow."""
    forbidden = {Mark.SCALE} if Mark.TENSOR in marks else set()
    return Verb(
        act, tuple(mark for mark in Mark if mark in marks and mark in ALLOWED_MARKS[act] and mark not in forbidden)
    )
