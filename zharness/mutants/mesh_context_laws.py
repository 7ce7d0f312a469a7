"""Define mutants of the traffic between the ranks of a sequence, of their random numbers, and of a loss over tokens.

The mutants wrap DeepSpeed's Ulysses, and need DeepSpeed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mesh import CONTEXT
from zharness.mutants import seams_engines
from zharness.mutants.mesh_context import UlyssesWrapper, change_inputs, find_attention
from zharness.mutants.mesh_dropout import DrawAnew, DrawFromASeed
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.parity import Part
from zharness.workload.exact_heads import Dropout

SEQUENCE_COMMUNICATION = "seq_parallel_communication_data_type"


def on_wire(parameter: str, dtype: str = "fp32") -> Target:
    """Return a target of the law mesh.wire on four ranks."""
    return Target("mesh.wire", Part.REDUCTION, "context", parameter=parameter, dtype=dtype, world_size=4, mesh="cp2")


@mutant(FaultKind.RESOURCES, on_wire("elements of activations along cp"), origin=Origin.MESH)
class ExchangesKeysAgain(UlyssesWrapper):
    """Exchanges the keys of attention once more than needed, and discards the result."""

    def spoil(self) -> None:
        change_inputs(self.module, self.exchange_again)

    def exchange_again(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Exchange the keys once more, and return the inputs of attention unchanged."""
        sent = key.detach().contiguous()
        dist.all_to_all_single(torch.empty_like(sent), sent, group=seams_engines.sequence_group())
        return query, key, value


@mutant(FaultKind.REDUCE_DTYPE, on_wire("activations along cp"), origin=Origin.MESH)
class ExchangesActivationsInBf16(UlyssesWrapper):
    """Exchanges query, key, value and output in bfloat16, which represents the integers of an exact model exactly."""

    def spoil(self) -> None:
        for attention in find_attention(self.module):
            inner = attention.attention
            inner.register_forward_pre_hook(
                lambda _module, inputs: (*(each.bfloat16() for each in inputs[:3]), *inputs[3:])
            )
            inner.register_forward_hook(lambda _module, _inputs, output: output.float())


@mutant(FaultKind.RESOURCES, on_wire("elements of gradients along cp"), origin=Origin.MESH)
class SumsGradientsOverASequenceAgain(UlyssesWrapper):
    """In each backward, also all-reduces gradient buffers over the ranks of a sequence, and discards them."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss, retain_graph=retain_graph)
        for parameter in self.module.parameters() if self.size > 1 else ():
            dist.all_reduce(torch.zeros(parameter.shape), group=seams_engines.sequence_group())


@mutant(FaultKind.RESOURCES, on_wire("elements of weights along cp"), origin=Origin.MESH)
class GathersWeightsOverASequence(UlyssesWrapper):
    """In each forward, gathers the weights over the ranks of a sequence, which all have them, and discards them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for parameter in self.module.parameters() if self.size > 1 else ():
            weight = parameter.detach()
            gathered = [torch.empty_like(weight) for _ in range(self.size)]
            dist.all_gather(gathered, weight, group=seams_engines.sequence_group())
        return self.base(*args, **kwargs)


