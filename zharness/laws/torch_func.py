"""Define the laws of the group ``torch_func``: torch.func transforms of an engine give plain PyTorch's results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import backward

from zharness.engines.protocol import AccumulationOwner, Engine, Feature
from zharness.law_kit.construction import is_dtensor
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law
from zharness.law_kit.law_steps import LawSteps, StepsKind
from zharness.law_kit.optimizers import ZERO_LR_SGD
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.scenario_law import scenario_law
from zharness.law_kit.scenarios import Participant, Scenario, ScenarioScript
from zharness.parity import Comparison, Tier
from zharness.workload import Batch, ModelSpec

# Models with float inputs. The loss of "fused" is a legacy autograd.Function, which plain PyTorch cannot transform.
DIFFERENTIABLE = ("mlp", "conv", "exact")

ACCUMULATIONS = (1, 4)

# The summation order of a matrix-vector product depends on the matrix's alignment in bytes. An engine may keep its
# weights as views of a flat buffer, so the judge gives the baseline's weights the alignment of the engine's weights.
ALIGNMENT = 64

Call = Callable[[Tensor], Tensor]

Transform = Callable[[Call, ModelSpec, Batch], Mapping[str, Tensor]]


def grad(call: Call, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """Return torch.func.grad of the loss with respect to the inputs."""
    return {"input": torch.func.grad(lambda inputs: spec.loss(call(inputs), batch.target))(batch.inputs)}


def vmap_grad(call: Call, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """Return the stacked per-sample gradients, computed by torch.func.vmap of torch.func.grad."""

    def sample_loss(inputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss of one sample."""
        return spec.loss(call(inputs[None]), target[None])

    return {"input": torch.func.vmap(torch.func.grad(sample_loss))(batch.inputs, batch.target)}


def make_loss_function(call: Call, spec: ModelSpec, batch: Batch) -> Call:
    """Return a function that computes the loss from the inputs."""
    return lambda inputs: spec.loss(call(inputs), batch.target)


def make_calls_by_shape(call: Call, batch: Batch) -> dict[str, tuple[Call, Tensor]]:
    """Return pairs of ``call`` and an input with 1, 2 or 3 dimensions, by the name of the shape."""
    return {"1d": (call, batch.inputs[0]), "2d": (call, batch.inputs), "batched": (call, batch.inputs[None])}


