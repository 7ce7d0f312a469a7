"""Every law of backwards, transforms, checkpoints and parameters fails on an engine that breaks it."""

from collections.abc import Iterator

import pytest

from zharness.case import Case
from zharness.parity import Part
from zharness.run import Request, Runner, Verdict, plan
from zharness.run.runner import surroundings

GRADIENT, REDUCED = Part.LOCAL_GRADIENT, Part.REDUCTION

# (engine, check, model, variant): the law that has to notice, and the part of the step it has to name.
KILLS = {
    ("autograd:doubles_every_gradient", "backward.engine_backward", "blocks", ""): REDUCED,
    ("autograd:doubles_every_gradient", "backward.tensor_backward", "blocks", ""): REDUCED,
    ("autograd:doubles_every_gradient", "backward.non_scalar", "blocks", ""): REDUCED,
    ("autograd:doubles_what_comes_to_its_output", "backward.joint_loss", "blocks", ""): REDUCED,
    ("autograd:only_the_first_backward_counts", "backward.auxiliary_loss", "blocks", ""): REDUCED,
    ("autograd:doubles_every_gradient", "backward.without_grad", "blocks", ""): REDUCED,
    ("autograd:divides_every_backward", "backward.autograd_grad", "blocks", ""): GRADIENT,
    ("autograd:doubles_what_comes_to_its_output", "backward.backward_inputs", "blocks", ""): GRADIENT,
    ("autograd:doubles_what_comes_to_its_output", "backward.recurrent", "blocks", ""): REDUCED,
    ("autograd:only_the_first_backward_counts", "backward.outputs", "blocks", ""): REDUCED,
    ("autograd:only_the_first_backward_counts", "backward.two_outputs_two_backwards", "blocks", ""): REDUCED,
    ("autograd:only_the_first_backward_counts", "backward.backward_in_forward", "blocks", ""): REDUCED,
    (":zero_grad_forgets_nothing", "backward.abort_and_retry", "blocks", ""): REDUCED,
    ("autograd:only_the_first_backward_counts", "double_backward.retained_same_loss", "blocks", ""): REDUCED,
    (":zero_grad_forgets_nothing", "double_backward.retain_leaks_nothing", "blocks", ""): REDUCED,
    ("autograd:weights_exchanged_unseen", "double_backward.step_between_retained_backwards", "blocks", ""): GRADIENT,
    ("autograd:first_order_only", "double_backward.gradient_penalty", "blocks", ""): GRADIENT,
    (":scaled_transform", "torch_func.grad_and_value", "mlp", ""): GRADIENT,
    (":scaled_transform", "torch_func.has_aux", "mlp", ""): GRADIENT,
    (":scaled_transform", "torch_func.vjp", "mlp", ""): GRADIENT,
    (":scaled_transform", "torch_func.jvp", "mlp", ""): GRADIENT,
    (":scaled_transform", "torch_func.jacrev", "mlp", ""): GRADIENT,
    (":scaled_transform", "torch_func.jacfwd", "mlp", ""): GRADIENT,
    (":scaled_transform", "torch_func.hessian", "mlp", ""): GRADIENT,
    (":silent_transform", "torch_func.hessian", "mlp", ""): GRADIENT,
    (":scaled_transform", "torch_func.vmap", "mlp", ""): GRADIENT,
    ("autograd:flipped_parameters", "torch_func.functional_call", "mlp", ""): GRADIENT,
    (":scaled_transform", "torch_func.identities", "exact", ""): GRADIENT,
    ("autograd:only_the_first_backward_counts", "torch_func.inside_forward", "blocks", ""): REDUCED,
    (":scaled_transform", "torch_func.through_transforms", "blocks", ""): GRADIENT,
    ("autograd:only_the_first_backward_counts", "checkpointing.block", "blocks", "reentrant"): REDUCED,
    ("autograd:doubles_every_gradient", "checkpointing.block", "blocks", "non_reentrant"): REDUCED,
    ("autograd:only_the_first_backward_counts", "checkpointing.nested", "blocks", "reentrant"): REDUCED,
    ("autograd:doubles_every_gradient", "checkpointing.whole_model", "blocks", "reentrant"): REDUCED,
    ("autograd:only_the_first_backward_counts", "checkpointing.two_regions", "blocks", "reentrant"): REDUCED,
    ("autograd:only_the_first_backward_counts", "checkpointing.frozen", "blocks", "reentrant"): REDUCED,
    ("autograd:doubles_every_gradient", "checkpointing.plain_inputs", "blocks", "non_reentrant"): REDUCED,
    ("autograd:only_the_first_backward_counts", "checkpointing.accumulation", "blocks", "non_reentrant"): REDUCED,
    ("autograd:only_the_first_backward_counts", "checkpointing.non_scalar", "blocks", "reentrant"): REDUCED,
    (":zero_grad_forgets_nothing", "checkpointing.exception", "blocks", "reentrant"): REDUCED,
    ("autograd:draws_while_recomputing", "checkpointing.dropout", "blocks", "non_reentrant"): REDUCED,
    ("autograd:doubles_every_gradient", "parameters.every_kind", "odd", ""): REDUCED,
    ("autograd:only_the_first_backward_counts", "parameters.used_on_some_ranks", "odd", ""): REDUCED,
    ("autograd:only_the_first_backward_counts", "parameters.outside_its_module", "odd", ""): REDUCED,
    ("autograd:edits_stay_where_they_are_made", "parameters.edited", "odd", ""): GRADIENT,
    ("autograd:decays_the_unused", "parameters.stay_put", "odd", ""): Part.OPTIMIZER,
    ("autograd:draws_twice_at_construction", "parameters.deferred", "mlp", ""): Part.GATHER,
    ("autograd:doubles_every_gradient", "parameters.late_submodule", "odd", ""): REDUCED,
}

