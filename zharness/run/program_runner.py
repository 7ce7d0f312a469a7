"""Run programs on ranks, and judge their evidence in a separate process."""

from __future__ import annotations

import importlib
import shlex
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zharness.engines import Capabilities, EngineConfig
from zharness.engines.options import merge_options
from zharness.errors import UsageError
from zharness.law_kit.judge_context import stop_at_first_mismatch
from zharness.law_kit.program_executor import observe_program
from zharness.law_kit.program_features import claims_for_program, explain_unsupported
from zharness.law_kit.program_judge import judge_program
from zharness.law_kit.program_overflow import cut_before, find_overflow
from zharness.laws import DTYPES, LOSS_SCALES, JudgeContext
from zharness.parity.baseline import Baseline
from zharness.parity.contamination import read_process_conditions, require_clean_torch
from zharness.run import observe_and_judge
from zharness.run.claims import get_claims
from zharness.run.record import Verdict
from zharness.run.runner import JUDGE_TIMEOUT
from zharness.run.verdicts import (
    conclude_judgement,
    is_raised_by_model,
    verdict_of_judge_failure,
    verdict_of_rank_failure,
)
from zharness.workload.program_model import program_model_spec
from zharness.workload.program_text import DEFAULT_SETTINGS
from zharness.workload.programs import Program
from zharness.world import GroupMode, Isolation, RankServer, RankTask
from zharness.world.rank import seed_torch
from zharness.world.server import RankEnvironment

SEED = 0x5EED  # seed of every program's weights; the batches also depend on the program's text


@dataclass(frozen=True)
class ProgramOutcome:
    """The verdict on programs that ran one after the other, and the cause of the verdict, which is empty for a pass.

    ``innermost_file`` is the file of the innermost frame of an exception, and empty for other causes. ``details``
    contains the reports of all ranks, with tracebacks, if one of them did not return.
    """

    verdict: Verdict
    cause: str = ""
    innermost_file: str = field(default="", compare=False)
    details: str = field(default="", compare=False, repr=False)

    def describe(self, engine: str, programs: Sequence[Program]) -> str:
        """Describe the outcome of ``programs``, with the command that runs them again."""
        cause = f"\n  {self.cause}" if self.cause else ""
        texts = "\n".join(f"{self.verdict.value}: {program}" for program in programs)
        return f"{texts}{cause}\n  again: {format_program_command(engine, programs)}"


def format_program_command(engine: str, programs: Sequence[Program]) -> str:
    """Return the shell command that runs ``programs`` on ``engine`` again."""
    first = programs[0]
    axes = f"--engine {shlex.quote(engine)} --stage {first.stage} --world-size {first.world_size}"
    axes += f" --mesh {first.mesh.label}" if first.mesh.sizes else ""
    rest = f"--dtype {first.dtype} --optimizer {first.optimizer}"
    rest += f" --clip {first.clip}" if first.clip is not None else ""
    rest += f" --window {first.window}" if first.window > 1 else ""
    rest += f" --reduction {first.reduction}" if first.reduction != DEFAULT_SETTINGS.reduction else ""
    rest += f" --window-owner {first.window_owner}" if first.window_owner != DEFAULT_SETTINGS.window_owner else ""
    rest += "".join(f" --option {shlex.quote(name)}" for name in first.options)
    return f"zharness program {axes} {rest} {shlex.join(map(str, programs))}"


def program_options(program: Program, capabilities: Capabilities) -> dict[str, Any]:
    """Return the engine options that ``program`` sets by name, merged."""
    options: dict[str, Any] = {}
    for name in program.options:
        options = merge_options(options, capabilities.engine_options[name].options)
    return options


def observe_programs(engine: str, programs: Sequence[Program], evidence_dir: str, capabilities: Capabilities) -> None:
    """On every rank: run the programs in turn, and write the evidence of each program into its own folder."""
    for number, program in enumerate(programs):
        config = EngineConfig(
            stage=program.stage,
            dtype=program.dtype,
            loss_scale=LOSS_SCALES[program.dtype],
            options=program_options(program, capabilities),
            mesh=program.mesh,
        )
        folder = program_evidence_dir(evidence_dir, number)
        claims = claims_for_program(program, capabilities)
        ctx = observe_and_judge.build_rank_context(
            engine, program_model_spec(program.layers), SEED, config, claims, folder
        )
        seed_torch(SEED)
        observe_program(ctx, program)
        ctx.finish()


