"""Define the law mesh.evaluation: forwards without gradients give plain PyTorch's outputs on every mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

from zharness.law_kit.integer_steps import SIGN_STEPS
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.program_exact import holds_sums
from zharness.law_kit.program_steps import EVAL_MODE_ACTS, get_grad_mode
from zharness.law_kit.rank_actions import eval_mode
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.record_comparisons import compare_initial_weights
from zharness.laws.mesh import mesh_law
from zharness.parity import Comparison, Part, compare_bitwise
from zharness.parity.certificate import bound_partial_sums
from zharness.workload import Batch, ModelSpec
from zharness.workload.programs import Act

ACTS = (Act.EVALUATION, Act.NO_GRAD, Act.INFERENCE)
LONGER = Act.INFERENCE  # the act whose forward gets longer sequences
TIMES = 2  # before and after a step
# The number of micro-batches in a forward: an expert then gets more than 4 tokens. Up to 4, DeepSpeed drops none.
JOINED = 4
SEQUENCE_DIM, SEQUENCE_DIMS = 1, 3  # the dimension of tokens, and the number of dimensions of inputs with tokens
# Added to biases after split matrices, so that bf16 cannot hold the numbers that ranks send in a forward.
LARGE = 257.0
LARGE_BIASES = ("first.bias", "value.bias", "out.bias", "moe.experts.*.bias")
MODELS = ("stepped_heads", "stepped_context", "routed")  # mesh.any_order_clipped evaluates stepped_sequence


def enlarge(spec: ModelSpec) -> ModelSpec:
    """Return the model with LARGE added to biases, except to their first element, by which a gate chooses experts."""
    return replace(spec, build=partial(build_enlarged, spec.build))


def build_enlarged(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model that ``build`` returns, with larger biases."""
    model = build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(fnmatchcase(name, pattern) for pattern in LARGE_BIASES):
                parameter[1:] += LARGE
    return model


def join_batches(batches: Sequence[Batch], act: Act) -> Batch:
    """Return one micro-batch with more samples, or longer sequences if ``act`` is LONGER and inputs have tokens."""
    inputs, targets = ([getattr(batch, part) for batch in batches] for part in ("inputs", "target"))
    dim = SEQUENCE_DIM if act is LONGER and inputs[0].dim() == SEQUENCE_DIMS else 0
    return Batch(torch.cat(inputs, dim), torch.cat(targets, dim))


def largest_output(output: Tensor, _batch: Batch) -> Tensor:
    """Return an objective whose gradients are 0, so that a bound on its sums is a bound on the forward's sums alone."""
    return output.detach().max() + 0 * output.sum()


def list_micro_batches(number: int) -> range:
    """Return the numbers of the micro-batches of forward ``number``."""
    return range(number * JOINED, (number + 1) * JOINED)


def observe_evaluation(ctx: RankContext) -> None:
    """Run forwards without gradients before and after a step, and record outputs and weights."""
    engine = ctx.build_engine_around(enlarge(ctx.spec).model(ctx.seed), optimizer=SIGN_STEPS)
    for step in range(TIMES):
        if step:
            ctx.train(engine, 0)
            engine.step()
            engine.zero_grad()
        ctx.record_weights(engine, step)
        for number, act in enumerate(ACTS):
            batch = join_batches([ctx.batch(micro) for micro in list_micro_batches(number)], act)
            with eval_mode(engine) if act in EVAL_MODE_ACTS else nullcontext(), get_grad_mode(act):
                ctx.record(f"output {act.value}", {"output": batch.feed(engine)}, step)
    engine.close()


def judge_evaluation(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare outputs bitwise with plain PyTorch's at the engine's weights, if the outputs round no sum."""
    ctx = replace(ctx, baseline=replace(ctx.baseline, spec=enlarge(ctx.baseline.spec)))
    yield from compare_initial_weights(ctx)
    for step in range(TIMES):
        weights = ctx.rank_records("params", step)[0] if step else None
        module = ctx.baseline.build_module(weights)
        for number, act in enumerate(ACTS):
            batches = [
                join_batches([ctx.baseline.batch(at, micro) for micro in list_micro_batches(number)], act)
                for at in range(ctx.data_size)
            ]
            bounds = [bound_partial_sums(ctx.baseline, each, largest_output, weights) for each in batches]
            if not holds_sums(ctx, max(bounds), step):
                continue
            module.train(act not in EVAL_MODE_ACTS)
            expected = [ctx.baseline.compute_output(module, batch).detach() for batch in batches]
            for rank, record in enumerate(ctx.rank_records(f"output {act.value}", step)):
                place = ctx.location("output", Part.FORWARD, step, rank)
                yield compare_bitwise(place, expected[ctx.data_coordinate(rank)], record["output"])


LAWS = (
    mesh_law(
        "evaluation",
        "a forward in evaluation mode, no_grad or inference_mode gives plain PyTorch's output before and after a step",
        observe_evaluation,
        judge_evaluation,
        models=MODELS,
        kept_because="names the mode of a wrong forward, and makes one step instead of running a program",
    ),
)
