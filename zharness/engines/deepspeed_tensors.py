"""Read DeepSpeed's gradients, weights, optimizer state and shards as full tensors by original parameter name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines.deepspeed_partition_state import PartitionState, choose_readable_keys, gather_objects
from zharness.engines.deepspeed_round_robin import RoundRobinLinks
from zharness.engines.protocol import Piece
from zharness.engines.torch_engine import snapshot


@dataclass(frozen=True)
class DeepSpeedTensorReader:
    """Reads full tensors from a deepspeed.DeepSpeedEngine at ``stage``.

    ``params`` maps each parameter's original name to the parameter. ``links`` are the right links of parameters to
    their partitions. ``data_group`` has the ranks over which tensors are partitioned; None means all ranks. Every
    method that returns tensors is a collective.
    """

    engine: Any
    params: Mapping[str, nn.Parameter]
    stage: int
    links: RoundRobinLinks
    data_group: Any

    def grads(self) -> dict[str, Tensor]:
        """Return the unscaled gradients that ``step`` will apply, or this rank's own if none was reduced yet."""
        grads = {}
        with self.links.applied():
            for name, param in self.params.items():
                grad = self._full_grad(param) if param.requires_grad else None
                if grad is not None:
                    grads[name] = snapshot((grad / (self.loss_scale() or 1.0)).to(self._master_dtype(grad)))
        return grads

    def step_gradients(self) -> dict[str, Tensor]:
        """Return the gradients, clipped, of the groups that the optimizer is about to step, from stage 1 on."""
        if self.stage == 3:
            return dict(self._iter_stage3_step_gradients())
        flat_grads = [flat.grad for flat in self._flat_masters()]
        with self.links.applied():
            return {
                name: self._assemble_state(param, grad)
                for name, param in self.params.items()
                if (grad := flat_grads[self._position(param)[0]]) is not None
            }

    def _iter_stage3_step_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradients of ``step_gradients`` by name at stage 3, from the parts of all ranks."""
        zero: Any = self.engine.optimizer
        for name, param in self.params.items():
            sharded: Any = param
            group, offset, elements = zero.grad_position[zero.get_param_id(param)]
            flat = zero.fp32_partitioned_groups_flat[group].grad
            if flat is not None:
                part = flat.narrow(0, offset, elements).contiguous()
                parts = [torch.empty_like(part) for _ in range(dist.get_world_size(self.data_group))]
                dist.all_gather(parts, part, group=self.data_group)
                yield name, snapshot(torch.cat(parts)[: sharded.ds_numel].reshape(sharded.ds_shape))

    def loss_scale(self) -> float | None:
        """Return the loss scale of torch's GradScaler under torch_autocast in fp16, else DeepSpeed's own.

        Returns None if there is no scaler.
        """
        zero = self.engine.optimizer
        at_stage_0 = getattr(self.engine, "torch_autocast_z0_gradscaler", None)  # DeepSpeed has it since 0.18.0
        scaler = getattr(zero, "torch_autocast_gradscaler", None) if at_stage_0 is None else at_stage_0
        scale = getattr(zero, "loss_scale", None) if scaler is None else scaler.get_scale()
        return None if scale is None else float(scale)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that the next forward uses.

        These are not the fp32 master weights, which would hide an error in copying them back to the parameters.
        """
        with self.gather_params(list(self.params.values())):
            return {name: snapshot(param) for name, param in self.params.items()}

    def masters(self) -> dict[str, Tensor]:
        """Return the fp32 master weights of low-precision parameters; empty if the optimizer updates the parameters."""
        from deepspeed.utils import safe_get_full_fp32_param

        masters = {}
        with self.links.applied():
            for name, param in self.params.items():
                if param.requires_grad and param.dtype in (torch.bfloat16, torch.float16):
                    master = self._stage0_master(param) if self.stage == 0 else safe_get_full_fp32_param(param)
                    if master is not None:  # a weight that was frozen when the engine was built has no master
                        masters[name] = snapshot(master.to(self._master_dtype(master)))
        return masters

    def state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        """Return ``module.state_dict()`` with full tensors; the names of a tied weight share one tensor."""
        with self.gather_params(list(self.params.values())):
            state = module.state_dict(keep_vars=True)
            copies = {id(tensor): snapshot(tensor) for tensor in state.values()}
            return {name: copies[id(tensor)] for name, tensor in state.items()}

    @contextmanager
    def edit_weights(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        """Yield full weights to edit; at the end every rank's parameters and master weights have rank 0's values.

        In a master weight, elements that were not edited keep their values, which are more precise.
        """
        from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

        chosen = [self.params[name] for name in names]
        with self.gather_params(chosen, modifier_rank=0):
            before = [param.detach().clone() for param in chosen]
            yield {name: self.params[name].detach() for name in names}
            values = [param.detach().clone() for param in chosen]
        for param, old, value in zip(chosen, before, values, strict=True):
            dist.broadcast(value, src=0)
            if self.stage < 3:
                param.detach().copy_(value)
            with self.links.applied():
                master = safe_get_full_fp32_param(param)
                edited = value if master is None else torch.where(old == value, master, value.to(master.dtype))
                safe_set_full_fp32_param(param, edited)

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer state by parameter name and key, which is empty before the first step."""
        if self.engine.global_steps == 0 and self.stage > 0:
            return {}
        readers = (self._stage0_state, self._stage12_state, self._stage12_state, self._stage3_state)
        with self.links.applied():
            return {name: readers[self.stage](param) for name, param in self.params.items() if self._has_state(param)}

    def _has_state(self, param: nn.Parameter) -> bool:
        """Return whether the optimizer may have state of ``param``; stage 0 keeps the state of frozen parameters."""
        if self.stage == 0:
            return param.requires_grad or self._stage0_master(param) in self.engine.optimizer.state
        return param.requires_grad and self._is_sharded(param)

    def _full_grad(self, param: Any) -> Tensor | None:
        """Return the reduced gradient of ``param``, or this rank's own gradient if nothing was reduced.

        This method does not always call safe_get_full_grad, which returns ``param.grad`` if it is set. Above stage 0
        ``param.grad`` is an unreduced gradient, while ``step`` applies the reduced partitions.
        """
        from deepspeed.utils import safe_get_full_grad

        if self._is_bf16_optimizer:
            return self._bf16_optimizer_grad(param) if self._is_used_on_any_rank(param) else None
        if not self._has_reduced_gradients():
            return cast("Tensor | None", param.grad)
        # Both branches run the same collective, so it does not matter if only some ranks have a param.grad. A parameter
        # that was frozen when the engine was built has no partitions.
        if self.stage == 0 or param.grad is None or not (hasattr(param, "_hp_mapping") or hasattr(param, "ds_id")):
            return cast("Tensor | None", safe_get_full_grad(param))
        if self.stage == 3:
            return cast(Tensor, param._z3_optimizer.get_fp32_grad_for_param(param))
        return cast(Tensor, param.get_full_hp_grad())

    @property
    def _is_bf16_optimizer(self) -> bool:
        """Whether DeepSpeed built its BF16_Optimizer: at stage 1 for bf16 accumulated in fp32, or for a pipeline."""
        return hasattr(self.engine.optimizer, "fp32_groups_has_gradients")

    def _is_used_on_any_rank(self, param: nn.Parameter) -> bool:
        """Return whether BF16_Optimizer has an accumulated gradient of ``param`` on some rank of the data group.

        This is a collective of this group, as other stages of a pipeline have other parameters. Afterwards the
        accumulated gradients are zeros, which safe_get_full_grad returns as gradients.
        """
        group, index = self._position(param)
        used = torch.tensor(bool(self.engine.optimizer.fp32_groups_has_gradients[group][index]), device=param.device)
        return bool(_maximum_over_ranks(used.int(), self.data_group))

    def _bf16_optimizer_grad(self, param: Any) -> Tensor:
        """Return the gradient that BF16_Optimizer steps with, from the elements that each rank owns.

        Not get_full_hp_grad, which in releases before 0.19.8 raises for a parameter that two ranks share; the laws of
        the group ``access`` call it.
        """
        group, index = self._position(param)
        accumulated = self.engine.optimizer.fp32_groups_gradients[group][index].flatten()
        full = torch.zeros_like(accumulated)
        mapping = param._hp_mapping
        if mapping is not None:
            owned = mapping.lp_fragment_address
            full[owned.start : owned.start + owned.numel] = accumulated.narrow(0, owned.start, owned.numel)
        dist.all_reduce(full, group=self.data_group)
        return full.reshape(param.shape)

    def _position(self, param: nn.Parameter) -> tuple[int, int]:
        """Return the index of the parameter group of ``param``, and its index in this group, at stages 1 and 2."""
        return next(_find_in_groups(self._parameter_groups, param))

    @property
    def _parameter_groups(self) -> Sequence[Sequence[nn.Parameter]]:
        """The parameter groups of the optimizer of stages 1 and 2."""
        zero = self.engine.optimizer
        return cast("list[list[nn.Parameter]]", zero.bf16_groups if self._is_bf16_optimizer else zero.bit16_groups)

    def _is_sharded(self, param: Any) -> bool:
        """Return whether ``param`` has a master weight and optimizer state in a partition, above stage 0.

        DeepSpeed makes partitions only of the parameters that require a gradient when the engine is built.
        """
        if self.stage == 3:
            return self.engine.optimizer.get_param_id(param) in self.engine.optimizer.grad_position
        return hasattr(param, "_hp_mapping")

    def _flat_masters(self) -> list[Tensor]:
        """Return the flat partition of master weights that this rank owns of each group, above stage 0."""
        zero = self.engine.optimizer
        if self._is_bf16_optimizer:
            return cast("list[Tensor]", zero.fp32_groups_flat_partition)
        return cast(
            "list[Tensor]",
            zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups,
        )

    def _has_reduced_gradients(self) -> bool:
        """Return whether every parameter group has reduced gradients; the result is the same on all ranks.

        Without this check a rank that owns a part of a parameter would raise an error, and ranks that own no part would
        hang in the collective.
        """
        if self.stage in (0, 3) or self.engine.zero_cpu_offload():
            return True
        averaged = self.engine.optimizer.averaged_gradients
        return all(averaged.get(index) is not None for index in range(len(self.engine.optimizer.bit16_groups)))

    def _master_dtype(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype of master weights and their gradients, which DeepSpeed's functions convert to fp32."""
        return tensor.dtype if self.stage == 0 else self._flat_masters()[0].dtype

    def _stage0_master(self, param: nn.Parameter) -> Tensor | None:
        """Return the tensor that stage 0's optimizer updates for ``param``: the parameter, or its fp32 master.

        Returns None if the parameter should have a master but has none, as for a weight that was frozen when the engine
        was built.
        """
        groups = getattr(self.engine.optimizer, "fp16_groups", None)
        if groups is None:
            return param
        masters: list[list[Tensor]] = self.engine.optimizer.fp32_groups
        position = next(_find_in_groups(groups, param), None)
        return None if position is None else masters[position[0]][position[1]]

    def _stage0_state(self, param: nn.Parameter) -> dict[str, Tensor]:
        """Return the optimizer state of ``param`` at stage 0, where every rank has all of it."""
        state = self.engine.optimizer.state.get(self._stage0_master(param), {})
        return {key: snapshot(value) for key, value in state.items() if isinstance(value, Tensor)}

    def _stage12_state(self, param: nn.Parameter) -> dict[str, Tensor]:
        """Return the full optimizer state of ``param`` at stages 1 and 2, from the flat partitions of all ranks."""
        # Not safe_get_full_optimizer_state: stages 1 and 2 link states to parameters once, after the first group has
        # stepped, so that function raises for parameters of every other group.
        group = self._position(param)[0]
        flat = self._flat_masters()[group]
        zero = self.engine.optimizer.optimizer
        state = zero.state[flat]
        keys = {key for key, value in state.items() if _is_shaped_like(value, flat)}
        if zero.param_groups[group].get("use_muon"):
            keys = choose_readable_keys(self._gather_partitions(group))
        return {**{key: self._assemble_state(param, state[key]) for key in sorted(keys)}, **_scalar_states(state)}

    def _gather_partitions(self, group: int) -> list[PartitionState]:
        """Return a parameter group's partitions and states on all ranks of the data group. This is a collective."""
        zero, flat = self.engine.optimizer, self._flat_masters()[group]
        states = {
            key: value.numel()
            for key, value in zero.optimizer.state[flat].items()
            if isinstance(value, Tensor) and value.dim()
        }
        is_padding = not any(map(local_piece, self._parameter_groups[group]))
        return gather_objects(PartitionState(dist.get_rank(), flat.numel(), is_padding, states), self.data_group)

    def _assemble_state(self, param: Any, flat_state: Tensor) -> Tensor:
        """Return one optimizer state of ``param`` in its original shape, from the elements that each rank owns."""
        full = torch.zeros(param.numel(), dtype=flat_state.dtype, device=flat_state.device)
        mapping = param._hp_mapping
        if mapping is not None:
            target, source = mapping.lp_fragment_address, mapping.hp_fragment_address
            full[target.start : target.start + target.numel] = flat_state.narrow(0, source.start, source.numel)
        dist.all_reduce(full, group=self.data_group)
        return snapshot(full.reshape(param.shape))

    def _stage3_state(self, param: nn.Parameter) -> dict[str, Tensor]:
        """Return the full optimizer state of ``param`` at stage 3."""
        from deepspeed.utils import safe_get_full_optimizer_state

        zero: Any = self.engine.optimizer
        group = zero.grad_position[zero.get_param_id(param)][0]
        flat = zero.fp32_partitioned_groups_flat[group]
        state = zero.optimizer.state[flat]
        keys = [key for key, value in state.items() if _is_shaped_like(value, flat)]
        return {**{key: snapshot(safe_get_full_optimizer_state(param, key)) for key in keys}, **_scalar_states(state)}

    @contextmanager
    def gather_params(self, params: Sequence[nn.Parameter], modifier_rank: int | None = None) -> Iterator[None]:
        """Gather full ``params`` inside the block; afterwards every rank has the values that ``modifier_rank`` set."""
        if self.stage < 3:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(params, modifier_rank=modifier_rank):
            yield

    def layout(self) -> dict[str, tuple[Piece, ...]]:
        """Return which piece of each trained parameter's master weight each rank owns; empty at stage 0."""
        if self.stage == 0:
            return {}
        with self.links.applied():
            local = {name: local_piece(param) for name, param in self.params.items() if param.requires_grad}
        ranks: list[dict[str, Piece | None]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, local)
        return {name: tuple(piece for rank in ranks if (piece := rank[name]) is not None) for name in local}


def local_piece(param: Any) -> Piece | None:
    """Return the piece of ``param`` whose master weight this rank owns, or None if this rank owns none."""
    rank = dist.get_rank()
    if hasattr(param, "ds_tensor"):
        size, part = param.ds_tensor.ds_numel, dist.get_rank(param.ds_process_group)
        start, stop = min(part * size, param.ds_numel), min((part + 1) * size, param.ds_numel)
        return Piece(rank, start, stop) if stop > start else None
    mapping = getattr(param, "_hp_mapping", None)
    if mapping is None:
        return None
    fragment = mapping.lp_fragment_address
    return Piece(rank, fragment.start, fragment.start + fragment.numel) if fragment.numel else None


def own_pieces(params: Mapping[str, nn.Parameter], *, are_sharded: bool) -> dict[str, Piece | None]:
    """Return the piece that this rank owns of each of its own parameters: its shard, or the whole parameter."""
    rank = dist.get_rank()
    return {
        name: local_piece(param) if are_sharded else Piece(rank, 0, param.numel()) for name, param in params.items()
    }


def gather_pieces(own: Mapping[str, Piece | None], names: Sequence[str]) -> dict[str, tuple[Piece, ...]]:
    """Return the pieces that all ranks own of each parameter of ``names``. This is a collective."""
    views: list[Mapping[str, Piece | None]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(views, dict(own))
    return {name: tuple(piece for view in views if (piece := view.get(name)) is not None) for name in names}


def gather_by_name(own: Mapping[str, Any], names: Sequence[str], group: Any) -> dict[str, Any]:
    """Return the entries ``own`` of all ranks of ``group``, in the order of ``names``. This is a collective.

    If several ranks have an entry for a name, a rank returns its own entry, or else the entry of the first rank.
    """
    views: list[Mapping[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(views, dict(own), group=group)
    entries = {name: value for view in reversed(views) for name, value in view.items()} | dict(own)
    return {name: entries[name] for name in names if name in entries}


def _maximum_over_ranks(tensor: Tensor, group: Any) -> Tensor:
    """Return the elementwise maximum of ``tensor`` over the ranks of ``group``. This is a collective."""
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor


def _find_in_groups(groups: Sequence[Sequence[Tensor]], param: nn.Parameter) -> Iterator[tuple[int, int]]:
    """Yield the index of the group that has ``param``, and its index in this group, if one of ``groups`` has it."""
    return ((i, j) for i, group in enumerate(groups) for j, member in enumerate(group) if member is param)


def _is_shaped_like(value: object, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape


def _scalar_states(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the entries of an optimizer state that are single numbers, such as the step count, as tensors."""
    tensors = {key: torch.as_tensor(value) for key, value in state.items() if isinstance(value, (int, float, Tensor))}
    return {key: snapshot(value) for key, value in tensors.items() if value.dim() == 0}
