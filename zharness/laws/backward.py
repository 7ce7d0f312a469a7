"""Build the laws of the group ``backward``: every form of backward that torch allows gives the right gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import backward, grad

from zharness.engines.protocol import Feature
from zharness.law_kit.law import Law, MeshSupport
from zharness.law_kit.raising_backward import backward_raises, run_with_raising_backward
from zharness.law_kit.scenario_law import BACKWARD_FEATURES, scenario_law
from zharness.law_kit.scenarios import NamedTensors, Participant, Scenario, ScenarioScript
from zharness.laws.backward_outputs import NamedTupleOutput


def engine_backward(participant: Participant) -> NamedTensors:
    """Call engine.backward twice. The second call has to raise, as in plain PyTorch without retain_graph."""
    loss = participant.training_loss()
    participant.backward(loss)
    try:
        participant.backward(loss)
        refused = torch.zeros(1)
    except NotImplementedError:  # a RuntimeError too, but not the refusal of a second backward
        raise
    except RuntimeError:
        refused = torch.ones(1)
    return {"refused": refused}


def tensor_backward(participant: Participant) -> None:
    """Call ``loss.backward()``."""
    backward(participant.training_loss())


def non_scalar(participant: Participant) -> None:
    """Call ``out.backward(g)`` with a tensor ``g`` of integers as the gradient of the output."""
    batch = participant.get_batch(0)
    backward(participant.call(batch.inputs), batch.target)


def joint_loss(participant: Participant) -> None:
    """Run backward on one loss that is computed from the outputs of two engines."""
    assert participant.partner is not None
    backward(
        participant.loss(participant.call(participant.inputs()) + 2 * participant.partner.call(participant.inputs(2)))
    )


def bypass(participant: Participant) -> None:
    """Run backward on a loss over two engines, plus a term that a submodule computes outside the engines' forwards."""
    assert participant.partner is not None
    joint_output = participant.call(participant.inputs()) + 2 * participant.partner.call(participant.inputs(2))
    backward(participant.loss(joint_output) + participant.module.head(participant.inputs()).sum())


