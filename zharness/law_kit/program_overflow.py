"""Find the verb of a program at which plain PyTorch's own numbers overflow, after which no engine can be judged."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines import optimizers
from zharness.law_kit.judge_context import BoundedGrads, JudgeContext
from zharness.law_kit.program_judge import ProgramJudge
from zharness.law_kit.program_steps import OPTIMIZERS, choose_edited_parameter, get_edited_value
from zharness.law_kit.program_updates import StepCounts
from zharness.parity import Comparison
from zharness.parity.baseline import Baseline, LocalResult
from zharness.workload.programs import CallerState, PendingGradients, Program, Verb, iter_verbs


class PlainTraining:
    """The weights of a plain model in float32, their optimizer and its schedule."""

    def __init__(self, baseline: Baseline, program: Program) -> None:
        """Start from the initial weights of the model."""
        initial = baseline.build_module().named_parameters()
        self.weights = {name: nn.Parameter(each.detach().float(), each.requires_grad) for name, each in initial}
        trained = {name: weight for name, weight in self.weights.items() if weight.requires_grad}
        spec = OPTIMIZERS[program.optimizer]
        self.optimizer = optimizers.build(trained, spec)
        self.schedule = optimizers.schedule(self.optimizer, spec)

    def read_state(self) -> Any:
        """Return a copy of the weights and of the states of the optimizer and the schedule."""
        weights = {name: weight.detach() for name, weight in self.weights.items()}
        return copy.deepcopy((weights, self.optimizer.state_dict(), self.schedule.state_dict()))

    def write_state(self, state: Any) -> None:
        """Restore what ``read_state`` returned."""
        weights, optimizer_state, schedule_state = copy.deepcopy(state)
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(weights[name])
        self.optimizer.load_state_dict(optimizer_state)
        self.schedule.load_state_dict(schedule_state)

    def step(self, grads: dict[str, Tensor], clip: float | None) -> None:
        """Make a step with ``grads``, whose norm is clipped to ``clip``; parameters without a gradient stay."""
        for name, grad in grads.items():
            self.weights[name].grad = grad.float()
        if clip is not None:
            nn.utils.clip_grad_norm_(list(self.weights.values()), clip)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()


@dataclass
class PlainRun(ProgramJudge):
    """A run of a program on plain PyTorch only, which steps its own weights and compares nothing.

    ``overflowing`` describes the numbers that are not finite. ``states`` has the states that saves wrote, by the
    version of the weights.
    """

    overflowing: list[str] = field(default_factory=list)
    states: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start the training."""
        self.training = PlainTraining(self.ctx.baseline, self.program)
        self.states[0] = self.training.read_state()

    def require_finite(self, what: str, numbers: Tensor) -> None:
        """Add ``what`` to the overflowing numbers if any of ``numbers`` is not finite."""
        if not bool(numbers.isfinite().all()):
            self.overflowing.append(what)

    def get_plain_module(self, weights_version: int) -> nn.Module:
        """Return the plain model with the current weights."""
        if self.cached_module is None or self.cached_module[0] != weights_version:
            self.cached_module = weights_version, self.ctx.baseline.build_module(self.training.weights)
        return super().get_plain_module(weights_version)

    def compare_output(self, position: int, verb: Verb, micro: int) -> Iterator[Comparison]:
        """Check whether the output of each rank is finite."""
        module = self.get_plain_module(self.weights_version)
        for rank in range(self.ctx.data_size):
            self.require_finite("an output", self.run_plain_forward(module, verb, micro, rank))
        return iter(())

    def compute_gradients(self, verb: Verb, micro: int) -> list[LocalResult]:
        """Return the local gradients of a backward, and check whether they are finite."""
        row = super().compute_gradients(verb, micro)
        for name, grad in (item for local in row for item in local.grads.items()):
            self.require_finite(f"the gradient of {name}", grad)
        return row

    def compare_window_grads(self, position: int, *, is_repeated: bool = False) -> Iterator[Comparison]:
        """Compare nothing."""
        return iter(())

    def judge_look(self, position: int, caller: CallerState) -> Iterator[Comparison]:
        """Compare nothing."""
        return iter(())

    def judge_optimizer_step(self, position: int, caller: CallerState) -> Iterator[Comparison]:
        """Make a step at an accumulation boundary."""
        if caller.is_boundary:
            scale = self.sum_factor / (self.program.window * self.ctx.data_size)
            grads: dict[str, Tensor] = {}
            for name, grad in (item for row in self.backwards.rows for local in row for item in local.grads.items()):
                grads[name] = grads.get(name, 0.0) + scale * grad.float()
            self.training.step(grads, self.program.clip)
            self.note_change()
        return iter(())

    def judge_update(
        self, position: int, grads: BoundedGrads, pending: PendingGradients, factor: object = None
    ) -> Iterator[Comparison]:
        """Make a step without a gradient."""
        self.training.step({}, self.program.clip)
        self.note_change()
        return iter(())

    def judge_edit(self) -> Iterator[Comparison]:
        """Fill the weight that an edit fills."""
        name = choose_edited_parameter(self.ctx.baseline.spec, self.ctx.baseline.seed, self.weights_version)
        with torch.no_grad():
            self.training.weights[name].fill_(get_edited_value(self.program))
        self.note_change()
        return iter(())

    def judge_load(self, step_counts: StepCounts, saved_version: int) -> Iterator[Comparison]:
        """Load the state that was saved when the weights had ``saved_version``."""
        self.training.write_state(self.states[saved_version])
        self.note_change()
        return iter(())

    def note_change(self) -> None:
        """Count a change of the weights, keep the state for a later load, and check that the weights are finite."""
        self.weights_version += 1
        self.states[self.weights_version] = self.training.read_state()
        for name, weight in self.training.weights.items():
            self.require_finite(f"the weight {name}", weight)


@dataclass(frozen=True)
class Overflow:
    """The position of the verb of a program, counted from 1, at which numbers of plain PyTorch are not finite."""

    position: int
    numbers: str
    verb: str

    def describe(self) -> str:
        """Describe which number of which verb is not finite."""
        return f"plain PyTorch's own numbers overflow: {self.numbers} at verb {self.position}, {self.verb}"


def find_overflow(baseline: Baseline, program: Program) -> Overflow | None:
    """Return the first verb at which a number of plain PyTorch is not finite, or None if all of them are finite.

    The weights come from plain PyTorch's own steps in float32, so that a program is cut at the same verb for all
    engines.
    """
    run = PlainRun(JudgeContext(baseline, (), baseline.dtype), program)
    for position, verb, caller in iter_verbs(program):
        for _ in run.judge_verb(position, verb, caller):
            pass
        if run.overflowing:
            return Overflow(position, run.overflowing[0], str(verb))
    return None


def cut_before(program: Program, overflow: Overflow) -> Program:
    """Return the program that ends before the verb at which numbers overflow."""
    return replace(program, verbs=program.verbs[: overflow.position - 1])
