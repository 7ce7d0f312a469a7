"""Translate the options of a DeepSpeed JSON into those of torch's engines, and name the keys that have no meaning."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zharness.errors import ConfigError, find_close_names
from zharness.reference.deepspeed_json.schema import Section
from zharness.reference.deepspeed_json.sections import TOP_LEVEL

ELEMENT_MIB = 4 / 2**20  # an fp32 element; DeepSpeed counts buckets in elements, DDP in MiB
AUTOCAST_KEYS = ("enabled", "dtype")
REDUCE_DTYPE = "communication_data_type"
ZERO = "zero_optimization"
OFFLOADS = ("offload_optimizer", "offload_param")
BUCKET_SIZE = f"{ZERO}.reduce_bucket_size"
# The keys of a translated section that its translation reads.
READ_KEYS: Mapping[str, tuple[str, ...]] = {
    "torch_autocast": AUTOCAST_KEYS,
    **{f"{ZERO}.{key}": ("device",) for key in OFFLOADS},
}
SECTION_EXAMPLES: Mapping[str, str] = {
    "torch_autocast": '{"enabled": true}',
    **{f"{ZERO}.{key}": '{"device": "cpu"}' for key in OFFLOADS},
}
# The only values of these keys that can be translated for torch's engines: any other value changes every step.
REQUIRED_VALUES: Mapping[str, Any] = {"amp.enabled": False, "gradient_allreduce_op": "mean"}
FORCES_CPU_ADAM = "zero_force_ds_cpu_optimizer"


@dataclass(frozen=True)
class TranslatedOptions:
    """The options of an engine, the keys of the file that have no meaning there, and a sentence for each change.

    ``sets_reduce_dtype`` says whether ``communication_data_type`` of the file has an effect.
    """

    options: Mapping[str, Any]
    meaningless_keys: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    sets_reduce_dtype: bool = True


def translate_options(engine: str, name: str, options: Mapping[str, Any]) -> TranslatedOptions:
    """Return a DeepSpeed JSON's options translated for ``engine``; a user's engine gets the options untranslated.

    Raises ConfigError, with the ``name`` of the configuration, for a key that DeepSpeed does not have and for a value
    that cannot be translated, if the engine does not read the file itself.
    """
    base = engine.partition("==")[0]
    if base == "deepspeed":
        return keep_torch_optimizer(options)
    if base not in TRANSLATIONS:
        return TranslatedOptions(options)
    require_known_keys(name, options, TOP_LEVEL)
    require_translatable_values(base, name, options)
    found = {path: find_value(options, path) for path in TRANSLATIONS[base]}
    meanings = {path: TRANSLATIONS[base][path](value) for path, value in found.items() if value is not None}
    used = {path: meaning for path, meaning in meanings.items() if meaning}
    read = {f"{path}.{key}" for path in used for key in READ_KEYS.get(path, ())} | used.keys()
    return TranslatedOptions(
        {key: value for meaning in used.values() for key, value in meaning.items()},
        tuple(path for path in list_paths(options) if path not in read),
        tuple(f"{path} means {dict(meaning)} on {base}" for path, meaning in used.items()),
        sets_reduce_dtype=REDUCE_DTYPE in used,
    )


def require_translatable_values(engine: str, name: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value of the wrong type, or one that changes every step and ``engine`` cannot do."""
    for path, required in REQUIRED_VALUES.items():
        value = find_value(options, path)
        if value not in (None, required):
            raise ConfigError(
                f"config {name!r}: {path} is {json.dumps(value, default=str)}, which {engine} cannot do and which "
                f"changes numbers; expected {json.dumps(required)}"
            )
    for path in TRANSLATIONS[engine]:
        value = find_value(options, path)
        if path == BUCKET_SIZE:
            valid = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
            expected = "a number of elements, as in 5e8 without quotes"
        elif path in READ_KEYS:
            valid, expected = isinstance(value, Mapping), f"a JSON object, as in {SECTION_EXAMPLES[path]}"
        else:
            continue
        if value is not None and not valid:
            raise ConfigError(f"config {name!r}: {path} is {json.dumps(value, default=str)}; expected {expected}")


def keep_torch_optimizer(options: Mapping[str, Any]) -> TranslatedOptions:
    """Allow torch's optimizer on DeepSpeed where the file offloads the optimizer's state.

    From the section "optimizer" DeepSpeed would build DeepSpeedCPUAdam, which rounds differently from the torch.optim
    optimizer that the laws replay.
    """
    device = find_value(options, f"{ZERO}.offload_optimizer.device")
    if device in (None, "none") or options.get(FORCES_CPU_ADAM) is False:
        return TranslatedOptions(options)
    notice = (
        f"{ZERO}.offload_optimizer: the file's optimizer is torch's, on the CPU, so {FORCES_CPU_ADAM} is set to false; "
        "DeepSpeedCPUAdam, which DeepSpeed would take, differs from it by units in the last place"
    )
    return TranslatedOptions({**options, FORCES_CPU_ADAM: False}, notices=(notice,))


def find_value(options: Mapping[str, Any], path: str) -> Any:
    """Return the value at ``path``, keys joined by dots, or None."""
    value: Any = options
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def list_paths(options: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the path of every value that is not a section."""
    for key, value in options.items():
        if isinstance(value, Mapping) and value:
            yield from list_paths(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def require_known_keys(name: str, options: Mapping[str, Any], section: Section, prefix: str = "") -> None:
    """Raise ConfigError for a key that the JSON of DeepSpeed does not have, with the closest one that it has."""
    known = {*section.supported_keys, *section.ignored_keys, *section.fixed_keys, *section.disabled_sections}
    for key, value in options.items():
        if key not in known:
            near = find_close_names(key, sorted(known))
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else f"; known: {', '.join(sorted(known))}"
            raise ConfigError(f"config {name!r}: DeepSpeed's JSON has no key {prefix + key!r}{hint}")
        rule = section.supported_keys.get(key)
        if rule is not None and isinstance(rule.parse, Section) and isinstance(value, Mapping):
            require_known_keys(name, value, rule.parse, f"{prefix}{key}.")


def translate_autocast(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the option ``torch_autocast``, without the keys that torch's engines do not have."""
    return {"torch_autocast": {key: section[key] for key in AUTOCAST_KEYS if key in section}}


def translate_bucket_size(elements: float) -> Mapping[str, Any]:
    """Return DDP's size of a bucket, in MiB, for a number of fp32 elements."""
    return {"bucket_cap_mb": max(elements * ELEMENT_MIB, ELEMENT_MIB)}


def translate_offload(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return FSDP's offload for a section that offloads parameters or optimizer state to the CPU."""
    return {"cpu_offload": True} if section.get("device") == "cpu" else {}


def translate_reduce_dtype(dtype: str) -> Mapping[str, Any]:
    """Return FSDP's dtype of reductions."""
    short = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
    return {"reduce_dtype": short.get(dtype, dtype)}


_DDP: Mapping[str, Callable[[Any], Mapping[str, Any]]] = {
    "torch_autocast": translate_autocast,
    BUCKET_SIZE: translate_bucket_size,
}
_FSDP: Mapping[str, Callable[[Any], Mapping[str, Any]]] = {
    "torch_autocast": translate_autocast,
    REDUCE_DTYPE: translate_reduce_dtype,
    **{f"{ZERO}.{key}": translate_offload for key in OFFLOADS},
}
TRANSLATIONS: Mapping[str, Mapping[str, Callable[[Any], Mapping[str, Any]]]] = {
    "ddp": _DDP,
    "zero1": _DDP,
    "fsdp1": _FSDP,
    "fsdp2": _FSDP,
}
