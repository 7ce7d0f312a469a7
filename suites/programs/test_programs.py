"""Programs: parsed, run on engines that have to get all of them right, and shrunk on engines that do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings

from zharness.errors import UsageError
from zharness.mesh import DEFAULT_MESH, Mesh
from zharness.run import Verdict
from zharness.run.program_runner import ProgramRunner
from zharness.run.program_search import SearchOptions, search_programs
from zharness.workload.legal_programs import program_size
from zharness.workload.program_text import parse_program
from zharness.workload.programs import Program
from zharness.workload.strategies import Repertoire, program_batches

REP2 = Mesh.parse("rep2")
BATCHES = 2  # of 8 programs, for each engine; `zharness program --batches 1000` runs more


@pytest.fixture(scope="module")
def runner() -> Iterator[ProgramRunner]:
    """One rank server for all tests: mutants and torch's engines may use the same ranks in turn."""
    with ProgramRunner() as started:
        yield started


@settings(max_examples=25, derandomize=True, database=None, deadline=None)
@given(program_batches({0: Repertoire()}, (2,), programs=1))
def test_a_program_is_parsed_back_from_its_text(drawn: tuple[Program, ...]) -> None:
    (program,) = drawn
    assert replace(parse_program(str(program)), optimizer=program.optimizer) == program


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x(3) linear(2)", "expected a model, | and verbs"),
        ("linear(2) | f", "expected x or tokens as the first layer"),
        ("x(3) x(3) | f", "expected x or tokens as the first layer"),
        ("x(3) relu | f", "no layer is trained"),
        ("x(3) linear(2) lenear(2) | f", "unknown layer 'lenear'; did you mean 'linear'?"),
        ("x(3) linear(2,2) | f", "expected 1 sizes above 0 for linear"),
        ("x(3) residual[linear(2) | f", "expected a ']' for every"),
        ("x(3) residual[linear(2)] | f", "ends with width 2; expected 3"),
        ("x(3) tied linear(1) | f", "has a weight with 3 inputs"),
        ("x(3) reentrant[linear(2)] | f", "no layer before it is trained"),
        ("x(3) linear(2) | f q", "unknown verb 'q'; allowed: f, b"),
        ("x(3) linear(2) | f b:late", "unknown mark of the verb b: 'late'; allowed: old"),
        ("x(3) linear(2) | f b b", "verb 3 of 'f b b', b: no output is kept for a backward"),
        (
            "x(3) linear(2) | n s",
            "verb 2 of 'n s', s: the last gradients are not reduced, because their backward ran in no_sync",
        ),
        ("x(3) linear(2) | load", "no checkpoint was saved"),
        ("x(3) checkpoint[linear(2)] | t", "torch.func does not support the saved-tensor hooks"),
        ("x(3) linear(2) | f b:few", "verb 2 of 'f b:few', b:few: this verb cannot have the mark few"),
        (
            "x(3) linear(2) | f b idle",
            "verb 3 of 'f b idle', idle: this verb is allowed only between steps, without gradients",
        ),
    ],
)
def test_an_invalid_program_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_program(text)
    assert message in str(caught.value)


RIGHT = [
    SearchOptions((0, 3), batches=BATCHES, dtypes=("fp32", "bf16")),
    SearchOptions((1, 2), batches=BATCHES, seed=1),
    SearchOptions((1, 3), (4,), batches=1, mesh=REP2),
]


@pytest.mark.parametrize("wanted", RIGHT, ids=lambda wanted: "-".join(map(str, wanted.stages)))
def test_no_program_fails_on_the_reference(runner: ProgramRunner, wanted: SearchOptions) -> None:
    found = search_programs(runner, "reference", wanted)
    assert not found.smallest, found.describe("reference")


# Without the bugs that FINDINGS.md describes: a forward under inference_mode, a save before the first step, an
# exception within a backward, verbs between the first and the last backward of an output, reentrant checkpoints. DDP
# also needs to know of unused parameters.
WITHOUT_KNOWN_BUGS = [
    ("fsdp2", SearchOptions((2, 3), batches=BATCHES, excluded_names=("i", "save", "xb"))),
    (
        "ddp",
        SearchOptions(
            (0,), batches=BATCHES, excluded_names=("retain", "reentrant", "unused", "sometimes", "xb"), max_outputs=1
        ),
    ),
]


@pytest.mark.parametrize(("engine", "wanted"), WITHOUT_KNOWN_BUGS, ids=[engine for engine, _ in WITHOUT_KNOWN_BUGS])
def test_no_program_fails_without_a_known_bug(runner: ProgramRunner, engine: str, wanted: SearchOptions) -> None:
    found = search_programs(runner, engine, wanted)
    assert not found.smallest, found.describe(engine)


