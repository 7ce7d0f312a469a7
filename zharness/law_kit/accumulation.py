"""Train one accumulation window on a rank, and judge the gradients that the engine computes in it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import Tensor

from zharness.engines.protocol import AccumulationOwner, Engine
from zharness.law_kit.judge_context import JudgeContext, stop_at_first_mismatch
from zharness.law_kit.rank_context import RankContext
from zharness.parity import Comparison
from zharness.parity.baseline import LocalResult, Objective
from zharness.parity.certificate import Exactness
from zharness.workload import Batch


def accumulate(
    ctx: RankContext,
    engine: Engine,
    owner: AccumulationOwner,
    window: range,
    label: str,
    backward: Callable[[Tensor], object],
    after_first: Callable[[], object] = lambda: None,
) -> None:
    """Run forward and ``backward`` for every micro-batch of ``window``, but no optimizer step at the end.

    The losses are recorded under ``label``. If the caller owns the accumulation, each loss is divided by the number of
    micro-batches. If the engine owns the accumulation, ``engine.step()`` is called after each micro-batch except the
    last. ``after_first`` is called after the first micro-batch.
    """
    for micro in window:
        loss = ctx.loss(engine, micro, label)
        backward(loss if owner is AccumulationOwner.ENGINE else loss / len(window))
        if owner is AccumulationOwner.ENGINE and micro != window[-1]:
            engine.step()
        if micro == window[0]:
            after_first()


def judge_engine_divided_gradients(
    ctx: JudgeContext,
    label: str,
    step: int,
    window: range,
    params: Mapping[str, Tensor],
    divided_locals: Sequence[Sequence[LocalResult]],
    exact: bool | Exactness = False,
) -> Iterator[Comparison]:
    """Compare the gradients of an accumulation window in which the engine divides by the number of micro-batches.

    An engine may divide each loss, the gradient at each output of its forward, or the gradients of the parameters. All
    three ways are right, but they round differently unless the divisor is a power of two. All gradients have to match
    the result of the same way. ``divided_locals`` are the local gradients that plain PyTorch computes from divided
    losses. If no way matches every gradient, this function yields the comparisons for the way that matches most
    gradients, because a wrong engine is usually right in most gradients.
    """
    steps = len(window)
    compare = partial(ctx.compare_reduced_grads, label, step=step, exact=exact)

    def compare_divided_outputs(explain: bool) -> Iterator[Comparison]:
        """Compare with the gradients that plain PyTorch computes if the gradients of its outputs are divided."""
        objective = divide_output_gradients(ctx.baseline.objective, steps)
        locals_ = [ctx.compute_local_grads(micro, params, objective) for micro in window]
        return compare(micros=locals_, scale=steps, explain=explain)

    def compare_divided_gradients(explain: bool) -> Iterator[Comparison]:
        """Compare with plain PyTorch's gradients of undivided losses, which this function then divides."""
        return compare(micros=[ctx.compute_local_grads(micro, params) for micro in window], explain=explain)

    ways = (
        lambda explain: compare(micros=divided_locals, scale=steps, explain=explain),
        compare_divided_gradients,
        compare_divided_outputs,
    )
    for way in ways:
        comparisons = list(stop_at_first_mismatch(way(explain=False)))
        if count_matches(comparisons) == len(comparisons):
            yield from comparisons
            return
    # If several ways match equally many gradients, ``max`` returns the first: the division of gradients. Its hints name
    # an exact factor.
    yield from max((list(way(explain=True)) for way in (ways[1], ways[0], ways[2])), key=count_matches)


def divide_output_gradients(objective: Objective, divisor: int) -> Objective:
    """Return a version of ``objective`` that divides the gradient of every tensor in the model's output by ``divisor``.

    DeepSpeed 0.18.3 to 0.19.5 divide these gradients. Later releases do so only in backwards other than
    ``engine.backward``. A gradient is divided once, even if one output was computed from another or is a parameter.
    """

    def compute_divided(output: Any, batch: Batch) -> Tensor:
        """Return the loss of ``output``."""
        aliases: dict[int, Tensor] = {}  # a tensor that occurs twice has one gradient

        def divide_gradient(tensor: Tensor) -> Tensor:
            """Return an alias of ``tensor`` that divides the gradient of the loss; the model itself uses no alias."""
            if tensor.requires_grad and id(tensor) not in aliases:
                aliases[id(tensor)] = tensor.view_as(tensor)
                aliases[id(tensor)].register_hook(lambda grad: grad / divisor)  # type: ignore[no-untyped-call]
            return aliases.get(id(tensor), tensor)

        return objective(replace_tensors(output, divide_gradient), batch)

    return compute_divided


def replace_tensors(output: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a model's output in which each tensor is ``function(tensor)``.

    The tensors may be in dictionaries, lists, tuples and dataclasses of any depth.
    """
    if isinstance(output, Tensor):
        return function(output)
    if isinstance(output, dict):
        changed = copy.copy(output)
        for key, value in output.items():  # not by update(): the output classes of transformers refuse it
            changed[key] = replace_tensors(value, function)
        return changed
    if isinstance(output, (list, tuple)):
        values = [replace_tensors(value, function) for value in output]
        return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)
    if is_dataclass(output) and not isinstance(output, type):
        replaced: Any = copy.copy(output)
        for field in fields(output):
            object.__setattr__(replaced, field.name, replace_tensors(getattr(output, field.name), function))
        return replaced
    return output


def count_matches(comparisons: Sequence[Comparison]) -> int:
    """Return the number of comparisons that passed."""
    return sum(comparison.mismatch is None for comparison in comparisons)


def select_accumulation_owner(ctx: RankContext) -> AccumulationOwner:
    """Return the owner of the accumulation in the configured training.

    The owner is the engine if the engine claims that it can accumulate, and otherwise the code that calls the engine.
    """
    engine_owns = AccumulationOwner.ENGINE in ctx.accumulation_owners()
    return AccumulationOwner.ENGINE if engine_owns else AccumulationOwner.CALLER


def build_configured_engine(ctx: RankContext) -> Engine:
    """Build an engine around the model with the optimizer, clipping and accumulation that the user configured."""
    training = ctx.training
    return ctx.build_engine(
        optimizer=training.optimizer,
        clip=training.clip,
        accumulation_steps=training.accumulation,
        accumulation_owner=select_accumulation_owner(ctx),
    )
