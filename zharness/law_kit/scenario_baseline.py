"""Run a scenario on plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from zharness.errors import HarnessFault
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.recorded_gradients import RecordedGradients, densify, drain_gradients, record_gradients
from zharness.law_kit.scenarios import NamedTensors, Participant, Scenario, get_detached_weights, train_follow_up
from zharness.parity.baseline import Baseline
from zharness.workload import Batch


def make_plain_participant(
    baseline: Baseline, variant: str, rank: int, dtype: torch.dtype, partner: Participant | None
) -> Participant:
    module = baseline.build_module().to(dtype)

    def get_batch(step: int) -> Batch:
        batch = baseline.batch(rank, step)
        return Batch(batch.inputs.to(dtype), batch.target.to(dtype))

    def backward(loss: Tensor, *, retain_graph: bool = False) -> None:
        torch.autograd.backward(loss, retain_graph=retain_graph)

    @torch.no_grad()
    def step() -> None:
        """A step that moves nothing: what it leaves behind is that the weights were written."""
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(torch.zeros_like(parameter))

    def recompute(function: Callable[..., Any], *args: Any, use_reentrant: bool) -> Any:
        return function(*args)

    return Participant(
        call=module,
        module=module,
        rank=rank,
        variant=variant,
        spec=baseline.spec,
        get_batch=get_batch,
        backward=backward,
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
    """What a play on the plain model leaves: values, each model's gradients, and those of the training after it.

    ``given`` is what each backward that reached a parameter gave it, in their order, each by its entries: a sparse one
    has several of a row, a dense one is its only one. The last backward's are all that is left of its gradient in an
    engine that drops the others, which is worth a hint. ``given_after`` is the same of the training after it.
    """

    values: NamedTensors
    grads: tuple[NamedTensors, ...]
    after: tuple[NamedTensors, ...]
    backward_grads: tuple[RecordedGradients, ...]
    backward_grads_after: tuple[RecordedGradients, ...]

    def flatten(self) -> dict[str, Tensor]:
        """Everything, by a name of its own."""
        parts = [self.values, *self.grads, *self.after]
        return {f"{number}/{name}": tensor for number, part in enumerate(parts) for name, tensor in part.items()}


def run_plain_scenario(
    baseline: Baseline, variant: str, scenario: Scenario, rank: int, dtype: torch.dtype
) -> ScenarioResult:
    sides: list[Participant] = []
    for _ in range(scenario.engine_count):
        sides.insert(0, make_plain_participant(baseline, variant, rank, dtype, sides[0] if sides else None))
    watched = [record_gradients(side.module) for side in sides]
    values = {name: tensor.detach() for name, tensor in (scenario.script(sides[0]) or {}).items()}
    given = tuple(drain_gradients(each) for each in watched)
    grads, after = [], []
    for side in sides:
        grads.append(collect_grads(side.module))
        side.zero_grad()
        train_follow_up(side)
        after.append(collect_grads(side.module))
    return ScenarioResult(values, tuple(grads), tuple(after), given, tuple(drain_gradients(each) for each in watched))


def collect_grads(module: nn.Module) -> NamedTensors:
    return {name: densify(p.grad) for name, p in module.named_parameters() if p.grad is not None}


@lru_cache(maxsize=1024)
def run_exact_scenario(
    baseline: Baseline, variant: str, scenario: Scenario, rank: int, dtype: torch.dtype
) -> ScenarioResult:
    """The play in the cell's dtype. Raises HarnessFault when float64 says that a bit was rounded away.

    The same for every engine and stage, so a process plays it once; what it holds is some 20 KB.
    """
    played, wide = (run_plain_scenario(baseline, variant, scenario, rank, each) for each in (dtype, torch.float64))
    double = wide.flatten()
    for name, tensor in played.flatten().items():
        if not torch.equal(tensor.double(), double[name].double()):
            raise HarnessFault(f"the play is not exact: {name} is rounded on rank {rank}, so it can judge no engine")
    return played


def run_scenario_on_all_ranks(ctx: JudgeContext, scenario: Scenario) -> list[ScenarioResult]:
    """What the play leaves on every rank's plain model, in rank order."""
    return [run_exact_scenario(ctx.baseline, ctx.variant, scenario, rank, ctx.dtype) for rank in range(ctx.world_size)]
