"""The laws of torch.func transforms, called on the engine itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import backward

from zharness.checks.accumulation import FROZEN
from zharness.checks.bench import Bench
from zharness.checks.construction import is_dtensor
from zharness.checks.law import Check
from zharness.checks.play import Play, Scene, Side, check
from zharness.checks.trial import Trial
from zharness.engines.protocol import AccumulationOwner, Engine, Feature
from zharness.parity import Comparison, Tier
from zharness.workload import Batch, ModelSpec

# Their inputs are floats. The loss of "fused" is a legacy autograd.Function, which vanilla does not transform either.
DIFFERENTIABLE = ("mlp", "conv", "exact")
ACCUMULATIONS = (1, 4)
# A product of a matrix and a vector is summed in an order that depends on where the matrix lies between two of these
# bytes, and an engine may keep weights as views of one flat buffer: the baseline's are put where the engine's lie.
ALIGNMENT = 64

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


def total(call: Call, spec: ModelSpec, batch: Batch) -> Call:
    """The loss as a function of the inputs."""
    return lambda inputs: spec.loss(call(inputs), batch.target)


def shapes(call: Call, batch: Batch) -> dict[str, tuple[Call, Tensor]]:
    """Functions of 1-D, 2-D and batched inputs, with the inputs."""
    return {"1d": (call, batch.inputs[0]), "2d": (call, batch.inputs), "batched": (call, batch.inputs[None])}


def grad_and_value(call: Call, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """The gradient, and a value that is the forward's."""
    gradient, value = torch.func.grad_and_value(total(call, spec, batch))(batch.inputs)
    return {"input": gradient, "value": value, "forward": total(call, spec, batch)(batch.inputs)}


