"""Link parameters to their partitions under ``round_robin_gradients``, where DeepSpeed links them in the wrong order.

With this option, stages 1 and 2 flatten the parameters of a group in another order than the group's own order.
DeepSpeed 0.19.8 links each parameter to the place that it would have in the group's own order, so that its functions
for partitioned states return and replace tensors of other parameters (``access.read_grad`` and others show it).
``DeepSpeedTensorReader``, which all other laws use, applies the right links, because these laws judge the training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

_LINK_ATTRIBUTES = ("_hp_mapping", "_index_in_param_group")


@dataclass(frozen=True)
class Link:
    """A parameter, and the values of the attributes by which DeepSpeed finds its elements in the flat partition."""

    param: Any
    values: Sequence[Any]

    @classmethod
    def from_param(cls, param: Any) -> Link:
        """Return the link that ``param`` has now."""
        return cls(param, [getattr(param, name, None) for name in _LINK_ATTRIBUTES])

    def apply(self) -> None:
        """Make this link the one that DeepSpeed's functions use."""
        for name, value in zip(_LINK_ATTRIBUTES, self.values, strict=True):
            setattr(self.param, name, value)


@dataclass(frozen=True)
class RoundRobinLinks:
    """The right links of all parameters; none if the optimizer flattens parameters in their own order."""

    links: Sequence[Link]

    @classmethod
    def build(cls, zero: Any) -> RoundRobinLinks:
        """Build the links for the optimizer ``zero`` of stage 1 or 2; an optimizer of another stage has no links."""
        if not getattr(zero, "round_robin_gradients", False):
            return cls(())
        own = [Link.from_param(param) for group in zero.bit16_groups for param in group]
        for index in range(len(zero.bit16_groups)):
            _link_group(zero, index)
        right = [Link.from_param(link.param) for link in own]
        for link in own:
            link.apply()
        return cls(right)

    def applied(self) -> AbstractContextManager[None]:
        """Return a context in which DeepSpeed's functions use these links."""
        return self._applied() if self.links else nullcontext()

    @contextmanager
    def _applied(self) -> Iterator[None]:
        """Apply the links inside the block, and the earlier ones again at its end."""
        own = [Link.from_param(link.param) for link in self.links]
        for link in self.links:
            link.apply()
        try:
            yield
        finally:
            for link in own:
                link.apply()


def _link_group(zero: Any, index: int) -> None:
    """Link the parameters of one group by DeepSpeed's own function, in the order in which they are flattened."""
    from deepspeed.utils.mixed_precision_linkage import link_hp_params

    process_group = zero.real_dp_process_group[index]
    partition_size = zero.bit16_groups_flat[index].numel() // dist.get_world_size(group=process_group)
    offsets = getattr(zero, "round_robin_bit16_offsets", None)  # since 0.19.8, with the option parameter_alignment
    link_hp_params(
        lp_param_list=zero.round_robin_bit16_groups[index],
        flat_hp_partition=zero.single_partition_of_fp32_groups[index],
        gradient_dict=zero.averaged_gradients,
        offload_gradient_dict=zero.offload_gradient_dict,
        use_offload=zero.cpu_offload,
        param_group_index=index,
        partition_start=dist.get_rank(group=process_group) * partition_size,
        partition_size=partition_size,
        dp_group=process_group,
        **({} if offsets is None else {"param_offsets": offsets[index]}),
    )
