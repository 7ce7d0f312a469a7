"""Register the models: functions that build each model, draw its micro-batches and compute its loss."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn

from zharness.device import is_gpu_requested
from zharness.workload import (
    causal_attention,
    exact_blocks,
    exact_chain,
    exact_heads,
    exact_layers,
    exact_mixing,
    exact_mlp,
    exact_splits,
    exact_tokens,
    matrices,
    mixed_precision,
    nets,
    random_routed,
)
from zharness.workload.generators import draw_on_cpu, fork_seeded_generators
from zharness.workload.nested_tensors import collect_tensors, map_tensors

# Before this release (seen on 2.8) mse_loss on CPU has no backward for bf16 or fp16 outputs and fp32 targets.
LOW_PRECISION_MSE_SINCE = (2, 13)
SAMPLES = 4  # per micro-batch and rank; a power of two, so that the mean over them is exact
# How tp splits models whose layers are called one by one: each layer takes and returns whole tensors. Layers outside a
# plan are whole.
GATHERED_COLUMNS, WHOLE_TO_ROWS = "colwise_gather_output", "rowwise_split_input"
THREE_LAYERS_PLAN = {"first": GATHERED_COLUMNS, "second": GATHERED_COLUMNS, "last": WHOLE_TO_ROWS}
BRANCHES_PLAN = dict.fromkeys(("frozen", "twice", "branch", "unused"), GATHERED_COLUMNS)  # tp unties the other layers
PARALLEL_LAYERS_PLAN = {"second": GATHERED_COLUMNS, "third": WHOLE_TO_ROWS}


@dataclass(frozen=True)
class Batch:
    """A micro-batch of one rank: the inputs of the model and the target of its loss, with equally many rows.

    ``inputs`` are a tensor, a tuple of positional arguments, or a mapping of keyword arguments. ``seed`` is the seed of
    torch's generator for the forward, which dropout needs. If ``seed`` is None, the generator is not seeded.
    """

    inputs: Any
    target: Any
    seed: int | None = None

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> Batch:
        """Return a copy of the batch on ``device``, with floating-point tensors cast to ``dtype``."""
        return self.map_tensors(lambda t: t.to(device, dtype) if t.is_floating_point() else t.to(device))

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return a copy of the batch in which every tensor of inputs and target is replaced by ``function(tensor)``."""
        return replace(self, inputs=map_tensors(self.inputs, function), target=map_tensors(self.target, function))

    @property
    def num_samples(self) -> int:
        """The number of samples, which is the number of rows of the first input."""
        return len(collect_tensors(self.inputs)[0])

    def feed(self, call: Callable[..., Any]) -> Any:
        """Call ``call``, a model or an engine, with the inputs and return its output.

        If the batch has a seed, torch's generator is seeded for the call and restored afterwards.
        """
        if self.seed is None:
            return self._call_with_inputs(call)
        with fork_seeded_generators(self.seed):
            return self._call_with_inputs(call)

    def generator_state_after(self, call: Callable[..., Any]) -> Tensor:
        """Seed torch's generator, call ``call`` with the inputs, and return the generator's state after the call.

        The state of torch's generator from before this function is restored.
        """
        with fork_seeded_generators(self.seed or 0):
            self._call_with_inputs(call)
            return torch.cuda.get_rng_state() if is_gpu_requested() else torch.get_rng_state()

    def _call_with_inputs(self, call: Callable[..., Any]) -> Any:
        """Call ``call`` with the inputs as keyword arguments, as positional arguments or as a single tensor."""
        if isinstance(self.inputs, Mapping):
            return call(**self.inputs)
        return call(*self.inputs) if isinstance(self.inputs, tuple) else call(self.inputs)


