"""Define the law engines.interleaved: engines that train in turns in one process do not share any state.

Two engines with the same parameter names and different weights, data and configurations train one after the other. Two
further engines like them then train in turns. An engine has to give the same numbers both times, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from zharness.engines.protocol import AccumulationOwner, Feature, OptimizerSpec, Reduction
from zharness.law_kit.engine_facts import collect_engine_facts
from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.optimizers import ADAMW
from zharness.law_kit.rank_actions import shared_folder
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.law_kit.record_comparisons import compare_records
from zharness.parity import Comparison, Part, Tier

MOMENTUM_SGD = OptimizerSpec("sgd", {"lr": 2.0**-6, "momentum": 0.5})
BATCHES_APART = 16  # the first micro-batch of the second engine

# The order of the engines' turns. Each engine is closed after its last turn, while the other continues to train.
SECOND_REMAINS = (0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 1, 1)
FIRST_REMAINS = (1, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0)

Config = Mapping[str, Any]  # fields of EngineConfig


def accumulate(steps: int, owner: AccumulationOwner = AccumulationOwner.ENGINE) -> Config:
    """Return the fields of EngineConfig for accumulation windows of ``steps`` micro-batches."""
    return {"accumulation_steps": steps, "accumulation_owner": owner}


@dataclass(frozen=True)
class EnginePair:
    """The configurations of two engines, and the order of their turns.

    With ``keeps_no_sync``, a ``no_sync`` block lasts from the first micro-batch of a window until the last one. With
    ``reloads``, each engine saves a checkpoint before its second turn, and loads it before its fourth turn.
    """

    configs: tuple[Config, Config]
    turns: tuple[int, ...]
    features: tuple[Feature, ...] = ()
    keeps_no_sync: bool = False
    reloads: bool = False


PAIRS: Mapping[str, EnginePair] = {
    "windows": EnginePair((accumulate(2), accumulate(2)), SECOND_REMAINS, (Feature.ENGINE_ACCUMULATION,)),
    "lengths": EnginePair((accumulate(4), {}), FIRST_REMAINS, (Feature.ENGINE_ACCUMULATION,)),
    "clipped": EnginePair(({"clip": 2.0**-6}, {"clip": 2.0**-3}), FIRST_REMAINS, (Feature.CLIP,)),
    "optimizers": EnginePair(({}, {"optimizer": ADAMW}), SECOND_REMAINS, (Feature.PARAM_GROUPS, Feature.SCHEDULE)),
    "reductions": EnginePair(({}, {"reduction": Reduction.SUM}), FIRST_REMAINS, (Feature.SUM,)),
    "no_sync": EnginePair(
        (accumulate(2, AccumulationOwner.CALLER), {}),
        SECOND_REMAINS,
        (Feature.CALLER_ACCUMULATION, Feature.NO_SYNC),
        keeps_no_sync=True,
    ),
    "checkpoints": EnginePair(({}, {}), SECOND_REMAINS, (Feature.CHECKPOINT,), reloads=True),
}

ALONE, IN_TURNS = "alone", "in_turns"
INSIDE = "inside"  # the weights after a micro-batch that does not end a window
MOVED_INSIDE_HINT = "the weights moved inside an accumulation window"
SAVE_TURN, LOAD_TURN = 1, 3


@dataclass
class Trainee:
    """One of the two engines, with the number of turns that it has taken. ``folders`` closes after every turn."""

    ctx: RankContext
    number: int
    run: str
    folders: ExitStack
    turn: int = 0
    no_sync: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.pair = PAIRS[self.ctx.variant]
        scale = {"loss_scale": self.ctx.config.loss_scale * 2**self.number} if self.ctx.config.dtype == "fp16" else {}
        fields = {"optimizer": MOMENTUM_SGD, **scale, **self.pair.configs[self.number]}
        self.engine = self.ctx.build_engine_around(self.ctx.spec.model(self.ctx.seed + self.number), **fields)
        self.window = fields.get("accumulation_steps", 1)
        self.engine_owns = fields.get("accumulation_owner") is AccumulationOwner.ENGINE
        self.turns = self.pair.turns.count(self.number)

    def label(self, what: str) -> str:
        """Return the label under which this engine's records of the kind ``what`` are stored."""
        return f"{what}-{self.run}-{self.number}"

    def take_turn(self) -> None:
        """Train one micro-batch, step if the accumulation window ends, and close the engine after its last turn."""
        if self.pair.reloads and self.turn == SAVE_TURN:
            self.folder = self.folders.enter_context(shared_folder())
            self.engine.save(self.folder)
        if self.pair.reloads and self.turn == LOAD_TURN:
            self.engine.load(self.folder)
        self.record_norm()
        self.train()
        self.turn += 1
        if self.turn == self.turns:
            self.record_norm()
            self.engine.close()

    def train(self) -> None:
        """Train one micro-batch, and make an optimizer step if the accumulation window ends."""
        micro = self.turn % self.window
        is_last = micro == self.window - 1
        if self.pair.keeps_no_sync and is_last:
            self.no_sync.close()
        elif self.pair.keeps_no_sync and micro == 0:
            self.no_sync.enter_context(self.engine.no_sync())
        batch = self.turn + self.number * BATCHES_APART
        self.engine.backward(self.ctx.loss(self.engine, batch, self.label("loss")))
        if is_last:
            self.ctx.record(self.label("grads"), self.engine.full_grads(), self.turn)
        if is_last or self.engine_owns:
            self.engine.step()
        if self.engine_owns and not is_last:
            self.ctx.record(self.label(INSIDE), self.engine.full_params(), self.turn)
        if is_last:
            self.engine.zero_grad()
            self.ctx.record_training_state(self.engine, self.turn, f"-{self.run}-{self.number}")

    def record_norm(self) -> None:
        """Record the norm of the engine's last step, and its learning rates and loss scale."""
        norm = self.engine.grad_norm()
        facts = collect_engine_facts(self.engine) | ({} if norm is None else {"norm": scalar(norm)})
        self.ctx.record(self.label("facts"), facts, self.turn)


