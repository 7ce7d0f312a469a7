"""Build an optimizer over this rank's leaves instead of the model's parameters, and the optimizer's schedule.

A leaf is the tensor that the optimizer updates on this rank for one parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zharness.errors import ConfigError, UsageError
from zharness.reference.deepspeed_json.settings import ClassChoice, Settings, refuse_non_elementwise
from zharness.reference.layout import ModelParam

Leaves = Mapping[str, Tensor]
OptimizerBuilder = Callable[[Leaves], torch.optim.Optimizer]
ParameterGroups = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]


class LeafSubstitution:
    """Replaces the model's Parameters by their leaves, the tensors that the optimizer updates on this rank."""

    def __init__(self, model_params: Mapping[str, ModelParam], leaves: Leaves) -> None:
        self._leaf_of = {param.parameter: leaves[name] for name, param in model_params.items()}

    def replace_groups(self, param_groups: ParameterGroups) -> list[dict[str, Any]]:
        """Return parameter groups of torch.optim in which each parameter is replaced by its leaf.

        ``param_groups`` contains either parameters or parameter groups.
        """
        entries = list(param_groups)
        groups = [dict(e) for e in entries] if entries and isinstance(entries[0], Mapping) else [{"params": entries}]
        for group in groups:
            group["params"] = [self._find_leaf(p) for p in _as_list(group["params"])]
        return groups

    def _find_leaf(self, parameter: Any) -> Tensor:
        """Return the leaf of ``parameter``. Raises ConfigError if ``parameter`` is not a parameter of the model."""
        if not isinstance(parameter, nn.Parameter) or parameter not in self._leaf_of:
            kind = type(parameter).__name__
            shape = tuple(parameter.shape) if isinstance(parameter, Tensor) else parameter
            raise ConfigError(
                f"the optimizer has a {kind} of shape {shape}, which is not a parameter of the model; "
                "build the optimizer from the parameters of the model that you pass to initialize"
            )
        return self._leaf_of[parameter]


def _as_list(params: Any) -> list[Any]:
    """Return the parameters of a group as a list, since torch.optim also allows a single tensor."""
    return [params] if isinstance(params, Tensor) else list(params)


def build_optimizer(
    optimizer: torch.optim.Optimizer | OptimizerBuilder | None,
    settings: Settings,
    parameters: ParameterGroups | None,
    model_params: Mapping[str, ModelParam],
    leaves: Leaves,
) -> torch.optim.Optimizer:
    """Return an optimizer that updates ``leaves``.

    ``optimizer`` is an optimizer over the model's parameters, a function that builds an optimizer from the leaves, or
    None for the configured optimizer. In an optimizer over the model's parameters, the groups get the leaves in place,
    so that a schedule over it still works. Such an optimizer is refused if it has already stepped, since its state
    would belong to other tensors. ``parameters`` are those that the configured optimizer updates, or None for all.
    Raises ConfigError for an optimizer that cannot be used.
    """
    substitution = LeafSubstitution(model_params, leaves)
    if isinstance(optimizer, torch.optim.Optimizer):
        _refuse_untested(type(optimizer), settings)
        if any(not _is_fresh(state) for state in optimizer.state.values()):
            raise ConfigError("the optimizer has stepped already; pass an optimizer that has made no step yet")
        groups = substitution.replace_groups(optimizer.param_groups)
        for group, replaced in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = replaced["params"]
        if isinstance(optimizer, torch.optim.Adagrad):  # the only one that makes its state before the first step
            optimizer.state.clear()
            optimizer.state.update(
                torch.optim.Adagrad([dict(g) for g in optimizer.param_groups], **optimizer.defaults).state
            )
        return optimizer
    if optimizer is not None:
        built = optimizer(leaves)
        _refuse_untested(type(built), settings)
        check_only_leaves(built, leaves)
        return built
    choice = settings.optimizer
    if choice is None:
        raise ConfigError(
            "no optimizer is given; set config['optimizer'], or pass an optimizer or a function that builds one as "
            "optimizer="
        )
    groups = substitution.replace_groups(parameters) if parameters is not None else [{"params": list(leaves.values())}]
    try:
        built = choice.target_class(groups, **choice.kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{choice.target_class.__name__} does not accept optimizer.params {dict(choice.kwargs)}: {error}"
        ) from None
    return built  # type: ignore[no-any-return]


