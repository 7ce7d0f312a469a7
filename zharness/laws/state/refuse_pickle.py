"""Define the law state.refuse_pickle: a load must not run code that a malicious checkpoint file contains."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from zharness.engines.protocol import Feature
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.law_steps import LawSteps, StepsKind
from zharness.law_kit.rank_actions import collect_training_state, load_raises, run_on_rank_0, shared_folder
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.setting import SettingSupport
from zharness.laws.state.common import compare_changes, record_changes, train_steps
from zharness.parity import Comparison, Part, Tier, compare_bitwise


class PickledCommand:
    """An object that creates the folder ``marker`` when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        """Return the function and the arguments that unpickling calls."""
        return os.mkdir, (self._marker,)


def observe_refuse_pickle(ctx: RankContext) -> None:
    """Replace each file of a checkpoint in turn by a file with a command, and record whether the load raises."""
    engine = ctx.build_engine()
    train_steps(ctx, engine, range(1), "before")
    with shared_folder() as folder:
        engine.save(folder)
        before, outcome = collect_training_state(engine), {}
        files = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
        for number, (path, whole) in enumerate(files.items()):
            marker = folder / f"ran-{number}"
            run_on_rank_0(partial(path.write_bytes, poison_file(whole, marker)))
            outcome[f"command/raised/{number}"] = load_raises(lambda: engine.load(folder))
            outcome[f"command/ran/{number}"] = torch.tensor(float(marker.exists()))
            run_on_rank_0(partial(path.write_bytes, whole))
        after = collect_training_state(engine)
        engine.load(folder)
    ctx.record("outcome", outcome)
    record_changes(ctx, before, after)
    engine.close()


def poison_file(content: bytes, marker: Path) -> bytes:
    """Return the bytes of a file that contains a command, in the format (torch.save or pickle) of ``content``."""
    if not zipfile.is_zipfile(io.BytesIO(content)):
        return pickle.dumps(PickledCommand(marker))
    buffer = io.BytesIO()
    torch.save(PickledCommand(marker), buffer)
    return buffer.getvalue()


def judge_refuse_pickle(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that every load of a replaced file raised, ran no command, and changed no weight or optimizer state."""
    for rank, outcome in enumerate(ctx.rank_records("outcome")):
        for name, value in outcome.items():
            expected = torch.tensor(float(name.startswith("command/raised")))
            yield compare_bitwise(ctx.location(name, Part.GATHER, 0, rank), expected, value)
        yield from compare_changes(ctx, rank)


LAWS = (
    Law(
        name="state.refuse_pickle",
        statement="a load of a file that contains a command raises on every rank, and the command never runs",
        tier=Tier.EXACT,
        models=("mlp",),
        observe=observe_refuse_pickle,
        judge=judge_refuse_pickle,
        features=(Feature.CHECKPOINT,),
        weights_stay_integers=False,
        variants=(Variant(compares_engine_with_itself=True),),
        steps=LawSteps(observe_refuse_pickle, StepsKind.SELF_COMPARISON, comparison_part="compare_refused_load"),
        setting_support=SettingSupport.WINDOWS_AND_CALLS,
        kept_because="the only law with a malicious file",
    ),
)