def observe_interleaved(ctx: RankContext) -> None:
    """Train two engines one after the other, and then two further engines of the same kind in turns."""
    pair = PAIRS[ctx.variant]
    with ExitStack() as folders:
        for number in range(2):
            alone = Trainee(ctx, number, ALONE, folders)
            for _ in range(alone.turns):
                alone.take_turn()
        trainees = [Trainee(ctx, number, IN_TURNS, folders) for number in range(2)]
        for number in pair.turns:
            trainees[number].take_turn()


def judge_interleaved(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare everything that an engine computed in turns with what it computed alone."""
    parts = {
        "loss": Part.FORWARD,
        "grads": Part.REDUCTION,
        INSIDE: Part.OPTIMIZER,
        "params": Part.OPTIMIZER,
        "masters": Part.OPTIMIZER,
    }
    parts |= {"state": Part.OPTIMIZER, "facts": Part.OPTIMIZER}
    for number in range(2):
        recorded = {(each.label, each.step) for each in ctx.evidence[0].snapshots}
        steps = sorted({step for label, step in recorded if label.endswith(f"-{ALONE}-{number}")})
        for step in steps:
            for what, part in parts.items():
                if (f"{what}-{ALONE}-{number}", step) in recorded:
                    alone, in_turns = (f"{what}-{run}-{number}" for run in (ALONE, IN_TURNS))
                    for comparison in compare_records(ctx, alone, in_turns, step, step, part):
                        yield add_hint(comparison, MOVED_INSIDE_HINT) if what == INSIDE else comparison


LAWS = (
    Law(
        name="engines.interleaved",
        statement="two engines that train in turns give the same numbers as if they train one after the other",
        tier=Tier.EXACT,
        models=("mlp",),
        observe=observe_interleaved,
        judge=judge_interleaved,
        weights_stay_integers=False,
        variants=tuple(Variant(name, pair.features, compares_engine_with_itself=True) for name, pair in PAIRS.items()),
        dtypes=("fp32", "fp16"),
        kept_because="the only engines in one process with windows, norms, optimizers and checkpoints of their own",
    ),
)
