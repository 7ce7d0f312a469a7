"""The optional methods of an engine: which built-in engines have them, and the error if a required one is missing."""

from __future__ import annotations

from typing import Any, cast

import pytest

from zharness.engines.deepspeed import DeepSpeedEngine
from zharness.engines.protocol import (
    Engine,
    require_full_state_dict,
    require_gathered,
    require_load_universal,
    supports_gathered,
    supports_uneven,
)
from zharness.engines.reference import ReferenceEngine
from zharness.engines.tensor_access import require_read_out, require_shard_access, require_write_in
from zharness.engines.torch_engine import TorchEngine
from zharness.errors import EngineContractError


class Wrapper:
    """Forwards every method to another engine, as engines around an engine do."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def unbuilt(engine_class: type) -> Engine:
    """An instance of ``engine_class`` whose constructor did not run: its methods exist and cannot be called."""
    return cast(Engine, object.__new__(engine_class))


@pytest.mark.parametrize(
    ("engine_class", "uneven", "gathered"),
    [(ReferenceEngine, True, True), (DeepSpeedEngine, False, True), (TorchEngine, False, False)],
)
def test_optional_methods_are_found_also_behind_a_wrapper(engine_class: type, uneven: bool, gathered: bool) -> None:
    for engine in (unbuilt(engine_class), cast(Engine, Wrapper(unbuilt(engine_class)))):
        assert (supports_uneven(engine), supports_gathered(engine)) == (uneven, gathered)
        assert require_full_state_dict(engine) is engine


@pytest.mark.parametrize(
    ("require", "message"),
    [
        (require_gathered, r"TorchEngine claims Feature\.EDITS but has no method gathered\(\)"),
        (require_load_universal, r"claims Feature\.UNIVERSAL_CHECKPOINT but has no method load_universal\(\)"),
    ],
)
def test_a_claimed_feature_without_its_method_breaks_the_contract(require: Any, message: str) -> None:
    with pytest.raises(EngineContractError, match=message):
        require(unbuilt(TorchEngine))


class WithoutMethods:
    """Has none of the optional methods."""


@pytest.mark.parametrize(
    ("require", "feature", "method"),
    [
        (require_read_out, "READ_OUT", "read_grad"),
        (require_write_in, "WRITE_IN", "write_grad"),
        (require_shard_access, "SHARD_ACCESS", "read_grad_shard"),
    ],
)
def test_engines_that_read_and_replace_tensors_have_all_methods(require: Any, feature: str, method: str) -> None:
    for engine_class in (ReferenceEngine, DeepSpeedEngine, TorchEngine):
        engine = unbuilt(engine_class)
        assert require(engine) is engine
    with pytest.raises(EngineContractError, match=rf"claims Feature\.{feature} but has no method {method}\(\)"):
        require(cast(Engine, WithoutMethods()))
