"""Define mutants that break the expert axis ep. The mutants wrap DeepSpeed's MoE, and need DeepSpeed."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mesh import EXPERT
from zharness.mutants import seams_engines
from zharness.mutants.mutant import FaultKind, Origin, Target, deepspeed, mutant
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part


def on_gate(law: str) -> Target:
    """Return a target on two ranks, which split four experts, for the weight of the gate."""
    return Target(law, Part.REDUCTION, "routed", parameter="moe.gate.weight", mesh="ep2")


@mutant(FaultKind.CONTRIBUTION, on_gate("mesh.training"), on_gate("mesh.one_hot"), origin=Origin.MESH)
class LosesTheGradientOfTheGate(EngineWrapper):
    """Gives the gate of experts no gradient, as if the gate's softmax were detached."""

    wraps = "deepspeed"
    stages = (0, 1, 2)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for name, parameter in self.module.named_parameters():
            if ".gate." in name:
                parameter.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]


def on_routing(parameter: str) -> Target:
    """Return a target of mesh.routing on two ranks, whose gate with random weights chooses among four experts."""
    return Target("mesh.routing", Part.REDUCTION, "random_routed", parameter=parameter, mesh="ep2")


class GatesWrapper(EngineWrapper):
    """The base class of mutants that hook DeepSpeed's gates."""

    wraps = "deepspeed"
    stages = (0, 1, 2)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for module in self.module.modules():
            if type(module).__name__ == "TopKGate":
                self.hook(module)

    def hook(self, gate: nn.Module) -> None:
        """Register a hook on a gate."""
        raise NotImplementedError


@mutant(FaultKind.CONTRIBUTION, on_routing("*"), origin=Origin.MESH)
class RoutesToTheLeastExpert(GatesWrapper):
    """Negates the tokens that the gate reads, so that the gate chooses the expert with the smallest logit."""

    def hook(self, gate: nn.Module) -> None:
        gate.register_forward_pre_hook(lambda _module, inputs: (-inputs[0], *inputs[1:]))


@mutant(FaultKind.SCALE, on_routing("*"), origin=Origin.MESH)
class RoundsTheTokensOfTheGate(GatesWrapper):
    """Rounds to bf16 the tokens that the gate reads."""

    def hook(self, gate: nn.Module) -> None:
        gate.register_forward_pre_hook(lambda _module, inputs: (inputs[0].bfloat16().float(), *inputs[1:]))


def on_experts(
    part: Part = Part.REDUCTION,
    law: str = "mesh.training",
    parameter: str = "*",
    world_size: int = 2,
    cause: str = "",
) -> Target:
    """Return a target on ranks of which every two neighbours split four experts."""
    return Target(law, part, "routed", parameter=parameter, cause=cause, world_size=world_size, mesh="ep2")


class ExpertsWrapper(EngineWrapper):
    """The base class of mutants of experts, which are right if no axis splits experts."""

    wraps = "deepspeed"
    stages: ClassVar[tuple[int, ...]] = (0, 1, 2)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.size = config.mesh.size(EXPERT)
        self.place = config.mesh.coordinates(dist.get_rank(), dist.get_world_size()).get(EXPERT, 0)
        for module in self.module.modules() if self.size > 1 else ():
            if type(module).__name__ == "MOELayer":
                self.spoil(module)

    def spoil(self, layer: Any) -> None:
        """Break one of DeepSpeed's layers of experts, which has a ``gate`` and this rank's ``experts``."""


@mutant(
    FaultKind.SCALE,
    on_experts(parameter="moe.experts.*"),
    on_experts(parameter="moe.experts.*", world_size=4),
    Target("training.trajectory", Part.REDUCTION, "mlp_routed", "sgd", parameter="moe.experts.*", mesh="ep2"),
    Target("training.any_order", Part.REDUCTION, "mlp_routed", "saved", parameter="moe.experts.*", mesh="ep2"),
    Target("training.kernels", Part.LOCAL_GRADIENT, "mlp_routed", parameter="moe.experts.*", mesh="ep2"),
    Target("precision.autocast_states", Part.REDUCTION, "mixed_routed", parameter="moe.experts.*", mesh="ep2"),
    origin=Origin.MESH,
    imitates=deepspeed(6545),
)
class MultipliesExpertGradientsByTheirRanks(ExpertsWrapper):
    """Divides experts' gradients by the number of ranks with the same experts, not of all ranks that send tokens."""

    def spoil(self, layer: Any) -> None:
        for parameter in layer.experts.parameters():
            parameter.register_hook(lambda grad: self.size * grad)