# A gradient that should not be there, or is missing, is no wrong number: the engine's contract says which there are.
MISNAMED = {
    ("autograd:zeros_for_unused", "parameters.every_kind"): "'unused.bias', 'unused.weight']",
    (":zero_grad_forgets_nothing", "parameters.branch"): "unknown ['branch.bias', 'branch.weight']",
    ("autograd:frozen_for_good", "parameters.frozen_and_unfrozen"): "missing ['frozen.bias', 'frozen.weight']",
}
BROKEN = {"autograd": "suites.meta.broken_autograd:", "": "suites.meta.broken:"}


def path_of(engine: str) -> str:
    file, name = engine.split(":")
    return BROKEN[file] + name


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    names = sorted({path_of(engine) for engine, *_ in (*KILLS, *MISNAMED)})
    with Runner({name: surroundings(name) for name in names}, timeout=10.0) as started:
        yield started


@pytest.mark.parametrize("key", KILLS, ids=lambda key: "-".join(filter(None, key)).replace(":", "-").strip("-"))
def test_a_broken_engine_fails_the_law_and_the_part_is_named(runner: Runner, key: tuple[str, ...]) -> None:
    engine, check, model, variant = key
    (planned,) = plan(Request(patterns=(Case(check, path_of(engine), 0, 2, "fp32", model, variant).id,)), runner.claims)
    assert not planned.unsupported, planned.unsupported
    record = runner.run(planned)
    assert record.verdict is Verdict.FAIL, record.cause
    assert record.divergence is not None, record.cause
    assert record.divergence.part is KILLS[key], record.cause


@pytest.mark.parametrize("key", MISNAMED, ids=lambda key: key[1])
def test_a_gradient_too_many_or_too_few_fails_the_law(runner: Runner, key: tuple[str, str]) -> None:
    engine, check = key
    (planned,) = plan(Request(patterns=(Case(check, path_of(engine), 0, 2, "fp32", "odd").id,)), runner.claims)
    record = runner.run(planned)
    assert record.verdict is Verdict.FAIL, record.cause
    assert MISNAMED[key] in record.cause
