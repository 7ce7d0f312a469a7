"""Alarms are told apart by what fails, and compared with recorded failures of the same kind alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from zharness import engines
from zharness.hunt.causes import WrongValue, find_cause, find_owner
from zharness.hunt.draw import MAX_NAMED_PAIRS, PairCoverage
from zharness.hunt.groups import AlarmGroup, find_explanation, find_group
from zharness.hunt.known import can_show_law, covers_program, find_known, is_recorded_cause
from zharness.run import Verdict
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.program_runner import ProgramOutcome
from zharness.workload.program_text import parse_program
from zharness.workload.programs import Program

MODEL = "x(3) linear(3) norm sometimes[matrix(3)] | f b s"


def make_wrong(
    name: str, step: int = 2, part: str = "reduction", values: str = "expected 1, got 2", hint: str = ""
) -> str:
    """Return the cause of a wrong number."""
    ending = f"; {hint}" if hint else ""
    return f"step {step}, {part}: {name}[0, 0] (seen on rank 0) {values} (bound 0, 1 of 1 elements wrong){ending}"


def make_raised(text: str) -> str:
    return f"rank 0 raised: {text}"


@dataclass(frozen=True)
class Pair:
    """Two causes on one program, and whether they are one."""

    first: str
    second: str
    is_same: bool
    verdict: Verdict = Verdict.FAIL


@pytest.mark.parametrize(
    "pair",
    [
        Pair(make_wrong("1.weight"), make_wrong("1.bias"), is_same=True),
        Pair(make_wrong("1.weight"), make_wrong("1.weight", values="expected 7, got -3.5"), is_same=True),
        Pair(make_wrong("1.weight"), make_wrong("2.weight"), is_same=False),
        Pair(make_wrong("1.weight"), make_wrong("3.inner.0.weight"), is_same=False),
        Pair(make_wrong("1.weight"), make_wrong("norm"), is_same=False),
        Pair(make_wrong("1.weight"), make_wrong("1.weight/exp_avg"), is_same=False),
        Pair(make_wrong("1.weight"), make_wrong("1.weight", values="expected 1, got 0"), is_same=False),
        Pair(make_wrong("1.weight"), make_wrong("1.weight", values="expected 1, got nan"), is_same=False),
        Pair(make_wrong("1.weight"), make_wrong("1.weight", step=3), is_same=False),
        Pair(make_wrong("1.weight"), make_wrong("1.weight", part="optimizer"), is_same=False),
        # A hint names the fault, so the tensor is beside the point.
        Pair(
            make_wrong("1.weight", hint="it is 0.5 x the right gradient"),
            make_wrong("norm", hint="it is 0.25 x the right gradient"),
            is_same=True,
        ),
        Pair(make_wrong("1.weight", hint="only 1 of 4 elements are wrong"), make_wrong("2.weight"), is_same=False),
        Pair(make_raised("KeyError: 0"), make_raised("KeyError: 17"), is_same=True, verdict=Verdict.CRASH),
        Pair(make_raised("KeyError: 'a b'"), make_raised("ValueError: x"), is_same=False, verdict=Verdict.CRASH),
        Pair("rank 0 exited without a result: status 3", "rank 1 was ended by a signal: SIGSEGV", is_same=False),
        Pair("rank 0 was ended by a signal: SIGSEGV", "rank 1 was ended by a signal: SIGSEGV", is_same=True),
    ],
)
def test_alarms_of_one_cause_fail_alike(pair: Pair) -> None:
    program = parse_program(MODEL)
    first, second = (ProgramOutcome(pair.verdict, text) for text in (pair.first, pair.second))
    group = AlarmGroup(1, program, first)
    found = find_group([group], find_cause(program, second), program)
    assert (found is group) is pair.is_same


def test_an_exception_without_a_message_is_known_by_its_file() -> None:
    program = parse_program(MODEL)
    one, other = (
        find_cause(
            program, ProgramOutcome(Verdict.CRASH, make_raised("AssertionError: (no message)"), f"/engine/{name}")
        )
        for name in ("first.py", "second.py")
    )
    assert one != other
    assert (one.detail, other.detail) == ("first.py", "second.py")


def test_the_owner_of_a_tensor_is_its_layer() -> None:
    layers = parse_program("tokens(3,2) linear(2) norm twice[reentrant[conv(1)] relu] unused(2) | f b s").layers
    assert find_owner(layers, "0.weight") == (frozenset(), "dense layer")
    assert find_owner(layers, "2.bias") == (frozenset(), "norm layer")
    assert find_owner(layers, "3.inner.0.inner.0.conv.weight") == (frozenset(("twice", "reentrant")), "conv layer")
    assert find_owner(layers, "4.idle") == (frozenset(), "unused layer")
    assert find_owner(layers, "output") == (frozenset(), "output")


def test_a_group_explains_an_alarm_of_its_role_in_more_blocks() -> None:
    smallest = parse_program("x(3) sometimes[matrix(3)] matrix(1) | f b")
    group = AlarmGroup(1, smallest, ProgramOutcome(Verdict.FAIL, make_wrong("1.inner.0.weight")))
    larger = parse_program("x(3) norm twice[sometimes[linear(3)]] matrix(1) | f b s")
    inside = find_cause(larger, ProgramOutcome(Verdict.FAIL, make_wrong("2.inner.0.inner.0.weight")))
    assert inside.role is not None
    assert inside.role.value is WrongValue.DIFFERENT
    assert find_explanation([group], inside, larger) is group
    outside = find_cause(larger, ProgramOutcome(Verdict.FAIL, make_wrong("3.weight")))
    assert find_explanation([group], outside, larger) is None


@pytest.mark.parametrize(
    ("text", "law", "can_show"),
    [
        ("x(1) linear(1) | t", "torch_func.grad", True),
        ("x(1) linear(1) | f b s", "torch_func.grad", False),
        ("x(1) checkpoint[linear(1)] | f b", "checkpointing.twice", True),
        ("x(1) linear(1) | f b", "checkpointing.twice", False),
        ("x(1) linear(1) | f b:retain b", "double_backward.retained", True),
        ("x(1) linear(1) | f b", "double_backward.retained", False),
        ("x(1) linear(1) | f b s save", "state.resume", True),
        ("x(1) linear(1) | f b s", "state.resume", False),
        ("x(1) linear(1) | f b s", "resources.memory", False),
        ("x(1) linear(1) | f b s", "training.grads", True),
        ("x(1) linear(1) | f b s", "*", True),
    ],
)
def test_a_program_shows_laws_whose_calls_it_has(text: str, law: str, can_show: bool) -> None:
    assert can_show_law(parse_program(text), law) is can_show


def test_a_recorded_failure_of_another_kind_does_not_make_an_alarm_known() -> None:
    claims = engines.capabilities("ddp", 0)
    assert claims is not None
    text = "you must override the setup_context staticmethod of an autograd.Function"
    outcome = ProgramOutcome(Verdict.CRASH, make_raised(f"RuntimeError: {text}"))

    def is_known(program: Program) -> bool:
        """Return whether the failure of ``program`` is recorded."""
        return bool(find_known("ddp", "2.13.0", program, outcome, claims, ()))

    assert is_known(parse_program("x(1) linear(1) | f t"))
    assert not is_known(parse_program("x(1) linear(1) | f b s"))


def test_pairs_that_no_draw_has_are_counted_and_named() -> None:
    pairs = {(("dtype", f"d{number}"), ("option", "o")) for number in range(MAX_NAMED_PAIRS + 2)}
    coverage = PairCoverage(set(pairs))
    for pair in sorted(pairs)[1:]:
        coverage.give_up(pair)
    described = coverage.describe()
    assert described.startswith("0 of 7 claimed pairs covered: dtype x option 0 of 7; no draw has d1 with o, d2 with o")
    assert described.endswith("d5 with o and 1 more")
    coverage.add(Program((), (), dtype="d3", options=("o",)))
    assert coverage.covered == {(("dtype", "d3"), ("option", "o"))}
    assert len(coverage.claimed) == len(pairs)


@pytest.mark.parametrize(
    ("setting", "options", "needed", "is_covered"),
    [
        ("offload_optimizer+2_by_caller", (), (), False),
        ("offload_optimizer+2_by_caller", ("offload_optimizer",), (), True),
        ("offload_optimizer+2_by_caller", ("offload_optimizer",), ("offload_optimizer",), True),
        ("offload_optimizer+2_by_caller", ("overlap_comm",), (), False),
        ("offload_optimizer+4_by_caller", ("offload_optimizer",), ("offload_optimizer",), False),
        ("2_by_caller", (), (), True),
        ("4_by_caller", (), (), False),
    ],
)
def test_an_entry_for_an_option_in_a_window_does_not_cover_the_window_alone(
    setting: str, options: tuple[str, ...], needed: tuple[str, ...], is_covered: bool
) -> None:
    entry = ExpectedFailure("deepspeed", "window", "x", "y", "fail", ("z",), engine_variants=(setting,))
    program = Program((), (), stage=1, window=2, window_owner="caller", options=options)
    own = tuple(name for name in options if name not in needed)
    assert covers_program(entry, program, own, "0.19.8") is is_covered


@pytest.mark.parametrize(
    ("signature", "cause", "is_recorded"),
    [
        ("it is {number} x the right gradient", make_wrong("1.weight", hint="it is 3 x the right gradient"), False),
        ("it is 3 x the right gradient", make_wrong("1.weight", hint="it is 3 x the right gradient"), True),
        ("reduction: factor[0] expected {number}, got {number}", "reduction: factor[0] expected 1, got 2", False),
    ],
)
def test_an_open_factor_or_value_of_a_law_records_no_cause(signature: str, cause: str, is_recorded: bool) -> None:
    entry = ExpectedFailure("deepspeed", "window", "x", "y", "fail", (signature,))
    assert is_recorded_cause(entry, ProgramOutcome(Verdict.FAIL, cause)) is is_recorded


def test_an_open_index_of_an_exception_is_any_number() -> None:
    entry = ExpectedFailure("deepspeed", "window", "x", "y", "crash", ("shape [{number}, {number}] is invalid here",))
    cause = make_raised("RuntimeError: shape [3, 40] is invalid here")
    assert is_recorded_cause(entry, ProgramOutcome(Verdict.CRASH, cause))
    assert not is_recorded_cause(
        replace(entry, signatures=("shape [{number}] is invalid here",)), ProgramOutcome(Verdict.CRASH, cause)
    )
