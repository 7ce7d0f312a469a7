"""The loop of `zharness check`: the order of cells, and the pools of ranks that it ends."""

import signal
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from zharness.cell import Cell
from zharness.run import Request, check_loop
from zharness.run.cell_planner import PlannedCell
from zharness.run.cell_queue import CellQueue, group_by_pool, keep_order
from zharness.run.check_loop import RunInterrupted, RunOptions, Stop, describe_stop, run_cells
from zharness.run.progress import ProgressLog
from zharness.run.rank_pool import RankPool, rank_pool
from zharness.run.record import Record, Verdict


def make_cell(stage: int, world_size: int, law: str = "training.grads", **cell: str) -> PlannedCell:
    named = {"engine": "reference", "model": "mlp"} | cell
    return PlannedCell(Cell(law, named["engine"], stage, world_size, "fp32", named["model"]))


def test_cells_of_one_pool_run_one_after_the_other() -> None:
    cells = [make_cell(0, 2), make_cell(1, 2), make_cell(0, 4), make_cell(0, 2, "training.sgd_step"), make_cell(1, 2)]
    pools = [rank_pool(cell.cell) for cell in RunOptions().order_cells(cells)]
    assert [(pool.name[6], pool.world_size) for pool in pools] == [("0", 2), ("0", 2), ("1", 2), ("1", 2), ("0", 4)]
    assert {rank_pool(cell.cell) for cell in RunOptions(shuffle_seed=1).order_cells(cells)} == set(pools)


class RunnerDouble:
    """Records which pools are open when a cell starts, and gives cells of ``broken_law`` the verdict FAIL."""

    def __init__(self, broken_law: str = "") -> None:
        self.broken_law = broken_law
        self.pools: set[RankPool] = set()
        self.open_pools: list[set[int]] = []

    def close_pools(self, needed: Container[RankPool]) -> None:
        self.pools = {pool for pool in self.pools if pool in needed}

    def run(self, planned: PlannedCell) -> Record:
        self.pools.add(rank_pool(planned.cell))
        self.open_pools.append({pool.world_size for pool in self.pools})
        verdict = Verdict.FAIL if planned.cell.law == self.broken_law else Verdict.PASS
        return Record(planned.cell, 0, verdict, "", "")

    def close(self) -> None:
        self.pools = set()


def test_a_pool_that_no_later_cell_needs_is_closed() -> None:
    runner = RunnerDouble()
    cells = [make_cell(0, 1), make_cell(0, 2), make_cell(0, 1, "training.sgd_step"), make_cell(0, 2), make_cell(0, 4)]
    records = run_cells(cells, [runner])
    assert [next(records).cell.world_size for _ in cells]
    assert {1, 2} in runner.open_pools
    assert 1 not in runner.open_pools[-1]


def test_each_runner_takes_the_cells_of_a_pool_of_its_own_as_long_as_there_are_some() -> None:
    cells = [make_cell(stage, 2, law) for stage in (0, 1) for law in ("training.grads", "training.modes")]
    queue = CellQueue([*cells, make_cell(1, 2, "training.sgd_step")], group_by_pool)
    assert [queue.take(runner).cell.stage for runner in "ababa"] == [0, 1, 0, 1, 1]
    assert {rank_pool(cell.cell).name[:7] for cell in cells} == {"stage 0", "stage 1"}
    in_turn = CellQueue(cells, keep_order)
    assert [in_turn.take(runner) for runner in "abab"] == cells
    assert RunOptions().grouping is group_by_pool
    assert RunOptions(shuffle_seed=1).grouping is keep_order


def test_runners_that_share_a_pool_of_all_stages_take_the_cells_of_a_model_each() -> None:
    cells = [make_cell(stage, 2, engine="fsdp2", model=model) for stage in (2, 3) for model in ("mlp", "exact", "tied")]
    assert len({rank_pool(cell.cell) for cell in cells}) == 1
    queue = CellQueue(cells, group_by_pool)
    taken = [queue.take(runner).cell for runner in "abbaab"]
    assert [(cell.model, cell.stage) for cell in taken] == [
        *(("mlp", 2), ("exact", 2), ("exact", 3), ("mlp", 3)),
        *(("tied", 2), ("tied", 3)),  # none is left but the model of runner a, so that runner b helps it
    ]