def grad_and_value(call: Call, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """Return the gradient and value of torch.func.grad_and_value, and the loss of a forward without a transform."""
    gradient, value = torch.func.grad_and_value(make_loss_function(call, spec, batch))(batch.inputs)
    return {"input": gradient, "value": value, "forward": make_loss_function(call, spec, batch)(batch.inputs)}


def has_aux(call: Any, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """Call torch.func.grad with ``has_aux`` and a keyword argument; return the gradient and the auxiliary output."""

    def loss_and_output(inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, and the output as the auxiliary value."""
        output: Tensor = call(x=inputs)
        return spec.loss(output, batch.target), output

    transformed: Callable[[Tensor], tuple[Tensor, Tensor]] = torch.func.grad(loss_and_output, has_aux=True)
    gradient, output = transformed(batch.inputs)
    return {"input": gradient, "output": output}


def vjp(call: Call, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """Return the output of torch.func.vjp, and the gradient that its function computes after the forward has ended."""
    output, pullback = torch.func.vjp(call, batch.inputs)[:2]
    return {"output": output, "input": pullback(batch.target)[0]}


def jvp(call: Call, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """Return the outputs and tangents of torch.func.jvp, where each input is its own tangent."""
    pairs = {
        shape: torch.func.jvp(function, (x,), (x,)) for shape, (function, x) in make_calls_by_shape(call, batch).items()
    }
    outputs = {f"{shape}-output": pair[0] for shape, pair in pairs.items()}
    return outputs | {f"{shape}-tangent": pair[1] for shape, pair in pairs.items()}


def jacrev(call: Call, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """Return the Jacobian of the output, computed by torch.func.jacrev (reverse mode)."""
    return {shape: torch.func.jacrev(function)(x) for shape, (function, x) in make_calls_by_shape(call, batch).items()}


def jacfwd(call: Call, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """Return the Jacobian of the output, computed by torch.func.jacfwd (forward mode)."""
    return {shape: torch.func.jacfwd(function)(x) for shape, (function, x) in make_calls_by_shape(call, batch).items()}


def hessian(call: Call, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """Return the Hessian, computed by forward over reverse mode and by reverse over reverse mode."""

    def sum_of_squares(inputs: Tensor) -> Tensor:
        """Return the sum of the squares of the output."""
        return call(inputs).pow(2).sum()

    inputs = batch.inputs[0]
    return {
        "forward_over_reverse": torch.func.hessian(sum_of_squares)(inputs),
        "reverse_over_reverse": torch.func.jacrev(torch.func.jacrev(sum_of_squares))(inputs),
    }


def vmap(call: Call, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """Return the model's output, computed by torch.func.vmap over the samples."""
    return {"output": torch.func.vmap(call)(batch.inputs)}


def functional_call(call: Any, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """Return the gradients of this rank's own loss with respect to all parameters, using functional_call."""
    is_engine = isinstance(call, Engine)
    module = call.module if is_engine else call
    weights = call.full_params() if is_engine else {name: p.detach() for name, p in call.named_parameters()}
    weights = {name: weight.to(batch.target.device) for name, weight in weights.items()}

    def loss(params: dict[str, Tensor]) -> Tensor:
        """Return the loss of the model with the parameters ``params``."""
        output: Tensor = torch.func.functional_call(module, params, (batch.inputs,))
        return spec.loss(output, batch.target)

    return dict(torch.func.grad(loss)(weights))


def identities(call: Call, spec: ModelSpec, batch: Batch) -> Mapping[str, Tensor]:
    """Return two differences that have to be 0.

    The first difference is jacrev minus the rows that autograd.grad computes one by one. The second difference is
    between the per-sample gradients of vmap(grad) and the gradient of the mean loss times the number of samples.
    """
    leaf = batch.inputs.clone().requires_grad_()
    rows = torch.func.jacrev(call)(batch.inputs[0])
    output = call(leaf)
    single_grads = torch.stack([torch.autograd.grad(o, leaf, retain_graph=True)[0][0] for o in output[0]])
    by_sample = vmap_grad(call, spec, batch)["input"]
    mean_grad = grad(call, spec, batch)["input"]
    return {"jacrev": rows - single_grads, "vmap_grad": by_sample - len(by_sample) * mean_grad}


class FusedLinearLoss(torch.autograd.Function):
    """An autograd.Function for a fused linear layer and loss, which uses torch.func in its forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return the loss, and save its gradients, which torch.func.grad_and_value computes."""

        def loss(hidden: Tensor, weight: Tensor) -> Tensor:
            """Return the sum of the positive outputs."""
            return torch.relu(hidden @ weight.t()).sum()

        gradients, value = torch.func.grad_and_value(loss, argnums=(0, 1))(hidden, weight)
        ctx.hidden, ctx.weight = gradients
        output: Tensor = value
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Return the saved gradients multiplied by the gradient of the loss."""
        return grads[0] * ctx.hidden, grads[0] * ctx.weight


def inside_forward(participant: Participant) -> None:
    """Apply a torch.func transform to a weight, once in the model's forward and once in a loss outside the forward."""

    def run_block(block: Call, hidden: Tensor) -> Tensor:
        """Run the block, and add the fused loss to its output."""
        fused: Tensor = FusedLinearLoss.apply(block(hidden), participant.module.shared.weight)  # type: ignore[no-untyped-call]
        return block(hidden) + fused

    backward(participant.loss(participant.call(participant.inputs(), run_block=run_block)))
    backward(FusedLinearLoss.apply(participant.call(participant.inputs(2)), participant.module.head.weight))  # type: ignore[no-untyped-call]


def through_transforms(participant: Participant) -> None:
    """Run backward through torch.func.vmap of the model, and through torch.func.vmap of the model's gradient."""
    backward(participant.loss(torch.func.vmap(participant.call)(participant.inputs())))
    by_sample = torch.func.vmap(torch.func.grad(lambda x: participant.call(x).clamp(-4, 4).sum()))(participant.inputs())
    backward(by_sample.sum())


def measure_weight_alignment(module: nn.Module) -> dict[str, Tensor]:
    """Return, for each unsharded weight, the offset of its memory address from a multiple of ALIGNMENT bytes."""
    weights = ((name, parameter) for name, parameter in module.named_parameters() if not is_dtensor(parameter))
    return {
        name: torch.tensor(weight.data_ptr() % ALIGNMENT)
        for name, weight in weights
        if weight.untyped_storage().nbytes() >= weight.nbytes > 0
    }


def align_weights(module: nn.Module, alignments: Mapping[str, Tensor]) -> nn.Module:
    """Return ``module`` after its weights were copied to memory with the offsets in ``alignments``."""
    for name, parameter in module.named_parameters():
        if name in alignments and parameter.shape:
            buffer = torch.empty(parameter.nbytes + 2 * ALIGNMENT, dtype=torch.uint8, device=parameter.device)
            start = (int(alignments[name]) - buffer.data_ptr()) % ALIGNMENT
            copy = buffer[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
            parameter.data = copy.copy_(parameter.detach())
    return module


def detach_values(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values, detached from their graphs."""
    return {name: tensor.detach() for name, tensor in values.items()}


def make_transform_observer(transform: Transform) -> Callable[[RankContext], None]:
    """Return an observer that applies ``transform`` and then trains accumulation windows of 1 and 4 micro-batches."""

    def observe(ctx: RankContext) -> None:
        """Record the transformed values, and the losses and gradients of the accumulation window."""
        engine_owns = AccumulationOwner.ENGINE in ctx.accumulation_owners()
        owner = AccumulationOwner.ENGINE if engine_owns else AccumulationOwner.CALLER
        for steps in ACCUMULATIONS if engine_owns else ACCUMULATIONS[:1]:
            engine = ctx.build_engine(accumulation_steps=steps, accumulation_owner=owner, optimizer=ZERO_LR_SGD)
            ctx.record(f"placed-{steps}", measure_weight_alignment(engine.module))
            ctx.record(f"transformed-{steps}", transform(engine, ctx.spec, ctx.batch(0)))
            for micro in range(steps):
                engine.backward(ctx.loss(engine, micro, f"loss-{steps}"))
                if micro == steps - 1:
                    ctx.record(f"grads-{steps}", engine.full_grads())
                engine.step()
            engine.close()

    return observe


def make_transform_judge(transform: Transform) -> Callable[[JudgeContext], Iterator[Comparison]]:
    """Return a judge that compares the transformed values, and the accumulation window after the transform."""

    def judge(ctx: JudgeContext) -> Iterator[Comparison]:
        """Compare the transformed values, the losses and the gradients with those of plain PyTorch."""
        spec = ctx.baseline.spec
        for steps in ACCUMULATIONS:
            if ctx.has_record(f"transformed-{steps}"):
                wanted = [
                    detach_values(
                        transform(align_weights(ctx.baseline.build_module(), where), spec, ctx.baseline.batch(rank, 0))
                    )
                    for rank, where in enumerate(ctx.rank_records(f"placed-{steps}"))
                ]
                yield from ctx.compare_values(f"transformed-{steps}", wanted)
                micros = [ctx.compute_local_grads(micro) for micro in range(steps)]
                for micro, local in enumerate(micros):
                    yield from ctx.compare_losses(micro, local, f"loss-{steps}")
                yield from ctx.compare_reduced_grads(
                    f"grads-{steps}", micros, exact=ctx.certify_exactness(range(steps))
                )

    return judge


def transform_law(
    name: str,
    statement: str,
    transform: Transform,
    models: tuple[str, ...] = ("mlp",),
    features: tuple[Feature, ...] = (Feature.TORCH_FUNC, Feature.TRANSFORMS),
    *,
    kept_because: str,
) -> Law:
    """Build the law that compares one torch.func transform of an engine with the same transform of a plain model."""
    return Law(
        name=f"torch_func.{name}",
        statement=statement,
        tier=Tier.EXACT,
        models=models,
        observe=make_transform_observer(transform),
        judge=make_transform_judge(transform),
        kept_because=kept_because,
        features=features,
        steps=LawSteps(transform, StepsKind.TRANSFORM),
    )


def transform_training_law(script: ScenarioScript, statement: str, *extra_features: Feature, kept_because: str) -> Law:
    """Build the law of a scenario in which training applies transforms of torch.func."""
    features = (Feature.TRANSFORMS, Feature.TENSOR_BACKWARD, *extra_features)
    return scenario_law("torch_func", Scenario(script), statement, kept_because=kept_because, features=features)


TORCH_FUNC_FEATURES = (Feature.TORCH_FUNC,)

EXACT_MODELS = ("exact",)

VECTOR_MODELS = ("mlp", "exact")

LAWS = (
    transform_law(
        "grad",
        "torch.func.grad of the engine is plain PyTorch's, not divided for accumulation, and training stays right",
        grad,
        DIFFERENTIABLE,
        TORCH_FUNC_FEATURES,
        kept_because="the shortest transform: read it first in a report",
    ),
    transform_law(
        "vmap_grad",
        "vmap(grad) of the engine gives plain PyTorch's per-sample gradients, and training stays right",
        vmap_grad,
        DIFFERENTIABLE,
        TORCH_FUNC_FEATURES,
        kept_because="per-sample gradients, the most common use of transforms",
    ),
    transform_law(
        "grad_and_value",
        "grad_and_value of the engine is plain PyTorch's, and its value equals the loss of a forward",
        grad_and_value,
        kept_because="the transform that fused losses call, with a value in addition to the gradient",
    ),
    transform_law(
        "has_aux",
        "grad with has_aux gives plain PyTorch's gradient and auxiliary output",
        has_aux,
        kept_because="the only transform with an output that is not differentiated, and with inputs by keyword",
    ),
    transform_law(
        "vjp",
        "vjp of the engine is plain PyTorch's, also if the vjp function is called after the forward has ended",
        vjp,
        kept_because="the vjp function runs after the forward, when a stage-3 engine has freed the full weights",
    ),
    transform_law(
        "jvp",
        "jvp (forward mode) of the engine is plain PyTorch's",
        jvp,
        VECTOR_MODELS,
        kept_because="the only law of forward mode alone: an autograd.Function without a jvp rule raises",
    ),
    transform_law(
        "jacrev",
        "jacrev of the engine is plain PyTorch's for 1-D, 2-D and batched inputs",
        jacrev,
        VECTOR_MODELS,
        kept_because="runs vmap over a vjp: an autograd.Function without a vmap rule raises",
    ),
    transform_law(
        "jacfwd",
        "jacfwd of the engine is plain PyTorch's for 1-D, 2-D and batched inputs",
        jacfwd,
        VECTOR_MODELS,
        kept_because="runs vmap over forward mode",
    ),
    transform_law(
        "hessian",
        "the Hessian of the engine, forward over reverse and reverse over reverse, is plain PyTorch's",
        hessian,
        VECTOR_MODELS,
        kept_because="one transform within another: two levels are active at once",
    ),
    transform_law(
        "vmap",
        "vmap of the engine is plain PyTorch's",
        vmap,
        kept_because="batching without differentiation",
    ),
    transform_law(
        "functional_call",
        "functional_call with full_params gives the parameter gradients of this rank's own loss",
        functional_call,
        kept_because="the engine's modules compute with parameters that the caller passes",
    ),
    transform_law(
        "identities",
        "rows of jacrev equal autograd.grad, and vmap(grad) is the number of samples times grad of the mean loss",
        identities,
        EXACT_MODELS,
        (Feature.TORCH_FUNC, Feature.TRANSFORMS, Feature.TENSOR_BACKWARD),
        kept_because="needs no baseline: transforms are compared with each other",
    ),
    transform_training_law(
        inside_forward,
        "a forward or a loss that applies torch.func to a weight trains as in plain PyTorch",
        Feature.OUTSIDE_FORWARD,
        kept_because="a transform within training: a released engine failed this law and no other law",
    ),
    transform_training_law(
        through_transforms,
        "backward through a vmap and a vmap(grad) of the engine is plain PyTorch's",
        kept_because="a backward through a transform, which trains parameters",
    ),
)