def _is_fresh(state: Mapping[str, Any]) -> bool:
    """Return whether an optimizer state was never updated, like the state that Adagrad creates in its constructor."""
    return "step" in state and not state["step"]


def _refuse_untested(optimizer_class: type, settings: Settings) -> None:
    """Raise ConfigError for an optimizer that cannot update shards.

    Also raises ConfigError for a class outside torch.optim, unless the stage is 0 or the configuration allows such
    classes.
    """
    for base_class in optimizer_class.__mro__:
        refuse_non_elementwise(base_class.__name__)
    if (
        settings.stage
        and not settings.allow_untested_optimizer
        and not optimizer_class.__module__.startswith("torch.optim.")
    ):
        raise ConfigError(
            f"optimizer {optimizer_class.__module__}.{optimizer_class.__name__} is not part of torch.optim; if it "
            "updates every element independently of the others, set zero_allow_untested_optimizer: true; otherwise use "
            "stage 0"
        )


def build_schedule(schedule: Any, choice: ClassChoice | None, optimizer: torch.optim.Optimizer) -> Any:
    """Return the learning-rate schedule of ``optimizer``, or None if there is neither ``schedule`` nor ``choice``.

    ``schedule`` is a schedule or a function that builds one from the optimizer; ``choice`` is the configured class.
    Raises ConfigError for a schedule that cannot be used.
    """
    built = schedule(optimizer) if callable(schedule) else schedule
    if built is None and choice is not None:
        try:
            built = choice.target_class(optimizer, **choice.kwargs)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{choice.target_class.__name__} does not accept scheduler.params {dict(choice.kwargs)}: {error}"
            ) from None
    if built is None:
        return None
    if isinstance(built, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau needs a metric at each step, which the engine does not have; step it yourself"
        )
    if not callable(getattr(built, "step", None)):
        raise ConfigError(
            f"lr_scheduler is a {type(built).__name__}; expected a scheduler, or a callable that builds a scheduler"
        )
    if getattr(built, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            "lr_scheduler belongs to another optimizer than the engine's; pass a callable that builds a scheduler"
        )
    return built


def describe_param_groups(optimizer: torch.optim.Optimizer, leaves: Leaves) -> dict[str, str]:
    """Describe the optimizer's class and the parameters and settings of its groups, to compare them between ranks.

    The description includes leaves without elements on this rank, since a checkpoint has the same groups on every rank.
    """
    names = {id(leaf): name for name, leaf in leaves.items()}
    facts = {"optimizer": type(optimizer).__name__}
    for index, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if isinstance(value, (bool, int, float, str, tuple))}
        members = [names[id(leaf)] for leaf in group["params"]]
        facts[f"optimizer group {index}"] = f"{members}, {settings}"
    return facts


def refuse_direct_steps(optimizer: torch.optim.Optimizer, leaves: Leaves) -> RemovableHandle:
    """Make ``optimizer.step()`` raise UsageError if no leaf has a gradient, that is, in a direct call by the user.

    Only the engine's ``step`` assigns gradients to leaves. Returns the handle that removes this check.
    """

    def check_has_grads(*_: Any) -> None:
        if all(leaf.grad is None for leaf in leaves.values()):
            raise UsageError(
                "optimizer.step() was called, but the engine keeps the gradients and the optimizer has none: call "
                "engine.step(), and engine.zero_grad() in place of optimizer.zero_grad()"
            )

    return optimizer.register_step_pre_hook(check_has_grads)


def check_only_leaves(optimizer: torch.optim.Optimizer, leaves: Leaves) -> None:
    """Raise ConfigError if the optimizer has a tensor that is not a leaf, which would never get a gradient."""
    known = {id(leaf) for leaf in leaves.values()}
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if id(tensor) not in known:
                raise ConfigError(
                    f"the optimizer has a tensor of shape {tuple(tensor.shape)} that is not one of the leaves to "
                    "which the engine assigns gradients; build its parameter groups only from the tensors that the "
                    "engine passes to your function"
                )
