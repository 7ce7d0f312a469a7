"""The laws of files that another program wrote: DeepSpeed's universal checkpoints, and checkpoints that carry code."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zharness.checks.bench import Bench
from zharness.checks.law import Check
from zharness.checks.optimizer_step import Moment, published
from zharness.checks.state import (
    RESHARDED,
    SAVED_AT,
    continue_once,
    judge_continued,
    same_records,
    shared_folder,
    train,
)
from zharness.checks.trial import Trial
from zharness.engines.protocol import Engine, Feature, Keeping
from zharness.parity import Comparison, Part, Tier, identical

MOMENTS = ("exp_avg", "exp_avg_sq")
# One of each kind of piece, as paths below the checkpoint's folder; {} is a parameter's name.
PIECES = ("zero/optimizer_state.pt", "zero/{}/fp32.pt", "zero/{}/exp_avg.pt", "zero/{}")


def on_rank_0(action: Callable[[], Any]) -> None:
    """Let rank 0 change files while nobody reads them. Collective."""
    dist.barrier()
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def numbers(bench: Bench) -> dict[str, dict[str, Tensor]]:
    """Weights and Adam's moments for every parameter, the same on all ranks: what a universal checkpoint will hold."""
    generator = torch.Generator().manual_seed(bench.seed)
    found = {}
    for name, parameter in bench.spec.model(bench.seed).named_parameters():
        drawn = [torch.randn(parameter.shape, generator=generator) for _ in range(3)]
        found[name] = {"fp32": drawn[0], "exp_avg": drawn[1] / 8, "exp_avg_sq": drawn[2].square() / 64}
    return found


def write_universal(
    folder: Path, values: Mapping[str, Mapping[str, Tensor]], groups: Any, step: int, flat: bool
) -> None:
    """DeepSpeed's universal layout: as ds_to_universal writes it from stage 3 (``flat``) or from stages 1 and 2."""
    count = torch.tensor(float(step))
    for name, entries in values.items():
        (folder / "zero" / name).mkdir(parents=True)
        for key, tensor in entries.items():
            saved: Any = tensor.reshape(-1) if flat else {"cat_dim": 0, "param": tensor}
            torch.save(saved, folder / "zero" / name / f"{key}.pt")
        if not flat:
            torch.save(count, folder / "zero" / name / "step.pt")
    whole = {"param_groups": [{**group, "params": [index]} for index, group in enumerate(groups)]}
    inner = {"optimizer_state_dict": {"state": {index: {"step": count} for index in range(len(groups))}}}
    torch.save(whole | inner | {"zero_stage": 3} if flat else whole | {"zero_stage": 2}, folder / PIECES[0])
    model = {"module": {}, "global_steps": step, "skipped_steps": 0, "lr_scheduler": None}
    torch.save(model, folder / f"{'zero_pp_rank_0_' if flat else ''}mp_rank_00_model_states.pt")


def settings() -> list[dict[str, Any]]:
    """RESHARDED's groups in effect at SAVED_AT, as torch.optim keeps them."""
    spec = RESHARDED
    factor = spec.schedule[min(SAVED_AT, len(spec.schedule) - 1)]
    overrides: tuple[Mapping[str, Any], ...] = ({}, *(group.overrides for group in spec.groups))
    groups = [{**spec.args, **changed} for changed in overrides]
    return [{**group, "initial_lr": group["lr"], "lr": group["lr"] * factor} for group in groups]


def observe_universal(bench: Bench) -> None:
    values, flat = numbers(bench), bench.variant == "flat"
    bench.record("masters-written", {name: entry["fp32"] for name, entry in values.items()}, SAVED_AT)
    state = {f"{name}/{key}": entry[key] for name, entry in values.items() for key in MOMENTS}
    counts = {f"{name}/step": torch.tensor(float(SAVED_AT)) for name in values}
    bench.record("state-written", state | counts, SAVED_AT)
    engine = bench.engine(optimizer=RESHARDED)
    train(bench, engine, range(SAVED_AT), "before")
    with shared_folder() as folder:
        on_rank_0(lambda: write_universal(folder, values, settings(), SAVED_AT, flat))
        refused = {}
        for number, piece in enumerate(PIECES):
            for damage in ("missing", "truncated") if piece.endswith(".pt") else ("missing",):
                with damaged(folder, piece.format(next(iter(values))), damage):
                    refused[f"{damage}-{number}"] = attempted(bench, engine, folder, f"{damage}-{number}")
        bench.record("refused", refused)
        cast(Keeping, engine).load_universal(folder)
    continue_once(bench, engine, "read")
    engine.close()


