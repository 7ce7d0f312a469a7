"""Build the laws of the group ``checkpointing``: activation checkpointing does not change any gradient.

A participant is the engine or the plain model on which a law runs. ``Participant.recompute`` does not checkpoint on the
plain model, except in the scenario in which torch's reentrant checkpointing itself changes the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import backward
from torch.utils.checkpoint import checkpoint

from zharness.engines.protocol import Feature
from zharness.law_kit.law import Law, MeshSupport, Variant
from zharness.law_kit.raising_backward import DeliberateError
from zharness.law_kit.scenario_law import scenario_law
from zharness.law_kit.scenarios import NamedTensors, Participant, Scenario, ScenarioScript
from zharness.workload.exact_blocks import call_block

Block = Callable[[Tensor], Tensor]

BlockRunner = Callable[[Block, Tensor], Tensor]

REENTRANT, NON_REENTRANT = "reentrant", "non_reentrant"
# Variants in which one of two uses of a layer is in a reentrant checkpoint: the first use or the last use.
REENTRANT_FIRST, REENTRANT_LAST = "reentrant_first", "reentrant_last"


def make_checkpoint_runner(participant: Participant) -> BlockRunner:
    """Return a function that runs a block with the kind of checkpointing that the law variant names."""
    is_reentrant = participant.variant != NON_REENTRANT
    return lambda block, hidden: participant.recompute(block, hidden, use_reentrant=is_reentrant)


def block(participant: Participant) -> None:
    """Checkpoint a block that is in the middle of the model and uses one layer twice."""
    participant.tensor_backward(
        participant.loss(participant.call(participant.leaf_inputs(), run_block=make_checkpoint_runner(participant)))
    )


def nested(participant: Participant) -> None:
    """Checkpoint a block within a checkpointed function."""
    run_checkpointed = make_checkpoint_runner(participant)

    def run_nested(block: Block, hidden: Tensor) -> Tensor:
        """Run the block within two nested checkpoints."""
        return run_checkpointed(lambda h: run_checkpointed(block, h), hidden)

    participant.tensor_backward(participant.loss(participant.call(participant.leaf_inputs(), run_block=run_nested)))


def whole_model(participant: Participant) -> NamedTensors:
    """Checkpoint the whole model, and return the gradient with respect to its input."""
    leaf = participant.leaf_inputs()
    participant.tensor_backward(participant.loss(make_checkpoint_runner(participant)(participant.call, leaf)))
    assert leaf.grad is not None
    return {"input": leaf.grad}


def two_regions(participant: Participant) -> None:
    """Use one layer in two checkpointed regions of one loss, or once in such a region and once outside it."""
    run_checkpointed = make_checkpoint_runner(participant)
    run_first = call_block if participant.variant == REENTRANT_LAST else run_checkpointed
    run_last = call_block if participant.variant == REENTRANT_FIRST else run_checkpointed
    participant.tensor_backward(
        participant.loss(
            participant.call(
                participant.leaf_inputs(), run_block=lambda block, hidden: run_last(block, run_first(block, hidden))
            )
        )
    )


def frozen(participant: Participant) -> None:
    """Checkpoint a frozen layer separately, and then a frozen layer together with a trainable block."""
    run_checkpointed = make_checkpoint_runner(participant)

    def run_regions(block: Block, hidden: Tensor) -> Tensor:
        """Checkpoint a frozen layer separately, and then a frozen layer together with the block."""
        return run_checkpointed(
            lambda h: block(participant.module.frozen(h)), run_checkpointed(participant.module.frozen, hidden)
        )

    participant.tensor_backward(participant.loss(participant.call(participant.leaf_inputs(), run_block=run_regions)))


def plain_inputs(participant: Participant) -> None:
    """Checkpoint the first layer, whose input does not require a gradient.

    In this case torch's reentrant checkpointing computes no gradients for the layer's parameters.
    """
    recompute = checkpoint if participant.variant == REENTRANT else participant.recompute
    hidden = recompute(participant.module.first, participant.inputs(), use_reentrant=participant.variant == REENTRANT)
    participant.tensor_backward(
        participant.module.head(participant.inputs()).sum() + participant.module.shared(hidden).sum()
    )


def accumulation(participant: Participant) -> None:
    """Accumulate gradients over two micro-batches whose forwards checkpoint a block."""
    for micro in (0, 2):
        participant.tensor_backward(
            participant.loss(
                participant.call(participant.leaf_inputs(micro), run_block=make_checkpoint_runner(participant)), micro
            )
        )


def non_scalar(participant: Participant) -> None:
    """Call ``out.backward(g)`` on an output that is computed by a checkpointed block."""
    backward(
        participant.call(participant.leaf_inputs(), run_block=make_checkpoint_runner(participant)),
        participant.get_batch(0).target,
    )


class RaisesOnRecompute:
    """A block that raises DeliberateError in its second call, which is the recomputation."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.calls = 0

    def __call__(self, hidden: Tensor) -> Tensor:
        """Run the block. Raise DeliberateError in the second call."""
        self.calls += 1
        if self.calls == 2:
            raise DeliberateError
        return self.block(hidden)


