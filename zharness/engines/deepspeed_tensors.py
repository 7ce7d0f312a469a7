"""DeepSpeed's gradients, weights, optimizer state and shards as whole tensors by original name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines.common import snapshot
from zharness.engines.protocol import Piece


@dataclass(frozen=True)
class Reader:
    """Reads ``engine``, a DeepSpeedEngine at ``stage``; ``params`` by original name. Collective."""

    engine: Any
    params: Mapping[str, nn.Parameter]
    stage: int

    def grads(self) -> dict[str, Tensor]:
        """The gradients that ``step`` is about to apply; where none were reduced, each rank's own."""
        found = {}
        for name, param in self.params.items():
            grad = self._full_grad(param) if param.requires_grad else None
            if grad is not None:
                found[name] = snapshot(grad)
        return found

    def weights(self) -> dict[str, Tensor]:
        """The weights that the next forward uses (not the fp32 masters, which a broken copy-back would leave apart)."""
        with self.gathered(list(self.params.values())):
            return {name: snapshot(param) for name, param in self.params.items()}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's, by parameter and key; empty before the first step."""
        if self.engine.global_steps == 0:
            return {}
        read = (self._whole_state, self._partitioned_state, self._partitioned_state, self._stage3_state)
        return {name: read[self.stage](param) for name, param in self.params.items() if param.requires_grad}

    def _full_grad(self, param: Any) -> Tensor | None:
        """safe_get_full_grad without its shortcut: it returns ``param.grad`` where one is set, and above stage 0 that
        is a gradient that was never reduced, while ``step`` applies the partitions.
        """
        from deepspeed.utils import safe_get_full_grad

        if not self._has_partitions():
            return cast("Tensor | None", param.grad)
        # Both ways run the same collective, so ranks that differ in having a param.grad do not wait for each other.
        if self.stage == 0 or param.grad is None:
            return cast("Tensor | None", safe_get_full_grad(param))
        if self.stage == 3:
            return cast(Tensor, param._z3_optimizer.get_fp32_grad_for_param(param))
        return cast(Tensor, param.get_full_hp_grad())

    def _has_partitions(self) -> bool:
        """Whether every group has reduced gradients. The same answer on all ranks: the groups are.

        Asked for first because a rank that owns a part of a parameter raises where a rank that owns none goes on into
        the collective, and waits.
        """
        if self.stage in (0, 3) or self.engine.zero_cpu_offload():
            return True
        held = self.engine.optimizer.averaged_gradients
        return all(held.get(index) is not None for index in range(len(self.engine.optimizer.bit16_groups)))

    def _whole_state(self, param: nn.Parameter) -> dict[str, Tensor]:
        state = self.engine.optimizer.state.get(param, {})
        return {key: snapshot(value) for key, value in state.items() if isinstance(value, Tensor)}

    def _partitioned_state(self, param: nn.Parameter) -> dict[str, Tensor]:
        # Not safe_get_full_optimizer_state: stages 1 and 2 link the states to the parameters when the first group has
        # stepped and never again, so it raises for the parameters of every other group.
        zero = self.engine.optimizer
        index = next(i for i, group in enumerate(zero.bit16_groups) if any(member is param for member in group))
        flat = zero.single_partition_of_fp32_groups[index]
        state = zero.optimizer.state[flat]
        found = {key: self._assembled(param, value) for key, value in state.items() if _shaped_like(value, flat)}
        return {**found, **_scalars_of(state)}

    def _assembled(self, param: Any, flat_state: Tensor) -> Tensor:
        """The original shape of one state of ``param``; every rank contributes the elements it owns."""
        whole = torch.zeros(param.numel(), dtype=flat_state.dtype, device=flat_state.device)
        mapping = param._hp_mapping
        if mapping is not None:
            here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
            whole[here.start : here.start + here.numel] = flat_state.narrow(0, there.start, there.numel)
        dist.all_reduce(whole)
        return snapshot(whole.reshape(param.shape))

    def _stage3_state(self, param: nn.Parameter) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        zero: Any = self.engine.optimizer
        group = zero.grad_position[zero.get_param_id(param)][0]
        flat = zero.fp32_partitioned_groups_flat[group]
        state = zero.optimizer.state[flat]
        keys = [key for key, value in state.items() if _shaped_like(value, flat)]
        return {**{key: snapshot(safe_get_full_optimizer_state(param, key)) for key in keys}, **_scalars_of(state)}

    @contextmanager
    def gathered(self, params: Sequence[nn.Parameter], modifier_rank: int | None = None) -> Iterator[None]:
        """A block in which ``params`` are whole; what ``modifier_rank`` writes in it is every rank's afterwards."""
        if self.stage < 3:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(params, modifier_rank=modifier_rank):
            yield

    def layout(self) -> dict[str, tuple[Piece, ...]]:
        if self.stage == 0:
            return {}
        mine = {name: _own_piece(param) for name, param in self.params.items() if param.requires_grad}
        ranks: list[dict[str, Piece | None]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, mine)
        return {name: tuple(piece for rank in ranks if (piece := rank[name]) is not None) for name in mine}


def _own_piece(param: Any) -> Piece | None:
    """The part of ``param`` whose master lives here, from DeepSpeed's own records; None when there is none."""
    rank = dist.get_rank()
    if hasattr(param, "ds_tensor"):
        size = param.ds_tensor.ds_numel
        start, stop = min(rank * size, param.ds_numel), min((rank + 1) * size, param.ds_numel)
        return Piece(rank, start, stop) if stop > start else None
    mapping = getattr(param, "_hp_mapping", None)
    if mapping is None:
        return None
    at = mapping.lp_fragment_address
    return Piece(rank, at.start, at.start + at.numel) if at.numel else None


def _shaped_like(value: object, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape


def _scalars_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """What an optimizer keeps one number of: the count of steps, the product of momenta."""
    found = {key: torch.as_tensor(value) for key, value in state.items() if isinstance(value, (int, float, Tensor))}
    return {key: snapshot(value) for key, value in found.items() if value.dim() == 0}
