"""Split layers of experts over the axis ep with DeepSpeed's MoE, and read the experts of all ranks."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines.deepspeed_round_robin import RoundRobinLinks
from zharness.engines.deepspeed_tensors import DeepSpeedTensorReader, gather_by_name, gather_pieces, own_pieces
from zharness.engines.protocol import EngineConfig, Piece
from zharness.engines.torch_engine import snapshot
from zharness.errors import ConfigError
from zharness.mesh import EXPERT


class RoutedExperts(nn.Module):
    """DeepSpeed's MoE with the call of the layer of experts that it replaces: it returns only the output."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.moe(tokens)[0]
        return output


def split_experts(model: nn.Module, config: EngineConfig) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """Return a copy of the model in which MoEs of this rank's experts replace the plan's layers, and its parameters.

    The parameters have their names in ``model``. If the mesh has no axis ep, ``model`` itself is returned. Raises
    ConfigError if the size of ep does not divide the number of experts.
    """
    size = config.mesh.size(EXPERT)
    if EXPERT not in config.mesh.axes:
        return model, dict(model.named_parameters())
    model = copy.deepcopy(model)
    params = dict(model.named_parameters())
    at = config.mesh.coordinates(dist.get_rank(), dist.get_world_size())[EXPERT]
    for name in config.ep_plan:
        layer: Any = model.get_submodule(name)
        if len(layer.experts) % size:
            raise ConfigError(f"the {len(layer.experts)} experts of {name} cannot be split over ep{size}")
        local = len(layer.experts) // size
        moe = build_moe(layer, size)
        renamed = {f"{name}.gate.weight": moe.deepspeed_moe.gate.wg.weight}
        for index, expert in enumerate(moe.deepspeed_moe.experts.deepspeed_experts):
            prefix = f"{name}.experts.{at * local + index}"
            renamed |= {f"{prefix}.{inner}": param for inner, param in expert.named_parameters()}
        with torch.no_grad():
            for inner, param in renamed.items():
                param.copy_(params[inner]).requires_grad_(params[inner].requires_grad)
        params = {
            inner: renamed.get(inner, param)
            for inner, param in params.items()
            if not inner.startswith(f"{name}.") or inner in renamed
        }
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, RoutedExperts(moe))
    return model, params


def build_moe(layer: Any, size: int) -> Any:
    """Return DeepSpeed's MoE for a layer of experts, set to drop no token, draw no random number and take few tokens.

    The MoE's new gate draws weights, so the generator's state is restored. The layer's own weights replace the drawn
    weights later.
    """
    moe_class: Any = importlib.import_module("deepspeed.moe.layer").MoE
    with torch.random.fork_rng(devices=[]):
        moe = moe_class(
            layer.gate.in_features,
            copy.deepcopy(layer.experts[0]),
            num_experts=len(layer.experts),
            ep_size=size,
            min_capacity=0,
            drop_tokens=False,
            use_rts=False,
        )
    return moe.to(layer.gate.weight)


SPLIT_FROM = "split_from"  # key of a parameter group: the number of the caller's group


def join_rates(groups: Sequence[Mapping[str, Any]], rates: Sequence[float]) -> tuple[float, ...]:
    """Return the learning rates of the caller's groups, from the ``rates`` of the ``groups`` of ``split_groups``.

    If the parts of a caller's group have different rates, the result has both rates.
    """
    numbers = (group.get(SPLIT_FROM, number) for number, group in enumerate(groups))
    return tuple(rate for _, rate in sorted(set(zip(numbers, rates, strict=True))))


def split_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return parameter groups with experts in separate groups, as DeepSpeed's optimizers need them."""
    utils: Any = importlib.import_module("deepspeed.moe.utils")
    named = [{**group, "name": f"group {index}", SPLIT_FROM: index} for index, group in enumerate(groups)]
    return [group for group in utils.split_params_into_different_moe_groups_for_optimizer(named) if group["params"]]


@dataclass(frozen=True)
class ExpertTensorReader(DeepSpeedTensorReader):
    """Reads tensors of a model whose experts are split; ``params`` are the parameters that all ranks have.

    ``experts`` reads this rank's experts, ``names`` are the names of all parameters, in the model's order, and
    ``expert_group`` has the ranks that have all experts together. Every method is a collective.
    """

    experts: DeepSpeedTensorReader
    names: tuple[str, ...]
    expert_group: Any

    def grads(self) -> dict[str, Tensor]:
        """Return the full gradients by name."""
        return self._merge(super().grads(), self.experts.grads())

    def weights(self) -> dict[str, Tensor]:
        """Return the full weights by name."""
        return self._merge(super().weights(), self.experts.weights())

    def masters(self) -> dict[str, Tensor]:
        """Return the full fp32 master weights by name."""
        return self._merge(super().masters(), self.experts.masters())

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the full optimizer state by parameter name and key."""
        return self._merge(super().optimizer_state(), self.experts.optimizer_state())

    def state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the state dict of the plain model: its weights, and the buffers of ``module``, which has no others."""
        buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        saved = module.state_dict()
        return self.weights() | {name: snapshot(saved[name]) for name in saved if name in buffers}

    def layout(self) -> dict[str, tuple[Piece, ...]]:
        """Return which pieces of a parameter each rank owns; a parameter that every rank has whole has no entry."""
        own = own_pieces(self.experts.params, are_sharded=self.stage > 0)
        if self.stage:
            own |= own_pieces(self.params, are_sharded=True)
        return {name: pieces for name, pieces in gather_pieces(own, self.names).items() if pieces}

    def _merge(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of ``shared`` and the entries of all ranks' experts, in the order of the model."""
        entries = {**gather_by_name(own, self.names, self.expert_group), **shared}
        return {name: entries[name] for name in self.names if name in entries}


def build_expert_reader(
    engine: Any, params: Mapping[str, nn.Parameter], names: Sequence[str], links: RoundRobinLinks, config: EngineConfig
) -> ExpertTensorReader:
    """Return the reader of an engine with experts; ``names`` has the parameter names of all ranks."""
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    is_expert = importlib.import_module("deepspeed.moe.utils").is_moe_param
    label = f"ep_size_{config.mesh.size(EXPERT)}"
    own = {name: param for name, param in params.items() if is_expert(param)}
    return ExpertTensorReader(
        engine,
        {name: param for name, param in params.items() if name not in own},
        config.stage,
        links,
        groups._get_data_parallel_group(),
        DeepSpeedTensorReader(engine, own, config.stage, links, groups._get_expert_data_parallel_group(label)),
        tuple(names),
        groups._get_expert_parallel_group(label),
    )
