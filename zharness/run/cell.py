"""The two halves of a cell: what runs in every rank, and what runs in the judge's own process."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zharness import engines
from zharness.case import Case
from zharness.checks import DTYPES, LOSS_SCALES, Bench, Check, Trial, check_named
from zharness.checks.construction import constructed, require_gradients, require_initial
from zharness.checks.course import curves
from zharness.checks.own_model import course_of
from zharness.checks.trial import until_wrong
from zharness.checks.usual import AS_USUAL, Training
from zharness.engines import Capabilities, EngineConfig
from zharness.engines.options import laid_over
from zharness.errors import EngineContractError, HarnessFault, UsageError
from zharness.parity import Comparison, Mismatch, Tier
from zharness.parity.baseline import Baseline
from zharness.parity.contamination import conditions, require_clean
from zharness.parity.exhibit import Curve, Exhibit, exhibit
from zharness.parity.junctions import with_junctions
from zharness.parity.snapshot import Records, read, records_in
from zharness.run.configuration import configured, is_file
from zharness.workload import ModelSpec, model_spec
from zharness.workload.foreign import is_foreign
from zharness.world.rank import rank_device, seed_torch

MOST_UNDETERMINED = 1 / 2  # the share of elements beyond which a cell that found nothing has shown nothing


@dataclass(frozen=True)
class Judgement:
    """What the judge found: the first mismatch, and over all comparisons the loosest tier and the largest ratio.

    In every tensor compared, a scale error above ``smallest``, and ``wrong_elements`` lost ones, would have been
    caught. ``undetermined`` of ``elements`` are smaller than their bound. ``exhibit`` is what the mismatch has to show.
    """

    comparisons: int
    tier: Tier
    ratio: float
    smallest: float
    mismatch: Mismatch | None
    elements: int = 0
    undetermined: int = 0
    wrong_elements: int = 1
    notes: tuple[str, ...] = ()
    exhibit: Exhibit | None = None

    @property
    def undecided(self) -> bool:
        """Whether the bounds leave more open than they show, so that no mismatch is no pass."""
        return self.undetermined > MOST_UNDETERMINED * self.elements


def observe(case: Case, salt: int, room: str, capabilities: Capabilities, options: Mapping[str, Any]) -> None:
    """In every rank: run the check's observer on the engine, and write what it saw into ``room``."""
    bench = bench_of(case, salt, capabilities, options, Path(room))
    # Seeded alike on all ranks: an engine that drew numbers of its own would draw the same ones everywhere.
    seed_torch(case.seed(salt))
    check_named(case.check).observe(bench)
    bench.finish()


def bench_of(
    case: Case, salt: int, capabilities: Capabilities, options: Mapping[str, Any], room: Path | None = None
) -> Bench:
    """This rank of the cell, whose records go into ``room``; None: nowhere that anyone finds them."""
    config = EngineConfig(
        stage=case.stage,
        dtype=case.dtype,
        loss_scale=LOSS_SCALES[case.dtype],
        options=laid_over(options_of(case, capabilities), options),
    )
    spec, training = model_spec(case.model), configured(case.engine_variant).training
    return bench_here(case.engine, spec, case.seed(salt), config, capabilities, room, case.variant, training)


def options_of(case: Case, capabilities: Capabilities) -> Mapping[str, Any]:
    """What the case's engine variant stands for: a file's options, or a named set of the engine's.

    They are laid over those that the engine wants for anyone's model, where it is one.
    """
    usual = capabilities.own_model if is_foreign(case.model) else {}
    if not case.engine_variant or is_file(case.engine_variant):
        return laid_over(usual, configured(case.engine_variant).options)
    return laid_over(usual, capabilities.variants[case.engine_variant])


def bench_here(
    engine: str,
    spec: ModelSpec,
    seed: int,
    config: EngineConfig,
    capabilities: Capabilities,
    room: Path | None,
    variant: str = "",
    training: Training = AS_USUAL,
) -> Bench:
    """A bench on this rank of the default group."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return Bench(
        spec=spec,
        seed=seed,
        rank=rank,
        world_size=world_size,
        config=config,
        factory=engines.get(engine),
        capabilities=capabilities,
        variant=variant,
        device=rank_device(rank, world_size),
        # Now, and not at the first record: a law may count the files that are open.
        records=Records(tempfile.TemporaryFile()) if room is None else records_in(room, rank),
        training=training,
    )


def baseline_of(case: Case, salt: int, capabilities: Capabilities) -> Baseline:
    """What the cell is held against."""
    spec, dtype, scale = spec_beside(case, capabilities), DTYPES[case.dtype], LOSS_SCALES[case.dtype]
    autocast = configured(case.engine_variant).autocast
    return Baseline(spec, case.seed(salt), case.world_size, dtype, scale, autocast)


def spec_beside(case: Case, capabilities: Capabilities) -> ModelSpec:
    """The plain model of the case; anyone's has the nodes in its graph that the engine puts there.

    The workload's own models need none: no engine's nodes part the uses of one of their tensors.
    """
    spec, junctions = model_spec(case.model), capabilities.junctions
    if junctions is None or not is_foreign(case.model):
        return spec
    return with_junctions(spec, junctions, options_of(case, capabilities))


def judge(case: Case, salt: int, room: str, capabilities: Capabilities) -> Judgement:
    """In a process that never saw the engine: every rank's evidence against the baseline.

    Raises HarnessFault where torch's functions were replaced in this process. What was otherwise in the ranks is noted.
    """
    return judge_beside(baseline_of(case, salt, capabilities), case, room, capabilities)


def judge_beside(baseline: Baseline, case: Case, room: str, capabilities: Capabilities) -> Judgement:
    """``judge`` with the case's own ``baseline``, or one that is watched as it runs."""
    here = conditions()
    require_clean(here)
    trial = trial_of(baseline, Path(room), case.dtype, capabilities, case.variant)
    asked = configured(case.engine_variant)
    trial = replace(trial, training=asked.training, wire=asked.wire or asked.autocast or trial.wire)
    found = held(trial, check_named(case.check))
    unlike = (words for evidence in trial.evidence for words in evidence.conditions.beside(here))
    return replace(found, notes=tuple(dict.fromkeys([*found.notes, *unlike])))


