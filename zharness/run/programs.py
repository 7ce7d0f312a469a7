"""Programs run on ranks and judged apart from them; and the smallest one that fails, found by Hypothesis."""

from __future__ import annotations

import importlib
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zharness import engines
from zharness.checks import DTYPES, LOSS_SCALES, Trial
from zharness.checks.program import missing, observe_program
from zharness.checks.program_judge import judge_program
from zharness.checks.trial import until_wrong
from zharness.engines import Capabilities, EngineConfig
from zharness.errors import UsageError
from zharness.parity.baseline import Baseline
from zharness.parity.contamination import conditions, require_clean
from zharness.run import cell
from zharness.run.record import Verdict
from zharness.run.runner import JUDGE_TIMEOUT, conclusion, of_judge, probed, verdict_of
from zharness.workload.layers import spec_of
from zharness.workload.program_text import PLAIN
from zharness.workload.programs import Program
from zharness.world import Group, Isolation, RankServer, Work
from zharness.world.rank import seed_torch
from zharness.world.server import Surroundings

SEED = 0x5EED  # of every program's weights; its batches follow from its text as well


@dataclass(frozen=True)
class Outcome:
    """What became of programs that ran one after the other, and why where it is no pass."""

    verdict: Verdict
    cause: str = ""

    def words(self, engine: str, programs: Sequence[Program]) -> str:
        """What became of ``programs``, and the command that shows it again."""
        cause = f"\n  {self.cause}" if self.cause else ""
        texts = "\n".join(f"{self.verdict.value}: {program}" for program in programs)
        return f"{texts}{cause}\n  again: {command(engine, programs)}"


def command(engine: str, programs: Sequence[Program]) -> str:
    """The command that runs ``programs`` on ``engine``, to be pasted into a shell."""
    first = programs[0]
    axes = f"--engine {shlex.quote(engine)} --stage {first.stage} --world-size {first.world_size}"
    rest = f"--dtype {first.dtype} --optimizer {first.optimizer}"
    rest += f" --clip {first.clip}" if first.clip is not None else ""
    rest += f" --window {first.window}" if first.window > 1 else ""
    rest += f" --reduction {first.reduction}" if first.reduction != PLAIN.reduction else ""
    return f"zharness program {axes} {rest} {shlex.join(map(str, programs))}"


def observe(engine: str, programs: Sequence[Program], room: str, capabilities: Capabilities) -> None:
    """In every rank: run the programs in turn, and write what was seen of each into a folder of its own."""
    for number, program in enumerate(programs):
        config = EngineConfig(stage=program.stage, dtype=program.dtype, loss_scale=LOSS_SCALES[program.dtype])
        folder = folder_of(room, number)
        bench = cell.bench_here(engine, spec_of(program.layers), SEED, config, capabilities, folder)
        seed_torch(SEED)
        observe_program(bench, program)
        bench.finish()


def judge(programs: Sequence[Program], room: str, capabilities: Capabilities) -> cell.Judgement:
    """In a process that never saw the engine: every rank's evidence against plain PyTorch, up to the first mismatch."""
    require_clean(conditions())
    compared = (
        comparison
        for number, program in enumerate(programs)
        for comparison in judge_program(trial_of(program, folder_of(room, number), capabilities), program)
    )
    return cell.summarize(list(until_wrong(compared)))


def folder_of(room: str, number: int) -> Path:
    """Where the evidence of one of several programs lies."""
    folder = Path(room) / str(number)
    folder.mkdir(exist_ok=True)
    return folder


def trial_of(program: Program, folder: Path, capabilities: Capabilities) -> Trial:
    """What ``program`` left in ``folder``, and the baseline it has to match."""
    dtype, scale = DTYPES[program.dtype], LOSS_SCALES[program.dtype]
    baseline = Baseline(spec_of(program.layers), SEED, program.world_size, dtype, scale)
    return cell.trial_of(baseline, folder, program.dtype, capabilities)


class ProgramRunner:
    """Runs programs on engines that one rank server can hold, over ranks that live on.

    Create it before any tensor operation of the process. A context manager: on leaving, its servers and ranks are gone.
    """

    def __init__(self, place: Surroundings | None = None, timeout: float = 60.0) -> None:
        """``place`` is what the server needs to have for the engines; ``timeout`` is for the ranks of one run."""
        # torch loads some 800 modules at the first optimizer: once here, or in every rank again.
        importlib.import_module("torch._dynamo")
        self.timeout = timeout
        self._server = RankServer(place)
        self._judge = RankServer()
        self._claims: dict[tuple[str, int], Capabilities] = {}

    def claims(self, engine: str, stage: int) -> Capabilities:
        """What ``engine`` claims at ``stage``."""
        if (engine, stage) not in self._claims:
            known = engines.capabilities(engine, stage)
            self._claims[engine, stage] = known or probed(self._server, engine, stage)
        return self._claims[engine, stage]

    def run(self, engine: str, programs: Sequence[Program]) -> Outcome:
        """What became of ``programs``, in the same ranks one after the other; they have all but their text in common.

        Raises UsageError where the engine does not claim what one of them takes.
        """
        claims = self.claims(engine, programs[0].stage)
        for program in programs:
            reason = missing(program, claims)
            if reason:
                raise UsageError(f"{engine} cannot be asked to run {str(program)!r}: {reason}")
        room = tempfile.mkdtemp(dir=self._judge.room)
        try:
            return self._outcome(engine, tuple(programs), room, claims)
        finally:
            shutil.rmtree(room, ignore_errors=True)

    def _outcome(self, engine: str, programs: tuple[Program, ...], room: str, claims: Capabilities) -> Outcome:
        stage, world_size = programs[0].stage, programs[0].world_size
        observed = Work(
            observe,
            (engine, programs, room, claims),
            world_size,
            self.timeout,
            group=Group.KEPT,
            isolation=Isolation.POOLED,
            pool=f"stage {stage}",
        )
        seen = self._server.submit(observed)
        if seen.cause is not None:
            return Outcome(verdict_of(seen.cause), seen.cause.words())
        judging = Work(
            judge, (programs, room, claims), timeout=JUDGE_TIMEOUT, group=Group.NONE, isolation=Isolation.POOLED
        )
        judged = self._judge.submit(judging)
        if judged.cause is None:
            return Outcome(*conclusion(judged.ranks[0].value))
        return Outcome(of_judge(judged.cause), judged.cause.words())

    def close(self) -> None:
        """End both servers."""
        self._server.close()
        self._judge.close()

    def __enter__(self) -> ProgramRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
