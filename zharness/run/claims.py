"""Look up the capabilities that an engine claims. An engine that is given as a factory is built once on a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress

import torch.distributed as dist

from zharness import engines
from zharness.device import rank_device
from zharness.engines import Capabilities, EngineConfig, registry
from zharness.engines.protocol import CallForm
from zharness.errors import UnknownStage, UsageError
from zharness.law_kit.construction import construct_engine, require_gradients, require_initial_weights
from zharness.names import STAGES
from zharness.run.observe_and_judge import raise_as_usage_error
from zharness.workload import model_spec
from zharness.world import RankOutcome, RankServer

NO_RELEASE = "(no release)"  # the version of an engine whose package has none


def get_claims(engine: str, stage: int, open_server: Callable[[], AbstractContextManager[RankServer]]) -> Capabilities:
    """Return the capabilities that ``engine`` claims at ``stage``. Raises UsageError if the engine cannot be built.

    ``open_server`` opens the engine's rank server; it is called only if the registry does not know the capabilities.
    """
    known = engines.capabilities(engine, stage)
    if known is not None:
        return known
    with open_server() as server:
        outcome = server.run(probe_capabilities, engine, stage)
    failure = outcome.cause
    if failure is not None:
        raise make_usage_error(failure, f"engine {engine!r} could not be built at stage {stage}: {failure.describe()}")
    claims: Capabilities = outcome.ranks[0].value
    return claims


def make_usage_error(failure: RankOutcome, fallback_message: str) -> UsageError:
    """Build the UsageError for a failure that happened before any cell ran.

    The error has the message of the failure's exception if that is an exception of zharness, else ``fallback_message``.
    """
    is_zharness_error = failure.exception.startswith("zharness.errors.")
    kind = UnknownStage if failure.exception == f"zharness.errors.{UnknownStage.__name__}" else UsageError
    return kind(failure.cause.partition(": ")[2] if is_zharness_error else fallback_message)


def get_engine_version(engine: str) -> str:
    """Return the release or version of ``engine``, or ``(no release)`` if its package has no version."""
    return registry.resolve_version(engine) or NO_RELEASE


def probe_capabilities(engine: str, stage: int) -> Capabilities:
    """Build the engine once, on one rank and its device, and return the capabilities that the engine claims.

    The engine is not built if the ``capabilities`` of its factory say that it needs a mesh of several ranks.
    Raises UsageError if the factory cannot be imported, raises, changes its model, or returns an object that is not an
    Engine. Also raises UsageError if a gradient has a name or a shape that no parameter of the model has.
    """
    factory = engines.get(engine)
    declared = getattr(factory, "capabilities", None)
    if isinstance(declared, Capabilities) and (declared.whole_mesh or declared.form is CallForm.WHOLE_BATCH):
        return declared
    config = EngineConfig(stage=stage)
    spec, device = model_spec("mlp"), rank_device(dist.get_rank())
    try:
        with raise_as_usage_error(f"factory {engine!r}"):
            built, _ = construct_engine(factory, spec.model(0).to(device), config)
    except UsageError as error:
        is_about_a_mesh = declared is None and "mesh" in str(error)
        hint = "; declare its attribute 'capabilities' if the engine cannot be built without a mesh"
        raise type(error)(f"{error}{hint if is_about_a_mesh else ''}") from error
    claims = built.capabilities
    with raise_as_usage_error(f"full_params() of engine {engine!r}"):
        require_initial_weights(built.full_params(), spec.model(0))
    # Ignore an exception in forward or backward: the cells report it, with every rank's traceback.
    with suppress(Exception):
        batch = spec.micro_batch(0, 0, 0).map_tensors(lambda tensor: tensor.to(device))
        built.backward(spec.loss(built(batch.inputs), batch.target))
    with raise_as_usage_error(f"full_grads() of engine {engine!r}"):
        require_gradients(built.full_grads(), spec.model(0))
    with raise_as_usage_error(f"close() of engine {engine!r}"):
        built.close()
    return claims


def list_known_claims(engine: str, stages: Sequence[int]) -> list[Capabilities]:
    """Return the claims of ``engine`` at each of ``stages``, or at all stages, that are known without building it."""
    found = list[Capabilities]()
    for stage in stages or STAGES:
        with suppress(UsageError):  # a missing engine or checkout is reported when it is to be run
            claims = engines.capabilities(engine, stage)
            found += [claims] if claims is not None and stage in claims.stages else []
    return found
