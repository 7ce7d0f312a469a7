"""Every law of resources, and of training told by varying one thing, fails on an engine that breaks it."""

from collections.abc import Iterator

import pytest

from zharness.case import Case
from zharness.parity import Part
from zharness.run import Request, Runner, Verdict, plan
from zharness.run.runner import surroundings

RESOURCES, TRAINING = "suites.meta.broken_resources:", "suites.meta.broken:"

# (engine, check, variant): the law that has to notice, and the part of the step it has to name.
KILLS = {
    (RESOURCES + "holds_the_state_twice", "resources.memory_per_rank", ""): Part.GATHER,
    (RESOURCES + "sends_twice", "resources.comm_volume", ""): Part.REDUCTION,
    (RESOURCES + "stays_gathered", "resources.gathered_bytes", ""): Part.GATHER,
    (RESOURCES + "leaves_tensors_behind", "resources.no_leak", ""): Part.GATHER,
    (RESOURCES + "reads_fresh_memory", "resources.poisoned_memory", ""): Part.REDUCTION,
    (RESOURCES + "looks_at_all_for_each", "resources.hook_count", ""): Part.REDUCTION,
    (RESOURCES + "decays_gradients", "training.loss_scale_power", ""): Part.LOCAL_GRADIENT,
    (TRAINING + "steps_late", "training.sgd_step", ""): Part.OPTIMIZER,
    (TRAINING + "one_rank_slips", "training.ranks_agree", ""): Part.GATHER,
    (RESOURCES + "buckets_count", "training.config_invariance", ""): Part.REDUCTION,
    (RESOURCES + "always_the_mean", "training.sum_or_mean", ""): Part.REDUCTION,
    (RESOURCES + "forgets_the_unsynced", "training.no_sync", ""): Part.ACCUMULATION,
    (TRAINING + "loses_a_micro_batch", "training.several_backwards", ""): Part.ACCUMULATION,
    (RESOURCES + "clips_to_half", "training.clip_and_norm", ""): Part.OPTIMIZER,
    (RESOURCES + "remembers_forwards", "training.forward_alone", "no_grad"): Part.REDUCTION,
}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    names = sorted({engine for engine, *_ in KILLS})
    with Runner({name: surroundings(name) for name in names}, timeout=10.0) as started:
        yield started


@pytest.mark.parametrize("key", KILLS, ids=lambda key: "-".join(filter(None, (key[0].split(":")[1], *key[1:]))))
def test_a_broken_engine_fails_the_law_and_the_part_is_named(runner: Runner, key: tuple[str, ...]) -> None:
    engine, check, variant = key
    (planned,) = plan(Request(patterns=(Case(check, engine, 0, 2, "fp32", "mlp", variant).id,)), runner.claims)
    assert not planned.unsupported, planned.unsupported
    record = runner.run(planned)
    assert record.verdict is Verdict.FAIL, record.cause
    assert record.divergence is not None, record.cause
    assert record.divergence.part is KILLS[key], record.cause