def auxiliary_loss(participant: Participant) -> None:
    """Run backward on a second loss, computed inside the forward from a weight and hidden activations."""
    losses: list[Tensor] = []

    def run_block(block: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Compute the second loss from a weight and the hidden activations, and run the block."""
        losses.append(participant.module.last.weight.sum() + hidden.sum())
        return block(hidden)

    loss = participant.loss(participant.call(participant.inputs(), run_block=run_block))
    backward(losses[0], retain_graph=True)
    backward(loss + losses[0])


def without_grad(participant: Participant) -> NamedTensors:
    """Run forwards under no_grad and inference_mode before and between backwards; gradients must not be affected."""
    with torch.no_grad():
        values = {"no_grad": participant.call(participant.inputs())}
    loss = participant.training_loss()
    with torch.inference_mode():
        values["inference"] = participant.call(participant.inputs()).clone()
    participant.tensor_backward(loss)
    return values


def autograd_grad(participant: Participant) -> NamedTensors:
    """Compute gradients of an output with respect to the input, for one output gradient and for a batch of them.

    No parameter may get a ``.grad``. Gradients with respect to parameters are computed too, but not compared: their
    values depend on an engine's claim, and double_backward.weight_penalty compares them. With OWN_WEIGHT_GRADIENTS they
    are the undivided gradients of this rank's loss: the reduction is outside the autograd graph (stages 0 to 2 of the
    reference). With REDUCED_WEIGHT_GRADIENTS they are shards of the reduced gradients, divided as in backward, also by
    the number of micro-batches of an engine's window: the reduction is inside the graph (stage 3 of the reference).
    """
    leaf = participant.leaf_inputs()
    output = participant.call(x=leaf)  # by keyword: an engine has to forward keyword arguments
    rows = torch.eye(3, output.numel(), dtype=output.dtype, device=output.device).view(3, *output.shape)
    batched = grad(output, leaf, rows, is_grads_batched=True, retain_graph=True)[0]
    grad(
        participant.training_loss(2),
        [parameter for parameter in participant.module.parameters() if parameter.requires_grad],
        allow_unused=True,
    )
    return {"input": grad(participant.loss(output), leaf)[0], "batched": batched}


def backward_inputs(participant: Participant) -> NamedTensors:
    """Call ``backward(inputs=[x])`` twice on one graph, after gradients of another micro-batch were accumulated."""
    backward(participant.training_loss(2))
    leaf = participant.leaf_inputs()
    loss = participant.loss(participant.call(leaf))
    backward(loss, inputs=[leaf], retain_graph=True)
    backward(loss, inputs=[leaf])
    assert leaf.grad is not None
    return {"input": leaf.grad}


def recurrent(participant: Participant) -> None:
    """Pass an output to the model as its input, and run one backward through several forwards."""
    first = participant.call(participant.inputs())
    again = participant.call(first)
    participant.tensor_backward(participant.loss(again) + participant.loss(participant.call(participant.inputs(2)), 2))


def two_outputs_two_backwards(participant: Participant) -> None:
    """Run a separate backward from each of two outputs."""
    packed = participant.call(participant.inputs(), pack=NamedTupleOutput)
    backward(packed.extra.sum())
    backward(participant.loss(packed.output))


class TiledLoss(torch.autograd.Function):
    """A loss that runs a backward within its forward for each tile of its input, as fused logits losses do."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the sum of the losses of all tiles, and save the gradient with respect to ``hidden``."""
        total = torch.zeros((), dtype=hidden.dtype, device=hidden.device)
        grads: list[Tensor] = []
        for tile in torch.split(hidden, 2):
            with torch.enable_grad():
                leaf = tile.detach().requires_grad_()
                loss = layer(leaf).sum()
                backward(loss)
            assert leaf.grad is not None
            total = total + loss.detach()
            grads.append(leaf.grad)
        ctx.save_for_backward(torch.cat(grads))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the saved gradient multiplied by the gradient of the loss."""
        (hidden_grad,) = ctx.saved_tensors
        return grads[0] * hidden_grad, None


def backward_in_forward(participant: Participant) -> None:
    """Train with a loss that computes the gradient of the head before the caller runs backward."""
    hidden = participant.call(participant.inputs())
    participant.tensor_backward(TiledLoss.apply(hidden, participant.module.head))  # type: ignore[no-untyped-call]


def abort_and_retry(participant: Participant) -> NamedTensors:
    """Raise an error halfway through three backwards (two retain the graph), zero the gradients, and train again."""
    raised = backward_raises(
        participant.loss(participant.call(participant.inputs(), run_block=run_with_raising_backward))
    )
    loss = participant.loss(participant.call(participant.inputs(), run_block=run_with_raising_backward))
    values = {"raised": raised, "again": backward_raises(loss, True), "and_again": backward_raises(loss, True)}
    participant.zero_grad()
    backward(participant.training_loss())
    return values


def backward_law(
    script: ScenarioScript,
    statement: str,
    *features: Feature,
    kept_because: str,
    engines: int = 1,
    accumulation: int = 1,
    models: tuple[str, ...] = ("blocks",),
    mesh_support: MeshSupport = MeshSupport.ANY,
) -> Law:
    """Build the law of one scenario. The law requires ``features`` in addition to the features of the group."""
    scenario = Scenario(script, engines, accumulation)
    return scenario_law(
        "backward",
        scenario,
        statement,
        kept_because=kept_because,
        features=(*BACKWARD_FEATURES, *features),
        models=models,
        mesh_support=mesh_support,
    )


LAWS = (
    backward_law(
        engine_backward,
        "engine.backward(loss) gives the gradients of plain PyTorch's loss.backward(), and frees the graph",
        models=("blocks", "delegating", "mapped"),
        kept_because="the call that DeepSpeed's users write, and in which engines count micro-batches",
    ),
    backward_law(
        tensor_backward,
        "loss.backward() gives plain PyTorch's gradients",
        Feature.TENSOR_BACKWARD,
        kept_because="torch's own call, which an engine notices only by its hooks",
    ),
    backward_law(
        non_scalar,
        "out.backward(g) gives plain PyTorch's gradients",
        Feature.TENSOR_BACKWARD,
        kept_because="the only backward that starts from a gradient that the caller passes",
    ),
    backward_law(
        joint_loss,
        "a loss over two engines gives both engines plain PyTorch's gradients",
        Feature.TENSOR_BACKWARD,
        engines=2,
        kept_because="the only backward that runs through two engines",
    ),
    backward_law(
        bypass,
        "a loss over two engines, with a branch that bypasses both, gives both engines plain PyTorch's gradients",
        Feature.TENSOR_BACKWARD,
        Feature.SUBMODULES,
        engines=2,
        kept_because="the only loss with a term that does not depend on any output of an engine",
    ),
    backward_law(
        auxiliary_loss,
        "an auxiliary loss that the forward computes gives plain PyTorch's gradients too",
        Feature.TENSOR_BACKWARD,
        Feature.RETAIN_GRAPH,
        kept_because="the only loss that does not depend on the output: engines that hook outputs miss it",
        mesh_support=MeshSupport.WHOLE_INPUTS,
    ),
    backward_law(
        without_grad,
        "forwards under no_grad and inference_mode give plain PyTorch's outputs and do not affect later gradients",
        kept_because="forwards under no_grad between a forward and its backward may overwrite state of modules",
    ),
    backward_law(
        autograd_grad,
        "torch.autograd.grad with respect to the input is plain PyTorch's, also in a window, and training stays right",
        Feature.TENSOR_BACKWARD,
        Feature.RETAIN_GRAPH,
        accumulation=4,
        kept_because="gradients that train no weight: an engine that counts backwards may count their computation",
    ),
    backward_law(
        backward_inputs,
        "loss.backward(inputs=[x]) gives plain PyTorch's gradient of x and changes no parameter's gradient",
        Feature.TENSOR_BACKWARD,
        Feature.RETAIN_GRAPH,
        kept_because="a backward that reaches no parameter, after which hooks on parameters still wait",
    ),
    backward_law(
        recurrent,
        "feeding an output back, and one backward through several forwards, gives plain PyTorch's gradients",
        kept_because="the only law that calls one module several times before one backward",
    ),
    backward_law(
        two_outputs_two_backwards,
        "one backward for each of two outputs gives the sum of both gradients",
        Feature.TENSOR_BACKWARD,
        kept_because="two backwards of one forward: a hook that fires only once fires too early",
    ),
    backward_law(
        backward_in_forward,
        "an autograd.Function that runs a backward within its forward does not disturb the caller's own backward",
        kept_because="the only backward within a forward, as in tiled losses",
        mesh_support=MeshSupport.WHOLE_INPUTS,
    ),
    backward_law(
        abort_and_retry,
        "after an exception within backward, and zero_grad, the next gradients are plain PyTorch's",
        Feature.TENSOR_BACKWARD,
        kept_because="the only backward that raises halfway through the hooks",
    ),
)
