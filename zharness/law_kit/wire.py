"""Judge what ranks send: compare its dtype with the policy's, and its elements with a formula for each channel."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from zharness.law_kit.dtypes import DTYPES
from zharness.law_kit.hints import add_hint, explain_nothing
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.observed_collectives import GRADIENTS, CollectiveObserver, Sent
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.mesh import CONTEXT
from zharness.parity import Comparison, Part, compare_bitwise, compare_within_range
from zharness.workload import Batch

Range = tuple[float, float]  # the least and the largest number of elements
NOTHING: Range = (0, 0)


@dataclass(frozen=True, order=True)
class Channel:
    """The content that is sent and the axes along which it is sent, joined by commas; ``receiver`` is as in Sent."""

    content: str
    axes: str
    receiver: str = ""

    @property
    def name(self) -> str:
        """The channel as a report names it."""
        where = f"to {self.axes} {self.receiver}" if self.receiver else f"along {self.axes}"
        return f"{self.content} {where}"


Explain = Callable[[Channel, float], str]


def get_channel(message: Sent) -> Channel:
    """Return the channel of a message."""
    return Channel(message.content, message.axes, message.receiver)


def record_sent(ctx: RankContext, observer: CollectiveObserver, step: int) -> None:
    """Record the numbers of elements that ``observer`` counted, by the name of their message."""
    ctx.record("sent", {sent.name: scalar(elements) for sent, elements in sorted(observer.elements.items())}, step)


def judge_dtypes(ctx: JudgeContext, rank: int, sent: Mapping[Sent, Tensor], step: int) -> Iterator[Comparison]:
    """Check that no element was sent in another dtype than the policy's."""
    for message, elements in sent.items():
        dtype = find_sent_dtype(ctx) if message.content == GRADIENTS else ctx.dtype
        right = str(dtype).removeprefix("torch.")
        place = ctx.location(f"{message.content} along {message.axes}", Part.REDUCTION, step, rank)
        expected = elements if message.dtype == right else scalar(0)
        yield add_hint(
            compare_bitwise(place, expected, elements), f"{message.content} are sent in {message.dtype}, not in {right}"
        )


def find_sent_dtype(ctx: JudgeContext) -> torch.dtype:
    """Return the dtype in which the engine says that it sends gradients."""
    sent = ctx.claims.sent_dtype_on_cp if CONTEXT in ctx.mesh.axes else None
    return DTYPES[sent.value] if sent else ctx.reduce_dtype


def judge_elements(
    ctx: JudgeContext,
    rank: int,
    sent: Mapping[Sent, Tensor],
    ranges: Mapping[Channel, Range],
    step: int,
    explain: Explain = explain_nothing,
) -> Iterator[Comparison]:
    """Check that the number of elements sent on each channel is in its range, or is 0 if the channel has no range.

    ``explain`` returns a hint for a number that is out of its range.
    """
    counts: Counter[Channel] = Counter()
    operators: defaultdict[Channel, set[str]] = defaultdict(set)
    for message, elements in sent.items():
        counts[get_channel(message)] += int(elements)
        operators[get_channel(message)].add(message.operator)
    for channel in (*ranges, *sorted(set(counts) - set(ranges))):
        least, most = ranges.get(channel, NOTHING)
        place = ctx.location(f"elements of {channel.name}", Part.REDUCTION, step, rank)
        comparison = compare_within_range(place, scalar(least), scalar(counts[channel]), scalar(most))
        if comparison.mismatch is not None:
            senders = " and ".join(sorted(operators[channel]))
            is_known = channel in ranges
            hint = explain(channel, counts[channel]) if is_known else f"no formula allows what {senders} sent"
            comparison = add_hint(comparison, hint)
        yield comparison


@dataclass(frozen=True)
class Activations:
    """The numbers of elements of activations that a rank of tp sends in the forward and in the backward of modules."""

    forward: int = 0
    backward: int = 0

    def __add__(self, other: Activations) -> Activations:
        return Activations(self.forward + other.forward, self.backward + other.backward)

    @property
    def total(self) -> int:
        """The elements of both directions."""
        return self.forward + self.backward


def measure_activations(
    model: nn.Module, batch: Batch, plan: Mapping[str, str], tensor_size: int
) -> dict[str, Activations]:
    """Return, for each module of ``plan``, the elements of activations that a rank of tp sends in forward and backward.

    This function counts the calls of modules in a forward of the plain ``model`` on ``batch``.
    """
    elements = dict.fromkeys(plan, Activations())

    def count(name: str, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Add what one call of a layer sends."""
        elements[name] += count_elements_of_call(plan[name], inputs[0], output, tensor_size)

    for name in plan if tensor_size > 1 else ():
        model.get_submodule(name).register_forward_hook(partial(count, name))
    if tensor_size > 1:
        batch.feed(model)
    return elements


def count_elements_of_call(word: str, given: Tensor, output: Tensor, tensor_size: int) -> Activations:
    """Return the elements of activations that a rank of tp sends for one call of a layer.

    ``word`` says how the plan splits the layer. A column-wise layer adds up the gradients of its input ``given``. A
    row-wise layer adds up its outputs, and gathers the gradients of an input that it splits. Under sequence parallelism
    the same tensors are also gathered in the other direction. For an input that requires no gradient, no gradient is
    sent.
    """
    inputs, outputs = given.numel(), output.numel()
    if "colwise" in word:
        gathered = inputs * word.startswith("sequence") + outputs * word.endswith("gather_output")
        return Activations(gathered // tensor_size, inputs * given.requires_grad)
    if word.startswith("rowwise"):
        gathered = inputs * (given.requires_grad and "split_input" in word) + outputs * word.endswith("to_sequence")
        return Activations(outputs, gathered // tensor_size)
    return Activations()