@contextmanager
def damaged(folder: Path, piece: str, damage: str) -> Iterator[None]:
    """``piece`` of ``folder`` missing or cut short while the block runs. Collective."""
    path, aside = folder / piece, folder / "aside"

    def spoil() -> None:
        path.rename(aside)
        if damage == "truncated":
            content = aside.read_bytes()
            path.write_bytes(content[: len(content) // 2])

    def restore() -> None:
        path.unlink(missing_ok=True)
        aside.rename(path)

    on_rank_0(spoil)
    yield
    on_rank_0(restore)


def attempted(bench: Bench, engine: Engine, folder: Path, label: str) -> Tensor:
    """1 where loading raised; whether anything was loaded is recorded under ``label``."""
    before = flattened(engine)
    raised = raises(lambda: cast(Keeping, engine).load_universal(folder))
    after = flattened(engine)
    changed = {name: torch.tensor(float(not torch.equal(after[name], value))) for name, value in before.items()}
    bench.record(f"changed-{label}", changed)
    return raised


def raises(load: Callable[[], None]) -> Tensor:
    try:
        load()
    except Exception:  # noqa: BLE001 - whatever an engine raises is a refusal
        return torch.tensor(1.0)
    return torch.tensor(0.0)


def flattened(engine: Engine) -> dict[str, Tensor]:
    """Weights and optimizer state by name."""
    state = engine.full_optimizer_state()
    return {**engine.full_params(), **{f"{n}/{k}": value for n, entry in state.items() for k, value in entry.items()}}


def judge_universal(trial: Trial) -> Iterator[Comparison]:
    """Damaged pieces are refused and change nothing; what is whole is read bitwise, and continues as vanilla."""
    for rank, refused in enumerate(trial.copies("refused")):
        for name, raised in refused.items():
            yield identical(trial.place(f"refused/{name}", Part.GATHER, SAVED_AT, rank), torch.ones(()), raised)
            for parameter, changed in trial.copies(f"changed-{name}")[rank].items():
                yield identical(trial.place(parameter, Part.GATHER, SAVED_AT, rank), torch.zeros(()), changed)
    yield from same_records(trial, "masters-written", "masters-read", SAVED_AT, SAVED_AT, Part.GATHER)
    yield from published(trial, Moment(SAVED_AT, "masters-read"), "params-read")
    yield from same_records(trial, "state-written", "state-read", SAVED_AT, SAVED_AT, Part.OPTIMIZER)
    yield from judge_continued(trial, "read")


class Command:
    """Whoever unpickles one of these makes the folder ``marker``."""

    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self._marker,)


def observe_refuse_pickle(bench: Bench) -> None:
    engine = bench.engine()
    train(bench, engine, range(1), "before")
    with shared_folder() as folder:
        engine.save(folder)
        before, outcome = flattened(engine), {}
        files = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
        for number, (path, whole) in enumerate(files.items()):
            marker = folder / f"ran-{number}"
            on_rank_0(partial(path.write_bytes, poisoned(whole, marker)))
            outcome[f"command/raised/{number}"] = raises(lambda: engine.load(folder))
            outcome[f"command/ran/{number}"] = torch.tensor(float(marker.exists()))
            on_rank_0(partial(path.write_bytes, whole))
        after = flattened(engine)
        engine.load(folder)
    bench.record("outcome", outcome)
    changed = {name: torch.tensor(float(not torch.equal(after[name], value))) for name, value in before.items()}
    bench.record("changed", changed)
    engine.close()


def poisoned(whole: bytes, marker: Path) -> bytes:
    """A file of the same kind (torch.save's or a bare pickle) that carries a command."""
    if not zipfile.is_zipfile(io.BytesIO(whole)):
        return pickle.dumps(Command(marker))
    buffer = io.BytesIO()
    torch.save(Command(marker), buffer)
    return buffer.getvalue()


def judge_refuse_pickle(trial: Trial) -> Iterator[Comparison]:
    for rank, outcome in enumerate(trial.copies("outcome")):
        for name, value in outcome.items():
            wanted = torch.tensor(float(name.startswith("command/raised")))
            yield identical(trial.place(name, Part.GATHER, 0, rank), wanted, value)
        for name, changed in trial.copies("changed")[rank].items():
            yield identical(trial.place(name, Part.GATHER, 0, rank), torch.zeros(()), changed)


CHECKS = (
    Check(
        name="state.universal",
        law="DeepSpeed's universal checkpoint loads and continues; without a piece it is refused, and nothing changes",
        tier=Tier.STAGED,
        models=("mlp",),
        observe=observe_universal,
        judge=judge_universal,
        needs=(Feature.UNIVERSAL_CHECKPOINT, Feature.PARAM_GROUPS, Feature.SCHEDULE),
        integral=False,
        variants=(("shaped", ()), ("flat", ())),
    ),
    Check(
        name="state.refuse_pickle",
        law="a checkpoint whose files carry a command is refused on every rank, and the command never runs",
        tier=Tier.EXACT,
        models=("mlp",),
        observe=observe_refuse_pickle,
        judge=judge_refuse_pickle,
        needs=(Feature.CHECKPOINT,),
        integral=False,
        own_numbers=("",),
    ),
)
