"""Define the law state.universal: an engine loads DeepSpeed's universal checkpoint, and refuses a damaged one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zharness.engines.protocol import Engine, Feature, require_load_universal
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.optimizer_step import RecordedStep, compare_published_weights
from zharness.law_kit.rank_actions import collect_training_state, load_raises, run_on_rank_0, shared_folder
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.record_comparisons import compare_records
from zharness.law_kit.setting import SettingSupport
from zharness.laws.state.common import (
    RESHARD_OPTIMIZER,
    SAVE_STEP,
    find_changes,
    judge_next_step,
    record_next_step,
    train_steps,
)
from zharness.parity import Comparison, Part, Tier, compare_bitwise

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")

# One file or folder of each kind in a checkpoint, as paths below its folder; {} stands for a parameter's name.
CHECKPOINT_PIECES = ("zero/optimizer_state.pt", "zero/{}/fp32.pt", "zero/{}/exp_avg.pt", "zero/{}")


def make_checkpoint_values(ctx: RankContext) -> dict[str, dict[str, Tensor]]:
    """Return random weights and Adam moments for a universal checkpoint, which are the same on all ranks."""
    generator = torch.Generator().manual_seed(ctx.seed)
    values = {}
    for name, parameter in ctx.spec.model(ctx.seed).named_parameters():
        drawn = [torch.randn(parameter.shape, generator=generator) for _ in range(3)]
        values[name] = {"fp32": drawn[0], "exp_avg": drawn[1] / 8, "exp_avg_sq": drawn[2].square() / 64}
    return values


def write_universal_checkpoint(
    folder: Path, values: Mapping[str, Mapping[str, Tensor]], param_groups: Any, step: int, flat: bool
) -> None:
    """Write a universal checkpoint like DeepSpeed's ds_to_universal.

    If ``flat`` is true, the files are like those of a conversion from stage 3; otherwise they are like those of a
    conversion from stage 1 or 2.
    """
    count = torch.tensor(float(step))
    for name, entries in values.items():
        (folder / "zero" / name).mkdir(parents=True)
        for key, tensor in entries.items():
            saved: Any = tensor.reshape(-1) if flat else {"cat_dim": 0, "param": tensor}
            torch.save(saved, folder / "zero" / name / f"{key}.pt")
        if not flat:
            torch.save(count, folder / "zero" / name / "step.pt")
    whole = {"param_groups": [{**group, "params": [index]} for index, group in enumerate(param_groups)]}
    inner = {"optimizer_state_dict": {"state": {index: {"step": count} for index in range(len(param_groups))}}}
    torch.save(whole | inner | {"zero_stage": 3} if flat else whole | {"zero_stage": 2}, folder / CHECKPOINT_PIECES[0])
    model = {"module": {}, "global_steps": step, "skipped_steps": 0, "lr_scheduler": None}
    torch.save(model, folder / f"{'zero_pp_rank_0_' if flat else ''}mp_rank_00_model_states.pt")


def make_param_groups() -> list[dict[str, Any]]:
    """Return the parameter groups of RESHARD_OPTIMIZER at SAVE_STEP, in the form in which torch.optim stores them."""
    spec = RESHARD_OPTIMIZER
    factor = spec.schedule[min(SAVE_STEP, len(spec.schedule) - 1)]
    overrides: tuple[Mapping[str, Any], ...] = ({}, *(group.overrides for group in spec.groups))
    groups = [{**spec.args, **changed} for changed in overrides]
    return [{**group, "initial_lr": group["lr"], "lr": group["lr"] * factor} for group in groups]


def observe_universal(ctx: RankContext) -> None:
    """Write a universal checkpoint, try to load it with several kinds of damage, load it intact, and make one step."""
    values, flat = make_checkpoint_values(ctx), ctx.variant == "flat"
    ctx.record("masters-written", {name: entry["fp32"] for name, entry in values.items()}, SAVE_STEP)
    state = {f"{name}/{key}": entry[key] for name, entry in values.items() for key in ADAM_MOMENTS}
    counts = {f"{name}/step": torch.tensor(float(SAVE_STEP)) for name in values}
    ctx.record("state-written", state | counts, SAVE_STEP)
    engine = ctx.build_engine(optimizer=RESHARD_OPTIMIZER)
    train_steps(ctx, engine, range(SAVE_STEP), "before")
    with shared_folder() as folder:
        run_on_rank_0(lambda: write_universal_checkpoint(folder, values, make_param_groups(), SAVE_STEP, flat))
        refused = {}
        for number, piece in enumerate(CHECKPOINT_PIECES):
            for damage in ("missing", "truncated") if piece.endswith(".pt") else ("missing",):
                with damage_piece(folder, piece.format(next(iter(values))), damage):
                    refused[f"{damage}-{number}"] = attempt_load(ctx, engine, folder, f"{damage}-{number}")
        ctx.record("refused", refused)
        require_load_universal(engine).load_universal(folder)
    record_next_step(ctx, engine, "read")
    engine.close()


@contextmanager
def damage_piece(folder: Path, piece: str, damage: str) -> Iterator[None]:
    """Remove or truncate the file or folder ``piece`` of a checkpoint in the ``with`` block, and restore it afterwards.

    Every rank has to enter this context manager.
    """
    path, aside = folder / piece, folder / "aside"

    def damage_file() -> None:
        """Rename the file or folder. If ``damage`` is "truncated", write the first half of the file under its name."""
        path.rename(aside)
        if damage == "truncated":
            content = aside.read_bytes()
            path.write_bytes(content[: len(content) // 2])

    def restore_file() -> None:
        """Move the original file or folder back to its place."""
        path.unlink(missing_ok=True)
        aside.rename(path)

    run_on_rank_0(damage_file)
    yield
    run_on_rank_0(restore_file)


def attempt_load(ctx: RankContext, engine: Engine, folder: Path, label: str) -> Tensor:
    """Load a checkpoint, record which weights and state the load changed, and return 1 if the load raised, else 0."""
    before = collect_training_state(engine)
    raised = load_raises(lambda: require_load_universal(engine).load_universal(folder))
    after = collect_training_state(engine)
    ctx.record(f"changed-{label}", find_changes(before, after))
    return raised


def judge_universal(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that damaged checkpoints are refused and change nothing, and judge the load of an intact checkpoint."""
    for rank, refused in enumerate(ctx.rank_records("refused")):
        for name, raised in refused.items():
            yield compare_bitwise(ctx.location(f"refused/{name}", Part.GATHER, SAVE_STEP, rank), torch.ones(()), raised)
            for parameter, changed in ctx.rank_records(f"changed-{name}")[rank].items():
                yield compare_bitwise(ctx.location(parameter, Part.GATHER, SAVE_STEP, rank), torch.zeros(()), changed)
    yield from compare_records(ctx, "masters-written", "masters-read", SAVE_STEP, SAVE_STEP, Part.GATHER)
    yield from compare_published_weights(ctx, RecordedStep(SAVE_STEP, "masters-read"), "params-read")
    yield from compare_records(ctx, "state-written", "state-read", SAVE_STEP, SAVE_STEP, Part.OPTIMIZER)
    yield from judge_next_step(ctx, "read")


LAWS = (
    Law(
        name="state.universal",
        statement="DeepSpeed's universal checkpoint is loaded and continued; a damaged one raises and changes nothing",
        tier=Tier.STAGED,
        models=("mlp",),
        observe=observe_universal,
        judge=judge_universal,
        features=(Feature.UNIVERSAL_CHECKPOINT, Feature.PARAM_GROUPS, Feature.SCHEDULE),
        weights_stay_integers=False,
        variants=(Variant("shaped"), Variant("flat")),
        setting_support=SettingSupport.WINDOWS_AND_CALLS,
        kept_because="the only law that loads files of another engine",
    ),
)