def test_a_run_stops_after_the_number_of_failures_that_it_may_have() -> None:
    cells = [make_cell(0, 2), *(make_cell(0, size, "training.modes") for size in (1, 2, 3)), make_cell(0, 4)]
    stopped = list(run_cells(cells, [RunnerDouble("training.modes")], stop=Stop(failures=2)))
    assert [record.verdict for record in stopped] == [Verdict.PASS, Verdict.FAIL, Verdict.FAIL]
    assert len(list(run_cells(cells, [RunnerDouble("training.modes")]))) == len(cells)
    assert describe_stop(stopped, cells) == ["STOPPED after 3 of 5 cells"]
    assert describe_stop(stopped[:1], cells)[0].endswith("; these laws did not run: training.modes")
    in_time = list(run_cells(cells, [RunnerDouble()], stop=Stop(seconds=1e-9)))
    assert len(in_time) == 1


def test_a_run_without_a_terminal_prints_a_line_every_15_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([100.0, 110.0, 115.0, 116.0, 131.0])
    log = ProgressLog(9, clock=lambda: next(times))
    for unexpected in (0, 0, 1, 1):
        log.count(unexpected)
    assert capsys.readouterr().err.splitlines() == [
        "2 of 9 cells in 15 s, 0 unexpected",
        "4 of 9 cells in 31 s, 1 unexpected",
    ]


class WaitingRunnerDouble(RunnerDouble):
    """Keeps the cells of the broken law running until the test lets them end."""

    def __init__(self, broken_law: str, may_end: Event) -> None:
        super().__init__(broken_law)
        self.may_end = may_end

    def run(self, planned: PlannedCell) -> Record:
        if planned.cell.law == self.broken_law:
            self.may_end.wait()
        return super().run(planned)


def test_cells_that_are_running_when_the_seconds_are_over_are_reported() -> None:
    may_end = Event()
    cells = [make_cell(0, 2, "training.modes"), make_cell(0, 2), make_cell(1, 2)]
    runners = [WaitingRunnerDouble("training.modes", may_end) for _ in range(2)]
    records = run_cells(cells, runners, stop=Stop(seconds=1e-9))
    assert next(records).verdict is Verdict.PASS
    may_end.set()
    assert Verdict.FAIL in [record.verdict for record in records]


class InterruptedRunnerDouble(RunnerDouble):
    """Raises KeyboardInterrupt in every cell, and notes the handler of Ctrl-C when it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.handlers_at_close: list[object] = []

    def run(self, planned: PlannedCell) -> Record:
        raise KeyboardInterrupt

    def close(self) -> None:
        self.handlers_at_close.append(signal.getsignal(signal.SIGINT))


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_is_ignored_while_ranks_are_ended_and_works_again_afterwards() -> None:
    runner = InterruptedRunnerDouble()
    with pytest.raises(KeyboardInterrupt):
        list(run_cells([make_cell(0, 2)], [runner]))
    assert runner.handlers_at_close == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupted_run_in_another_thread_closes_its_runners() -> None:
    runner = InterruptedRunnerDouble()
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(lambda: list(run_cells([make_cell(0, 2)], [runner])))
        assert isinstance(run.exception(), KeyboardInterrupt)
    assert runner.handlers_at_close == [signal.default_int_handler]


@pytest.mark.usefixtures("ctrl_c")
def test_a_second_ctrl_c_does_not_end_the_report_of_an_interrupted_run(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[object] = []

    class ReporterDouble:
        jsonl = None

        def require_writable(self) -> None:
            pass

        def report_run(self, records: list[Record], *_: object, **__: object) -> int:
            handlers.append(signal.getsignal(signal.SIGINT))
            return len(records)

    def interrupt(*_: object) -> None:
        raise RunInterrupted([Record(make_cell(0, 2).cell, 0, Verdict.PASS, "", "")], 2)

    monkeypatch.setattr(check_loop, "run_request", interrupt)
    with pytest.raises(KeyboardInterrupt):
        check_loop.run_check(Request(), RunOptions(), ReporterDouble(), lambda _: None)
    assert handlers == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