def exception(participant: Participant) -> NamedTensors:
    """Raise an error in the recomputation, then zero the gradients and train the same micro-batch again."""

    def run_raising_region(block: Block, hidden: Tensor) -> Tensor:
        """Checkpoint a block that raises DeliberateError when it is recomputed."""
        result: Any = checkpoint(RaisesOnRecompute(block), hidden, use_reentrant=participant.variant == REENTRANT)
        return result  # type: ignore[no-any-return]

    try:
        participant.tensor_backward(
            participant.loss(participant.call(participant.leaf_inputs(), run_block=run_raising_region))
        )
        raised = torch.zeros(1)
    except DeliberateError:
        raised = torch.ones(1)
    participant.zero_grad()
    block(participant)
    return {"raised": raised}


def dropout(participant: Participant) -> None:
    """Checkpoint a block with dropout. The recomputation has to use the same dropout mask as the forward."""
    torch.manual_seed(participant.rank)
    loss = participant.loss(
        participant.call(participant.leaf_inputs(), run_block=make_checkpoint_runner(participant), with_dropout=True)
    )
    torch.manual_seed(100)
    participant.tensor_backward(loss)


def checkpointing_law(
    script: ScenarioScript,
    statement: str,
    *features: Feature,
    kept_because: str,
    variants: tuple[str, ...] = (REENTRANT, NON_REENTRANT),
    mesh_support: MeshSupport = MeshSupport.ANY,
) -> Law:
    """Build the law of one scenario, with a law variant for each kind of checkpointing."""
    return scenario_law(
        "checkpointing",
        Scenario(script),
        statement,
        kept_because=kept_because,
        features=(Feature.RECOMPUTATION, *features),
        variants=tuple(map(Variant, variants)),
        mesh_support=mesh_support,
    )


LAWS = (
    checkpointing_law(
        block,
        "checkpointing a block that uses one layer twice changes no gradient",
        kept_because="the shortest checkpointed region: read it first in a report",
    ),
    checkpointing_law(
        nested,
        "a checkpoint within a checkpoint changes no gradient",
        kept_because="the only recomputation within a recomputation",
    ),
    checkpointing_law(
        whole_model,
        "checkpointing the whole model changes no gradient",
        kept_because="unshards every module twice, and no module outside a checkpointed region",
    ),
    checkpointing_law(
        two_regions,
        "a layer used in two checkpointed regions, or inside and outside of one, gets the sum of both gradients",
        kept_because="one layer in two autograd graph tasks: a reduction after the first one loses the second gradient",
        variants=(REENTRANT, NON_REENTRANT, REENTRANT_FIRST, REENTRANT_LAST),
    ),
    checkpointing_law(
        frozen,
        "checkpointing regions with frozen layers, or with frozen layers alone, changes no gradient",
        kept_because="regions in which no parameter gets a gradient, so gradient hooks never fire",
    ),
    checkpointing_law(
        plain_inputs,
        "a checkpointed region whose inputs require no gradient gives the same gradients as in plain PyTorch",
        Feature.SUBMODULES,
        kept_because="the only region that autograd skips in plain PyTorch",
    ),
    checkpointing_law(
        accumulation,
        "checkpointed micro-batches accumulate to the sum of their gradients",
        Feature.TENSOR_BACKWARD,
        Feature.CALLER_ACCUMULATION,
        kept_because="the only checkpointed regions in several micro-batches",
    ),
    checkpointing_law(
        non_scalar,
        "out.backward(g) through a checkpointed region gives plain PyTorch's gradients",
        Feature.TENSOR_BACKWARD,
        kept_because="a region at the end of the graph, whose backward starts from a gradient that the caller passes",
    ),
    checkpointing_law(
        exception,
        "after an exception within a recomputation, and zero_grad, the next gradients are plain PyTorch's",
        kept_because="the only recomputation that raises",
    ),
    checkpointing_law(
        dropout,
        "a recomputation draws the same random numbers as the forward",
        kept_because="the only recomputation that draws random numbers",
        mesh_support=MeshSupport.WHOLE_INPUTS,
    ),
)
