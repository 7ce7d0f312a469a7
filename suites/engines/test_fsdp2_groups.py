"""How the FSDP2 adapter divides a model into groups and a parameter into pieces, without ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from zharness.engines import fsdp2, fsdp2_deferred, fsdp2_options, fsdp_groups
from zharness.engines.protocol import Piece
from zharness.errors import ConfigError


def test_pieces_are_those_of_torch_chunk_and_last_ranks_may_own_nothing() -> None:
    assert fsdp2.shard_pieces((5, 2), 4) == (Piece(0, 0, 4), Piece(1, 4, 8), Piece(2, 8, 10))
    assert fsdp2.shard_pieces((1,), 2) == (Piece(0, 0, 1),)
    assert fsdp2.shard_pieces((0, 3), 2) == ()


def named_groups(model: nn.Module, grouping: str = "leaf") -> list[str]:
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)] for module in fsdp_groups.select_group_modules(model, grouping)]


class Holder(nn.Module):
    """A root with a parameter, a parameter list, and a module whose forward reads its child's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.rows = nn.ParameterList([nn.Parameter(torch.ones(2))])
        self.attention = nn.MultiheadAttention(4, 2)
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def test_a_group_is_a_module_that_owns_parameters_and_its_submodules() -> None:
    with torch.device("meta"):
        assert named_groups(Holder()) == ["attention", "blocks.0", "blocks.2"]
        assert named_groups(Holder(), "root") == []
        assert named_groups(nn.Linear(4, 4)) == []


def test_owners_of_a_tied_parameter_are_in_the_root_group() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    assert named_groups(model) == ["1"]


def test_a_module_used_under_two_names_is_one_group() -> None:
    with torch.device("meta"):
        layer = nn.Linear(4, 4)
        assert named_groups(nn.Sequential(layer, nn.Sequential(layer, nn.Linear(4, 4)))) == ["0", "1.1"]


def test_modules_of_in_root_are_in_the_root_group() -> None:
    with torch.device("meta"):
        model = Holder()
    assert [type(module) for module in fsdp_groups.select_group_modules(model, "leaf", ["blocks.2"])] == [
        nn.MultiheadAttention,
        nn.Linear,
    ]
    with pytest.raises(ConfigError, match=r"unknown module in in_root 'head'; allowed: attention"):
        fsdp_groups.select_group_modules(model, "leaf", ["head"])


def test_an_unknown_grouping_is_refused() -> None:
    with pytest.raises(ConfigError, match="leaf, block, root"):
        fsdp_groups.select_group_modules(nn.Identity(), "blocks")


class Counting(nn.Module):
    """A layer and a buffer that is not in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def reset_parameters(self) -> None:
        """Initialize only its own buffer."""
        self.seen = torch.zeros(())


def test_a_meta_model_is_refused_if_its_state_dict_does_not_cover_it() -> None:
    with torch.device("meta"):
        mixed, counting = nn.Sequential(nn.Linear(2, 2)), Counting()
    mixed.append(nn.Linear(2, 2))
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match=r"'1.weight' is not on the meta device, but other tensors are"):
        fsdp2_deferred.initial_state_on_rank0(mixed, cpu)
    with pytest.raises(ConfigError, match="'seen' is not in the state dict"):
        fsdp2_deferred.initial_state_on_rank0(counting, cpu)
    assert fsdp2_deferred.initial_state_on_rank0(nn.Linear(2, 2), cpu) is None


def fully_shard_of_torch_2_6(module: nn.Module, *, mesh: object = None) -> None:
    """``fully_shard`` before it had ``ignored_params``."""


def test_features_that_older_torch_lacks_are_required_only_when_used() -> None:
    assert fsdp2.ignored_params_argument([], fully_shard_of_torch_2_6) == {}
    with pytest.raises(ConfigError, match="has no ignored_params; use torch"):
        fsdp2.ignored_params_argument([nn.Parameter(torch.tensor(1.0))], fully_shard_of_torch_2_6)
    with pytest.raises(ConfigError, match="has no reset_iter_state"):
        fsdp2_options.require_method("reset_iter_state", nn.Identity())


def test_the_installed_fully_shard_accepts_ignored_params() -> None:
    scalar = nn.Parameter(torch.tensor(1.0))
    assert fsdp2.ignored_params_argument([scalar], fully_shard) == {"ignored_params": {scalar}}