@dataclass(frozen=True)
class ModelSpec:
    """A registered model: the functions that build it, draw its micro-batches and compute its loss.

    ``build()`` returns the model, and is called with torch's generator seeded. ``batch(generator)`` draws a
    micro-batch. ``loss(output, target)`` returns a scalar, the mean over samples. ``exact`` says that weights and
    inputs are small integers and that every operation is linear or ReLU, so that sums are exact in any order. Each cell
    verifies this claim. ``tp_plan`` says how tp splits a module, ``colwise`` or ``rowwise``; a model without a plan has
    no cells on the axis tp. ``tp_parts`` are the numbers that tp has to divide, such as the number of attention heads.
    ``pp_plan`` has the modules that are called one after another, which pp splits. ``ep_plan`` has the number of
    experts of each layer of experts, which ep splits. ``cp_plan`` has the attention modules of a model whose sequence
    cp splits, and ``cp_parts`` has the numbers that cp has to divide. ``stands_in_for`` is the model whose laws this
    model runs on a mesh with ep or cp. ``splits_exactly`` says that, for any weights, the sums that ep or cp splits
    round nothing.
    """

    name: str
    summary: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Any, Any], Tensor]
    exact: bool = False
    tp_plan: Mapping[str, str] = field(default_factory=dict, hash=False)
    pp_plan: tuple[str, ...] = ()
    ep_plan: Mapping[str, int] = field(default_factory=dict, hash=False)
    cp_plan: tuple[str, ...] = ()
    cp_parts: Mapping[str, int] = field(default_factory=dict, hash=False)
    stands_in_for: str = ""
    splits_exactly: bool = False
    tp_parts: Mapping[str, int] = field(default_factory=dict, hash=False)

    def model(self, seed: int) -> nn.Module:
        """Build the model, with its initial weights drawn from ``seed``; the state of torch's generator is restored."""
        with torch.random.fork_rng(devices=[]), draw_on_cpu() as device:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would also queue a call for unused devices
            return self.build() if device is None else self.build().to(device)

    def micro_batch(self, seed: int, rank: int, step: int) -> Batch:
        """Draw the micro-batch that ``rank`` gets at micro-step ``step``; every process draws the same values."""
        key = hashlib.sha256(f"{self.name}-{seed}-{rank}-{step}".encode()).digest()
        with draw_on_cpu() as device:
            batch = self.batch(torch.Generator("cpu").manual_seed(int.from_bytes(key[:7], "big")))
        return batch if device is None else batch.map_tensors(lambda tensor: tensor.to(device))


