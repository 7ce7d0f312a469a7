"""A program whose numbers overflow in plain PyTorch judges no engine from there on, and judges all before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.program_overflow import PlainRun, cut_before, find_overflow
from zharness.run import Verdict
from zharness.run.program_runner import ProgramRunner, build_program_baseline
from zharness.workload.program_text import parse_program
from zharness.workload.programs import Program, iter_verbs

GROWS = "tokens(5,5) tied tied tied tied | f b s f b s f b s"  # the third forward overflows


@pytest.fixture(scope="module")
def runner() -> Iterator[ProgramRunner]:
    with ProgramRunner() as started:
        yield started


def make_program(text: str, dtype: str = "fp32", **fields: object) -> Program:
    return replace(parse_program(text), dtype=dtype, optimizer="sgd", **fields)  # type: ignore[arg-type]


def run_plain(text: str, **fields: object) -> PlainRun:
    """Run a program on plain PyTorch alone, and return the run at its end."""
    program = make_program(text, **fields)
    baseline = build_program_baseline(program)
    run = PlainRun(JudgeContext(baseline, (), baseline.dtype), program)
    for position, verb, caller in iter_verbs(program):
        assert not [*run.judge_verb(position, verb, caller)], "a plain run compares nothing"
    return run


def test_an_overflow_is_found_at_its_verb() -> None:
    program = make_program(GROWS)
    overflow = find_overflow(build_program_baseline(program), program)
    assert overflow is not None
    assert (overflow.position, overflow.verb, overflow.numbers) == (7, "f", "an output")
    before = cut_before(program, overflow)
    assert str(before) == GROWS.removesuffix(" f b s")
    assert find_overflow(build_program_baseline(program), before) is None


def test_a_program_without_a_step_does_not_overflow() -> None:
    program = make_program("x(3) linear(2) | f f b b:old t v e l z f b")
    assert find_overflow(build_program_baseline(program), program) is None


@pytest.mark.parametrize(
    "verbs", ["f b s save f b s load", "save f b s save:old f b s f b s load:old", "f b s xb", "f b s l"]
)
def test_a_plain_run_ends_with_the_weights_of_its_verbs(verbs: str) -> None:
    once, now = run_plain("x(2) linear(2) | f b s"), run_plain(f"x(2) linear(2) | {verbs}")
    for name, weight in once.training.weights.items():
        assert torch.equal(weight, now.training.weights[name]), name


@pytest.mark.parametrize("verbs", ["f b s idle", "f b s f b s", "f b s f b:unseen s", "f b s edit"])
def test_a_plain_run_changes_the_weights_or_the_rate(verbs: str) -> None:
    once, now = run_plain("x(2) linear(2) | f b s"), run_plain(f"x(2) linear(2) | {verbs}")
    same = all(torch.equal(weight, now.training.weights[name]) for name, weight in once.training.weights.items())
    assert same == verbs.endswith("idle")
    assert (now.training.schedule.last_epoch == 2) == (not verbs.endswith("edit"))


def test_a_plain_run_steps_by_the_mean_over_ranks_and_micro_batches() -> None:
    run = run_plain("x(2) matrix(2) | f b f b s", world_size=2, window=2, window_owner="caller")
    baseline = run.ctx.baseline
    results = [baseline.run_rank(rank, micro) for micro in (0, 1) for rank in (0, 1)]
    for name, weight in baseline.build_module().named_parameters():
        weight.grad = sum(result.grads[name] for result in results) / len(results)
        torch.optim.SGD([weight], lr=0.05, momentum=0.9, weight_decay=0.01).step()
        assert torch.equal(run.training.weights[name], weight)


def test_the_reference_is_not_blamed_for_an_overflow(runner: ProgramRunner) -> None:
    program = make_program(GROWS)
    outcome = runner.run("reference", [program])
    assert outcome.verdict is Verdict.UNDETERMINED, outcome
    assert "plain PyTorch's own numbers overflow" in outcome.cause


def test_a_failure_before_the_overflow_still_counts(runner: ProgramRunner) -> None:
    outcome = runner.run("zharness.mutants:never_reduces", [make_program(GROWS)])
    assert outcome.verdict is Verdict.FAIL, outcome
    assert "step 2, " in outcome.cause
