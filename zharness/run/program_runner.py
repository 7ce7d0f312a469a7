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
from zharness.engines import Capabilities, EngineConfig
from zharness.errors import UsageError
from zharness.law_kit.judge_context import stop_at_first_mismatch
from zharness.law_kit.program_executor import observe_program
from zharness.law_kit.program_features import explain_unsupported
from zharness.law_kit.program_judge import judge_program
from zharness.laws import DTYPES, LOSS_SCALES, JudgeContext
from zharness.parity.baseline import Baseline
from zharness.parity.contamination import read_process_conditions, require_clean_torch
from zharness.run import observe_and_judge
from zharness.run.record import Verdict
from zharness.run.runner import (
    JUDGE_TIMEOUT,
    conclude_judgement,
    probe_engine,
    verdict_of_judge_failure,
    verdict_of_rank_failure,
)
from zharness.workload.program_model import program_model_spec
from zharness.workload.program_text import DEFAULT_SETTINGS
from zharness.workload.programs import Program
from zharness.world import Group, Isolation, RankServer, RankTask
from zharness.world.rank import seed_torch
from zharness.world.server import RankEnvironment

SEED = 0x5EED  # of every program's weights; its batches follow from its text as well


@dataclass(frozen=True)
class ProgramOutcome:
    """What became of programs that ran one after the other, and why where it is no pass."""

    verdict: Verdict
    cause: str = ""

    def describe(self, engine: str, programs: Sequence[Program]) -> str:
        """What became of ``programs``, and the command that shows it again."""
        cause = f"\n  {self.cause}" if self.cause else ""
        texts = "\n".join(f"{self.verdict.value}: {program}" for program in programs)
        return f"{texts}{cause}\n  again: {format_program_command(engine, programs)}"


def format_program_command(engine: str, programs: Sequence[Program]) -> str:
    """The command that runs ``programs`` on ``engine``, to be pasted into a shell."""
    first = programs[0]
    axes = f"--engine {shlex.quote(engine)} --stage {first.stage} --world-size {first.world_size}"
    rest = f"--dtype {first.dtype} --optimizer {first.optimizer}"
    rest += f" --clip {first.clip}" if first.clip is not None else ""
    rest += f" --window {first.window}" if first.window > 1 else ""
    rest += f" --reduction {first.reduction}" if first.reduction != DEFAULT_SETTINGS.reduction else ""
    return f"zharness program {axes} {rest} {shlex.join(map(str, programs))}"


def observe_programs(engine: str, programs: Sequence[Program], evidence_dir: str, capabilities: Capabilities) -> None:
    """In every rank: run the programs in turn, and write what was seen of each into a folder of its own."""
    for number, program in enumerate(programs):
        config = EngineConfig(stage=program.stage, dtype=program.dtype, loss_scale=LOSS_SCALES[program.dtype])
        folder = program_evidence_dir(evidence_dir, number)
        bench = observe_and_judge.build_rank_context(
            engine, program_model_spec(program.layers), SEED, config, capabilities, folder
        )
        seed_torch(SEED)
        observe_program(bench, program)
        bench.finish()


def judge_programs(
    programs: Sequence[Program], evidence_dir: str, capabilities: Capabilities
) -> observe_and_judge.Judgement:
    """In a process that never saw the engine: every rank's evidence against plain PyTorch, up to the first mismatch."""
    require_clean_torch(read_process_conditions())
    compared = (
        comparison
        for number, program in enumerate(programs)
        for comparison in judge_program(
            build_program_judge_context(program, program_evidence_dir(evidence_dir, number), capabilities), program
        )
    )
    return observe_and_judge.summarize_comparisons(list(stop_at_first_mismatch(compared)))


def program_evidence_dir(evidence_dir: str, number: int) -> Path:
    """Where the evidence of one of several programs lies."""
    folder = Path(evidence_dir) / str(number)
    folder.mkdir(exist_ok=True)
    return folder


def build_program_judge_context(program: Program, evidence_dir: Path, capabilities: Capabilities) -> JudgeContext:
    """What ``program`` left in ``folder``, and the baseline it has to match."""
    dtype, scale = DTYPES[program.dtype], LOSS_SCALES[program.dtype]
    baseline = Baseline(program_model_spec(program.layers), SEED, program.world_size, dtype, scale)
    return observe_and_judge.build_judge_context(baseline, evidence_dir, program.dtype, capabilities)


class ProgramRunner:
    """Runs programs on engines that one rank server can hold, over ranks that live on.

    Create it before any tensor operation of the process. A context manager: on leaving, its servers and ranks are gone.
    """

    def __init__(self, environment: RankEnvironment | None = None, timeout: float = 60.0) -> None:
        """``place`` is what the server needs to have for the engines; ``timeout`` is for the ranks of one run."""
        # torch loads some 800 modules at the first optimizer: once here, or in every rank again.
        importlib.import_module("torch._dynamo")
        self.timeout = timeout
        self._server = RankServer(environment)
        self._judge_server = RankServer()
        self._claims: dict[tuple[str, int], Capabilities] = {}

    def claims(self, engine: str, stage: int) -> Capabilities:
        """What ``engine`` claims at ``stage``."""
        if (engine, stage) not in self._claims:
            known = engines.capabilities(engine, stage)
            self._claims[engine, stage] = known or probe_engine(self._server, engine, stage)
        return self._claims[engine, stage]

    def run(self, engine: str, programs: Sequence[Program]) -> ProgramOutcome:
        """What became of ``programs``, in the same ranks one after the other; they have all but their text in common.

        Raises UsageError where the engine does not claim what one of them takes.
        """
        claims = self.claims(engine, programs[0].stage)
        for program in programs:
            reason = explain_unsupported(program, claims)
            if reason:
                raise UsageError(f"{engine} cannot be asked to run {str(program)!r}: {reason}")
        room = tempfile.mkdtemp(dir=self._judge_server.scratch_dir)
        try:
            return self._run_and_judge(engine, tuple(programs), room, claims)
        finally:
            shutil.rmtree(room, ignore_errors=True)

    def _run_and_judge(
        self, engine: str, programs: tuple[Program, ...], evidence_dir: str, capabilities: Capabilities
    ) -> ProgramOutcome:
        stage, world_size = programs[0].stage, programs[0].world_size
        observed = RankTask(
            observe_programs,
            (engine, programs, evidence_dir, capabilities),
            world_size,
            self.timeout,
            group=Group.REUSED,
            isolation=Isolation.POOLED,
            pool=f"stage {stage}",
        )
        seen = self._server.submit(observed)
        if seen.cause is not None:
            return ProgramOutcome(verdict_of_rank_failure(seen.cause), seen.cause.describe())
        judging = RankTask(
            judge_programs,
            (programs, evidence_dir, capabilities),
            timeout=JUDGE_TIMEOUT,
            group=Group.NONE,
            isolation=Isolation.POOLED,
        )
        judged = self._judge_server.submit(judging)
        if judged.cause is None:
            return ProgramOutcome(*conclude_judgement(judged.ranks[0].value))
        return ProgramOutcome(verdict_of_judge_failure(judged.cause), judged.cause.describe())

    def close(self) -> None:
        """End both servers."""
        self._server.close()
        self._judge_server.close()

    def __enter__(self) -> ProgramRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
