"""Define the context in which a rank runs a law, which builds engines, returns micro-batches and records tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines.options import merge_options
from zharness.engines.protocol import (
    Absent,
    AccumulationOwner,
    Capabilities,
    Engine,
    EngineConfig,
    EngineFactory,
    Feature,
    Observations,
    Piece,
)
from zharness.law_kit.backward_calls import call_backward
from zharness.law_kit.construction import InitialValues, construct_engine, require_cpu_tensor, require_mapping
from zharness.law_kit.default_training import DEFAULT_TRAINING, TrainingConfig
from zharness.law_kit.dtypes import DTYPES
from zharness.law_kit.setting import DEFAULT_SETTING, Setting
from zharness.parity.contamination import ProcessConditions, read_process_conditions
from zharness.parity.snapshot import EvidenceWriter
from zharness.workload import Batch, ModelSpec
from zharness.workload.models import SAMPLES


def scalar(value: float) -> Tensor:
    """Return ``value``, which is a count or a flag, as a float64 tensor that can be recorded."""
    return torch.tensor(value, dtype=torch.float64)


class RankContext:
    """The context in which a law runs on one rank.

    ``spec`` is the model with its data and loss. ``capabilities`` are the engine's claims, by which the cell was
    selected. ``records`` writes this rank's evidence. ``training`` is the training that the user configured.
    ``setting`` contains the cell's accumulation window and the way in which the cell calls backward.
    """

    def __init__(
        self,
        spec: ModelSpec,
        seed: int,
        rank: int,
        world_size: int,
        config: EngineConfig,
        factory: EngineFactory,
        capabilities: Capabilities,
        variant: str,
        device: torch.device,
        records: EvidenceWriter,
        training: TrainingConfig = DEFAULT_TRAINING,
        setting: Setting = DEFAULT_SETTING,
    ) -> None:
        self.spec = spec
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.config = replace(
            config,
            micro_batch_size=SAMPLES,
            accumulation_steps=setting.accumulation_steps,
            accumulation_owner=setting.owner,
        )
        self.capabilities = capabilities
        self.variant = variant
        self.device = device
        self.training = training
        self.setting = setting
        self._factory = factory
        self._records = records
        self._layout: Mapping[str, tuple[Piece, ...]] = {}
        self._contamination = ProcessConditions({}, ())

    @property
    def data_size(self) -> int:
        """The number of data coordinates, which is the number of different micro-batches in one step."""
        return self.config.mesh.data_size(self.world_size)

    @property
    def data_coordinate(self) -> int:
        """The number of the micro-batch that this rank gets; ranks that differ only along tp, cp or pp share one."""
        return self.config.mesh.data_coordinate(self.rank, self.world_size)

    def build_engine(self, **overrides: Any) -> Engine:
        """Build a new engine around the model with its initial weights. ``overrides`` replace fields of EngineConfig.

        The override ``options`` is merged into the options of the cell. Raise EngineContractError if the factory
        returns an object that is not an Engine, or if it changes the model.
        """
        return self.build_engine_around(self.spec.model(self.seed), **overrides)

    def build_engine_around(self, model: nn.Module, **overrides: Any) -> Engine:
        """Build a new engine around ``model``, which is moved to this rank's device unless it is on the meta device."""
        return self._construct(model, InitialValues.KEPT, overrides)

    def build_engine_from_rank_0(self, model: nn.Module, **overrides: Any) -> Engine:
        """Build a new engine around ``model``, whose weights and buffers may differ from those of rank 0's model."""
        return self._construct(model, InitialValues.FROM_RANK_0, overrides)

    def _construct(self, model: nn.Module, values: InitialValues, overrides: dict[str, Any]) -> Engine:
        """Build a new engine around ``model``, and keep its layout and the conditions of the process for ``finish``.

        Both replace those of an engine that the law built before, so the evidence describes the last engine only. Notes
        of a record use the conditions, and no verdict depends on them. The layout names the owner of a wrong element.
        If a law builds engines with different layouts, the named owner is that of the last layout, and the law's judge
        must not read the layout (``judge_meshes`` in zharness/laws/mesh_state.py removes it).
        """
        if not any(parameter.is_meta for parameter in model.parameters()):
            model = model.to(self.device)
        options = merge_options(self.config.options, overrides.pop("options", {}))
        engine, self._layout = construct_engine(
            self._factory, model, replace(self.config, options=options, **overrides), values
        )
        # Read the conditions while the engine is open: a closed engine may have undone its changes to the process.
        self._contamination = read_process_conditions()
        return engine

    def batch(self, step: int) -> Batch:
        """Return this rank's micro-batch number ``step``, on its device and in the cell's dtype."""
        return self.spec.micro_batch(self.seed, self.data_coordinate, step).to(DTYPES[self.config.dtype], self.device)

    def loss(self, call: Callable[..., Any] | Engine | nn.Module, step: int, label: str = "loss") -> Tensor:
        """Run the forward of this rank's micro-batch, record the loss under ``label``, and return the loss."""
        batch = self.batch(step)
        loss = self.spec.loss(batch.feed(call), batch.target)
        self.record(label, {"loss": loss}, step)
        return loss

    def train(self, engine: Engine, step: int, label: str = "loss") -> None:
        """Run forward and backward of micro-batch ``step``, and record the loss under ``label``."""
        self.backward(engine, self.loss(engine, step, label), step)

    def backward(self, engine: Engine, loss: Tensor, step: int, factor: float = 1.0) -> None:
        """Run backward on ``loss``, the loss of micro-batch ``step``, in the way that the cell calls backward.

        In a cell with an accumulation window, the micro-batch is repeated until the window is full, so that the mean
        gradient of the accumulation window is the gradient of the micro-batch. Each loss is multiplied by ``factor``
        first.
        """
        for remaining in range(self.setting.accumulation_steps - 1, -1, -1):
            self._run_backward(engine, loss if factor == 1.0 else loss * factor)
            if remaining:
                if self.setting.owner is AccumulationOwner.ENGINE:
                    engine.step()
                batch = self.batch(step)
                loss = self.spec.loss(batch.feed(engine), batch.target)

    def _run_backward(self, engine: Engine, loss: Tensor) -> None:
        """Run backward by the call that the cell's setting names; divide the loss first if the caller accumulates."""
        if self.setting.loss_divisor > 1:
            loss = loss / self.setting.loss_divisor
        call_backward(engine, loss, self.setting.backward_call)

    def record(self, label: str, tensors: Mapping[str, Tensor], step: int = 0) -> None:
        """Record a copy of ``tensors`` under ``label`` and ``step``.

        Raise HarnessFault if tensors are already recorded under this label and step, because a judge would see only the
        first.
        """
        checked = require_mapping(label, tensors)
        self._records.write_snapshot(
            label, step, {name: require_cpu_tensor(label, name, tensor) for name, tensor in checked.items()}
        )

    def record_weights(self, engine: Engine, step: int, suffix: str = "") -> Observations:
        """Record the weights of the model under ``params``, and the master weights under ``masters``.

        Return the engine's observations, which contain the master weights, so that the caller does not gather them
        again.
        """
        weights = require_mapping("full_params", engine.full_params())
        observations = engine.observe()
        masters_or_absent = observations.masters
        masters = (
            {} if isinstance(masters_or_absent, Absent) else require_mapping("observe().masters", masters_or_absent)
        )
        self.record(f"params{suffix}", weights, step)
        on_cpu = {name: require_cpu_tensor("observe().masters", name, tensor) for name, tensor in masters.items()}
        self._records.write_snapshot(f"masters{suffix}", step, on_cpu, base_label=f"params{suffix}")
        return observations

    def record_training_state(self, engine: Engine, step: int, suffix: str = "") -> Observations:
        """Record weights, master weights and optimizer state under labels that end in ``suffix``.

        Return the engine's observations.
        """
        observations = self.record_weights(engine, step, suffix)
        self.record_optimizer_state(f"state{suffix}", engine, step)
        return observations

    def record_optimizer_state(self, label: str, engine: Engine, step: int) -> None:
        """Record the engine's optimizer state as a flat dictionary with keys ``parameter/key``."""
        self.record(label, flatten_optimizer_state(engine.full_optimizer_state()), step)

    def accumulation_owners(self) -> tuple[AccumulationOwner, ...]:
        """Return who may own the accumulation according to the engine's claims: the engine, its caller, or both."""
        features = {
            AccumulationOwner.CALLER: Feature.CALLER_ACCUMULATION,
            AccumulationOwner.ENGINE: Feature.ENGINE_ACCUMULATION,
        }
        return tuple(owner for owner, feature in features.items() if self.capabilities.refusal(feature) is None)

    def finish(self, nondeterministic: Sequence[str] = ()) -> None:
        """Write the last engine's layout and the process conditions to this rank's evidence file, and close the file.

        ``nondeterministic`` are the operators that ran without a deterministic algorithm.
        """
        self._records.finish(self._layout, replace(self._contamination, nondeterministic=tuple(nondeterministic)))


def flatten_optimizer_state(state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Convert an engine's optimizer state into a flat dictionary with keys ``parameter/key``."""
    return {
        f"{name}/{key}": value
        for name, entries in require_mapping("full_optimizer_state", state).items()
        for key, value in require_mapping(f"full_optimizer_state()[{name!r}]", entries).items()
    }
