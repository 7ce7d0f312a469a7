"""Record and check the learning rates, loss scale and number of skipped steps that an engine reports."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zharness.engines.optimizers import param_groups
from zharness.engines.protocol import Absent, Engine, Observations, OptimizerSpec
from zharness.law_kit.judge_context import JudgeContext
from zharness.parity import Comparison, Part, compare_bitwise


def collect_engine_facts(engine: Engine) -> dict[str, Tensor]:
    """Return the learning rates, loss scale and number of skipped steps that the engine currently reports, by name."""
    return build_facts(engine.observe())


def build_facts(observations: Observations) -> dict[str, Tensor]:
    """Return the learning rates, loss scale and number of skipped steps in ``observations``, by name.

    Values that the engine does not report are left out.
    """
    rates = () if isinstance(observations.learning_rates, Absent) else observations.learning_rates
    values = {learning_rate_fact(group): rate for group, rate in enumerate(rates)}
    facts = {LOSS_SCALE_FACT: observations.loss_scale, SKIPPED_STEPS_FACT: observations.skipped_steps}
    values |= {name: fact for name, fact in facts.items() if not isinstance(fact, Absent)}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def compare_engine_facts(ctx: JudgeContext, spec: OptimizerSpec, step: int, steps_made: int) -> Iterator[Comparison]:
    """Check the learning rates, loss scale and number of skipped steps that every rank recorded at ``step``.

    ``steps_made`` is the number of steps that the optimizer has made. The expected learning rate of each parameter
    group is the one that the schedule sets for the step after these. The expected number of skipped steps is 0.
    """
    parameters = dict(ctx.baseline.spec.model(ctx.baseline.seed).named_parameters())
    factor = spec.schedule[min(steps_made, len(spec.schedule) - 1)]
    rates = [group.get("lr", spec.args["lr"]) * factor for group in param_groups(parameters, spec)]
    wanted = {learning_rate_fact(group): rate for group, rate in enumerate(rates)}
    wanted |= {LOSS_SCALE_FACT: ctx.baseline.loss_scale, SKIPPED_STEPS_FACT: 0}
    for rank, record in enumerate(ctx.rank_records("facts", step)):
        for name, value in record.items():
            expected = torch.tensor(wanted.get(name, torch.nan), dtype=torch.float64)
            yield compare_bitwise(ctx.location(name, Part.OPTIMIZER, step, rank), expected, value)


LOSS_SCALE_FACT, SKIPPED_STEPS_FACT = "loss scale", "skipped steps"


def learning_rate_fact(group: int) -> str:
    """Return the name under which the learning rate of the parameter group with index ``group`` is recorded."""
    return f"learning rate of group {group}"
