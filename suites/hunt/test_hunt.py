"""A hunt draws the same programs again, finds what is planted, shrinks and groups it, and resumes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from zharness import engines
from zharness.cli import cli
from zharness.engines.registry import BUILT_IN
from zharness.errors import UsageError
from zharness.hunt.command import HuntOptions, run_hunt
from zharness.hunt.draw import PairCoverage, iter_draws
from zharness.hunt.groups import AlarmGroup
from zharness.hunt.hunter import Hunter, HuntLimits
from zharness.hunt.known import covers_program, explain_changed_numbers, find_known, is_recorded_cause
from zharness.hunt.log import HuntLog, program_as_json, read_program
from zharness.hunt.space import Space
from zharness.hunt.symptoms import SYMPTOMS, Symptom
from zharness.law_kit.program_features import explain_unsupported
from zharness.mesh import DEFAULT_MESH, Mesh
from zharness.releases.repros import load_catalogue
from zharness.run import Verdict
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.program_runner import ProgramOutcome
from zharness.run.shipped_failures import expected_failures_for
from zharness.workload.program_text import parse_program, require_legal
from zharness.workload.programs import Act, LayerKind, Program
from zharness.world import Isolation
from zharness.world.server import RankEnvironment

PASS = ProgramOutcome(Verdict.PASS)
WRONG = ProgramOutcome(Verdict.FAIL, "step 3, reduction: 1.weight[0, 0] expected 1, got 2")


def make_space(
    engine: str = "reference", stages: Sequence[int] = (0, 1, 2, 3), mesh: Mesh = DEFAULT_MESH, **fields: Any
) -> Space:
    claims = {stage: engines.capabilities(engine, stage) for stage in stages}
    known = {stage: found.on_mesh(mesh) for stage, found in claims.items() if found is not None}
    world_sizes = (2, 4) if mesh.sizes else (1, 2)
    return Space(engine, known, world_sizes, ("fp32", "bf16"), mesh=mesh, **fields)


@dataclass
class FakeRunner:
    """A runner without ranks: programs for which ``is_broken`` holds fail, on new ranks or, if pooled, only on used."""

    is_broken: Callable[[Program], bool]
    fails_pooled_only: bool = False
    programs: list[Program] = field(default_factory=list)

    def run(self, _engine: str, programs: Sequence[Program], isolation: Isolation) -> ProgramOutcome:
        self.programs += programs
        is_fresh_pass = self.fails_pooled_only and isolation is Isolation.FRESH
        return WRONG if self.is_broken(programs[0]) and not is_fresh_pass else PASS


def hunt(space: Space, runner: FakeRunner, log: HuntLog, draws: int) -> None:
    """Run ``draws`` draws with a fake runner; no cause is known, and scripts are not written."""
    coverage = PairCoverage(space.list_claimed_pairs())
    hunter = Hunter(
        space,
        runner,  # type: ignore[arg-type]
        log,
        coverage,
        lambda _program, _outcome: "",
        lambda _group: ("", ""),
        lambda _state: None,
    )
    hunter.hunt(0, HuntLimits(None, draws))


def is_planted(program: Program) -> bool:
    """Return whether a program shows the planted failure, which needs an option, a window and a kind of layer."""
    has_layer = any(layer.kind is LayerKind.NORM for layer in program.walk())
    has_step = any(verb.act is Act.STEP for verb in program.verbs)
    return "overlap_comm" in program.options and program.window == 2 and has_layer and has_step


@pytest.mark.parametrize("engine", BUILT_IN)
def test_an_option_that_some_laws_alone_are_judged_with_is_not_drawn(engine: str) -> None:
    space = make_space(engine)
    page = (Path(__file__).parents[2] / "docs" / "hunt.md").read_text(encoding="utf-8")
    for stage, claims in space.claims_at.items():
        options = claims.engine_options
        restricted = {name for name, option in options.items() if option.laws}
        assert set(space.list_options(stage)) == {n for n, option in options.items() if not option.absent} - restricted
        assert not restricted & {name for each in SYMPTOMS if each.engine == engine for name in each.options}
        for name in restricted:
            assert f"| `{name}` |" in page, "docs/hunt.md says why no program can be judged with it"


def test_draws_repeat_and_cover_every_pair_first() -> None:
    space = make_space()
    first, again = (list(islice(iter_draws(space, 3, PairCoverage(space.list_claimed_pairs())), 60)) for _ in range(2))
    assert [draw.program for draw in first] == [draw.program for draw in again]
    coverage = PairCoverage(space.list_claimed_pairs())
    total = len(coverage.claimed)
    for draw in islice(iter_draws(space, 3, coverage), 300):
        assert not coverage.missing or draw.wanted is not None
        if not coverage.missing:
            break
    assert not coverage.missing
    assert len(coverage.claimed) == total
    assert len(coverage.covered) > 0.95 * total, "nearly all pairs can be brought about"


@pytest.mark.parametrize(("engine", "mesh"), [("reference", ""), ("ddp", ""), ("fsdp2", ""), ("fsdp2", "rep2")])
def test_every_draw_is_legal_and_claimed(engine: str, mesh: str) -> None:
    stages = {"reference": (1, 3), "ddp": (0,), "fsdp2": (2, 3)}[engine]
    space = make_space(engine, stages, Mesh.parse(mesh))
    for draw in islice(iter_draws(space, 1, PairCoverage(space.list_claimed_pairs())), 80):
        program = draw.program
        require_legal(program)
        assert not explain_unsupported(program, space.claims_at[program.stage])
        assert program.stage in space.stages
        assert program.mesh.label == mesh
        assert read_program(json.loads(json.dumps(program_as_json(program)))) == program


def test_excluded_names_are_not_drawn() -> None:
    space = make_space(excluded_names=("save", "norm", "overlap_comm"))
    for draw in islice(iter_draws(space, 0, PairCoverage(space.list_claimed_pairs())), 60):
        acts = {verb.act for verb in draw.program.verbs}
        kinds = {layer.kind for layer in draw.program.walk()}
        assert Act.SAVE not in acts
        assert LayerKind.NORM not in kinds
        assert "overlap_comm" not in draw.program.options


def test_an_alarm_is_shrunk_in_setting_and_program_at_once(tmp_path: Path) -> None:
    with HuntLog(tmp_path / "hunt.jsonl", {"seed": 0}) as log:
        hunt(make_space(), FakeRunner(is_planted), log, 150)
        assert len(log.state.groups) == 1
        (group,) = log.state.groups
        smallest = group.smallest
        assert smallest.options == ("overlap_comm",)
        assert (smallest.window, smallest.dtype, smallest.world_size, smallest.stage) == (2, "fp32", 1, 0)
        assert (smallest.clip, smallest.optimizer, smallest.reduction) == (None, "sgd", "mean")
        kinds = [layer.kind for layer in smallest.walk()]
        assert kinds[1:] == [LayerKind.NORM]
        assert [verb.act for verb in smallest.verbs].count(Act.STEP) == 1
        assert len(group.draws) == log.state.alarm_count


@pytest.mark.parametrize("needs_mesh", [True, False])
def test_a_smallest_program_has_a_mesh_only_if_it_needs_it(needs_mesh: bool, tmp_path: Path) -> None:
    def is_broken(program: Program) -> bool:
        return bool(program.mesh.sizes) or not needs_mesh

    with HuntLog(tmp_path / "hunt.jsonl", {"seed": 0}) as log:
        hunt(make_space(mesh=Mesh.parse("rep2")), FakeRunner(is_broken), log, 5)
        (group,) = log.state.groups
        assert (group.smallest.mesh.label, group.smallest.world_size) == (("rep2", 2) if needs_mesh else ("", 1))
        assert ("2 ranks on the mesh rep2, " in group.describe("reference")) is needs_mesh
        assert (" --mesh rep2 " in group.describe("reference")) is needs_mesh


@pytest.mark.parametrize("meshes", [("rep2",), ()])
def test_a_failure_on_a_mesh_is_known_by_entries_of_that_mesh(meshes: tuple[str, ...]) -> None:
    entry = ExpectedFailure("fsdp2", "training.grads", "", "", "crash", ("a message",), meshes=meshes)
    for mesh in ("", "rep2"):
        program = Program((), (), mesh=Mesh.parse(mesh))
        assert covers_program(entry, program, (), "2.13.0") is (mesh in (meshes or ("",)))


def test_a_hunt_resumes_without_repeating_draws(tmp_path: Path) -> None:
    path, space = tmp_path / "hunt.jsonl", make_space()
    with HuntLog(path, {"seed": 0}) as log:
        hunt(space, FakeRunner(is_planted), log, 60)
        whole = [group.smallest for group in log.state.groups]
    with path.open("a") as file:
        file.write('{"draw": 61, "prog')  # as a process leaves it that is killed while it writes
    again = FakeRunner(is_planted)
    with HuntLog(path, {"seed": 0}) as log:
        hunt(space, again, log, 60)
        assert not again.programs
        hunt(space, again, log, 61)
        assert again.programs
        assert log.state.draw_count == 61
        assert [group.smallest for group in log.state.groups][: len(whole)] == whole


def test_the_log_of_another_hunt_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hunt.jsonl"
    HuntLog(path, {"engine": "ddp", "seed": 0}).close()
    with pytest.raises(UsageError, match="the log of another hunt, which differs in seed"):
        HuntLog(path, {"engine": "ddp", "seed": 1})
    path.write_text("no log\n")
    with pytest.raises(UsageError, match="is not the log of a hunt"):
        HuntLog(path, {"engine": "ddp", "seed": 1})


def test_a_failure_of_used_ranks_alone_is_reported_as_such(tmp_path: Path) -> None:
    with HuntLog(tmp_path / "hunt.jsonl", {}) as log:
        hunt(make_space(), FakeRunner(lambda _: True, fails_pooled_only=True), log, 3)
        assert not log.state.groups
        assert len(log.state.unconfirmed) == 3


@dataclass(frozen=True)
class FailureCase:
    """A failure of a program, and whether expected failures record its cause."""

    options: tuple[str, ...]
    stage: int
    cause: str
    verdict: Verdict
    is_known: bool


EARLY_STEP = "step 5, optimizer: 1.weight[0, 0] expected 1, got 2 (bound 0); a step was made before the window was full"


@pytest.mark.parametrize(
    "case",
    [
        FailureCase((), 1, EARLY_STEP, Verdict.FAIL, is_known=True),
        FailureCase(("overlap_comm",), 1, EARLY_STEP, Verdict.FAIL, is_known=False),
        FailureCase((), 1, EARLY_STEP, Verdict.CRASH, is_known=False),
        FailureCase((), 1, "step 5, optimizer: 1.weight[0, 0] expected 1, got 2", Verdict.FAIL, is_known=False),
    ],
)
def test_a_known_cause_is_told_from_a_new_one(case: FailureCase) -> None:
    program = Program((), (), stage=case.stage, options=case.options)
    claims = engines.capabilities("deepspeed", case.stage)
    assert claims is not None
    found = find_known("deepspeed", "0.19.8", program, ProgramOutcome(case.verdict, case.cause), claims, ())
    assert bool(found) is case.is_known


def test_an_option_that_may_change_numbers_excuses_no_exception() -> None:
    program = Program((), (), stage=2, options=("all_reduce_last",))
    claims = engines.capabilities("fsdp2", 2)
    assert claims is not None
    assert explain_changed_numbers(program, WRONG, claims)
    missing = ProgramOutcome(Verdict.FAIL, "rank 0 raised: EngineContractError: full_grads has the wrong names")
    assert not explain_changed_numbers(program, missing, claims)


@pytest.mark.parametrize(("details", "is_known"), [("in f\n  p.grad.record_stream(s)", True), ("", False)])
def test_the_details_of_an_entry_are_looked_up_in_the_traceback(details: str, is_known: bool) -> None:
    entry = next(entry for entry in expected_failures_for("deepspeed") if "p.grad.record_stream(" in entry.details)
    outcome = ProgramOutcome(Verdict(entry.verdict), f"rank 0 raised: {entry.signatures[0]}", details=details)
    assert is_recorded_cause(entry, outcome) is is_known


@pytest.mark.parametrize("symptom", SYMPTOMS, ids=lambda symptom: symptom.repro)
def test_a_symptom_names_a_reproduction_and_needs_its_setting(symptom: Symptom) -> None:
    assert symptom.repro in {repro.id for repro in load_catalogue()}
    options = tuple(sorted(symptom.options))[:1]
    program = Program((), (), stage=symptom.stages[0], options=options, world_size=symptom.min_world_size)
    program = replace(program, dtype=symptom.dtypes[0])
    names, outcome = set(symptom.needs), ProgramOutcome(Verdict.FAIL, f"step 1: {symptom.text}")
    assert symptom.matches(symptom.engine, program, names, outcome)
    assert not symptom.matches("torch_tp", program, names, outcome)
    assert not symptom.matches(symptom.engine, program, names, ProgramOutcome(Verdict.FAIL, "step 1: other"))
    if options:
        assert not symptom.matches(symptom.engine, replace(program, options=()), names, outcome)
    if names:
        assert not symptom.matches(symptom.engine, program, set(), outcome)


def test_groups_contain_alarms_that_have_more(tmp_path: Path) -> None:
    smallest = parse_program("x(1) norm | f b s")
    group = AlarmGroup(1, smallest, WRONG)
    larger = parse_program("tokens(3,2) linear(2) norm relu | e f b:other l s f b")
    assert group.explains(group.cause, larger)
    assert not group.explains(group.cause, parse_program("tokens(3,2) linear(2) relu | f b s"))
    assert not group.explains(group.cause, parse_program("x(1) norm | b s f".replace("b s f", "f b")))


@pytest.mark.parametrize(
    ("mutant", "stage", "mesh"),
    [("never_reduces", 0, ""), ("leaves_out_the_sum_over_copies", 3, "rep2")],
    ids=["no mesh", "rep2"],
)
def test_a_mutant_is_found_and_exported(
    mutant: str, stage: int, mesh: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = HuntOptions(
        HuntLimits(None, 1 if mesh else 6),
        stages=(stage,),
        world_sizes=(2,),
        dtypes=("fp32",),
        output=tmp_path,
        mesh=Mesh.parse(mesh),
    )
    engine = f"zharness.mutants:{mutant}"
    assert run_hunt(engine, options, lambda _: RankEnvironment(), None) == 1
    printed = capsys.readouterr().out
    assert "new: fail" in printed
    assert f"again: zharness program --engine {engine}" in printed
    scripts = list(tmp_path.glob("*.py"))
    assert scripts
    shown = f'mesh="{mesh}",' if mesh else "repro: REPRODUCED"
    assert all(shown in script.read_text() for script in scripts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["deepsped"], "unknown engine 'deepsped'"),
        (["ddp", "--minutes", "0"], "--minutes: got 0; expected a finite number above 0"),
        (["ddp", "--minutes", "nan"], "--minutes: got nan"),
        (["ddp", "--without", "qq"], "unknown layer, verb, mark or engine option to leave out 'qq'"),
        (["ddp", "--mesh", "rep2"], "ddp does not claim the axis dp_replicate of the mesh; axes that it claims: none"),
        (["ddp", "--stage", "3"], "unknown stage of ddp '3'; allowed: 0"),
        (["ddp", "--dtype", "fp9"], "unknown dtype 'fp9'"),
        (["ddp", "--output", "/dev/null/x"], "cannot write '/dev/null/x'"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(arguments: list[str], message: str, tmp_path: Path) -> None:
    output = [] if "--output" in arguments else ["--output", str(tmp_path)]
    with pytest.raises(UsageError) as caught:
        cli.main(["hunt", *arguments, *output], standalone_mode=False)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
