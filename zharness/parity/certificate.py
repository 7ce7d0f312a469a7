"""Prove that no sum in a cell is rounded, in any order of summation. This proof is the certificate of tier X.

Weights, inputs and targets are integers. The only divisions are by the number of samples and by the number of terms,
both powers of two, so every number in the cell is a multiple of q = 1 / (samples x terms). The certificate runs the
model in float64 on absolute values; for linear layers, residuals and ReLUs this bounds every partial sum in any order.
If the bound is below q x 2**significand, no bit is rounded away. In addition, the run in the cell's dtype has to be
bitwise equal to a run in float64. In a cell whose products are in TF32, every factor has to fit into its 11 bits, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from zharness.device.float32_products import Float32Products
from zharness.parity.baseline import Baseline, LocalResult, Objective, convert_to_float64, run_local
from zharness.parity.compare import CHUNK_ELEMENTS
from zharness.workload import Batch

SIGNIFICAND_BITS = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}


def is_power_of_two(number: int) -> bool:
    """Return whether ``number`` is a power of two. A division by such a number changes only the exponent."""
    return number > 0 and number & (number - 1) == 0


@dataclass(frozen=True)
class Exactness:
    """Whether tier X (bitwise comparison) applies to a cell, as the value of ``bool()``, and the reason if it does not.

    ``reason`` is empty for a model that does not claim to be exact.
    """

    applies: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.applies


NOT_EXACT = Exactness(False)


def as_exactness(exact: bool | Exactness) -> Exactness:
    """Return ``exact`` as an Exactness, without a reason if it is a bool."""
    return exact if isinstance(exact, Exactness) else Exactness(exact)


def division_exactness(terms: int) -> Exactness:
    """Return whether a division by ``terms`` is exact, which is the case only for a power of two."""
    if is_power_of_two(terms):
        return Exactness(True)
    return Exactness(False, f"a mean of {terms} terms is not exact: {terms} is not a power of two")


def single_term_mean_exactness(
    local: LocalResult, terms: int, dtype: torch.dtype, loss_scale: float = 1.0
) -> Exactness:
    """Return whether ``loss_scale`` times the mean over ``terms`` gradients is exact in ``dtype``.

    One of the gradients is that of ``local`` and all others are zero. A division by a power of two keeps the
    significand, except that it loses the last bit of a subnormal number.
    """
    if not is_power_of_two(terms):
        return division_exactness(terms)
    factor = loss_scale / terms
    if all(is_scaling_exact(grad.flatten(), factor, dtype) for grad in local.grads.values()):
        return Exactness(True)
    name = str(dtype).removeprefix("torch.")
    return Exactness(
        False, f"a mean of {terms} terms is not exact: a gradient divided by {terms} is not a number of {name}"
    )


def is_scaling_exact(grad: Tensor, factor: float, dtype: torch.dtype) -> bool:
    """Return whether every element of the flat ``grad`` times ``factor``, a power of two, is a number of ``dtype``."""
    pieces = (grad[start : start + CHUNK_ELEMENTS] for start in range(0, grad.numel(), CHUNK_ELEMENTS))
    if grad.dtype == dtype:
        return all(torch.equal(piece * factor / factor, piece) for piece in pieces)
    scaled = (piece.double() * factor for piece in pieces)
    return all(torch.equal(piece.to(dtype).double(), piece) for piece in scaled)


def certify_exactness(
    baseline: Baseline,
    steps: range,
    dtype: torch.dtype,
    objective: Objective | None = None,
    repeats: int = 1,
    params: Mapping[str, Tensor] | None = None,
) -> Exactness:
    """Return whether the gradients of the micro-steps ``steps``, and their mean over ranks and steps, are exact.

    Exact means that no number is rounded in ``dtype``. Each micro-step occurs ``repeats`` times in the mean.
    ``objective`` computes the loss (None: the loss of the model's spec); the loss must be linear in the output, with
    integer coefficients. ``params`` are the weights of these steps (None: the initial weights). For a model with random
    weights the answer is no, with an empty reason.
    """
    if not baseline.spec.exact:
        return Exactness(False)
    # The result for a law's own objective is not cached: the cache would keep the cell's tensors alive for nothing.
    if params is not None:
        return certify_exact_model(baseline, steps, dtype, objective or baseline.objective, repeats, params)
    return (certify_exact_model_cached if objective is None else certify_exact_model)(
        baseline, steps, dtype, objective or baseline.objective, repeats
    )


def certify_exact_model(
    baseline: Baseline,
    steps: range,
    dtype: torch.dtype,
    loss: Objective,
    repeats: int = 1,
    params: Mapping[str, Tensor] | None = None,
) -> Exactness:
    """Return the answer of ``certify_exactness`` for a model with integer weights, without the cache."""
    terms = baseline.data_size * len(steps) * repeats
    batches = ((baseline.batch(rank, step), loss) for rank in range(baseline.data_size) for step in steps)
    division = division_exactness(terms)
    return certify_sums(baseline, batches, dtype, terms * terms, params) if division else division


def certify_multiples(
    baseline: Baseline, batches: Iterable[tuple[Batch, Objective]], dtype: torch.dtype, terms: int
) -> Exactness:
    """Return the answer of ``certify_exactness`` for losses that are multiplied by the ``terms`` of the mean.

    The gradient of each batch is ``terms`` times the gradient of its objective, divided by a power of two, which
    changes only the exponent.
    """
    if not baseline.spec.exact:
        return Exactness(False)
    division = multiple_division_exactness(terms, dtype)
    return certify_sums(baseline, batches, dtype, terms * find_odd_part(terms)) if division else division


def find_odd_part(number: int) -> int:
    """Return the largest odd divisor of ``number``."""
    return number // (number & -number)


@lru_cache(maxsize=64)
def multiple_division_exactness(terms: int, dtype: torch.dtype) -> Exactness:
    """Return whether dividing a multiple of ``terms`` by ``terms`` is exact, also as a product with 1 / ``terms``.

    DDP multiplies by 1 / ``terms``. In float32, 7 x n times the rounded 1 / 7 is not n for every n, but 3 x n times the
    rounded 1 / 3 is n.
    """
    if is_power_of_two(terms):
        return Exactness(True)
    odd = find_odd_part(terms)
    numbers = torch.arange(1, 2 ** SIGNIFICAND_BITS[dtype] // odd + 1, dtype=torch.float32).to(dtype)
    if torch.equal(odd * numbers * torch.tensor(1 / odd, dtype=dtype), numbers):
        return Exactness(True)
    return Exactness(False, f"a mean of {terms} terms is not exact: a product with 1 / {terms} rounds multiples of it")


def certify_sums(
    baseline: Baseline,
    batches: Iterable[tuple[Batch, Objective]],
    dtype: torch.dtype,
    factor: int,
    params: Mapping[str, Tensor] | None = None,
) -> Exactness:
    """Return whether no sum of a batch is rounded in any order, even if the sum is ``factor`` times as large."""
    if all(is_locally_exact(baseline, batch, factor, dtype, loss, params) for batch, loss in batches):
        return Exactness(True)
    name = str(dtype).removeprefix("torch.")
    if baseline.products is Float32Products.TF32 and dtype is torch.float32:
        return Exactness(
            False,
            f"the {baseline.products.factor_bits} bits of tf32 do not hold every factor of the exact model, or "
            f"the {SIGNIFICAND_BITS[dtype]} bits of {name} every partial sum",
        )
    return Exactness(
        False, f"the {SIGNIFICAND_BITS[dtype]} bits of {name} do not hold every partial sum of the exact model"
    )


certify_exact_model_cached = lru_cache(maxsize=1024)(
    certify_exact_model
)  # the result is the same for every engine, stage and law


def is_locally_exact(
    baseline: Baseline,
    batch: Batch,
    factor: int,
    dtype: torch.dtype,
    loss: Objective,
    params: Mapping[str, Tensor] | None = None,
) -> bool:
    """Return whether no sum of one rank's gradients is rounded, even if the sum is ``factor`` times as large.

    For a mean of n gradients, ``factor`` is n x n. Every number is a multiple of q = 1 / (samples x n), because an
    engine may divide by n before it adds. If B is the bound of ``bound_partial_sums``, a sum of n gradients is at most
    n x B. So no sum is rounded if n x B < q x 2**bits, that is, if B x samples x n x n < 2**bits.
    """
    samples = len(batch.inputs)
    if not is_power_of_two(samples):
        return False
    return bound_partial_sums(baseline, batch, loss, params) * samples * factor < 2.0 ** SIGNIFICAND_BITS[dtype]


def bound_partial_sums(
    baseline: Baseline, batch: Batch, loss: Objective, params: Mapping[str, Tensor] | None = None
) -> float:
    """Return a bound of every partial sum of a forward and backward of an exact model with the weights ``params``.

    The bound is infinite if weights, inputs or targets are no integers, if the run in the cell's dtype differs from a
    run in float64, or if a factor of a product has too many bits.
    """
    model = baseline.build_module(params)
    if not all(is_integral(t) for t in [batch.inputs, batch.target, *model.parameters()]):
        return math.inf
    narrow = run_local(baseline.build_module(params), batch, loss)
    wide = run_local(*convert_to_float64(model, batch), loss)
    same = torch.equal(narrow.loss.double(), wide.loss) and all(
        torch.equal(narrow.grads[name].double(), grad) for name, grad in wide.grads.items()
    )
    if not same or not are_factors_exact(baseline, *convert_to_float64(model, batch), loss):
        return math.inf
    return largest_partial_sum(*convert_to_float64(model, batch, take_abs=True), loss)


def is_integral(tensor: Tensor) -> bool:
    """Return whether every element of ``tensor`` is an integer."""
    return torch.equal(tensor, tensor.round())


def largest_partial_sum(model: nn.Module, batch: Batch, loss: Objective) -> float:
    """Return the largest activation, activation gradient and parameter gradient of one forward and backward.

    The caller passes a model and a batch of absolute values, so that the result bounds every partial sum.
    """
    local, seen = record_activations(model, batch, loss)
    return max(float(tensor.abs().max()) for tensor in [local.loss, *local.grads.values(), *seen])


def are_factors_exact(baseline: Baseline, model: nn.Module, batch: Batch, loss: Objective) -> bool:
    """Return whether each factor of ``model``'s products stays the same when it is rounded to the bits of a factor.

    The factors are the weights, inputs, activations and activation gradients of a float64 ``model``. Their values do
    not depend on the order of summation if no sum is rounded. Factors of other dtypes than float32 are never rounded.
    """
    bits = baseline.products.factor_bits
    if baseline.products is Float32Products.FULL or baseline.dtype is not torch.float32:
        return True
    _, seen = record_activations(model, batch, loss)
    factors = [batch.inputs, *model.parameters(), *seen]
    return all(torch.equal(round_to_bits(factor, bits), factor) for factor in factors)


def round_to_bits(tensor: Tensor, bits: int) -> Tensor:
    """Return ``tensor`` with significands rounded to ``bits`` bits, the leading one included, ties to even."""
    significand, exponent = torch.frexp(tensor.detach())
    return torch.ldexp(torch.round(significand * 2.0**bits) * 2.0**-bits, exponent)


def record_activations(model: nn.Module, batch: Batch, loss: Objective) -> tuple[LocalResult, list[Tensor]]:
    """Return the result of one forward and backward, each module's output, and the gradient of each output."""
    seen: list[Tensor] = []

    def record_output(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            seen.append(tensor.detach())
            if tensor.requires_grad:  # the output of a frozen gate requires none
                tensor.register_hook(seen.append)  # type: ignore[no-untyped-call]

    hooks = [module.register_forward_hook(record_output) for module in model.modules()]
    local = run_local(model, batch, loss)
    for hook in hooks:
        hook.remove()
    return local, seen
