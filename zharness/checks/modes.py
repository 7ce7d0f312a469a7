"""The law of modes: dropout, running statistics, training and evaluation are the model's own and the caller's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from zharness.checks.bench import Bench
from zharness.checks.single_step import evaluating
from zharness.checks.trial import Trial
from zharness.engines.protocol import Engine, Feature, OptimizerSpec
from zharness.parity import Comparison, Part, identical

SGD = OptimizerSpec(name="sgd", args={"lr": 0.05})
STEPS = 2
EVALUATED = 10  # the micro-batch of the evaluation after step 0
GENERATOR = "generator"  # as a training forward leaves it: the next one's dropout begins there


def observe_modes(bench: Bench) -> None:
    own = bench.capabilities.refusal(Feature.RANK_BUFFERS) is None
    bench.record("case", {"own": torch.tensor(float(own))})
    engine = bench.engine(optimizer=SGD)
    for step in range(STEPS):
        bench.record("params", engine.full_params(), step)
        engine.backward(bench.loss(engine, step))
        bench.record("grads", engine.full_grads(), step)
        bench.record("buffers", dict(engine.module.named_buffers()), step)
        engine.step()
        engine.zero_grad()
        bench.record("params", engine.full_params(), EVALUATED + step)
        with evaluating(engine), torch.no_grad():
            bench.loss(engine, EVALUATED + step)
            bench.record("modes", modes(engine), step)
        bench.record("buffers", dict(engine.module.named_buffers()), EVALUATED + step)
    with torch.no_grad():
        bench.record(GENERATOR, {GENERATOR: bench.batch(0).generator_behind(engine)})
    engine.close()


def modes(engine: Engine) -> dict[str, Tensor]:
    """Which modules are in training."""
    return {f"mode of {name}": torch.tensor(float(module.training)) for name, module in engine.module.named_modules()}


def judge_modes(trial: Trial) -> Iterator[Comparison]:
    """Losses, gradients, buffers and what dropout takes of the generator are plain PyTorch's; the mode is the caller's.

    The statistics that a rank starts from are its own where the engine claims so, else perhaps those of rank 0.
    """
    own = bool(trial.copies("case")[0]["own"])
    buffers: list[Mapping[str, Tensor]] = [{} for _ in range(trial.world_size)]
    for step in range(STEPS):
        local = trial.locals(step, trial.copies("params", step)[0])
        yield from trial.same_loss(step, local)
        yield from trial.reduced("grads", [local], step)
        for rank in range(trial.world_size):
            training = continued(trial, rank, step, buffers[rank])
            score(trial, training, rank, step)
            buffers[rank] = {name: buffer.clone() for name, buffer in training.named_buffers()}
            if own or rank == 0:
                yield from evaluated(trial, rank, step, buffers[rank])
            elif step == 0:
                yield from same_buffers(trial, rank, 0, buffers[rank])
    for rank, copy in enumerate(trial.copies(GENERATOR)):
        module, batch = trial.baseline.module(trial.copies("params", STEPS - 1)[rank]), trial.baseline.batch(rank, 0)
        with torch.no_grad():
            state = batch.generator_behind(module)
        yield identical(trial.place(GENERATOR, Part.FORWARD, STEPS, rank), state.double(), copy[GENERATOR].double())


def evaluated(trial: Trial, rank: int, step: int, buffers: Mapping[str, Tensor]) -> Iterator[Comparison]:
    """The buffers after a training forward, and the evaluation behind the step that followed."""
    yield from same_buffers(trial, rank, step, buffers)
    for name, mode in trial.copies("modes", step)[rank].items():
        yield identical(trial.place(name, Part.FORWARD, step, rank), torch.tensor(0.0), mode)
    micro = EVALUATED + step
    loss = score(trial, continued(trial, rank, micro, buffers).eval(), rank, micro)
    yield identical(trial.place("loss", Part.FORWARD, step, rank), loss, trial.copies("loss", micro)[rank]["loss"])
    yield from same_buffers(trial, rank, micro, buffers)


def continued(trial: Trial, rank: int, step: int, buffers: Mapping[str, Tensor]) -> nn.Module:
    """The plain model in the weights that were recorded at ``step``, with ``buffers`` where there are any."""
    module = trial.baseline.module(trial.copies("params", step)[rank])
    module.load_state_dict(dict(buffers), strict=False)
    return module


@torch.no_grad()
def score(trial: Trial, module: nn.Module, rank: int, micro: int) -> Tensor:
    """The loss of one rank's micro-batch."""
    batch = trial.baseline.batch(rank, micro)
    return trial.baseline.objective(trial.baseline.output(module, batch), batch)


def same_buffers(trial: Trial, rank: int, step: int, wanted: Mapping[str, Tensor]) -> Iterator[Comparison]:
    for name, buffer in wanted.items():
        found = trial.copies("buffers", step)[rank][name]
        yield identical(trial.place(name, Part.FORWARD, step % EVALUATED, rank), buffer.double(), found.double())
