"""Run collectives on host copies of their tensors, one after another, in a thread of their process group.

A collective is issued, executed and delivered. The caller issues it on its own thread and stream; from then on, the
inputs count as read and the outputs as undefined. The thread of the process group copies the inputs to the host, after
the work that the caller's stream had queued at the issue, and exchanges them. When the caller waits, the results are
copied into the outputs on the stream that waits. If the caller never waits, its outputs keep their old bytes: with
``Poison.ON`` these are bytes of 0xFF, which are NaN in every floating-point dtype and -1 in every signed integer dtype.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zharness.device import Poison
from zharness.errors import EngineContractError
from zharness.torch_private import suspend_transforms

POISON_BYTE = 0xFF


Finish = Callable[[], threading.Lock]  # ends an exchange, and returns the lock that its callers wait for
RunFinish = Callable[[list[Finish]], None]  # removes the only function from the list and calls it


@dataclass(frozen=True)
class Exchange:
    """A started exchange of host tensors: after ``works``, ``finish`` returns one result for each output."""

    works: Sequence[Any]
    finish: Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Request:
    """A collective: the tensors that it reads and writes, and ``start``, which exchanges host copies of ``inputs``.

    ``name`` is the collective's name in torch.distributed.
    """

    name: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    start: Callable[[Sequence[Tensor]], Exchange]


@dataclass(frozen=True)
class Outcome:
    """The outcome of an exchange: one result for each output, or an error."""

    results: Sequence[Tensor]
    error: BaseException | None = None


class StagedWork(dist.Work):
    """The handle of an issued collective. ``wait`` delivers the results, or raises the error of the exchange."""

    def __init__(self, request: Request, poison: Poison) -> None:
        super().__init__()
        self._request = request
        # Clone the inputs, because poisoning an output also overwrites an input that is a view of the output.
        self._copies = [copy_bytes(tensor) for tensor in request.inputs] if poison is Poison.ON else None
        if poison is Poison.ON:
            for output in request.outputs:
                poison_tensor(output)
        self._issue_event = record_event([*request.inputs, *request.outputs])
        # Hold this lock until the exchange has ended. threading.Event waits in Python code, whose calls a law counts.
        self._exchange_lock = threading.Lock()
        self._exchange_lock.acquire()
        self._outcome: Outcome | None = None
        self._delivery_lock = threading.Lock()
        self._delivery_events: list[torch.cuda.Event | None] = []  # one entry once the results are delivered
        self._future: torch.futures.Future[Any] | None = None

    def start(self) -> Finish:
        """Copy the inputs to the host and start the exchange; return the function that ends it."""
        try:
            sources = self._request.inputs if self._copies is None else self._copies
            host = [copy_to_host(source, self._issue_event, self._request.name) for source in sources]
            exchange = self._request.start(host)
        except BaseException as error:  # noqa: BLE001 - raised where the caller waits
            return partial(self._conclude, Outcome((), error))
        return partial(self._finish, exchange)

    def _finish(self, exchange: Exchange) -> threading.Lock:
        """Wait for the exchange, and keep its results for the caller."""
        try:
            for work in exchange.works:
                work.wait()
            # Use pinned memory, so that the copy to the GPU does not block the host.
            on_gpu = self._issue_event is not None
            results = [
                result.pin_memory() if on_gpu and not result.is_sparse else result for result in exchange.finish()
            ]
        except BaseException as error:  # noqa: BLE001 - raised where the caller waits
            return self._conclude(Outcome((), error))
        return self._conclude(Outcome(results))

    def _conclude(self, outcome: Outcome) -> threading.Lock:
        """Store the outcome, and complete the future if the caller asked for one; return the lock to release.

        The future is completed in a new thread, because its callbacks may wait for another collective.
        """
        with self._delivery_lock:
            self._outcome, future = outcome, self._future
        if future is not None:
            run_in_thread(lambda: self._complete(future))
        return self._exchange_lock

    def wait(self, timeout: Any = None) -> bool:
        """Block until the exchange has ended, and deliver the results on the current stream.

        A later call makes the current stream wait for that delivery. ``timeout`` is ignored: exchanges have the
        time-out of their group.
        """
        del timeout
        with self._exchange_lock:  # several threads may wait
            pass
        self._deliver()
        return True

    def _deliver(self) -> None:
        """Copy the results into the outputs, once. Raises the error of the exchange, or EngineContractError."""
        device = next((tensor.device for tensor in self._request.outputs if tensor.is_cuda), None)
        with self._delivery_lock, suspend_transforms():
            assert self._outcome is not None, "delivered before the exchange has ended"
            if self._outcome.error is not None:
                raise self._outcome.error
            if not self._delivery_events:
                self._copy_results(self._outcome.results, device)
                self._outcome, self._copies = Outcome(()), None
        event = self._delivery_events[0]
        if event is not None:
            torch.cuda.current_stream(device).wait_event(event)

    def _copy_results(self, results: Sequence[Tensor], device: torch.device | None) -> None:
        """Copy the results into the outputs on the current stream of ``device``; record the event of the copy."""
        try:
            self._require_unchanged_inputs()
            for output in self._request.outputs:
                require_storage(output, f"an output of {self._request.name}")
        except EngineContractError as error:
            self._outcome = Outcome((), error)
            raise
        if self._issue_event is not None and device is not None:
            # Wait for the stream of the issue, which may be another stream and which poisons the outputs.
            torch.cuda.current_stream(device).wait_event(self._issue_event)
        for output, result in zip(self._request.outputs, results, strict=True):
            deliver(output, result)
        self._delivery_events.append(record_event(self._request.outputs))

    def _require_unchanged_inputs(self) -> None:
        """Raise EngineContractError for an input that was freed, or that is not an output and differs from its copy."""
        for tensor, copied in zip(self._request.inputs, self._copies or (), strict=self._copies is not None):
            if any(share_storage(tensor, output) for output in self._request.outputs):
                continue
            require_storage(tensor, f"an input of {self._request.name}")
            if not torch.equal(copy_bytes(tensor), copied):
                raise EngineContractError(
                    f"an input of {self._request.name}, of shape {tuple(tensor.shape)}, was overwritten before the "
                    "collective was waited for; wait for it first"
                )

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the list of outputs; the results are delivered as soon as the exchange has ended."""
        with self._delivery_lock:
            if self._future is not None:
                return self._future
            devices = sorted({tensor.device for tensor in self._request.outputs if tensor.is_cuda}, key=str)
            future = self._future = torch.futures.Future(devices=devices)  # type: ignore[arg-type] # list is invariant
            has_ended = self._outcome is not None
        if has_ended:
            self._complete(future)
        return future

    def _complete(self, future: torch.futures.Future[Any]) -> None:
        """Deliver the results, and complete ``future`` with the outputs or with the error."""
        try:
            self._deliver()
        except Exception as error:  # noqa: BLE001 - raised where the caller waits for the future
            future.set_exception(error)
        else:
            future.set_result(list(self._request.outputs))

    def is_completed(self) -> bool:
        """Return whether the exchange has ended; if so, deliver the results, because the caller may then read them."""
        if self._outcome is None:
            return False
        with suppress(Exception):  # exception() and wait() report the error
            self._deliver()
        return True

    def is_success(self) -> bool:
        """Return whether the exchange has ended without an error."""
        return self._outcome is not None and self._outcome.error is None

    def exception(self) -> BaseException | None:
        """Return the error of the exchange, or None."""
        return None if self._outcome is None else self._outcome.error

    def synchronize(self) -> None:
        """Deliver the results, as ``wait`` does."""
        self.wait()

    def block_current_stream(self) -> None:
        """Deliver the results, as ``wait`` does; the calling thread blocks until the exchange has ended."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Return the outputs, without waiting."""
        return list(self._request.outputs)


