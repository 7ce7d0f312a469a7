"""Run a scenario, which is a script of calls, on plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from zharness.errors import RoundedScenarioError
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.recorded_gradients import RecordedGradients, densify, drain_gradients, record_gradients
from zharness.law_kit.scenarios import NamedTensors, Participant, Scenario, get_detached_weights, train_follow_up
from zharness.parity.baseline import Baseline
from zharness.workload import Batch


def make_plain_participant(
    baseline: Baseline, variant: str, rank: int, dtype: torch.dtype, partner: Participant | None
) -> Participant:
    """Wrap a plain model in a Participant, the interface through which scripts call engines and plain models.

    The model has the dtype ``dtype`` and gets the data of rank ``rank``.
    """
    module = baseline.build_module().to(dtype)

    def get_batch(step: int) -> Batch:
        """Return micro-batch ``step`` of this rank in ``dtype``."""
        batch = baseline.batch(rank, step)
        return Batch(batch.inputs.to(dtype), batch.target.to(dtype))

    def backward(loss: Tensor, *, retain_graph: bool = False) -> None:
        """Run torch's own backward on ``loss``."""
        torch.autograd.backward(loss, retain_graph=retain_graph)

    @torch.no_grad()
    def step() -> None:
        """Write to all weights that have a gradient, in place, without changing their values.

        An optimizer step with a learning rate of 0 has the same effect.
        """
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(torch.zeros_like(parameter))

    def recompute(function: Callable[..., Any], *args: Any, use_reentrant: bool) -> Any:
        """Call ``function`` without activation checkpointing."""
        return function(*args)

    return Participant(
        call=module,
        module=module,
        rank=rank,
        variant=variant,
        spec=baseline.spec,
        get_batch=get_batch,
        backward=backward,
        tensor_backward=backward,
        zero_grad=module.zero_grad,
        step=step,
        allow_uneven_use=nullcontext,
        gather_weights=lambda names: nullcontext(get_detached_weights(module, names)),
        keeps_edits=True,
        recompute=recompute,
        partner=partner,
    )


@dataclass(frozen=True)
class ScenarioResult:
    """The result of a scenario on the plain model: the values of each repetition, and the gradients of each model.

    ``grads`` are the gradients of the scenario, and ``after`` those of the follow-up training, which is one ordinary
    micro-batch after the scenario. ``backward_grads`` holds, for each parameter, the gradient of every backward in
    order, split into entries: a dense gradient is one entry, and a sparse gradient may have several entries for one
    row. From the gradient of the last backward, the judge finds out whether an engine keeps only this gradient or drops
    it. ``backward_grads_after`` holds the same for the follow-up training.
    """

    values: tuple[NamedTensors, ...]
    grads: tuple[NamedTensors, ...]
    after: tuple[NamedTensors, ...]
    backward_grads: tuple[RecordedGradients, ...]
    backward_grads_after: tuple[RecordedGradients, ...]

    def flatten(self) -> dict[str, Tensor]:
        """Return all values and gradients in one dictionary."""
        parts = [*self.values, *self.grads, *self.after]
        return {f"{number}/{name}": tensor for number, part in enumerate(parts) for name, tensor in part.items()}


def run_plain_scenario(
    baseline: Baseline, variant: str, scenario: Scenario, rank: int, dtype: torch.dtype, repeats: int = 1
) -> ScenarioResult:
    """Run a scenario on plain models as rank ``rank``, and then the follow-up training, each ``repeats`` times.

    The follow-up training is one ordinary micro-batch.
    """
    participants: list[Participant] = []
    for _ in range(scenario.engine_count):
        participants.insert(
            0, make_plain_participant(baseline, variant, rank, dtype, participants[0] if participants else None)
        )
    recorders = [record_gradients(participant.module) for participant in participants]
    values = tuple(
        {name: tensor.detach() for name, tensor in (scenario.script(participants[0]) or {}).items()}
        for _ in range(repeats)
    )
    backward_grads = tuple(drain_gradients(recorder) for recorder in recorders)
    grads, after = [], []
    for participant in participants:
        grads.append(collect_grads(participant.module))
        participant.zero_grad()
        for _ in range(repeats):
            train_follow_up(participant)
        after.append(collect_grads(participant.module))
    return ScenarioResult(
        values, tuple(grads), tuple(after), backward_grads, tuple(drain_gradients(recorder) for recorder in recorders)
    )


def collect_grads(module: nn.Module) -> NamedTensors:
    """Return the gradients of the module's parameters as dense tensors, by name."""
    return {name: densify(p.grad) for name, p in module.named_parameters() if p.grad is not None}


@lru_cache(maxsize=1024)
def run_exact_scenario(
    baseline: Baseline, variant: str, scenario: Scenario, rank: int, dtype: torch.dtype, repeats: int = 1
) -> ScenarioResult:
    """Run a scenario in the cell's dtype and in float64, and return the result in the cell's dtype.

    Raise RoundedScenarioError if the two results differ, because a number in the scenario is then rounded. The result
    is cached, because it is the same for every engine and stage; a cached result takes about 20 KB.
    """
    result, wide = (
        run_plain_scenario(baseline, variant, scenario, rank, precision, repeats)
        for precision in (dtype, torch.float64)
    )
    double = wide.flatten()
    for name, tensor in result.flatten().items():
        if not torch.equal(tensor.double(), double[name].double()):
            raise RoundedScenarioError(
                f"the scenario is not exact: {name} is rounded on rank {rank}, so no engine can be judged by it"
            )
    return result


def run_scenario_on_all_ranks(ctx: JudgeContext, scenario: Scenario) -> list[ScenarioResult]:
    """Return the result of the scenario on the plain model, for each rank."""
    repeats = ctx.setting.accumulation_steps
    return [
        run_exact_scenario(ctx.baseline, ctx.variant, scenario, rank, ctx.dtype, repeats)
        for rank in range(ctx.data_size)
    ]
