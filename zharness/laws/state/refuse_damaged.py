"""Define the law state.refuse_damaged: a load of a damaged checkpoint raises on every rank, and changes no tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zharness.engines.protocol import Feature
from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.optimizers import PLAIN_ADAMW
from zharness.law_kit.rank_actions import collect_training_state, load_raises, run_on_rank_0, shared_folder
from zharness.law_kit.rank_context import RankContext
from zharness.laws.state.common import find_changes, train_steps
from zharness.parity import Comparison, Part, Tier, compare_bitwise

MISSING, TRUNCATED, CHANGED = "missing_file", "truncated", "changed_bytes"
RAISED_ELSEWHERE = "the load raised on other ranks, and returned on this one"
CHANGED_AND_RAISED = "the load raised, and had changed the tensor"
LOADED_WRONG = "the load raised nothing, and the tensor is not what was saved"


def damage_content(damage: str, content: bytes, saved: Iterable[Tensor]) -> bytes:
    """Return a file's ``content`` truncated to its first half, or of the same length with one byte changed.

    The byte belongs to one of the ``saved`` tensors if the file holds any of them uncompressed. A byte changed
    elsewhere would break the file's format, and a load would notice this without checksums.
    """
    middle = len(content) // 2
    if damage == TRUNCATED:
        return content[:middle]
    places = (
        content.find(tensor.flatten()[:2].view(torch.uint8).numpy().tobytes())
        for tensor in saved
        if tensor.count_nonzero() > 1
    )
    place = next((place for place in places if place >= 0), middle)
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def observe_refuse_damaged(ctx: RankContext) -> None:
    """Damage each file of a checkpoint in turn, load, and record whether the load raised, and the state after it.

    Before each load the engine makes a step, so that its state differs from the one that was saved.
    """
    engine = ctx.build_engine(optimizer=PLAIN_ADAMW)
    raised_by_file: dict[str, Tensor] = {}
    wrong: dict[str, Tensor] = {}
    train_steps(ctx, engine, range(1), "before")
    with shared_folder() as folder:
        engine.save(folder)
        dist.barrier()  # a rank may return from ``save`` before others have written their files
        files = {
            path: content for path in sorted(folder.rglob("*")) if path.is_file() and (content := path.read_bytes())
        }
        saved = collect_training_state(engine)
        for step, (path, whole) in enumerate(files.items(), start=1):
            train_steps(ctx, engine, range(step, step + 1), "saved")
            before, name = collect_training_state(engine), path.relative_to(folder).as_posix()
            if ctx.variant == MISSING:
                run_on_rank_0(path.unlink)
            else:
                run_on_rank_0(partial(path.write_bytes, damage_content(ctx.variant, whole, saved.values())))
            raised = load_raises(lambda: engine.load(folder))
            right, after = before if raised else saved, collect_training_state(engine)
            raised_by_file[name] = raised
            wrong |= {f"{name}: {key}": changed for key, changed in find_changes(right, after).items()}
            run_on_rank_0(partial(path.write_bytes, whole))
        engine.load(folder)
    ctx.record("raised", raised_by_file)
    ctx.record("wrong", wrong)
    engine.close()


def judge_refuse_damaged(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that after each load all ranks raised and kept their state, or all ranks have the saved state.

    A checkpoint may have files that a load does not need.
    """
    outcomes = ctx.rank_records("raised")
    for file in outcomes[0]:
        raised = torch.stack([outcome[file] for outcome in outcomes]).max()
        for rank, outcome in enumerate(outcomes):
            compared = compare_bitwise(ctx.location(f"raised: {file}", Part.GATHER, 0, rank), raised, outcome[file])
            yield add_hint(compared, RAISED_ELSEWHERE)
    for rank, wrong in enumerate(ctx.rank_records("wrong")):
        for name, value in wrong.items():
            file, _, _ = name.partition(": ")
            compared = compare_bitwise(ctx.location(name, Part.GATHER, 0, rank), torch.zeros(()), value)
            yield add_hint(compared, CHANGED_AND_RAISED if outcomes[rank][file] else LOADED_WRONG)


LAWS = (
    Law(
        name="state.refuse_damaged",
        statement="a load of missing or damaged files raises on every rank, and changes no weight or optimizer state",
        tier=Tier.EXACT,
        models=("mlp",),
        observe=observe_refuse_damaged,
        judge=judge_refuse_damaged,
        features=(Feature.CHECKPOINT,),
        weights_stay_integers=False,
        variants=(
            Variant(MISSING, compares_engine_with_itself=True),
            Variant(TRUNCATED, compares_engine_with_itself=True),
            Variant(CHANGED, features=(Feature.CHECKSUMS,), compares_engine_with_itself=True),
        ),
        kept_because="the only law with files that are incomplete or changed",
    ),
)
