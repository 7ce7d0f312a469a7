"""Normalize over the rows of all ranks on any device, as torch's SyncBatchNorm does only on GPUs.

torch's SyncBatchNorm has no kernels for a CPU, and its forward and DDP refuse a CPU. ``replace_synchronized_norms``
makes it compute like a ``SynchronizedBatchNorm``. Ranks exchange sums through the default process group; the baseline
runs all ranks of a step in threads of one process (``run_jointly``), which exchange the same sums.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from zharness.workload.generators import read_generator_states, set_generator_states

T = TypeVar("T")


class Exchange(Protocol):
    """Gives every rank the tensors of all ranks."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors that all ranks pass to this call, in rank order; all tensors have the same shape."""


class GroupExchange:
    """An exchange between processes, over the default process group."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, by an all-gather."""
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, tensor)
        return gathered


class JointRun:
    """Runs one function for each rank in a thread of its own, one thread at a time.

    A thread runs until it needs the other ranks' tensors, and then passes its turn to the next rank. So the order of
    all operations is always the same, and each rank continues with its own state of torch's generators.
    """

    def __init__(self, size: int) -> None:
        self._changed = threading.Condition()
        self._size, self._turn = size, 0
        self._running = set(range(size))
        self._rounds: list[dict[int, Tensor]] = []
        self._error: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Return the results of ``functions`` in order. Raises the first exception of a function."""
        results: dict[int, T] = {}
        # torch keeps these settings for each thread.
        has_grad, infers, device = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_device(),
        )
        on_device = nullcontext() if device.type == "cpu" else device

        def run_rank(rank: int) -> None:
            """Run the function of ``rank`` and keep its result, or its exception if it is the first."""
            _THREAD.exchange = JointExchange(self, rank)
            try:
                self.wait_for_turn(rank)
                with torch.inference_mode(infers), torch.set_grad_enabled(has_grad), on_device:
                    results[rank] = functions[rank]()
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                self._error = self._error or error
            finally:
                self.end(rank)

        threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(len(functions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return [results[rank] for rank in range(len(functions))]

    def gather(self, rank: int, number: int, tensor: Tensor) -> list[Tensor]:
        """Return the tensors that all ranks pass to their gather ``number``, counted from 0, in rank order."""
        if number == len(self._rounds):
            self._rounds.append({})
        self._rounds[number][rank] = tensor
        generator_states = read_generator_states()
        self.pass_turn(rank)
        self.wait_for_turn(rank)
        set_generator_states(generator_states)
        found = self._rounds[number]
        if len(found) < self._size:
            raise RuntimeError("one rank calls a SyncBatchNorm more often than another, which would wait without end")
        return [found[at] for at in sorted(found)]

    def wait_for_turn(self, rank: int) -> None:
        """Wait until it is the turn of ``rank``. Raises RuntimeError if another rank has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank or self._error is not None)
        if self._error is not None:
            raise RuntimeError("another rank failed") from self._error

    def pass_turn(self, rank: int) -> None:
        """Give the turn to the next rank that has not ended."""
        with self._changed:
            later = sorted(self._running, key=lambda other: (other <= rank, other))
            self._turn = later[0] if later else rank
            self._changed.notify_all()

    def end(self, rank: int) -> None:
        """Note that the function of ``rank`` has ended, and give the turn to the next rank."""
        with self._changed:
            self._running.discard(rank)
        self.pass_turn(rank)


class JointExchange:
    """The exchange of one rank of a ``JointRun``."""

    def __init__(self, joint_run: JointRun, rank: int) -> None:
        self._joint_run, self._rank, self._calls = joint_run, rank, 0

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks of the run."""
        number, self._calls = self._calls, self._calls + 1
        return self._joint_run.gather(self._rank, number, tensor)


class _ThreadExchange(threading.local):
    """The exchange of the current thread, if the thread is a rank of a ``JointRun``."""

    exchange: Exchange | None = None


_THREAD = _ThreadExchange()


def run_jointly(functions: Sequence[Callable[[], T]]) -> list[T]:
    """Run one function for each rank, with synchronized norms that see all ranks' rows; return the results in order."""
    return JointRun(len(functions)).run(functions)


def find_exchange() -> Exchange | None:
    """Return the exchange of this rank, or None if there is only one rank."""
    if _THREAD.exchange is not None:
        return _THREAD.exchange
    has_peers = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return GroupExchange() if has_peers else None


class SynchronizedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm over the rows of all ranks, with the parameters, buffers and modes of torch's SyncBatchNorm.

    The module computes in float64 and rounds once, so that its numbers do not depend on how rows are divided among
    ranks.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of torch's own argument
        """Normalize ``input`` of shape (rows, channels, ...), in training mode with the statistics of all ranks."""
        exchange = find_exchange()
        if not self.training or exchange is None:
            return super().forward(input)
        normalized, mean, variance, count = normalize_over_ranks(input.double(), self.eps, exchange)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            self.update_statistics(mean, variance * count / (count - 1))
        shape = (1, -1) + (1,) * (input.dim() - 2)
        if self.affine:
            normalized = normalized * self.weight.double().view(shape) + self.bias.double().view(shape)
        rounded: Tensor = normalized.to(input.dtype)
        return rounded

    def update_statistics(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics toward the mean and the unbiased variance of one forward."""
        assert self.num_batches_tracked is not None, "it comes with the running statistics"
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            for running, seen in ((self.running_mean, mean), (self.running_var, variance)):
                assert running is not None, "the caller has looked"
                running.copy_((1 - share) * running.double() + share * seen)

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - as above
        """Raise ValueError for an input without channels."""
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {input.dim()}")


class NormalizeOverRanks(torch.autograd.Function):
    """An autograd function that normalizes each channel of float64 rows by the mean and variance over all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, eps: float, exchange: Exchange) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the normalized rows, and the mean, the biased variance (a number for each channel) and the count."""
        dims, shape = channel_dims(rows)
        local_count = rows.new_full((1,), rows.numel() // rows.size(1))
        sums = sum_over_ranks(exchange, torch.cat([rows.sum(dims), local_count]))
        mean, count = sums[:-1] / sums[-1], sums[-1:]
        centred = rows - mean.view(shape)
        variance = sum_over_ranks(exchange, centred.square().sum(dims)) / count
        scale = (variance + eps).rsqrt().view(shape)
        normalized = centred * scale
        ctx.save_for_backward(normalized, scale, count)
        ctx.exchange = exchange
        ctx.mark_non_differentiable(mean, variance, count)
        return normalized, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_statistics: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the rows, to which the losses of all ranks contribute."""
        normalized, scale, count = ctx.saved_tensors
        dims, shape = channel_dims(normalized)
        parts = torch.stack([grad.sum(dims), (grad * normalized).sum(dims)])
        mean_grad, mean_product = (part.view(shape) for part in sum_over_ranks(ctx.exchange, parts) / count)
        return scale * (grad - mean_grad - normalized * mean_product), None, None


def normalize_over_ranks(rows: Tensor, eps: float, exchange: Exchange) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Call ``NormalizeOverRanks``."""
    return NormalizeOverRanks.apply(rows, eps, exchange)  # type: ignore[no-any-return, no-untyped-call]


def channel_dims(rows: Tensor) -> tuple[list[int], tuple[int, ...]]:
    """Return the dimensions over which a channel is summed, and the shape that spreads a number for each channel."""
    return [0, *range(2, rows.dim())], (1, -1) + (1,) * (rows.dim() - 2)


def sum_over_ranks(exchange: Exchange, tensor: Tensor) -> Tensor:
    """Return the sum of the ranks' tensors, in rank order."""
    total = torch.zeros_like(tensor)
    for part in exchange.gather(tensor):
        total = total + part
    return total


def replace_synchronized_norms(model: nn.Module) -> nn.Module:
    """Make each torch.nn.SyncBatchNorm of ``model`` compute like a ``SynchronizedBatchNorm``, and return ``model``.

    The modules stay the same objects, with their parameters, buffers, settings and hooks: only their class changes, as
    the two classes have the same attributes.
    """
    for module in model.modules():
        if is_replaceable(module):
            module.__class__ = SynchronizedBatchNorm
    return model


def is_replaceable(module: nn.Module) -> bool:
    """Return whether ``module`` is torch's SyncBatchNorm over all ranks, and no subclass."""
    return type(module) is nn.SyncBatchNorm and module.process_group is None


def has_synchronized_norm(model: nn.Module) -> bool:
    """Return whether a training forward of ``model`` needs the rows of all ranks."""
    return any(isinstance(module, SynchronizedBatchNorm) for module in model.modules())


def has_independent_ranks(model: nn.Module) -> bool:
    """Return whether a rank's gradients depend only on its own loss, and not on other ranks by a SyncBatchNorm."""
    return not has_synchronized_norm(model)