def has_aux(call: Any, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """grad with an auxiliary output: here, the model's, to which its inputs go by keyword."""

    def both(inputs: Tensor) -> tuple[Tensor, Tensor]:
        output: Tensor = call(x=inputs)
        return spec.loss(output, batch.target), output

    transformed: Callable[[Tensor], tuple[Tensor, Tensor]] = torch.func.grad(both, has_aux=True)
    gradient, output = transformed(batch.inputs)
    return {"input": gradient, "output": output}


def vjp(call: Call, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """vjp, whose pullback is called after the forward is over."""
    output, pullback = torch.func.vjp(call, batch.inputs)[:2]
    return {"output": output, "input": pullback(batch.target)[0]}


def jvp(call: Call, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """Forward mode along the inputs themselves."""
    pairs = {shape: torch.func.jvp(function, (x,), (x,)) for shape, (function, x) in shapes(call, batch).items()}
    outputs = {f"{shape}-output": pair[0] for shape, pair in pairs.items()}
    return outputs | {f"{shape}-tangent": pair[1] for shape, pair in pairs.items()}


def jacrev(call: Call, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """The Jacobian by reverse mode."""
    return {shape: torch.func.jacrev(function)(x) for shape, (function, x) in shapes(call, batch).items()}


def jacfwd(call: Call, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """The Jacobian by forward mode."""
    return {shape: torch.func.jacfwd(function)(x) for shape, (function, x) in shapes(call, batch).items()}


def hessian(call: Call, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """Forward over reverse, and reverse over reverse."""

    def one(inputs: Tensor) -> Tensor:
        return call(inputs).pow(2).sum()

    inputs = batch.inputs[0]
    return {
        "forward_over_reverse": torch.func.hessian(one)(inputs),
        "reverse_over_reverse": torch.func.jacrev(torch.func.jacrev(one))(inputs),
    }


def vmap(call: Call, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """The model over the samples, one by one."""
    return {"output": torch.func.vmap(call)(batch.inputs)}


def functional_call(call: Any, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """The gradient of every parameter of this rank's own loss."""
    engine = isinstance(call, Engine)
    module = call.module if engine else call
    weights = call.full_params() if engine else {name: p.detach() for name, p in call.named_parameters()}

    def loss(given: dict[str, Tensor]) -> Tensor:
        output: Tensor = torch.func.functional_call(module, given, (batch.inputs,))
        return spec.loss(output, batch.target)

    return dict(torch.func.grad(loss)(weights))


def identities(call: Call, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """Zeros: rows of jacrev beside single gradients, and the sum of vmap(grad) beside samples x grad of the mean."""
    leaf = batch.inputs.clone().requires_grad_()
    rows = torch.func.jacrev(call)(batch.inputs[0])
    output = call(leaf)
    alone = torch.stack([torch.autograd.grad(o, leaf, retain_graph=True)[0][0] for o in output[0]])
    by_sample = vmap_grad(call, spec, batch)["input"]
    together = grad(call, spec, batch)["input"]
    return {"jacrev": rows - alone, "vmap_grad": by_sample - len(by_sample) * together}


class Fused(torch.autograd.Function):
    """A fused linear loss: it transforms its own arithmetic, within the model's forward or the caller's loss."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        def loss(hidden: Tensor, weight: Tensor) -> Tensor:
            return torch.relu(hidden @ weight.t()).sum()

        gradients, value = torch.func.grad_and_value(loss, argnums=(0, 1))(hidden, weight)
        ctx.hidden, ctx.weight = gradients
        output: Tensor = value
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0] * ctx.hidden, grads[0] * ctx.weight


def inside_forward(side: Side) -> None:
    """In the model's forward, on a weight that it reads; and in a loss outside it."""

    def through(block: Call, hidden: Tensor) -> Tensor:
        fused: Tensor = Fused.apply(block(hidden), side.module.shared.weight)  # type: ignore[no-untyped-call]
        return block(hidden) + fused

    backward(side.loss(side.call(side.x(), through=through)))
    backward(Fused.apply(side.call(side.x(2)), side.module.head.weight))  # type: ignore[no-untyped-call]


def through_transforms(side: Side) -> None:
    """Backward through a vmap, and through a vmap of grad, of the engine."""
    backward(side.loss(torch.func.vmap(side.call)(side.x())))
    by_sample = torch.func.vmap(torch.func.grad(lambda x: side.call(x).clamp(-4, 4).sum()))(side.x())
    backward(by_sample.sum())


def placed(module: nn.Module) -> dict[str, Tensor]:
    """How far behind a multiple of ALIGNMENT bytes each weight lies; one that is not whole here is left out."""
    weights = ((name, parameter) for name, parameter in module.named_parameters() if not is_dtensor(parameter))
    return {
        name: torch.tensor(weight.data_ptr() % ALIGNMENT)
        for name, weight in weights
        if weight.untyped_storage().nbytes() >= weight.nbytes > 0
    }


def placed_as(module: nn.Module, where: Mapping[str, Tensor]) -> nn.Module:
    """``module``, its weights copied to where ``placed`` says."""
    for name, parameter in module.named_parameters():
        if name in where and parameter.shape:
            room = torch.empty(parameter.nbytes + 2 * ALIGNMENT, dtype=torch.uint8, device=parameter.device)
            start = (int(where[name]) - room.data_ptr()) % ALIGNMENT
            copy = room[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
            parameter.data = copy.copy_(parameter.detach())
    return module


def detached(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The numbers without their graph."""
    return {name: tensor.detach() for name, tensor in values.items()}


def observing(transform: Transform) -> Callable[[Bench], None]:
    """Apply ``transform`` to the engine, then train one ordinary boundary, at accumulation 1 and 4."""

    def observe(bench: Bench) -> None:
        engine_owns = AccumulationOwner.ENGINE in bench.owners()
        owner = AccumulationOwner.ENGINE if engine_owns else AccumulationOwner.CALLER
        for steps in ACCUMULATIONS if engine_owns else ACCUMULATIONS[:1]:
            engine = bench.engine(accumulation_steps=steps, accumulation_owner=owner, optimizer=FROZEN)
            bench.record(f"placed-{steps}", placed(engine.module))
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
        for steps in ACCUMULATIONS:
            if trial.recorded(f"transformed-{steps}"):
                wanted = [
                    detached(transform(placed_as(trial.baseline.module(), where), spec, trial.baseline.batch(rank, 0)))
                    for rank, where in enumerate(trial.copies(f"placed-{steps}"))
                ]
                yield from trial.same_value(f"transformed-{steps}", wanted)
                micros = [trial.locals(micro) for micro in range(steps)]
                for micro, local in enumerate(micros):
                    yield from trial.same_loss(micro, local, f"loss-{steps}")
                yield from trial.reduced(f"grads-{steps}", micros, exact=trial.exact(range(steps)))

    return judge


def law(
    name: str,
    words: str,
    transform: Transform,
    models: tuple[str, ...] = ("mlp",),
    needs: tuple[Feature, ...] = (Feature.TORCH_FUNC, Feature.TRANSFORMS),
) -> Check:
    """A check of one transform."""
    return Check(
        name=f"torch_func.{name}",
        law=words,
        tier=Tier.EXACT,
        models=models,
        observe=observing(transform),
        judge=judging(transform),
        needs=needs,
    )


def trained_law(play: Play, words: str, *needs: Feature) -> Check:
    """A check of training through a transform; ``needs`` are features on top of this group's."""
    name = play.__name__
    return check(f"torch_func.{name}", words, Scene(play), (Feature.TRANSFORMS, Feature.TENSOR_BACKWARD, *needs))


EVERYWHERE = (Feature.TORCH_FUNC,)
EXACTLY = ("exact",)
VECTORS = ("mlp", "exact")
CHECKS = (
    law(
        "grad",
        "torch.func.grad of the engine is vanilla's, unscaled by accumulation; training goes on unharmed",
        grad,
        DIFFERENTIABLE,
        EVERYWHERE,
    ),
    law(
        "vmap_grad",
        "vmap(grad) of the engine is vanilla's, sample by sample; training goes on unharmed",
        vmap_grad,
        DIFFERENTIABLE,
        EVERYWHERE,
    ),
    law("grad_and_value", "grad_and_value of the engine is vanilla's, and its value is the forward's", grad_and_value),
    law("has_aux", "grad with an auxiliary output is vanilla's in both", has_aux),
    law("vjp", "vjp of the engine is vanilla's, its pullback called when the forward is over", vjp),
    law("jvp", "forward mode through the engine is vanilla's", jvp, VECTORS),
    law("jacrev", "jacrev of the engine is vanilla's for 1-D, 2-D and batched inputs", jacrev, VECTORS),
    law("jacfwd", "jacfwd of the engine is vanilla's for 1-D, 2-D and batched inputs", jacfwd, VECTORS),
    law(
        "hessian",
        "the Hessian of the engine is vanilla's, forward over reverse and reverse over reverse",
        hessian,
        VECTORS,
    ),
    law("vmap", "vmap of the engine is vanilla's", vmap),
    law(
        "functional_call",
        "parameter gradients by functional_call over full_params are this rank's own",
        functional_call,
    ),
    law(
        "identities",
        "rows of jacrev are gradients; vmap(grad) sums to samples x grad of the mean",
        identities,
        EXACTLY,
        (Feature.TORCH_FUNC, Feature.TRANSFORMS, Feature.TENSOR_BACKWARD),
    ),
    trained_law(
        inside_forward,
        "a forward or a loss that uses torch.func itself, on a weight, trains as vanilla's",
        Feature.OUTSIDE_FORWARD,
    ),
    trained_law(through_transforms, "backward through a vmap and a vmap(grad) of the engine is vanilla's"),
)