def trial_of(baseline: Baseline, room: Path, dtype: str, capabilities: Capabilities, variant: str = "") -> Trial:
    """What every rank wrote into ``room``, and the baseline that it has to match."""
    wire = capabilities.wires.get(dtype)
    return Trial(
        baseline=baseline,
        evidence=tuple(read(room, rank) for rank in range(baseline.world_size)),
        dtype=DTYPES[dtype],
        variant=variant,
        wire=None if wire is None else DTYPES[wire],
    )


def held(trial: Trial, check: Check) -> Judgement:
    """What ``check`` finds, and where that is a mismatch, what there is to show of it."""
    comparisons = check.judge(trial)
    seen = list(until_wrong(comparisons))
    found = summarize(seen)
    if found.mismatch is None:
        return found
    try:
        return replace(found, exhibit=exhibit(seen, comparisons, trial.baseline.names, curves_of(trial, check)))
    except Exception as error:  # noqa: BLE001 - the verdict stands, whatever the wrong numbers do to what is shown of it
        return replace(found, notes=(*found.notes, f"no evidence is shown: {type(error).__name__}: {error}"))


def curves_of(trial: Trial, check: Check) -> Mapping[str, Curve]:
    """How the training went; nothing where the check has none, or where what is wrong keeps it from being told."""
    course = course_of(trial.training, trial.variant) if check.counted else check.courses.get(trial.variant)
    if course is None:
        return {}
    # A loss that was not recorded, is no tensor, or has another shape; gradients of which there are none.
    with suppress(EngineContractError, LookupError, TypeError, ValueError, RuntimeError):
        return curves(trial, course)
    return {}


def summarize(seen: Sequence[Comparison]) -> Judgement:
    """All comparisons in one; only the last of them may be a mismatch. Raises HarnessFault where there are none."""
    if not seen:
        raise HarnessFault("the check compared nothing, so it cannot have passed")
    tiers = list(Tier)
    caught = [found.smallest for found in seen if math.isfinite(found.smallest)]
    return Judgement(
        comparisons=len(seen),
        tier=max((found.tier for found in seen), key=tiers.index),
        ratio=max(found.ratio for found in seen),
        smallest=max(caught, default=math.inf),
        mismatch=seen[-1].mismatch,
        elements=sum(found.elements for found in seen),
        undetermined=sum(found.undetermined for found in seen),
        wrong_elements=1 + max(found.undetermined for found in seen),
        notes=tuple(dict.fromkeys(found.note for found in seen if found.note)),
    )


def probe(engine: str, stage: int) -> Capabilities:
    """In a rank: build the engine once, and return what it claims.

    Raises UsageError for a factory that does not import, raises, returns something that is not an Engine, or changes
    the model that it was given; and for gradients of one backward under names or in shapes that are not the model's.
    """
    factory = engines.get(engine)
    config = EngineConfig(stage=stage)
    spec = model_spec("mlp")
    with blamed(f"factory {engine!r}"):
        built, _ = constructed(factory, spec.model(0), config)
    claims = built.capabilities
    with blamed(f"full_params() of the engine of {engine!r}"):
        require_initial(built.full_params(), spec.model(0))
    # What a forward or a backward raises is the matter of the cells, which show it with every rank's report.
    with suppress(Exception):
        batch = spec.micro_batch(0, 0, 0)
        built.backward(spec.loss(built(batch.inputs), batch.target))
    with blamed(f"full_grads() of the engine of {engine!r}"):
        require_gradients(built.full_grads(), spec.model(0))
    with blamed(f"close() of the engine of {engine!r}"):
        built.close()
    return claims


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """A block of the user's code: whatever it raises, the user has to hear of it, as one UsageError."""
    try:
        yield
    except EngineContractError as error:
        raise UsageError(f"{what}: {error}") from error
    except Exception as error:
        raise UsageError(f"{what} raised {type(error).__name__}: {error}") from error
