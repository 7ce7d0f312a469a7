"""DeepSpeed's gradients, weights, optimizer state and shards as whole tensors by original name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines.protocol import Piece
from zharness.engines.torch_engine import snapshot


@dataclass(frozen=True)
class DeepSpeedTensorReader:
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
                found[name] = snapshot((grad / (self.loss_scale() or 1.0)).to(self._master_dtype(grad)))
        return found

    def loss_scale(self) -> float | None:
        """By which the gradients are too large: torch's scaler under torch_autocast in fp16, else DeepSpeed's own."""
        zero = self.engine.optimizer
        at_stage_0 = self.engine.torch_autocast_z0_gradscaler
        scaler = getattr(zero, "torch_autocast_gradscaler", None) if at_stage_0 is None else at_stage_0
        scale = getattr(zero, "loss_scale", None) if scaler is None else scaler.get_scale()
        return None if scale is None else float(scale)

    def weights(self) -> dict[str, Tensor]:
        """The weights that the next forward uses (not the fp32 masters, which a broken copy-back would leave apart)."""
        with self.gather_params(list(self.params.values())):
            return {name: snapshot(param) for name, param in self.params.items()}

    def masters(self) -> dict[str, Tensor]:
        """The weights that the optimizer works on under bf16; nothing where the parameters are as wide."""
        from deepspeed.utils import safe_get_full_fp32_param

        found = {}
        for name, param in self.params.items():
            if param.requires_grad and param.dtype in (torch.bfloat16, torch.float16):
                whole = self._stage0_master(param) if self.stage == 0 else safe_get_full_fp32_param(param)
                found[name] = snapshot(whole.to(self._master_dtype(whole)))
        return found

    def state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        """``module.state_dict()`` with whole tensors; a tied weight is one tensor under each of its names."""
        with self.gather_params(list(self.params.values())):
            held = module.state_dict(keep_vars=True)
            copies = {id(tensor): snapshot(tensor) for tensor in held.values()}
            return {name: copies[id(tensor)] for name, tensor in held.items()}

    @contextmanager
    def edit_weights(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        """A block in which whole weights may be edited; rank 0's edits are every rank's, in the masters too."""
        from deepspeed.utils import safe_set_full_fp32_param

        chosen = [self.params[name] for name in names]
        with self.gather_params(chosen, modifier_rank=0):
            yield {name: self.params[name].detach() for name in names}
            values = [param.detach().clone() for param in chosen]
        for param, value in zip(chosen, values, strict=True):
            dist.broadcast(value, src=0)
            if self.stage < 3:
                param.detach().copy_(value)
            safe_set_full_fp32_param(param, value)

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's, by parameter and key; above stage 0 there is none to be read before the first step."""
        if self.engine.global_steps == 0 and self.stage > 0:
            return {}
        read = (self._stage0_state, self._stage12_state, self._stage12_state, self._stage3_state)
        return {name: read[self.stage](param) for name, param in self.params.items() if param.requires_grad}

    def _full_grad(self, param: Any) -> Tensor | None:
        """safe_get_full_grad without its shortcut: it returns ``param.grad`` where one is set, and above stage 0 that
        is a gradient that was never reduced, while ``step`` applies the partitions.
        """
        from deepspeed.utils import safe_get_full_grad

        if not self._has_reduced_gradients():
            return cast("Tensor | None", param.grad)
        # Both ways run the same collective, so ranks that differ in having a param.grad do not wait for each other. A
        # parameter that was frozen when the engine was built has no partitions.
        if self.stage == 0 or param.grad is None or not (hasattr(param, "_hp_mapping") or hasattr(param, "ds_id")):
            return cast("Tensor | None", safe_get_full_grad(param))
        if self.stage == 3:
            return cast(Tensor, param._z3_optimizer.get_fp32_grad_for_param(param))
        return cast(Tensor, param.get_full_hp_grad())

    def _has_reduced_gradients(self) -> bool:
        """Whether every group has reduced gradients. The same answer on all ranks: the groups are.

        Asked for first because a rank that owns a part of a parameter raises where a rank that owns none goes on into
        the collective, and waits.
        """
        if self.stage in (0, 3) or self.engine.zero_cpu_offload():
            return True
        held = self.engine.optimizer.averaged_gradients
        return all(held.get(index) is not None for index in range(len(self.engine.optimizer.bit16_groups)))

    def _master_dtype(self, tensor: Tensor) -> torch.dtype:
        """The dtype of masters and their gradients, which DeepSpeed's own functions give in fp32 whatever it is."""
        zero = self.engine.optimizer
        if self.stage == 0:
            return tensor.dtype
        flats: list[Tensor] = (
            zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        )
        return flats[0].dtype

    def _stage0_master(self, param: nn.Parameter) -> Tensor:
        """What the optimizer of stage 0 works on: the parameter, or its fp32 copy in DeepSpeed's low-precision one."""
        groups = getattr(self.engine.optimizer, "fp16_groups", None)
        if groups is None:
            return param
        masters: list[list[Tensor]] = self.engine.optimizer.fp32_groups
        places = ((i, j) for i, group in enumerate(groups) for j, member in enumerate(group) if member is param)
        i, j = next(places)
        return masters[i][j]

    def _stage0_state(self, param: nn.Parameter) -> dict[str, Tensor]:
        state = self.engine.optimizer.state.get(self._stage0_master(param), {})
        return {key: snapshot(value) for key, value in state.items() if isinstance(value, Tensor)}

    def _stage12_state(self, param: nn.Parameter) -> dict[str, Tensor]:
        # Not safe_get_full_optimizer_state: stages 1 and 2 link the states to the parameters when the first group has
        # stepped and never again, so it raises for the parameters of every other group.
        zero = self.engine.optimizer
        index = next(i for i, group in enumerate(zero.bit16_groups) if any(member is param for member in group))
        flat = zero.single_partition_of_fp32_groups[index]
        state = zero.optimizer.state[flat]
        found = {
            key: self._assemble_state(param, value) for key, value in state.items() if _is_shaped_like(value, flat)
        }
        return {**found, **_scalar_states(state)}

    def _assemble_state(self, param: Any, flat_state: Tensor) -> Tensor:
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
        keys = [key for key, value in state.items() if _is_shaped_like(value, flat)]
        return {**{key: snapshot(safe_get_full_optimizer_state(param, key)) for key in keys}, **_scalar_states(state)}

    @contextmanager
    def gather_params(self, params: Sequence[nn.Parameter], modifier_rank: int | None = None) -> Iterator[None]:
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
        mine = {name: _local_piece(param) for name, param in self.params.items() if param.requires_grad}
        ranks: list[dict[str, Piece | None]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, mine)
        return {name: tuple(piece for rank in ranks if (piece := rank[name]) is not None) for name in mine}


def _local_piece(param: Any) -> Piece | None:
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


def _is_shaped_like(value: object, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape


def _scalar_states(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """What an optimizer keeps one number of: the count of steps, the product of momenta."""
    found = {key: torch.as_tensor(value) for key, value in state.items() if isinstance(value, (int, float, Tensor))}
    return {key: snapshot(value) for key, value in found.items() if value.dim() == 0}
