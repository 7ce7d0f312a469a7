"""Engines behind one protocol: the baseline, the reference, torch's own, DeepSpeed, and anyone's by its factory."""

from zharness.engines.protocol import (
    Absent,
    AccumulationOwner,
    Capabilities,
    Engine,
    EngineConfig,
    EngineFactory,
    Feature,
    GroupSpec,
    Observations,
    OptimizerSpec,
    Piece,
    Reduction,
    Resources,
    Traffic,
)
from zharness.engines.registry import EngineInfo, capabilities, get, info, registered_engines, require

__all__ = [
    "Absent",
    "AccumulationOwner",
    "Capabilities",
    "Engine",
    "EngineConfig",
    "EngineFactory",
    "EngineInfo",
    "Feature",
    "GroupSpec",
    "Observations",
    "OptimizerSpec",
    "Piece",
    "Reduction",
    "Resources",
    "Traffic",
    "capabilities",
    "get",
    "info",
    "registered_engines",
    "require",
]