@dataclass(frozen=True)
class Known:
    """A program with a known verdict on an engine at a stage, and what its cause contains."""

    text: str
    engine: str
    stage: int
    verdict: Verdict
    dtype: str = "fp32"
    mesh: Mesh = DEFAULT_MESH
    setting: Mapping[str, Any] = field(default_factory=dict)
    cause: str = ""


KNOWN = [
    Known("x(1) linear(1) | i f b", "fsdp2", 2, Verdict.FAIL),
    Known("x(1) linear(1) | f f b b", "ddp", 0, Verdict.FAIL),
    Known("x(1) linear(1) | save f b s", "fsdp2", 3, Verdict.FAIL),
    # Failed once: an unused parameter got a gradient of zeros if it was gathered together with others.
    Known("x(1) unused(1) linear(1) | f b s", "reference", 3, Verdict.PASS, dtype="bf16"),
    # Failed once: zeros were expected for a weight without a gradient, since the engine has them elsewhere.
    Known("x(1) sometimes[norm] linear(1) | f b:unseen s", "fsdp1", 0, Verdict.PASS),
    Known(
        "tokens(5,3) residual[linear(5) gelu linear(3)] tied | f f b:old,tensor e b:scale s", "fsdp2", 3, Verdict.PASS
    ),
    Known("x(2) linear(3) norm | f b s n f b s l f:few b:unseen s", "fsdp2", 2, Verdict.PASS, mesh=REP2),
    # Failed once: the engine adds up the three parts of a gradient in another order than plain PyTorch.
    Known(
        "x(5) norm twice[reentrant[matrix(1)] checkpoint[frozen(4)] linear(5)] tied matrix(2) | v f b",
        *("reference", 3, Verdict.PASS),
        setting={"world_size": 1},
    ),
    Known(
        *("x(1) linear(1) | f b f s t", "fsdp2", 2, Verdict.FAIL),
        cause="the forward used the weights from before the last change",
    ),
    Known(
        *("tokens(1,2) | f b f s n f b", "fsdp2", 2, Verdict.FAIL),
        cause="the forward used the weights from before the last change",
    ),
    Known(
        *("tokens(2,1) tied norm linear(2) | f b f s f b", "fsdp2", 3, Verdict.FAIL),
        setting={"options": ("root_kept_after_forward",), "world_size": 1},
        cause="the forward used the weights from before the last change",
    ),
    Known("x(1) linear(1) | n t", "fsdp2", 2, Verdict.CRASH, cause="would mutate a captured Tensor"),
    # The loss of a micro-batch that raises is divided too.
    Known(
        *("x(1) linear(1) linear(2) | xb f b:retain b", "fsdp2", 2, Verdict.FAIL),
        setting={"options": ("iteration_reset", "one_group"), "window": 2, "window_owner": "caller"},
        cause="it is the sum with the backwards that raised",
    ),
]


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: f"{known.engine}-{known.text}")
def test_a_known_program_has_its_verdict(runner: ProgramRunner, known: Known) -> None:
    program = replace(
        parse_program(known.text),
        stage=known.stage,
        dtype=known.dtype,
        mesh=known.mesh,
        **known.setting,
    )
    outcome = runner.run(known.engine, [program])
    assert outcome.verdict is known.verdict, outcome.describe(known.engine, [program])
    assert known.cause in outcome.cause


@dataclass(frozen=True)
class Shrunk:
    """A mutant, the stage at which it is broken, and a program of the size to which its failure has to shrink."""

    mutant: str
    smallest: str
    stage: int = 0
    mesh: Mesh = DEFAULT_MESH


SHRUNK = [
    Shrunk("never_reduces", "x(1) linear(1) | f b"),
    Shrunk("forgets_the_unsynced", "x(1) linear(1) | f n b"),
    Shrunk("only_the_first_backward_counts", "x(1) linear(1) | f f b b"),
    Shrunk("never_publishes", "x(1) linear(1) | f b s", stage=1),
    Shrunk("reduces_tied_twice", "x(1) linear(1) tied | f b"),
    Shrunk("slips_shards", "x(1) frozen(2) linear(2) | save load", stage=3),
    Shrunk("leaves_out_the_sum_over_copies", "x(1) linear(1) | f b", stage=3, mesh=REP2),
]


@pytest.mark.parametrize("shrunk", SHRUNK, ids=lambda shrunk: shrunk.mutant)
def test_a_mutant_is_found_and_its_program_shrinks(runner: ProgramRunner, shrunk: Shrunk) -> None:
    engine = f"zharness.mutants:{shrunk.mutant}"
    found = search_programs(runner, engine, SearchOptions((shrunk.stage,), batches=12, mesh=shrunk.mesh))
    assert found.smallest, found.describe(engine)
    (program,) = found.smallest
    assert program.mesh == shrunk.mesh
    assert program_size(program)[0] <= program_size(parse_program(shrunk.smallest))[0], found.describe(engine)