def judge_programs(
    programs: Sequence[Program], evidence_dir: str, capabilities: Capabilities
) -> observe_and_judge.Judgement:
    """Judge every rank's evidence against plain PyTorch, up to the first mismatch.

    Runs in a process that never imported the engine.
    """
    require_clean_torch(read_process_conditions())
    comparisons = (
        comparison
        for number, program in enumerate(programs)
        for comparison in judge_program(
            build_program_judge_context(program, program_evidence_dir(evidence_dir, number), capabilities), program
        )
    )
    return observe_and_judge.summarize_comparisons(list(stop_at_first_mismatch(comparisons)))


def program_evidence_dir(evidence_dir: str, number: int) -> Path:
    """Create and return the evidence folder of program ``number``."""
    folder = Path(evidence_dir) / str(number)
    folder.mkdir(exist_ok=True)
    return folder


def build_program_baseline(program: Program) -> Baseline:
    """Return the plain PyTorch model with which ``program`` is compared."""
    dtype, scale = DTYPES[program.dtype], LOSS_SCALES[program.dtype]
    data_size = program.mesh.data_size(program.world_size)
    return Baseline(program_model_spec(program.layers), SEED, data_size, dtype, scale)


def run_plain_models(programs: Sequence[Program]) -> None:
    """Run forward and backward of the plain model of each program on the first micro-batch of every rank.

    Raises any exception of the model's code.
    """
    for program in programs:
        baseline = build_program_baseline(program)
        for rank in range(baseline.data_size):
            baseline.run_rank(rank, 0)


@dataclass(frozen=True)
class FinitePart:
    """Programs cut before the numbers of plain PyTorch overflow, and the reason why later verbs judge no engine."""

    programs: tuple[Program, ...]
    reason: str


def find_finite_part(programs: Sequence[Program]) -> FinitePart | None:
    """Return the programs cut before the first number of plain PyTorch that is not finite; None if all are finite."""
    for count, program in enumerate(programs):
        overflow = find_overflow(build_program_baseline(program), program)
        if overflow is not None:
            reason = f"{overflow.describe()}, and the engine is right before that, so the program proves nothing more"
            return FinitePart((*programs[:count], cut_before(program, overflow)), reason)
    return None


def build_program_judge_context(program: Program, evidence_dir: Path, capabilities: Capabilities) -> JudgeContext:
    """Read the evidence of ``program`` from ``evidence_dir``, and combine it with its baseline."""
    baseline = build_program_baseline(program)
    claims = claims_for_program(program, capabilities)
    return observe_and_judge.build_judge_context(baseline, evidence_dir, program.dtype, claims, mesh=program.mesh)


