"""Record the random numbers that a run draws, as dropout does, and give each sample the same numbers in another run.

Tier C runs plain PyTorch on single samples and on permuted samples. With dropout such a run is comparable only if each
sample gets the mask that it has in the whole micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zharness.errors import ZHarnessError
from zharness.workload.generators import have_drawn_since, read_generator_states

Result = TypeVar("Result")
DROPOUT = torch.ops.aten.native_dropout.default  # the dropout of GPUs; on a CPU, dropout calls bernoulli_


class SharedDrawError(ZHarnessError):
    """Raised for random numbers that cannot be assigned to samples."""


class _DrawRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that appends every drawn tensor to ``draws``."""

    def __init__(self, draws: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result, has_drawn = call_and_detect_draw(func, args, kwargs or {})
        if has_drawn:
            self._draws.append(require_draw(func, result).detach().clone())
        return result


class _DrawReplayer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that replaces the numbers that each operation draws by the recorded numbers of the samples ``rows``."""

    def __init__(self, draws: Sequence[Tensor], rows: Tensor, samples: int, dims: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws: Iterator[tuple[Tensor, int]] = iter(zip(draws, dims, strict=True))
        self._rows, self._samples = rows, samples

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result, has_drawn = call_and_detect_draw(func, args, kwargs or {})
        if not has_drawn:
            return result
        draw, dim = next(self._draws, (None, 0))
        if draw is None:
            raise SharedDrawError("a run of some samples draws more random tensors than the run of all samples")
        drawn = require_draw(func, result)
        drawn.copy_(select_rows(draw, self._rows, self._samples, drawn.shape, dim))
        return result if func is not DROPOUT else (drop(args[0], drawn, args[1]), drawn)


def drop(tensor: Tensor, mask: Tensor, probability: float) -> Tensor:
    """Return the output of dropout with this mask of the elements that are kept."""
    return tensor * mask * (1 / (1 - probability) if probability < 1 else 0.0)


def call_and_detect_draw(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, bool]:
    """Return the result of an operation, and whether the operation drew numbers from one of torch's generators.

    An operation that can draw does not always draw: attention without dropout draws nothing.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return func(*args, **kwargs), False
    before = read_generator_states()
    result = func(*args, **kwargs)
    return result, have_drawn_since(before)


def require_draw(func: Any, result: Any) -> Tensor:
    """Return the tensor that an operation drew: its result, or for a GPU's dropout the mask, its second result.

    Raises SharedDrawError if the operation drew anything else than one tensor.
    """
    if func is DROPOUT:
        return result[1]  # type: ignore[no-any-return]
    if not isinstance(result, Tensor):
        raise SharedDrawError(f"an operation that draws random numbers returned a {type(result).__name__}")
    return result


def select_rows(draw: Tensor, rows: Tensor, samples: int, shape: torch.Size, dim: int = 0) -> Tensor:
    """Return the part of ``draw`` that belongs to the samples ``rows``; ``shape`` is the shape that it has to have.

    Several rows in succession may belong to one sample, as the heads of attention do. Raises SharedDrawError if the
    dimension ``dim`` does not count the samples.
    """
    if draw.dim() and draw.shape[dim] % samples == 0:
        first = draw.movedim(dim, 0)
        chosen = first.reshape(samples, -1, *first.shape[1:])[rows].flatten(0, 1).movedim(0, dim)
        if chosen.shape == shape:
            return chosen
    raise SharedDrawError(
        f"the forward draws a random tensor of shape {tuple(draw.shape)} for {samples} samples; a row for each sample "
        "is needed in one dimension"
    )


def find_sample_dims(draws: Sequence[Tensor], parts: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the dimension of each of ``draws`` that counts samples: the one in which a run of fewer samples differs.

    ``parts`` are the draws of that run. The result is 0 for a draw in which no dimension differs, or several do. A
    layer such as nn.LSTM puts the samples behind the positions.
    """
    dims = []
    for number, draw in enumerate(draws):
        part = parts[number] if number < len(parts) else draw
        differing = [dim for dim, sizes in enumerate(zip(draw.shape, part.shape, strict=False)) if sizes[0] != sizes[1]]
        dims.append(differing[0] if len(differing) == 1 else 0)
    return tuple(dims)


def record_draws(run: Callable[[], object]) -> tuple[Tensor, ...]:
    """Call ``run``, and return every tensor of random numbers that it drew, in order.

    Raises SharedDrawError if an operation drew anything else than one tensor.
    """
    draws: list[Tensor] = []
    with _DrawRecorder(draws):
        run()
    return tuple(draws)


def replay_draws(
    run: Callable[[], Result], draws: Sequence[Tensor], rows: Tensor, samples: int, dims: Sequence[int] = ()
) -> Result:
    """Return ``run()``, in which every random tensor has the numbers of the samples ``rows`` in the recorded ``draws``.

    ``samples`` is the number of samples of the recorded run. ``dims`` has, for each draw, the dimension that counts
    samples, by default the first. Raises SharedDrawError if a draw has no row for each sample in this dimension.
    """
    if not draws:
        return run()
    with _DrawReplayer(draws, rows, samples, dims or [0] * len(draws)):
        return run()


def permute_rows(count: int, seed: int) -> Tensor:
    """Return the indices of ``count`` samples in the order that ``seed`` determines."""
    return torch.randperm(count, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