def _mse(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error; on older torch this also works for low-precision outputs."""
    if output.dtype in (torch.bfloat16, torch.float16) and Version(torch.__version__).release < LOW_PRECISION_MSE_SINCE:
        return (output - target).square().mean()
    return nn.functional.mse_loss(output, target)


def _draw_float_batch(shape: tuple[int, ...], generator: torch.Generator) -> Batch:
    """Draw normally distributed inputs and targets; ``shape`` is the shape of one sample's inputs."""
    inputs = torch.randn(SAMPLES, *shape, generator=generator)
    return Batch(inputs, torch.randn(SAMPLES, nets.OUTPUTS, generator=generator))


def _draw_seeded_batch(generator: torch.Generator) -> Batch:
    """Draw inputs and targets as for the model ``mlp``, and a seed for the dropout in the forward."""
    drawn = _draw_float_batch((nets.FEATURES,), generator)
    return replace(drawn, seed=int(torch.randint(1 << 30, (), generator=generator)))


def _draw_ternary_batch(generator: torch.Generator) -> Batch:
    """Draw a micro-batch whose inputs and targets have elements in {-1, 0, 1}."""
    inputs = exact_mlp.random_ternary((SAMPLES, exact_mlp.WIDTH), generator)
    return Batch(inputs, exact_mlp.random_ternary((SAMPLES, exact_mlp.WIDTH), generator))


def _draw_parts(draw: Callable[[int, torch.Generator], tuple[Any, ...]], generator: torch.Generator) -> Batch:
    """Return the micro-batch whose inputs, target and perhaps seed ``draw(samples, generator)`` returns."""
    return Batch(*draw(SAMPLES, generator))


def _fused_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean of the model's output, which contains the loss of each sample. The target is not used."""
    return (output + 0 * target[:, :1]).mean()


MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec(
            name="mlp",
            summary="linear, layer norm and GELU; widths that no world size above 1 divides",
            build=nets.MLP,
            batch=partial(_draw_float_batch, (nets.FEATURES,)),
            loss=_mse,
            tp_plan=THREE_LAYERS_PLAN,
        ),
        ModelSpec(
            name="transformer",
            summary="two pre-norm attention blocks between a tied embedding and head",
            build=nets.Transformer,
            batch=partial(_draw_parts, nets.draw_tokens),
            loss=nets.next_token_loss,
            tp_plan=nets.TENSOR_PLAN,
            tp_parts={"hidden features": 2 * nets.WIDTH},
        ),
        ModelSpec(
            name="conv",
            summary="two convolutions, group norm, pooling, linear head",
            build=nets.ConvNet,
            batch=partial(_draw_float_batch, (nets.CHANNELS, nets.PIXELS, nets.PIXELS)),
            loss=_mse,
        ),
        ModelSpec(
            name="exact",
            summary="residual ReLU layers with weights in {-1, 0, 1}: every sum is exact in any order",
            build=exact_mlp.ExactMLP,
            batch=_draw_ternary_batch,
            loss=exact_mlp.linear_loss,
            exact=True,
            tp_plan=THREE_LAYERS_PLAN,
            stands_in_for="mlp",
        ),
        ModelSpec(
            name="blocks",
            summary="an exact model for every spelling of backward: a layer used twice, a frozen one, a second head",
            build=exact_blocks.BlocksModel,
            batch=_draw_ternary_batch,
            loss=exact_mlp.linear_loss,
            exact=True,
            tp_plan={"first": GATHERED_COLUMNS, "shared": GATHERED_COLUMNS, "last": WHOLE_TO_ROWS},
        ),
        ModelSpec(
            name="delegating",
            summary="the model blocks with a wrapper that returns the attributes of the layer inside it",
            build=exact_blocks.DelegatingBlocksModel,
            batch=_draw_ternary_batch,
            loss=exact_mlp.linear_loss,
            exact=True,
        ),
        *(
            ModelSpec(
                name=name,
                summary=summary,
                build=build,
                batch=_draw_ternary_batch,
                loss=exact_mlp.linear_loss,
                exact=True,
                tp_plan=plan,
            )
            for name, (summary, build, plan) in exact_layers.LAYERS_MODELS.items()
        ),
        *(
            ModelSpec(
                name=name,
                summary=summary,
                build=build,
                batch=_draw_ternary_batch,
                loss=exact_mlp.linear_loss,
                exact=True,
                tp_plan=BRANCHES_PLAN,
            )
            for name, summary, build in exact_blocks.BRANCHING_MODELS
        ),
        *(
            ModelSpec(
                name=f"odd_{kind}",
                summary=f"an exact model of two linear layers and one unusual parameter, of the kind {kind!r}",
                build=partial(exact_blocks.OneOddParameterModel, kind),
                batch=_draw_ternary_batch,
                loss=exact_mlp.linear_loss,
                exact=True,
                tp_plan={"first": GATHERED_COLUMNS, "last": WHOLE_TO_ROWS},
            )
            for kind in exact_blocks.ODD_PARAMETERS
        ),
        ModelSpec(
            name="gated",
            summary="an exact model whose last layer has a parameter that not every forward uses",
            build=exact_blocks.GatedModel,
            batch=_draw_ternary_batch,
            loss=exact_mlp.linear_loss,
            exact=True,
            tp_plan={"first": GATHERED_COLUMNS},
        ),
        ModelSpec(
            name="experts",
            summary="an exact model of a list of layers, of which each forward uses the named ones in the named order",
            build=exact_blocks.ExpertsModel,
            batch=_draw_ternary_batch,
            loss=exact_mlp.linear_loss,
            exact=True,
            tp_plan={
                "first": GATHERED_COLUMNS,
                "experts.0": GATHERED_COLUMNS,
                "experts.1": WHOLE_TO_ROWS,
                "last": WHOLE_TO_ROWS,
            },
        ),
        ModelSpec(
            name="similar",
            summary="an exact model of parallel layers of one shape, one tied and one frozen; all weights differ",
            build=exact_blocks.SimilarLayersModel,
            batch=_draw_ternary_batch,
            loss=exact_mlp.linear_loss,
            exact=True,
            tp_plan=PARALLEL_LAYERS_PLAN,
        ),
        ModelSpec(
            name="aligned",
            summary="the model similar with parameters that 2, 3 and 4 ranks divide",
            build=exact_blocks.AlignedLayersModel,
            batch=partial(_draw_parts, exact_blocks.draw_aligned_parts),
            loss=exact_mlp.linear_loss,
            exact=True,
            tp_plan=PARALLEL_LAYERS_PLAN,
        ),
        *(
            ModelSpec(
                name=each.name,
                summary=each.summary,
                build=each.build,
                batch=partial(_draw_parts, each.draw),
                loss=each.loss,
                exact=True,
                tp_plan=each.plan,
                tp_parts={"heads": exact_heads.HEADS},
            )
            for each in (*exact_heads.HEADS_MODELS, *exact_tokens.TOKEN_MODELS)
        ),
        ModelSpec(
            name="mixing",
            summary="an exact model that mixes samples by layers that tp splits, whose input is transposed",
            build=partial(exact_mixing.MixingModel, SAMPLES),
            batch=_draw_ternary_batch,
            loss=exact_mlp.linear_loss,
            exact=True,
            **exact_mixing.TENSOR_SPLIT,
        ),
        *(
            ModelSpec(
                name=each.name,
                summary=f"an exact model that pp splits into stages: {each.parts}",
                build=each.build,
                batch=_draw_ternary_batch,
                loss=exact_mlp.linear_loss,
                exact=True,
                pp_plan=each.plan,
                tp_plan=each.split,
            )
            for each in exact_chain.PIPELINE_MODELS
        ),
        ModelSpec(
            name="random_chain",
            summary="four blocks of random weights and buffers, of odd widths, of which each takes the output before",
            build=exact_chain.RandomChainModel,
            batch=_draw_ternary_batch,
            loss=_mse,
            pp_plan=exact_chain.PIPELINE_PLAN,
            tp_plan=exact_chain.SPLIT_BLOCKS,
        ),
        *(
            ModelSpec(batch=partial(_draw_parts, draw), **fields)
            for draw, fields in (
                *random_routed.EXPERT_MODELS,
                *causal_attention.MODELS,
                *exact_chain.TOKEN_MODELS,
                *exact_splits.MODELS,
                *matrices.MODELS,
            )
        ),
        ModelSpec(
            "lookup",
            "an exact model of a table with a sparse gradient, which looks up some rows several times",
            exact_blocks.LookupModel,
            _draw_ternary_batch,
            exact_mlp.linear_loss,
            exact=True,
        ),
        ModelSpec(
            name="mixed",
            summary="linear layers and a norm, buffers, a frozen parameter, and a block that leaves torch.autocast",
            build=mixed_precision.MixedPrecisionModel,
            batch=partial(_draw_float_batch, (nets.FEATURES,)),
            loss=_mse,
        ),
        ModelSpec(
            name="recomputed",
            summary="the model mixed, whose first and last layers are recomputed in backward",
            build=mixed_precision.RecomputedMixedPrecisionModel,
            batch=partial(_draw_float_batch, (nets.FEATURES,)),
            loss=_mse,
        ),
        ModelSpec(
            name="stateful",
            summary="a batch norm with running statistics, and dropout: what differs in training and in evaluation",
            build=nets.StatefulModel,
            batch=_draw_seeded_batch,
            loss=_mse,
        ),
        ModelSpec(
            name="fused",
            summary="a fused linear loss: torch.func inside the forward, on a weight read by attribute",
            build=nets.FusedLossNet,
            batch=partial(_draw_float_batch, (nets.FEATURES,)),
            loss=_fused_loss,
        ),
    )
}