class ProgramRunner:
    """Runs programs on the engines of one rank server, in pooled ranks.

    Create the runner before any tensor operation of the process, since ranks are forked. On exit, the context manager
    ends its servers and ranks.
    """

    def __init__(
        self,
        environment: RankEnvironment | None = None,
        timeout: float = 60.0,
        observe: Callable[[str, Sequence[Program], str, Capabilities], None] = observe_programs,
    ) -> None:
        """Start the servers; ``environment`` is the environment of the ranks' server.

        ``timeout`` is the time limit in seconds for the ranks of one run. ``observe`` runs on every rank; it is a
        function of a module, or a partial of one.
        """
        # torch loads some 800 modules at the first optimizer: load them here, not in every rank.
        importlib.import_module("torch._dynamo")
        self.timeout = timeout
        self._observe = observe
        self._server = RankServer(environment)
        self._judge_server = RankServer()
        self._claims: dict[tuple[str, int], Capabilities] = {}

    def claims(self, engine: str, stage: int) -> Capabilities:
        """Return the capabilities that ``engine`` claims at ``stage``.

        Raises UsageError if the engine cannot be built.
        """
        if (engine, stage) not in self._claims:
            self._claims[engine, stage] = get_claims(engine, stage, lambda: nullcontext(self._server))
        return self._claims[engine, stage]

    def run(self, engine: str, programs: Sequence[Program], isolation: Isolation = Isolation.POOLED) -> ProgramOutcome:
        """Run ``programs`` one after the other on the same ranks, which are new ranks or ranks of a pool.

        The programs may differ only in their text. If the numbers of plain PyTorch overflow, a failure after the
        overflow does not count: the verdict is that of the verbs before the overflow, or ``undetermined`` if these
        verbs show no failure. Raises UsageError if the engine does not claim a feature that one of the programs needs.
        """
        claims = self.claims(engine, programs[0].stage)
        for program in programs:
            reason = explain_unsupported(program, claims)
            if reason:
                raise UsageError(f"{engine} cannot run {str(program)!r}: {reason}")
        outcome = self._run_and_judge(engine, tuple(programs), claims, isolation)
        finite = self._find_finite_part(tuple(programs)) if outcome.verdict.is_broken else None
        if finite is None:
            return outcome
        before = self._run_and_judge(engine, finite.programs, claims, isolation)
        shows_nothing = before.verdict in (Verdict.PASS, Verdict.UNDETERMINED)
        return ProgramOutcome(Verdict.UNDETERMINED, finite.reason) if shows_nothing else before

    def _run_and_judge(
        self,
        engine: str,
        programs: tuple[Program, ...],
        capabilities: Capabilities,
        isolation: Isolation,
    ) -> ProgramOutcome:
        """Run the programs on ranks of their stage and judge their evidence in a temporary folder."""
        evidence_dir = tempfile.mkdtemp(dir=self._judge_server.scratch_dir)
        try:
            return self._judge_folder(engine, programs, evidence_dir, capabilities, isolation)
        finally:
            shutil.rmtree(evidence_dir, ignore_errors=True)

    def _judge_folder(
        self,
        engine: str,
        programs: tuple[Program, ...],
        evidence_dir: str,
        capabilities: Capabilities,
        isolation: Isolation,
    ) -> ProgramOutcome:
        """Run the programs on ranks of their stage, which write evidence into ``evidence_dir``, and judge it."""
        stage, world_size = programs[0].stage, programs[0].world_size
        observe_task = RankTask(
            self._observe,
            (engine, programs, evidence_dir, capabilities),
            world_size,
            self.timeout,
            group=GroupMode.REUSED,
            isolation=isolation,
            pool=f"stage {stage} {programs[0].mesh.label}",
        )
        observed = self._server.submit(observe_task)
        if observed.cause is not None:
            cause, verdict = observed.cause, verdict_of_rank_failure(observed.cause)
            if verdict is Verdict.ERROR and is_raised_by_model(cause) and self._plain_models_run(programs, isolation):
                verdict = Verdict.CRASH
            return ProgramOutcome(verdict, cause.describe(), cause.innermost_file, observed.describe())
        judge_task = RankTask(
            judge_programs,
            (programs, evidence_dir, capabilities),
            timeout=JUDGE_TIMEOUT,
            group=GroupMode.NONE,
            isolation=Isolation.POOLED,
        )
        judged = self._judge_server.submit(judge_task)
        if judged.cause is None:
            return ProgramOutcome(*conclude_judgement(judged.ranks[0].value))
        return ProgramOutcome(verdict_of_judge_failure(judged.cause, programs[0].dtype), judged.cause.describe())

    def _find_finite_part(self, programs: tuple[Program, ...]) -> FinitePart | None:
        """Return the result of ``find_finite_part``, or None if plain PyTorch fails to run the programs."""
        task = RankTask(
            find_finite_part,
            (programs,),
            timeout=JUDGE_TIMEOUT,
            group=GroupMode.NONE,
            isolation=Isolation.POOLED,
        )
        found = self._judge_server.submit(task)
        finite: FinitePart | None = found.ranks[0].value if found.cause is None else None
        return finite

    def _plain_models_run(self, programs: tuple[Program, ...], isolation: Isolation) -> bool:
        """Return whether forward and backward of the plain models of ``programs`` raise nothing."""
        task = RankTask(run_plain_models, (programs,), timeout=JUDGE_TIMEOUT, group=GroupMode.NONE, isolation=isolation)
        return self._judge_server.submit(task).cause is None

    def close(self) -> None:
        """End the rank server and the judges' server, and with them their ranks."""
        self._server.close()
        self._judge_server.close()

    def __enter__(self) -> ProgramRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