class JoinedWork(dist.Work):
    """The handle of the collectives of a coalescing block; ``wait`` waits for each of them."""

    def __init__(self, works: Sequence[StagedWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        """Wait for every collective."""
        return all(work.wait(timeout) for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the list of all outputs."""
        futures = torch.futures.collect_all([work.get_future() for work in self._works])
        return futures.then(lambda done: [output for each in done.value() for output in each.value()])

    def is_completed(self) -> bool:
        """Return whether every collective has ended."""
        return all([work.is_completed() for work in self._works])  # noqa: C419 - each delivers its results

    def result(self) -> list[Tensor]:
        """Return the outputs of all collectives, without waiting."""
        return [output for work in self._works for output in work.result()]


class Executor:
    """A thread that starts the exchanges of one process group in the order of their issue.

    ``run_finish`` calls the function that ends an exchange, either in this thread, or in another thread so that the
    next exchange starts at once.
    """

    def __init__(self, name: str, run_finish: RunFinish) -> None:
        self._run_finish = run_finish
        self._requests: queue.SimpleQueue[StagedWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: StagedWork) -> StagedWork:
        """Execute ``work`` after all work that was submitted before, and return ``work``.

        Raises RuntimeError if the process group was destroyed.
        """
        if self._thread is None:
            raise RuntimeError("the process group was destroyed")
        self._requests.put(work)
        return work

    def stop(self, seconds: float) -> None:
        """Let the thread end after the submitted work, and wait at most ``seconds`` for its end."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._requests.put(None)
            if thread is not threading.current_thread():
                thread.join(seconds)

    def _run(self) -> None:
        """Execute requests until ``stop``."""
        while (work := self._requests.get()) is not None:
            pending = [work.start()]
            del work  # a reference here would keep the tensors of the last collective alive
            self._run_finish(pending)


def finish_here(pending: list[Finish]) -> None:
    """End an exchange in this thread.

    The lock is released only when this thread has no reference to the tensors any more, because a caller that has
    waited and dropped its references may then measure the memory in use.
    """
    lock = pending.pop()()
    lock.release()


def finish_in_thread(pending: list[Finish]) -> None:
    """End an exchange in a new thread."""
    run_in_thread(partial(finish_here, pending))


def run_in_thread(function: Callable[[], None]) -> None:
    """Call ``function`` in a new thread."""
    threading.Thread(target=function, name="staged exchange", daemon=True).start()


def require_storage(tensor: Tensor, name: str) -> None:
    """Raise EngineContractError if the storage of ``tensor``, which messages call ``name``, was freed or cut."""
    if tensor.is_sparse or not tensor.numel():
        return
    last = tensor.storage_offset() + sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if (last + 1) * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise EngineContractError(
            f"{name}, of shape {tuple(tensor.shape)}, was freed before the collective was waited for; wait for it first"
        )


def record_event(tensors: Sequence[Tensor]) -> torch.cuda.Event | None:
    """Record an event on the current stream of the GPU of ``tensors``; return None if all of them are on the CPU."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def deliver(output: Tensor, result: Tensor) -> None:
    """Copy a result, which is the bytes of a dense tensor or a sparse tensor, into ``output`` on the current stream."""
    if output.is_sparse:
        output.copy_(result.to(output.device))
    else:
        # Write to .data, because autograd must not record a collective as an in-place change.
        output.data.copy_(result.view(output.dtype).view(output.shape), non_blocking=True)


def copy_to_host(tensor: Tensor, ready: torch.cuda.Event | None, name: str) -> Tensor:
    """Return the bytes of ``tensor`` on the host, in a new flat uint8 tensor, read after the event ``ready``.

    The copy runs on a stream of its own and ends before this function returns, so that no caller has to keep the tensor
    alive any longer. Raises EngineContractError if the input of the collective ``name`` was freed.
    """
    require_storage(tensor, f"an input of {name}")
    if ready is None or not tensor.is_cuda:
        return copy_bytes(tensor)
    with torch.cuda.device(tensor.device), torch.cuda.stream(staging_stream(tensor.device)):
        torch.cuda.current_stream().wait_event(ready)
        return flatten_to_bytes(tensor).cpu()


_staging_streams: dict[torch.device, torch.cuda.Stream] = {}


def staging_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of this process on which tensors of ``device`` are copied to the host."""
    if device not in _staging_streams:
        _staging_streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _staging_streams[device]


def flatten_to_bytes(tensor: Tensor) -> Tensor:
    """Return the elements of ``tensor`` as a flat uint8 tensor, which is a view if the tensor is contiguous.

    A sparse tensor is returned as it is.
    """
    if tensor.is_sparse:
        return tensor.detach()
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def copy_bytes(tensor: Tensor) -> Tensor:
    """Return a copy of the elements of ``tensor`` as a flat uint8 tensor on its device."""
    return flatten_to_bytes(tensor).clone()


def poison_tensor(tensor: Tensor) -> None:
    """Fill ``tensor`` with bytes of 0xFF, or with NaN if it is not contiguous; leave strided integers unchanged."""
    if tensor.is_sparse:
        return
    if tensor.is_contiguous() and tensor.dtype is not torch.bool:
        tensor.data.view(-1).view(torch.uint8).fill_(POISON_BYTE)
    elif tensor.is_floating_point():
        tensor.data.fill_(torch.nan)


def share_storage(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are the same tensor or views of one storage."""
    if first is second or first.is_sparse or second.is_sparse:
        return first is second
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