@mutant(FaultKind.REDUCE_DTYPE, on_wire("gradients along dp_shard,cp", "bf16"), origin=Origin.MESH)
class SumsPartsOfASequenceInBf16(UlyssesWrapper):
    """Sums the gradients of parts of a sequence in bfloat16, as DeepSpeed can with its option for sequences."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        narrow = {SEQUENCE_COMMUNICATION: config.dtype} if config.mesh.size(CONTEXT) > 1 else {}
        super().__init__(model, replace(config, options={**config.options, **narrow}))


def on_dropout(part: Part, variant: str = "", parameter: str = "*", world_size: int = 2) -> Target:
    """Return a target of the law mesh.dropout."""
    fields = {"parameter": parameter, "world_size": world_size, "mesh": "cp2"}
    return Target("mesh.dropout", part, "dropped_context", variant, **fields)  # type: ignore[arg-type]


class SequenceDropoutWrapper(UlyssesWrapper):
    """The base class of mutants that change the masks which dropout draws for a part of a sequence."""

    def spoil(self) -> None:
        for module in self.module.modules():
            if isinstance(module, Dropout):
                self.spoil_dropout(module)

    def spoil_dropout(self, dropout: Dropout) -> None:
        """Break one dropout module."""
        raise NotImplementedError


@mutant(
    FaultKind.RANKS,
    on_dropout(Part.FORWARD, "masks", "masks of drop_*"),
    on_dropout(Part.FORWARD, "masks", "masks of drop_*", world_size=4),
    origin=Origin.MESH,
)
class DropsTheSameOfEachPartOfASequence(SequenceDropoutWrapper):
    """Draws dropout from a generator that all ranks of a sequence have seeded alike, like a trainer with one seed."""

    def spoil_dropout(self, dropout: Dropout) -> None:
        dropout.draw = DrawAnew(0)


@mutant(FaultKind.RANKS, on_dropout(Part.FORWARD, "masks_in_a_window", "masks of drop_*"), origin=Origin.MESH)
class DropsTheSameOfEachPartInAWindow(SequenceDropoutWrapper):
    """With windows of several micro-batches, draws dropout from a generator that all ranks have seeded alike."""

    def spoil_dropout(self, dropout: Dropout) -> None:
        if self.config.accumulation_steps > 1:
            dropout.draw = DrawAnew(0)


@mutant(FaultKind.RANKS, on_dropout(Part.FORWARD, "masks", "masks of drop_*"), origin=Origin.MESH)
class SeedsDropoutByThePlaceAlone(SequenceDropoutWrapper):
    """Seeds the dropout of each part by its place alone, so that the part drops the same elements in every step."""

    def spoil_dropout(self, dropout: Dropout) -> None:
        dropout.draw = DrawFromASeed(self.place)


@mutant(FaultKind.GRAPH, on_dropout(Part.LOCAL_GRADIENT, "recomputed", "mask of drop_*"), origin=Origin.MESH)
class RecomputesTheLastPartWithANewMask(SequenceDropoutWrapper):
    """In a recomputation, drops other elements of the last part of a sequence than the forward did."""

    def spoil_dropout(self, dropout: Dropout) -> None:
        if self.place == self.size - 1:
            dropout.draw = DrawAnew(1000)


@mutant(FaultKind.CONTRIBUTION, on_dropout(Part.LOCAL_GRADIENT), origin=Origin.MESH)
class BackwardPassesWhatTheLastPartDropped(SequenceDropoutWrapper):
    """Ignores the dropout mask in the backward of the last part of a sequence."""

    def spoil_dropout(self, dropout: Dropout) -> None:
        def pass_all(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return output.detach() + inputs[0] - inputs[0].detach()

        if self.place == self.size - 1:
            dropout.register_forward_hook(pass_all)


def on_token_loss(part: Part, world_size: int = 2) -> Target:
    """Return a target of the law mesh.token_loss."""
    return Target("mesh.token_loss", part, "context_tokens", world_size=world_size, mesh="cp2")


@mutant(
    FaultKind.SCALE,
    on_token_loss(Part.LOCAL_GRADIENT),
    on_token_loss(Part.LOCAL_GRADIENT, world_size=4),
    origin=Origin.MESH,
)
class AveragesTheMeansOfParts(UlyssesWrapper):
    """Computes the gradient of the mean over parts of each part's own mean over the tokens that have a gradient."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.base(*args, **kwargs)
        if self.size > 1:
            output.register_hook(self.weigh_parts)
        return output

    def weigh_parts(self, grad: Tensor) -> Tensor:
        """Return the gradient of the whole output, weighted so that all parts count equally."""
        parts = grad.chunk(self.size, dim=1)
        counts = [float((part != 0).any(dim=-1).sum()) for part in parts]
        return torch.cat(
            [part * sum(counts) / (self.size * max(count, 1.0)) for part, count in zip(parts, counts, strict=True)],
            dim=1,
        )


@mutant(FaultKind.SCALE, on_token_loss(Part.REDUCTION), origin=Origin.MESH)
class GathersOutputsByTorch(UlyssesWrapper):
    """Gathers the output by torch's all_gather, as DeepSpeed's tutorial gathers losses.

    The backward of torch's all_gather adds up the gradients of all ranks of a sequence.
    """

    def spoil(self) -> None:
        seams_engines.replace_join(self.base, gather_by_torch)


def gather_by_torch(part: Tensor, group: Any) -> Tensor:
    """Return the parts of all ranks of ``group``, joined along the sequence."""
    parts = torch.distributed.nn.functional.all_gather(part.contiguous(), group=group)  # type: ignore[no-untyped-call]
    return torch.cat(parts, dim=1)


@mutant(FaultKind.CONTRIBUTION, on_token_loss(Part.LOCAL_GRADIENT), origin=Origin.MESH)
class SumsTheFirstMicroBatchOverASequenceTwice(UlyssesWrapper):
    """In a window of several micro-batches, sums the first micro-batch's gradient over a sequence's ranks twice."""

    backwards = 0

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        is_summed_again = self.size > 1 and self.config.accumulation_steps > 1 and self.backwards == 0
        self.backwards += 1
        self.base.backward(self.size * loss if is_summed_again else loss, retain_graph=retain_graph)

    def step(self) -> None:
        self.backwards = 0
        self.base.step()
