"""DeepSpeed's JSON as this engine reads it: a key is honoured, or cannot change a number, or is refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from zharness.errors import ConfigError
from zharness.reference.layout import STAGES


@dataclass(frozen=True)
class Section:
    """The keys of one object of the JSON. What is in neither set is refused by name."""

    honoured: frozenset[str]
    harmless: frozenset[str] = frozenset()

    def check(self, where: str, got: Mapping[str, Any]) -> None:
        """Raise ConfigError for the first key of ``got`` that is in neither set."""
        known = self.honoured | self.harmless
        for key in got:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; honoured: {', '.join(sorted(self.honoured))}"
                raise ConfigError(f"the reference engine does not honour {(where + key)!r}{hint}")


TOP = Section(
    honoured=frozenset(
        {
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "gradient_clipping",
            "optimizer",
            "zero_optimization",
        }
    ),
    # How often and how much is printed or measured.
    harmless=frozenset({"steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state"}),
)
ZERO = Section(
    honoured=frozenset({"stage"}),
    # How many elements travel together, when, from which memory, and how long they are kept: never which ones.
    harmless=frozenset(
        {
            "allgather_bucket_size",
            "allgather_partitions",
            "contiguous_gradients",
            "overlap_comm",
            "reduce_bucket_size",
            "reduce_scatter",
            "round_robin_gradients",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_module_granularity_threshold",
            "stage3_param_persistence_threshold",
            "stage3_model_persistence_threshold",
            "stage3_prefetch_bucket_size",
            "sub_group_size",
        }
    ),
)
OPTIMIZER = Section(honoured=frozenset({"type", "params"}))
# Sections that choose another arithmetic: absent and disabled mean the same.
PRECISION = frozenset({"fp16", "bf16", "torch_autocast", "amp"})


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer of torch.optim and its keyword arguments."""

    kind: type[torch.optim.Optimizer] = torch.optim.AdamW
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """The configuration, complete and consistent. ``clip`` is None where the norm is not limited."""

    stage: int
    micro_batch_size: int
    accumulation_steps: int
    clip: float | None
    optimizer: OptimizerChoice | None


def read(config: Mapping[str, Any], world_size: int) -> Settings:
    """The settings in ``config``. Raises ConfigError, by name, for what cannot be honoured."""
    config = {key: value for key, value in config.items() if not _disabled(key, value)}
    TOP.check("", config)
    zero = config.get("zero_optimization", {})
    ZERO.check("zero_optimization.", zero)
    stage = zero.get("stage", 0)
    if stage not in STAGES:
        raise ConfigError.unknown("zero_optimization.stage", stage, sorted(STAGES))
    micro, steps = _batch(config, world_size)
    clip = float(config.get("gradient_clipping", 0.0))
    if clip < 0:
        raise ConfigError(f"gradient_clipping is {clip}; a norm limit is positive, and 0 means no limit")
    return Settings(stage, micro, steps, clip or None, _optimizer(config.get("optimizer")))


def _disabled(key: str, value: Any) -> bool:
    if key not in PRECISION:
        return False
    if isinstance(value, Mapping) and not value.get("enabled", False):
        return True
    raise ConfigError(
        f"the reference engine does not honour {key!r}: it computes in fp32; remove or disable the section"
    )


def _batch(config: Mapping[str, Any], world_size: int) -> tuple[int, int]:
    """Micro-batch size and accumulation steps, from any two of DeepSpeed's three sizes (or one and a default of 1)."""
    train, micro, steps = (
        _positive(config, key)
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    if train is None and micro is None:
        raise ConfigError("neither train_batch_size nor train_micro_batch_size_per_gpu is given; give one of them")
    if steps is None:
        steps = 1 if train is None or micro is None else max(1, train // (micro * world_size))
    if micro is None:
        micro = max(1, (train or 1) // (steps * world_size))
    expected = micro * steps * world_size
    if train is not None and train != expected:
        raise ConfigError(
            f"train_batch_size is {train}, but train_micro_batch_size_per_gpu x gradient_accumulation_steps x world "
            f"size = {micro} x {steps} x {world_size} = {expected}; leave one of the three out"
        )
    return micro, steps


def _positive(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{key} is {value!r}; expected a positive integer")
    return value


def _optimizer(section: Mapping[str, Any] | None) -> OptimizerChoice | None:
    """DeepSpeed's names for torch's optimizers.

    Its "Adam" decays weights as AdamW does unless ``adam_w_mode`` is false, and so does this one; ``torch_adam`` asks
    DeepSpeed for torch's implementation, which is the only one here.
    """
    if section is None:
        return None
    OPTIMIZER.check("optimizer.", section)
    args = dict(section.get("params", {}))
    name = str(section.get("type", ""))
    match name.lower():
        case "adam":
            decoupled = args.pop("adam_w_mode", True)
            kind: type[torch.optim.Optimizer] = torch.optim.AdamW if decoupled else torch.optim.Adam
            args.pop("torch_adam", None)
        case "adamw":
            kind = torch.optim.AdamW
            args.pop("torch_adam", None)
        case "sgd":
            kind = torch.optim.SGD
        case _:
            raise ConfigError.unknown("optimizer.type", name, ["Adam", "AdamW", "SGD"], "or pass optimizer= a callable")
    return OptimizerChoice(kind, args)


def harmless_keys() -> Iterable[str]:
    """Every key that is accepted because it cannot change a number, with its section."""
    yield from sorted(TOP.harmless)
    yield from sorted(f"zero_optimization.{key}" for key in ZERO.harmless)
