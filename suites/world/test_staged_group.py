"""Collectives of the backend ``staged``, beside those of gloo."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zharness.comm import ALL_GATHER
from zharness.device import BACKEND_VARIABLE, DEVICE_VARIABLE, BackendName, Poison, choose_backend
from zharness.errors import EngineContractError, UsageError
from zharness.world.staged_group import BACKEND, register_staged_backend
from zharness.world.staged_work import (
    Exchange,
    Executor,
    Request,
    RunFinish,
    StagedWork,
    finish_here,
    finish_in_thread,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)
LENGTH = 4  # elements for each rank
Run = Callable[[Tensor, dist.ProcessGroup], "Tensor | list[Tensor]"]


@pytest.fixture
def staged() -> Iterator[dist.ProcessGroup]:
    register_staged_backend(Poison.ON)
    group = dist.new_group(backend=BACKEND)
    dist.barrier()  # without it a rank may close the group while another one still connects
    yield group
    dist.destroy_process_group(group)


@pytest.fixture
def gloo() -> Iterator[dist.ProcessGroup]:
    group = dist.new_group(backend="gloo")
    dist.barrier()
    yield group
    dist.destroy_process_group(group)


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor


def all_reduce_sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    reduced = tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor
    dist.all_reduce(reduced, group=group)
    return reduced


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group=group)
    return parts


def all_gather_into_tensor(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = tensor.new_empty(group.size() * len(tensor))
    ALL_GATHER(whole, tensor, group=group)
    return whole


def broadcast(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.broadcast(tensor, group.size() - 1, group=group)
    return tensor


def reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.reduce(tensor, 0, op=dist.ReduceOp.MIN, group=group)
    return tensor if group.rank() == 0 else tensor.new_empty(0)


def gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(group.size())] if group.rank() == 1 else None
    dist.gather(tensor, parts, dst=1, group=group)
    return parts or []


def scatter(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    part = tensor.new_empty(len(tensor) // group.size())
    parts = list(tensor.view(group.size(), -1))
    dist.scatter(part, parts if group.rank() == 1 else None, src=1, group=group)
    return part


def all_to_all_single(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor, group=group)
    return received


def send_around(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    received, rank, size = torch.empty_like(tensor), group.rank(), group.size()
    operations = [
        dist.P2POp(dist.isend, tensor, (rank + 1) % size, group=group),
        dist.P2POp(dist.irecv, received, (rank - 1) % size, group=group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


MOVES: dict[str, Run] = {
    function.__name__: function
    for function in (
        all_gather,
        all_gather_into_tensor,
        broadcast,
        gather,
        scatter,
        all_to_all_single,
        send_around,
    )
}
REDUCTIONS: dict[str, Run] = {function.__name__: function for function in (all_reduce, all_reduce_sum, reduce)}


def compare(run: Run, tensor: Tensor, staged: dist.ProcessGroup, gloo: dist.ProcessGroup) -> None:
    found, wanted = run(tensor.clone(), staged), run(tensor.clone(), gloo)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)


def draw(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(0, 8, (LENGTH * dist.get_world_size(),), generator=generator).to(dtype)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("name", MOVES)
def test_bytes_move_as_over_gloo(name: str, staged: dist.ProcessGroup, gloo: dist.ProcessGroup) -> None:
    for dtype in DTYPES:
        as_bytes = torch.uint8 if dtype is torch.bool else dtype  # gloo has no booleans
        compare(MOVES[name], draw(dtype).to(as_bytes), staged, gloo)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_are_those_of_gloo(name: str, staged: dist.ProcessGroup, gloo: dist.ProcessGroup) -> None:
    for dtype in DTYPES[:-1]:
        compare(REDUCTIONS[name], draw(dtype), staged, gloo)


@pytest.mark.world_size(2, 4)
def test_reduce_scatter_keeps_the_part_of_the_rank(staged: dist.ProcessGroup) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    whole, part = torch.arange(LENGTH * size, dtype=torch.float32), torch.empty(LENGTH)
    dist.reduce_scatter_tensor(part, whole, group=staged)
    assert torch.equal(part, size * whole.chunk(size)[rank])
    dist.reduce_scatter(part, [chunk.contiguous() for chunk in whole.chunk(size)], group=staged)
    assert torch.equal(part, size * whole.chunk(size)[rank])


@pytest.mark.world_size(2)
def test_mean_and_scaled_sum(staged: dist.ProcessGroup) -> None:
    for dtype, mean in ((torch.float32, 1.5), (torch.int64, 1)):
        tensor = torch.full((3,), dist.get_rank() + 1, dtype=dtype)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=staged)
        assert torch.equal(tensor, torch.full_like(tensor, mean))
    tensor = torch.ones(3)
    dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(0.25), group=staged)
    assert torch.equal(tensor, torch.full((3,), 0.5))


@pytest.mark.world_size(2)
def test_an_output_is_nan_until_it_is_waited_for(staged: dist.ProcessGroup) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        tensor = torch.ones(5, dtype=dtype)
        work = dist.all_reduce(tensor, group=staged, async_op=True)
        assert tensor.isnan().all()
        work.wait()
        assert torch.equal(tensor, torch.full_like(tensor, 2))


@pytest.mark.world_size(2)
def test_an_input_that_is_overwritten_too_early_is_named(staged: dist.ProcessGroup) -> None:
    whole, part = torch.ones(2 * LENGTH), torch.empty(LENGTH)
    work = dist.reduce_scatter_tensor(part, whole, group=staged, async_op=True)
    whole.zero_()
    with pytest.raises(
        EngineContractError, match=r"an input of reduce_scatter_tensor, of shape \(8,\), was overwritten"
    ):
        work.wait()


@pytest.mark.world_size(2)
def test_a_strided_output_is_delivered(staged: dist.ProcessGroup) -> None:
    tensor = torch.ones(4, 4)[:, ::2]
    dist.all_reduce(tensor, group=staged)
    assert torch.equal(tensor, torch.full((4, 2), 2.0))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", [*MOVES, *REDUCTIONS])
def test_empty_tensors_pass(name: str, staged: dist.ProcessGroup) -> None:
    found = {**MOVES, **REDUCTIONS}[name](torch.empty(0), staged)
    assert not torch.cat([*found]).numel() if isinstance(found, list) and found else not len(found)


@pytest.mark.world_size(2)
def test_a_future_delivers(staged: dist.ProcessGroup) -> None:
    tensor = torch.ones(3)
    future = dist.all_reduce(tensor, group=staged, async_op=True).get_future()
    assert torch.equal(future.then(lambda done: done.value()[0] / 2).wait(), torch.ones(3))


@pytest.mark.world_size(2)
def test_a_callback_of_a_future_may_wait_for_another_collective(staged: dist.ProcessGroup) -> None:
    def reduce_again(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        again = done.value()[0].clone()
        dist.all_reduce(again, group=staged)
        return again

    future = dist.all_reduce(torch.ones(2), group=staged, async_op=True).get_future().then(reduce_again)
    assert torch.equal(future.wait(), torch.full((2,), 4.0))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_a_coalescing_block_delivers_all_its_collectives(
    device: torch.device | None, staged: dist.ProcessGroup
) -> None:
    tensors = [torch.ones(3), torch.full((2,), 2.0)]
    with dist._coalescing_manager(staged, device, async_ops=True) as block:
        for tensor in tensors:
            dist.all_reduce(tensor, group=staged, async_op=True)
    block.wait()
    assert [tensor.unique().item() for tensor in tensors] == [2.0, 4.0]


@pytest.mark.world_size(2)
def test_a_send_passes_a_collective_that_was_issued_before(staged: dist.ProcessGroup) -> None:
    reduced, sent = torch.ones(2), torch.full((3,), 7.0)
    if dist.get_rank() == 0:
        work = dist.all_reduce(reduced, group=staged, async_op=True)
        dist.send(sent, 1, group=staged)
        work.wait()
    else:
        received = torch.zeros(3)
        dist.recv(received, 0, group=staged)
        assert torch.equal(received, sent)
        dist.all_reduce(reduced, group=staged)
    assert torch.equal(reduced, torch.full((2,), 2.0))


@pytest.mark.world_size(2)
def test_a_tensor_that_is_freed_too_early_is_named(staged: dist.ProcessGroup) -> None:
    for freed in range(2):
        tensors = torch.empty(LENGTH), torch.ones(2 * LENGTH)
        work = dist.reduce_scatter_tensor(*tensors, group=staged, async_op=True)
        tensors[freed].untyped_storage().resize_(0)
        with pytest.raises(EngineContractError, match=r"put of reduce_scatter_tensor, of shape .*, was freed before"):
            work.wait()


@pytest.mark.world_size(3)
def test_lists_of_uneven_sizes(staged: dist.ProcessGroup) -> None:
    rank = dist.get_rank()
    rows = [torch.arange(size, dtype=torch.float32) for size in (1, 2, 3)]
    part = torch.empty(rank + 1)
    dist.reduce_scatter(part, rows, group=staged)
    assert torch.equal(part, 3 * rows[rank])
    gathered = [torch.empty_like(row) for row in rows]
    dist.all_gather(gathered, rows[rank], group=staged)
    assert all(torch.equal(found, row) for found, row in zip(gathered, rows, strict=True))


@pytest.mark.world_size(2)
def test_a_collective_that_says_it_is_completed_has_delivered(staged: dist.ProcessGroup) -> None:
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, group=staged, async_op=True)
    while not work.is_completed():
        pass
    assert torch.equal(tensor, torch.full((3,), 2.0))


@pytest.mark.world_size(2)
def test_a_sum_of_booleans_is_whether_any_is_true(staged: dist.ProcessGroup) -> None:
    flags = torch.tensor([True, False, dist.get_rank() == 0])
    dist.all_reduce(flags, group=staged)
    assert flags.tolist() == [True, False, True]
    assert flags.view(torch.uint8).max() == 1


@pytest.mark.world_size(2)
def test_functional_collectives_and_ddp_find_the_group(staged: dist.ProcessGroup) -> None:
    from torch.distributed._functional_collectives import all_reduce as functional_all_reduce

    assert torch.equal(functional_all_reduce(torch.ones(3), "sum", staged), torch.full((3,), 2.0))
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    wrapped = DistributedDataParallel(model, process_group=staged)
    wrapped(torch.full((1, 3), dist.get_rank() + 1.0)).sum().backward()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((2, 3), 1.5))


@pytest.mark.world_size(2)
def test_a_destroyed_group_has_no_thread() -> None:
    register_staged_backend(Poison.ON)
    group = dist.new_group(backend=BACKEND)
    [thread] = [thread for thread in threading.enumerate() if thread.name.startswith(f"{BACKEND} ")]
    dist.barrier(group)
    dist.destroy_process_group(group)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="the process group was destroyed"):
        group.barrier()


def test_the_backend_follows_from_device_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    monkeypatch.delenv(DEVICE_VARIABLE, raising=False)
    assert choose_backend(2) is BackendName.GLOO
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [choose_backend(size) for size in (1, 2)] == [BackendName.NCCL, BackendName.STAGED]
    monkeypatch.setenv(BACKEND_VARIABLE, "nccl")
    with pytest.raises(UsageError, match="nccl, which needs one GPU for each of 2 ranks, and ranks have 1"):
        choose_backend(2)
    monkeypatch.setenv(BACKEND_VARIABLE, "mpi")
    with pytest.raises(UsageError, match="'mpi'; expected one of gloo, nccl, staged"):
        choose_backend(2)


class WatchedLock:
    """A lock that notes, when it is released, which of ``watched`` objects are alive."""

    def __init__(self, *watched: object) -> None:
        self._references = [weakref.ref(each) for each in watched]
        self.alive: list[bool] = []
        self.is_released = threading.Event()

    def release(self) -> None:
        self.alive += [reference() is not None for reference in self._references]
        self.is_released.set()


@pytest.mark.parametrize("run_finish", [finish_here, finish_in_thread])
def test_no_thread_keeps_the_tensors_of_a_collective_that_was_waited_for(run_finish: RunFinish) -> None:
    dropped, output = threading.Event(), torch.zeros(2)

    def start(_host: object) -> Exchange:
        assert dropped.wait(60)
        return Exchange([], lambda: [torch.ones(2).view(torch.uint8)])

    work = StagedWork(Request("all_gather", [], [output], start), Poison.OFF)
    lock = WatchedLock(work, output)
    work._exchange_lock = lock  # type: ignore[assignment]
    executor = Executor("test", run_finish)
    executor.submit(work)
    del work, output
    dropped.set()
    assert lock.is_released.wait(60)
    executor.stop(60)
    assert lock.alive == [False, False]
