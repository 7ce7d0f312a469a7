"""The laws of torch.func transforms, called on the engine itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from zharness.checks.accumulation import FROZEN
from zharness.checks.bench import Bench
from zharness.checks.law import Check
from zharness.checks.trial import Trial
from zharness.engines.protocol import AccumulationOwner, Feature
from zharness.parity import Comparison, Tier
from zharness.workload import MODELS, Batch, ModelSpec

DIFFERENTIABLE = tuple(spec.name for spec in MODELS.values() if spec.differentiable)
ACCUMULATIONS = (1, 4)

Call = Callable[[Tensor], Tensor]
Transform = Callable[[Call, ModelSpec, Batch], Mapping[str, Tensor]]


def grad(call: Call, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """torch.func.grad of the loss with respect to the inputs: the shape of the inputs."""
    return {"input": torch.func.grad(lambda inputs: spec.loss(call(inputs), batch.target))(batch.inputs)}


def vmap_grad(call: Call, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """vmap(grad): one gradient for each sample, stacked."""

    def one(inputs: Tensor, target: Tensor) -> Tensor:
        return spec.loss(call(inputs[None]), target[None])

    return {"input": torch.func.vmap(torch.func.grad(one))(batch.inputs, batch.target)}


def observing(transform: Transform) -> Callable[[Bench], None]:
    """Apply ``transform`` to the engine, then train one ordinary boundary, at accumulation 1 and 4."""

    def observe(bench: Bench) -> None:
        engine_owns = AccumulationOwner.ENGINE in bench.owners()
        owner = AccumulationOwner.ENGINE if engine_owns else AccumulationOwner.CALLER
        for steps in ACCUMULATIONS if engine_owns else ACCUMULATIONS[:1]:
            engine = bench.engine(accumulation_steps=steps, accumulation_owner=owner, optimizer=FROZEN)
            bench.record(f"transformed-{steps}", transform(engine, bench.spec, bench.batch(0)))
            for micro in range(steps):
                engine.backward(bench.loss(engine, micro, f"loss-{steps}"))
                if micro == steps - 1:
                    bench.record(f"grads-{steps}", engine.full_grads())
                engine.step()
            engine.close()

    return observe


def judging(transform: Transform) -> Callable[[Trial], Iterator[Comparison]]:
    """The transformed values are vanilla's on every rank; the boundary trained afterwards is unharmed."""

    def judge(trial: Trial) -> Iterator[Comparison]:
        spec = trial.baseline.spec
        wanted = [
            {
                name: tensor.detach()
                for name, tensor in transform(trial.baseline.module(), spec, trial.baseline.batch(rank, 0)).items()
            }
            for rank in range(trial.world_size)
        ]
        for steps in ACCUMULATIONS:
            if trial.recorded(f"transformed-{steps}"):
                yield from trial.same_value(f"transformed-{steps}", wanted)
                micros = [trial.locals(micro) for micro in range(steps)]
                for micro, local in enumerate(micros):
                    yield from trial.same_loss(micro, local, f"loss-{steps}")
                yield from trial.reduced(f"grads-{steps}", micros, exact=trial.exact(range(steps)))

    return judge


def law(name: str, words: str, transform: Transform) -> Check:
    """A check of one transform."""
    return Check(
        name=f"torch_func.{name}",
        law=words,
        tier=Tier.EXACT,
        models=DIFFERENTIABLE,
        observe=observing(transform),
        judge=judging(transform),
        needs=(Feature.TORCH_FUNC,),
    )


CHECKS = (
    law(
        "grad", "torch.func.grad of the engine is vanilla's, unscaled by accumulation; training goes on unharmed", grad
    ),
    law("vmap_grad", "vmap(grad) of the engine is vanilla's, sample by sample; training goes on unharmed", vmap_grad),
)
