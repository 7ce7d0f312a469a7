"""Define the backend ``staged``: collectives of ranks that share a GPU, exchanged by gloo between host copies.

NCCL refuses two ranks on one GPU. This backend takes tensors of GPUs and of the CPU in every collective of
torch.distributed, and orders streams as NCCL does (``staged_work.py``). On the CPU the same code runs without streams.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zharness.device import Poison, is_gpu_requested
from zharness.torch_private import is_backend_registered, suspend_transforms, unwrap_functorch
from zharness.world.staged_operands import (
    count_bytes,
    make_options,
    pad,
    read_op,
    start_all_reduces,
)
from zharness.world.staged_work import (
    Exchange,
    Executor,
    JoinedWork,
    Request,
    StagedWork,
    finish_here,
    finish_in_thread,
)

BACKEND = "staged"
SHUTDOWN_SECONDS = 10.0


def register_staged_backend(poison: Poison) -> None:
    """Register ``staged`` with torch.distributed, once for each process."""
    if is_backend_registered(BACKEND):
        return

    def create(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> StagedGroup:
        """Create the process group of one set of ranks."""
        return StagedGroup(store, rank, size, timeout, poison)

    dist.Backend.register_backend(BACKEND, create, devices=["cpu", "cuda"])


# torch's stubs declare overloads of the methods of process groups, but torch never calls these on a group in Python.
ProcessGroupBase: Any = dist.ProcessGroup


class StagedGroup(ProcessGroupBase):  # type: ignore[misc]
    """A process group that copies tensors to the host, exchanges them by gloo, and delivers the results at a wait."""

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta, poison: Poison) -> None:
        super().__init__(rank, size)
        self._poison = poison
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._collectives = Executor(f"{BACKEND} {rank}", finish_here)
        self._transfers: Executor | None = None  # started by the first send or receive
        self._coalesced: list[StagedWork] | None = None  # the collectives of an open coalescing block
        self._request_count = 0
        self._name = self._description = ""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the backend."""
        return BACKEND

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives, sends and receives that were issued."""
        return self._request_count

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        """Store the name by which functional collectives find the group."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Return the name by which functional collectives find the group."""
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - torch's name
        """Store the description of the group."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """Return the description of the group."""
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        """Return the devices whose tensors the group takes; the device of the ranks comes first."""
        return [torch.device(name) for name in (("cuda", "cpu") if is_gpu_requested() else ("cpu", "cuda"))]

    def shutdown(self) -> None:
        """End the threads of the group; do not wait longer than ``SHUTDOWN_SECONDS`` for exchanges that hang."""
        self._stop(SHUTDOWN_SECONDS)

    def abort(self) -> None:
        """End the threads of the group without waiting for exchanges."""
        self._stop(0)

    def _stop(self, seconds: float) -> None:
        """End each thread of the group, and wait for it at most ``seconds``."""
        for executor in (self._collectives, self._transfers):
            if executor is not None:
                executor.stop(seconds)

    def _transfer(self, request: Request) -> StagedWork:
        """Issue a send or a receive, and return its handle.

        Sends and receives have a thread of their own, because two ranks may both send before they receive, and before a
        collective that was issued earlier ends.
        """
        if self._transfers is None:
            self._transfers = Executor(f"{BACKEND} transfers {self.rank()}", finish_in_thread)
        return self._transfers.submit(self._make_work(request))

    def _submit(self, request: Request) -> StagedWork:
        """Issue a collective and return its handle."""
        work = self._collectives.submit(self._make_work(request))
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _make_work(self, request: Request) -> StagedWork:
        """Return the handle of a request for the plain tensors inside of torch.func's wrappers.

        ``start`` runs in another thread, where wrappers cannot be read. So it gets only plain tensors, and the closure
        of ``start`` must not contain a wrapper.
        """
        self._request_count += 1
        inputs, outputs = ([unwrap_functorch(each) for each in some] for some in (request.inputs, request.outputs))
        with suspend_transforms():
            return StagedWork(replace(request, inputs=inputs, outputs=outputs), self._poison)

    def _reduce_in_place(self, name: str, tensors: Sequence[Tensor], op: Any) -> StagedWork:
        """Issue an all-reduce of each of ``tensors``."""
        dtypes = [tensor.dtype for tensor in tensors]
        return self._submit(
            Request(name, tensors, tensors, lambda host: start_all_reduces(self._gloo, host, dtypes, op, self.size()))
        )

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> StagedWork:
        """Reduce each of ``tensors`` in place."""
        return self._reduce_in_place("all_reduce", tensors, read_op(opts))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> StagedWork:
        """Reduce each of ``tensors`` in place."""
        return self._reduce_in_place("all_reduce_coalesced", tensors, read_op(opts))

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> StagedWork:
        """Reduce each of ``tensors`` in place on the root; the tensors of other ranks do not change."""
        outputs = tensors if opts.rootRank == self.rank() else []
        op, dtypes = read_op(opts), [tensor.dtype for tensor in tensors]

        def start(host: Sequence[Tensor]) -> Exchange:
            exchange = start_all_reduces(self._gloo, host, dtypes, op, self.size())
            return exchange if outputs else Exchange(exchange.works, list)

        return self._submit(Request("reduce", tensors, outputs, start))

    def _gather_all(self, name: str, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> StagedWork:
        """Issue one all-gather for each of ``inputs``; its item of ``outputs`` is a list with one tensor per rank."""
        sizes = [[output.nbytes for output in row] for row in outputs]

        def start(host: Sequence[Tensor]) -> Exchange:
            # gloo gathers only tensors of equal size.
            padded = [pad(flat, max(row)) for flat, row in zip(host, sizes, strict=True)]
            parts = [[torch.empty_like(flat) for _ in row] for flat, row in zip(padded, sizes, strict=True)]
            works = [
                self._gloo.allgather([row], [flat]) for row, flat in zip(parts, padded, strict=True) if flat.numel()
            ]
            flat_sizes = [size for row in sizes for size in row]
            flat_parts = [part for row in parts for part in row]
            return Exchange(works, lambda: [part[:size] for part, size in zip(flat_parts, flat_sizes, strict=True)])

        return self._submit(Request(name, inputs, [tensor for row in outputs for tensor in row], start))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> StagedWork:
        """Gather the tensor of every rank into a list on every rank."""
        del opts
        return self._gather_all("all_gather", outputs, inputs)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> StagedWork:
        """Gather several tensors; ``outputs`` has one list for each rank, of one tensor for each input."""
        del opts
        return self._gather_all("all_gather_coalesced", list(zip(*outputs, strict=True)), inputs)

    def _gather_joined(self, name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> StagedWork:
        """Issue one all-gather for each of ``inputs``; its output is one tensor with the rows of all ranks."""

        def start(host: Sequence[Tensor]) -> Exchange:
            joined = [flat.new_empty(self.size() * flat.numel()) for flat in host]
            works = [
                self._gloo.allgather([list(whole.chunk(self.size()))], [flat])
                for whole, flat in zip(joined, host, strict=True)
                if flat.numel()
            ]
            return Exchange(works, lambda: joined)

        return self._submit(Request(name, inputs, outputs, start))

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> StagedWork:
        """Gather the tensor of every rank into one tensor on every rank."""
        del opts
        return self._gather_joined("all_gather_into_tensor", [output], [tensor])

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> StagedWork:
        """Gather several tensors, each into one tensor."""
        del opts
        return self._gather_joined("all_gather_into_tensor_coalesced", outputs, inputs)

    def _reduce_and_scatter(
        self, name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], rows: int, op: Any
    ) -> StagedWork:
        """Issue reduce-scatters: join every ``rows`` successive inputs, reduce them, and give each rank one part.

        ``rows`` is 1 if each input already contains the parts of all ranks, else the number of ranks.
        """
        dtypes = [output.dtype for output in outputs]
        sizes = [tensor.nbytes for tensor in inputs]
        places = [
            sizes[at : at + rows] if rows > 1 else [sizes[at] // self.size()] * self.size()
            for at in range(0, len(sizes), rows)
        ]

        def start(host: Sequence[Tensor]) -> Exchange:
            joined = [torch.cat(list(host[at : at + rows])) for at in range(0, len(host), rows)]
            exchange = start_all_reduces(self._gloo, joined, dtypes, op, self.size())

            def finish() -> list[Tensor]:
                """Return this rank's part of each reduced tensor."""
                wholes = zip(exchange.finish(), places, strict=True)
                return [torch.split(whole, place)[self.rank()] for whole, place in wholes]

            return Exchange(exchange.works, finish)

        return self._submit(Request(name, inputs, outputs, start))

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> StagedWork:
        """Reduce a list with one tensor for each rank, and keep this rank's tensor."""
        flat_inputs = [tensor for row in inputs for tensor in row]
        return self._reduce_and_scatter("reduce_scatter", outputs, flat_inputs, self.size(), read_op(opts))

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> StagedWork:
        """Reduce one tensor that consists of the parts of all ranks, and keep this rank's part."""
        return self._reduce_and_scatter("reduce_scatter_tensor", [output], [tensor], 1, read_op(opts))

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> StagedWork:
        """Reduce several tensors that consist of the parts of all ranks, and keep this rank's part of each."""
        return self._reduce_and_scatter("reduce_scatter_tensor_coalesced", outputs, inputs, 1, read_op(opts))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> StagedWork:
        """Overwrite a tensor with the tensor of the root."""
        root, index = (0, 0) if opts is None else (opts.rootRank, opts.rootTensor)
        outputs = [] if root == self.rank() else [tensors[index]]

        def start(host: Sequence[Tensor]) -> Exchange:
            works = [
                self._gloo.broadcast([flat], make_options(dist.BroadcastOptions, rootRank=root))
                for flat in host
                if flat.numel()
            ]
            return Exchange(works, lambda: list(host) if outputs else [])

        return self._submit(Request("broadcast", [tensors[index]], outputs, start))

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> StagedWork:
        """Gather the tensor of every rank on the root."""
        is_root = opts.rootRank == self.rank()

        def start(host: Sequence[Tensor]) -> Exchange:
            parts = [torch.empty_like(host[0]) for _ in range(self.size())] if is_root else []
            if not host[0].numel():  # gloo divides by the number of elements
                return Exchange([], lambda: parts)
            work = self._gloo.gather(
                [parts] if is_root else [], [host[0]], make_options(dist.GatherOptions, rootRank=opts.rootRank)
            )
            return Exchange([work], lambda: parts)

        return self._submit(Request("gather", inputs, list(outputs[0]) if is_root else [], start))

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> StagedWork:
        """Send each rank its tensor of the root's list."""
        is_root, size = opts.rootRank == self.rank(), outputs[0].nbytes

        def start(host: Sequence[Tensor]) -> Exchange:
            part = torch.empty(size, dtype=torch.uint8)
            if not part.numel():  # gloo divides by the number of elements
                return Exchange([], lambda: [part])
            work = self._gloo.scatter(
                [part], [list(host)] if is_root else [], make_options(dist.ScatterOptions, rootRank=opts.rootRank)
            )
            return Exchange([work], lambda: [part])

        return self._submit(Request("scatter", list(inputs[0]) if is_root else [], outputs, start))

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> StagedWork:
        """Send the i-th part of a tensor to rank i; the splits are numbers of rows; empty splits mean equal parts."""
        del opts
        received_bytes = count_bytes(output, output_splits, self.size())
        sent_bytes = count_bytes(tensor, input_splits, self.size())

        def start(host: Sequence[Tensor]) -> Exchange:
            received = torch.empty(sum(received_bytes), dtype=torch.uint8)
            work = self._gloo.alltoall_base(received, host[0], received_bytes, sent_bytes)
            return Exchange([work], lambda: [received])

        return self._submit(Request("all_to_all_single", [tensor], [output], start))

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> StagedWork:
        """Send the i-th of ``inputs`` to rank i."""
        del opts
        sizes = [output.nbytes for output in outputs]

        def start(host: Sequence[Tensor]) -> Exchange:
            received = torch.empty(sum(sizes), dtype=torch.uint8)
            work = self._gloo.alltoall_base(received, torch.cat(list(host)), sizes, [flat.numel() for flat in host])
            return Exchange([work], lambda: torch.split(received, sizes))

        return self._submit(Request("all_to_all", inputs, outputs, start))

    def barrier(self, opts: Any = None) -> StagedWork:
        """Wait for all ranks."""
        del opts
        return self._submit(Request("barrier", [], [], lambda _: Exchange([self._gloo.barrier()], list)))

    def send(self, tensors: Sequence[Tensor], destination: int, tag: int) -> StagedWork:
        """Send a tensor to a rank of the group."""

        def start(host: Sequence[Tensor]) -> Exchange:
            return Exchange([self._gloo.send([host[0]], destination, tag)], list)

        return self._transfer(Request("send", tensors, [], start))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> StagedWork:
        """Receive a tensor from a rank of the group."""
        return self._receive(tensors, lambda buffer: self._gloo.recv([buffer], source, tag))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> StagedWork:
        """Receive a tensor from any rank of the group."""
        return self._receive(tensors, lambda buffer: self._gloo.recv_anysource([buffer], tag))

    def _receive(self, tensors: Sequence[Tensor], receive: Callable[[Tensor], Any]) -> StagedWork:
        """Issue a receive into the only one of ``tensors``."""
        size = tensors[0].nbytes

        def start(_: Sequence[Tensor]) -> Exchange:
            buffer = torch.empty(size, dtype=torch.uint8)
            return Exchange([receive(buffer)], lambda: [buffer])

        return self._transfer(Request("recv", [], tensors, start))

    def _start_coalescing(self, device: torch.device) -> None:
        """Open a coalescing block; its collectives are still issued one by one."""
        del device
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> JoinedWork:
        """Close the coalescing block, and return one handle for all its collectives."""
        del device
        works, self._coalesced = self._coalesced or [], None
        return JoinedWork(works)

    # The names of these methods in torch 2.11 and older.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
