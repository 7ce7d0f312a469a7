"""Run collectives on host copies of their tensors, one after another, in a thread of their process group.

A collective is issued, executed and delivered. At the issue, on the caller's thread and stream, the inputs count as
read and the outputs as undefined. The thread copies the inputs to the host, behind what the caller's stream had queued
at the issue, and exchanges them. The results are delivered into the outputs when the caller waits, on the stream that
waits. A caller that never waits keeps its old outputs: with ``Poison.ON`` these are bytes of 0xFF, which are NaN in
every floating-point dtype and -1 in every signed integer dtype.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zharness.errors import EngineContractError
from zharness.torch_private import suspend_transforms

POISON_BYTE = 0xFF


class Poison(Enum):
    """Whether a collective makes its outputs useless until it is waited for, and compares its inputs then."""

    OFF = "off"
    ON = "on"


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
    """How an exchange ended: one result for each output, or an error."""

    results: Sequence[Tensor]
    error: BaseException | None = None


class StagedWork(dist.Work):
    """The handle of an issued collective. ``wait`` delivers the results, and raises what the exchange raised."""

    def __init__(self, request: Request, poison: Poison) -> None:
        super().__init__()
        self._request = request
        # Clones, because poisoning an output also overwrites an input that is a view of it.
        self._copies = [copy_bytes(tensor) for tensor in request.inputs] if poison is Poison.ON else None
        if poison is Poison.ON:
            for output in request.outputs:
                poison_tensor(output)
        self._issued = record_event([*request.inputs, *request.outputs])
        # Held until the exchange has ended. An Event would wait by Python code, whose calls a law counts.
        self._running = threading.Lock()
        self._running.acquire()
        self._outcome: Outcome | None = None
        self._delivery = threading.Lock()
        self._delivered: list[torch.cuda.Event | None] = []  # one entry once the results are delivered
        self._future: torch.futures.Future[Any] | None = None

    def execute(self, finish_in: Callable[[Callable[[], None]], None]) -> None:
        """Copy the inputs to the host and start the exchange; ``finish_in`` calls the function that ends it."""
        try:
            sources = self._request.inputs if self._copies is None else self._copies
            exchange = self._request.start([copy_to_host(source, self._issued) for source in sources])
        except Exception as error:  # noqa: BLE001 - raised where the caller waits
            self._conclude(Outcome((), error))
        else:
            finish_in(lambda: self._finish(exchange))

    def _finish(self, exchange: Exchange) -> None:
        """Wait for the exchange, and keep its results for the caller."""
        try:
            for work in exchange.works:
                work.wait()
            results = exchange.finish()
        except Exception as error:  # noqa: BLE001 - raised where the caller waits
            self._conclude(Outcome((), error))
        else:
            self._conclude(Outcome([self._pin(result) for result in results]))

    def _conclude(self, outcome: Outcome) -> None:
        """Store the outcome, and complete the future if the caller asked for one."""
        with self._delivery:
            self._outcome, future = outcome, self._future
        self._running.release()
        if future is not None:
            self._complete(future)

    def _pin(self, result: Tensor) -> Tensor:
        """Return a result for a GPU in pinned memory, so that its copy to the GPU does not block the host."""
        return result.pin_memory() if self._issued is not None and not result.is_sparse else result

    def wait(self, timeout: Any = None) -> bool:
        """Block until the exchange has ended, and deliver the results on the current stream.

        A later call makes the current stream wait for that delivery. Time-outs are those of the exchange.
        """
        del timeout
        with self._running:  # several threads may wait
            pass
        self._deliver()
        return True

    def _deliver(self) -> None:
        """Copy the results into the outputs, once. Raise what the exchange raised, or EngineContractError."""
        with self._delivery, suspend_transforms():
            assert self._outcome is not None, "delivered before the exchange has ended"
            if self._outcome.error is not None:
                raise self._outcome.error
            if not self._delivered:
                self._require_unchanged_inputs()
                for output, result in zip(self._request.outputs, self._outcome.results, strict=True):
                    deliver(output, result)
                self._delivered.append(record_event(self._request.outputs))
                self._outcome, self._copies = Outcome(()), None
        event = self._delivered[0]
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def _require_unchanged_inputs(self) -> None:
        """Raise EngineContractError for an input that differs from its copy and is not an output as well."""
        for tensor, copied in zip(self._request.inputs, self._copies or (), strict=self._copies is not None):
            if any(share_storage(tensor, output) for output in self._request.outputs):
                continue
            if not torch.equal(copy_bytes(tensor), copied):
                error = EngineContractError(
                    f"an input of {self._request.name}, of shape {tuple(tensor.shape)}, was overwritten before the "
                    "collective was waited for; wait for it first"
                )
                self._outcome = Outcome((), error)
                raise error

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the list of outputs, which delivers the results as soon as they are there."""
        with self._delivery:
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
        """Return whether the exchange has ended."""
        return self._outcome is not None

    def is_success(self) -> bool:
        """Return whether the exchange has ended without an error."""
        return self._outcome is not None and self._outcome.error is None

    def exception(self) -> BaseException | None:
        """Return what the exchange raised, or None."""
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


class Executor:
    """A thread that executes the collectives of one process group in the order of their issue.

    Point-to-point exchanges start in that order too, but end in threads of their own: two ranks may both send before
    they receive.
    """

    def __init__(self, name: str) -> None:
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit_collective(self, work: StagedWork) -> StagedWork:
        """Execute ``work`` after everything that was submitted before, and return it."""
        self._requests.put(lambda: work.execute(call))
        return work

    def submit_point_to_point(self, work: StagedWork) -> StagedWork:
        """Start ``work`` after everything that was submitted before, and return it."""
        self._requests.put(lambda: work.execute(call_in_thread))
        return work

    def stop(self) -> None:
        """Let the thread end after what was submitted; submitting more than once, or from the thread, is harmless."""
        self._requests.put(None)

    def _run(self) -> None:
        """Execute requests until ``stop``."""
        while (request := self._requests.get()) is not None:
            request()
            del request  # or the thread would keep the tensors of the last collective alive


def call(function: Callable[[], None]) -> None:
    """Call ``function`` in this thread."""
    function()


def call_in_thread(function: Callable[[], None]) -> None:
    """Call ``function`` in a new thread."""
    threading.Thread(target=function, name="staged exchange", daemon=True).start()


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
        # .data: a collective does not count as a change that autograd has to know.
        output.data.copy_(result.view(output.dtype).view(output.shape), non_blocking=True)


def copy_to_host(tensor: Tensor, ready: torch.cuda.Event | None) -> Tensor:
    """Return the bytes of ``tensor`` on the host, in a new flat uint8 tensor, read after the event ``ready``.

    The copy runs on a stream of its own, which ends before this function returns: nobody has to keep the tensor longer.
    """
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
    """Fill ``tensor`` with bytes of 0xFF, or with NaN if it is strided. Strided integers are left alone."""
    if tensor.is_sparse:
        return
    if tensor.is_contiguous() and tensor.dtype is not torch.bool:
        tensor.data.view(-1).view(torch.uint8).fill_(POISON_BYTE)
    elif tensor.is_floating_point():
        tensor.data.fill_(torch.nan)


def share_storage(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are one, or views of one storage."""
    if first is second or first.is_sparse or second.is_sparse:
        return first is second
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
