"""Define the law access.step_count: a read by name returns a copy of the named parameter's step count."""

from __future__ import annotations

from collections.abc import Iterator

from zharness.engines.protocol import Feature
from zharness.engines.tensor_access import require_read_out
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.access.common import EXACT_ADAM, access_law, read_all, trained_names
from zharness.laws.access.write_in import IDLE, IDLE_LAYER
from zharness.parity import Comparison, Part, compare_bitwise
from zharness.parity.compare import check_names

STEPS = 3
IDLE_STEP = 1  # in the variant IDLE, the step that does not use the layer IDLE_LAYER
CALLERS_VALUE = 100.0  # the caller writes this value into the tensors that it has read


def observe_step_count(ctx: RankContext) -> None:
    """Make steps; after each step, read every trained parameter's step count and overwrite the returned tensors."""
    engine = ctx.build_engine(optimizer=EXACT_ADAM)
    access, names = require_read_out(engine), trained_names(engine)
    for step in range(STEPS):
        batch, is_idle = ctx.batch(step), ctx.variant == IDLE and step == IDLE_STEP
        engine.backward(ctx.spec.loss(engine(batch.inputs, with_third=not is_idle), batch.target))
        engine.step()
        engine.zero_grad()
        counts = read_all(names, lambda name: access.read_optimizer_state(name, "step"))
        ctx.record("counts", {name: scalar(float(count)) for name, count in counts.items()}, step)
        for count in counts.values():
            count.fill_(CALLERS_VALUE)
    ctx.record("trained", {name: scalar(name.startswith(IDLE_LAYER)) for name in names})
    engine.close()


def judge_step_count(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check that each step count is the number of steps that used the parameter, as torch's optimizers count them."""
    for step in range(STEPS):
        for rank, record in enumerate(ctx.rank_records("counts", step)):
            trained = ctx.rank_records("trained")[rank]
            check_names("read_optimizer_state", trained, record)
            for name, count in record.items():
                is_skipped = ctx.variant == IDLE and step >= IDLE_STEP and bool(trained[name])
                place = ctx.location(f"{name}/step", Part.OPTIMIZER, step, rank)
                yield compare_bitwise(place, scalar(step + 1 - is_skipped), count)


LAWS = (
    access_law(
        "step_count",
        "a step count read by name is the number of steps that used the parameter, and overwriting it changes nothing",
        observe_step_count,
        judge_step_count,
        features=(Feature.READ_OUT, Feature.STEP_READ_OUT),
        variants=(
            Variant(compares_engine_with_itself=True),
            Variant(IDLE, (Feature.NO_GRADIENT, Feature.PARAMETERS), compares_engine_with_itself=True),
        ),
        weights_stay_integers=False,
        kept_because="the only law that reads an entry of optimizer state which is a single number",
    ),
)
