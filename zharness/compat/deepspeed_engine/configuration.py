"""Translate DeepSpeed's JSON into the reference engine's, where the two differ in a default or in who counts steps."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zharness.compat.deepspeed_engine.refusals import require

# DeepSpeed clips gradients at this norm if its JSON does not say otherwise; the reference engine does not clip.
DEFAULT_GRADIENT_CLIPPING = 1.0
# Keys of zero_optimization that DeepSpeed accepts without their prefix stage3_ too.
STAGE3_NAMES = {"prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance"}
TAG_VALIDATIONS = ("WARN", "IGNORE", "FAIL")  # the first is DeepSpeed's default
DEFAULT_HYSTERESIS = 2  # of the dynamic loss scale; the reference engine's default is GradScaler's, 1


class DeepSpeedConfigError(Exception):
    """The exception of DeepSpeed for a wrong value in its JSON, raised here for ``tag_validation`` only."""


class ZeRORuntimeException(Exception):
    """The exception of DeepSpeed's ZeRO optimizers, which this package never raises."""


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Return whether the release of torch, as major.minor, is within these limits."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    release = (major, minor)
    limits = [tuple(int(part) for part in str(limit).split(".")) for limit in (min_version or 0.0, max_version or 99.0)]
    return limits[0] <= release <= limits[1]


@dataclass(frozen=True)
class EngineConfig:
    """The configuration of one engine: the reference engine's JSON, and what this package does itself.

    If ``is_managed`` is False, every call of step is a boundary, and the mean is still taken over the number of
    micro-batches in the JSON. ``leaf_modules`` is the section ``leaf_module``: lists of ``classes``, ``names`` and
    ``name_suffixes``. ``tag_validation`` is FAIL, WARN or IGNORE.
    """

    reference_json: Mapping[str, Any]
    is_managed: bool
    half_dtype: torch.dtype | None
    leaf_modules: Mapping[str, Sequence[str]]
    tag_validation: str

    @property
    def gathers_on_save(self) -> bool:
        """Whether ``save_16bit_model`` saves at stage 3."""
        zero = self.reference_json.get("zero_optimization", {})
        return any(zero.get(f"stage3_gather_{kind}_weights_on_model_save") for kind in ("16bit", "fp16"))

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return int(self.reference_json.get("zero_optimization", {}).get("stage", 0))


def read_config(config: Any) -> dict[str, Any]:
    """Return a copy of DeepSpeed's JSON, given as a mapping or as the path of a file."""
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    loaded: dict[str, Any] = json.loads(Path(config).read_text(encoding="utf-8"))
    return loaded


def half_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype to which DeepSpeed casts a model: that of the section bf16 or fp16 that is enabled, or None."""
    for section, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        if config.get(section, {}).get("enabled", False):
            return dtype
    return None


def translate_config(config: Any) -> EngineConfig:
    """Translate DeepSpeed's JSON.

    Raises AssertionError, as DeepSpeed does, for a combination that it refuses, and DeepSpeedConfigError for an unknown
    ``tag_validation``.
    """
    json_config = read_config(config)
    if "bfloat16" in json_config:
        json_config["bf16"] = json_config.pop("bfloat16")
    is_managed = bool(json_config.pop("managed_gradient_accumulation", True))
    zero = json_config.setdefault("zero_optimization", {})
    for name in STAGE3_NAMES & zero.keys():
        zero[f"stage3_{name}"] = zero.pop(name)
    zero.pop("elastic_checkpoint", None)  # every checkpoint of the reference engine loads at any world size
    leaf_modules = {
        key: [value] if isinstance(value, str) else list(value) for key, value in zero.pop("leaf_module", {}).items()
    }
    if not is_managed:
        require(
            not zero.get("overlap_comm") or zero.get("stage") == 2,
            "managed_gradient_accumulation=False supports overlap_comm only with ZeRO stage 2",
        )
    if isinstance(json_config.get("optimizer"), dict):
        json_config["optimizer"].pop("torch_adam", None)  # a choice between DeepSpeed's implementations
    json_config.setdefault("gradient_clipping", DEFAULT_GRADIENT_CLIPPING)
    if json_config.get("fp16", {}).get("enabled"):
        json_config["fp16"].setdefault("hysteresis", DEFAULT_HYSTERESIS)
    tag_validation = str(json_config.get("checkpoint", {}).get("tag_validation", TAG_VALIDATIONS[0])).upper()
    if tag_validation not in TAG_VALIDATIONS:
        raise DeepSpeedConfigError(f"checkpoint.tag_validation is {tag_validation!r}; allowed are {TAG_VALIDATIONS}")
    return EngineConfig(json_config, is_managed, half_dtype(json_config), leaf_modules, tag_validation)