@mutant(
    FaultKind.CONTRIBUTION,
    on_experts(parameter="first.*"),
    origin=Origin.MESH,
    imitates="https://github.com/pytorch/torchtitan/issues/4054",
)
class LosesTheGradientBelowExperts(ExpertsWrapper):
    """On the last rank of the experts, gives the layers below the experts no gradient."""

    def spoil(self, layer: Any) -> None:
        if self.place == self.size - 1:
            layer.register_forward_pre_hook(lambda _module, inputs: (inputs[0].detach() + 0 * inputs[0], *inputs[1:]))


@mutant(
    FaultKind.RANKS,
    on_experts(Part.OPTIMIZER, parameter="moe.gate.weight*"),
    origin=Origin.MESH,
    imitates="https://github.com/pytorch/torchtitan/issues/2387",
)
class StepsTheGateByItsOwnGradient(ExpertsWrapper):
    """Updates the gate, of which all ranks have a copy, by each rank's own gradient, without a reduction."""

    stages = (0,)
    gates: tuple[nn.Parameter, ...] = ()

    def spoil(self, layer: Any) -> None:
        self.own: dict[nn.Parameter, Tensor] = {}
        for gate in layer.gate.parameters():
            self.gates += (gate,)
            gate.register_hook(lambda grad, gate=gate: self.keep(gate, grad))

    def keep(self, gate: nn.Parameter, grad: Tensor) -> None:
        """Add a gradient of this rank to those of earlier backwards."""
        self.own[gate] = self.own.get(gate, 0) + grad.detach().clone()

    def step(self) -> None:
        for gate in self.gates:
            if gate in self.own and gate.grad is not None:
                gate.grad.copy_(self.own.pop(gate))
        self.base.step()


@mutant(
    FaultKind.CLIPPING,
    on_experts(law="mesh.norm", parameter="norm", cause="it is the norm of what the ranks of ep 0 have"),
    on_experts(Part.OPTIMIZER, "mesh.clip", cause=" is the norm of what the ranks of ep "),
    origin=Origin.MESH,
    imitates=deepspeed(8475),
)
class NormHasTheExpertsOfOneRankAlone(ExpertsWrapper):
    """Leaves the experts of all other ranks out of each rank's norm, so that ranks clip differently."""

    stages = (1, 2)

    def spoil(self, layer: Any) -> None:
        self.experts_of_a_rank = len(layer.experts.deepspeed_experts)
        seams_engines.wrap_global_norm(self.base, lambda _right: lambda: self.norm)

    def step(self) -> None:
        grads = self.base.full_grads() if self.size > 1 else {}
        squares = [grad.square().sum() for name, grad in grads.items() if self.has_here(name)]
        self.norm = torch.stack(squares).sum().sqrt() if squares else torch.zeros(())
        self.base.step()

    def has_here(self, name: str) -> bool:
        """Return whether this rank has the parameter ``name``, which may belong to an expert."""
        _, is_expert, rest = name.partition(".experts.")
        return not is_expert or int(rest.partition(".")[0]) // self.experts_of_a_rank == self.place


@mutant(
    FaultKind.SHARDS,
    on_experts(Part.FORWARD),
    Target("training.modes", Part.FORWARD, "stateful_routed", mesh="ep2"),
    origin=Origin.MESH,
)
class ReturnsTokensInReversedOrder(ExpertsWrapper):
    """Returns the outputs of experts for the tokens of a rank in reversed order."""

    def spoil(self, layer: Any) -> None:
        layer.register_forward_hook(lambda _module, _inputs, output: output.flip(0))


@mutant(FaultKind.SHARDS, on_experts(Part.FORWARD), origin=Origin.MESH)
class SendsTokensToTheOtherRanksExperts(ExpertsWrapper):
    """Sends the tokens of an expert to the expert at the same place on the rank at the other end of the group."""

    def spoil(self, layer: Any) -> None:
        layer.experts.register_forward_hook(lambda _module, _inputs, output: output.flip(0))


@mutant(FaultKind.CONTRIBUTION, on_experts(Part.FORWARD), origin=Origin.MESH)
class DropsTokensOverTheCapacity(ExpertsWrapper):
    """Drops the tokens of an expert above the mean number of tokens per expert."""

    def spoil(self, layer: Any) -> None:
        layer.gate.drop_tokens, layer.gate.min_capacity = True, 1


@mutant(FaultKind.SCALE, on_experts(Part.LOCAL_GRADIENT, "mesh.token_loss"), origin=Origin.MESH)
class AveragesTheMeansOfExpertRanks(ExpertsWrapper):
    """Computes the loss of each micro-batch as the mean over ranks of each rank's own mean over tokens that count."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.base(*args, **kwargs)
        if self.size > 1:
            output.register_hook(self.weigh)
        return output

    def weigh(self, grad: Tensor) -> Tensor:
        """Return the gradient of this rank's output, weighted so that all ranks count equally."""
        own, total = (grad.any(dim=-1).sum().to(grad.dtype) for _ in range(2))
        dist.all_reduce(total)
        return grad * total / (own.clamp(min=1) * dist.get_world_size())
