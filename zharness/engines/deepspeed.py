"""Adapt DeepSpeed's ZeRO stages 0 to 3 to the Engine protocol, with DeepSpeed's documented methods.

``capabilities_at`` refuses what DeepSpeed documents as unsupported. Everything else is claimed, so that a law can show
where it fails. DeepSpeed is imported when a factory or ``warm_up`` runs, not with this module.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from zharness.device import compute_device_type
from zharness.engines.deepspeed_access import DeepSpeedTensorAccess
from zharness.engines.deepspeed_build import (
    BACKWARDS_PER_STEP,
    COALESCE,
    initialize,
    json_overrides,
    offload_and_reload,
    require_buildable,
    require_given_rates,
    require_sharding_optimizer,
    run_muon_eagerly,
    save_universal,
    unwrap_and_wrap,
)
from zharness.engines.deepspeed_capabilities import CAPABILITIES, capabilities_of_release
from zharness.engines.deepspeed_experts import build_expert_reader, join_rates, split_experts
from zharness.engines.deepspeed_operators import load_built_adam
from zharness.engines.deepspeed_options import (
    OFFLOAD_STATES,
    UNIVERSAL_CHECKPOINT,
    UNSCALED_BACKWARD,
    UNWRAPPED,
)
from zharness.engines.deepspeed_process import (
    DeepSpeedGlobalState,
    import_deepspeed,
    name_last_place,
    prepare_deepspeed,
)
from zharness.engines.deepspeed_round_robin import RoundRobinLinks
from zharness.engines.deepspeed_sequence import split_sequences
from zharness.engines.deepspeed_tensor_parallel import build_reader, tensor_parallel_section
from zharness.engines.options import merge_options
from zharness.engines.protocol import (
    Absent,
    AccumulationOwner,
    EngineConfig,
    Feature,
    Observations,
    Piece,
    Reduction,
)
from zharness.errors import ConfigError, EngineContractError, EngineRefusal, UnknownStage
from zharness.mesh import EXPERT


def factory(model: nn.Module, config: EngineConfig) -> DeepSpeedEngine:
    """Build a DeepSpeed engine around ``model``. This is a collective.

    Raises ConfigError for a configuration that this adapter does not support, EngineRefusal for one that DeepSpeed
    refuses, and MissingEngine if DeepSpeed is not installed.
    """
    if config.dtype not in CAPABILITIES.dtypes:
        raise ConfigError.unknown_name("dtype of the deepspeed engine", config.dtype, sorted(CAPABILITIES.dtypes))
    if config.stage not in CAPABILITIES.stages:
        raise UnknownStage.unknown_name("stage of the deepspeed engine", config.stage, sorted(CAPABILITIES.stages))
    if config.reduction is Reduction.SUM and config.stage == 3:
        raise ConfigError("got reduction sum at stage 3; DeepSpeed reduces by sum at stages 0-2 only; use mean")
    if reason := CAPABILITIES.explain_axes(config.mesh):
        raise ConfigError(f"DeepSpeed {reason}")
    require_buildable(config.stage, config.options)
    return DeepSpeedEngine(model, config)


def json_config(config: EngineConfig) -> dict[str, Any]:
    """Return DeepSpeed's JSON for ``config``, into which ``config.options`` are merged recursively."""
    engine_owns = config.accumulation_owner is AccumulationOwner.ENGINE
    base: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": config.accumulation_steps if engine_owns else 1,
        # Always written, because since 0.19.3 the default is 1.0, with which DeepSpeed clips.
        "gradient_clipping": 0.0 if config.clip is None else config.clip,
        "zero_allow_untested_optimizer": True,
        # The default of 5e8 elements would allocate a buffer of 2 GB on every rank.
        "zero_optimization": {"stage": config.stage, "reduce_bucket_size": 1_000_000},
    }
    if config.dtype == "bf16":
        base["bf16"] = {"enabled": True}
    if config.reduction is Reduction.SUM:
        base["gradient_allreduce_op"] = "sum"
    if config.stage == 3:
        # The default of 100,000 elements would leave small models unsharded.
        base["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    base |= tensor_parallel_section(config.mesh, config.tp_plan)
    return merge_options(base, json_overrides(config))


class DeepSpeedEngine(DeepSpeedTensorAccess):
    """An engine built by ``deepspeed.initialize`` with a torch.optim optimizer and a LambdaLR schedule.

    DeepSpeed's own "Adam" is not used, because it is AdamW with a weight decay of 0.01.
    """

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        self._config = config
        self._backwards_per_step = int(config.options.get(BACKWARDS_PER_STEP, config.accumulation_steps))
        self._caller_owns_accumulation = (
            config.accumulation_owner is AccumulationOwner.CALLER and self._backwards_per_step > 1
        )
        self._engine_finds_boundaries = bool(config.options.get("managed_gradient_accumulation", True))
        self._coalesce_block = ExitStack()
        self._backward_count = 0
        names = [name for name, _ in model.named_parameters()]
        deepspeed = prepare_deepspeed(next(model.parameters()).device.type)
        model, params = split_experts(model, config)
        self._sequence_parts, mpu = split_sequences(model, config)
        shapes = {name: param.shape for name, param in params.items()}
        self.capabilities = capabilities_of_release(config.stage, deepspeed.__version__)
        self._require_known_options()
        ds_config = json_config(config)
        self._global_state = DeepSpeedGlobalState(autocast=bool(ds_config.get("torch_autocast", {}).get("enabled")))
        self._eager = ExitStack()
        self._eager.enter_context(run_muon_eagerly(config))
        with ExitStack() as undo:
            undo.callback(self._eager.close)
            undo.callback(self._global_state.restore)  # after an error, for the next engine
            try:
                built: tuple[Any, Sequence[Tensor]] = initialize(deepspeed, model, params, config, ds_config, mpu)
            except (AssertionError, ValueError, NotImplementedError) as error:
                raise EngineRefusal(
                    f"DeepSpeed does not accept the configuration ({type(error).__name__}: {error})"
                    f"{name_last_place(error)}: {ds_config}"
                ) from error
            self._engine, self._given_rates = built
            self._global_state.grid = self._engine.mpu
            require_sharding_optimizer(self._engine.optimizer, config.stage)
            self.module: nn.Module = self._engine.module
            links = RoundRobinLinks.build(self._engine.optimizer)
            self._reader = build_reader(self._engine, params, shapes, links, config)
            if EXPERT in config.mesh.axes:
                self._reader = build_expert_reader(self._engine, params, names, links, config)
            self._layout = self._reader.layout()
            undo.pop_all()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._prepare_accumulation()
        if self._sequence_parts is not None:
            return self._sequence_parts.call(self._engine, args, kwargs)
        return self._engine(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self._prepare_accumulation()
        if self._config.options.get(UNSCALED_BACKWARD):
            micro_batches = self._engine.gradient_accumulation_steps()
            self._engine.backward(loss / micro_batches, retain_graph=retain_graph, scale_wrt_gas=False)
        else:
            self._engine.backward(loss, retain_graph=retain_graph)
        self._backward_count += 1

    def scale(self, loss: Tensor) -> Tensor:
        self._prepare_accumulation()
        self._backward_count += 1
        return cast(Tensor, self._engine.scale(loss))

    def step(self) -> None:
        if self._caller_owns_accumulation and self._backward_count == 0:
            raise EngineContractError(
                "got step() before any backward; if the caller owns accumulation, call engine.backward(loss) or "
                "engine.scale(loss).backward(): this adapter cannot count a plain loss.backward()"
            )
        self._coalesce_block.close()
        ends_window = self._engine.is_gradient_accumulation_boundary()
        self._engine.step()
        require_given_rates(self._engine.optimizer, self._given_rates)
        if self._config.options.get(OFFLOAD_STATES) and ends_window:
            offload_and_reload(self._engine, self._config.stage)
        if self._config.options.get(UNWRAPPED) and ends_window:
            unwrap_and_wrap(self._engine)
        if self._backward_count >= self._backwards_per_step:
            self._backward_count = 0

    def zero_grad(self) -> None:
        self._coalesce_block.close()
        if BACKWARDS_PER_STEP not in self._config.options:  # the option counts discarded backwards, too
            self._backward_count = 0
        # Both calls are needed: the optimizer clears the accumulated partitions, and the engine clears ``param.grad``.
        # The BF16_Optimizer of releases before 0.16.5 has no zero_grad.
        if hasattr(self._engine.optimizer, "zero_grad"):
            self._engine.optimizer.zero_grad()
        self._engine.zero_grad()

    def no_sync(self) -> AbstractContextManager[Any]:
        return cast(AbstractContextManager[Any], self._engine.no_sync())

    def full_grads(self) -> dict[str, Tensor]:
        self._coalesce_block.close()
        return self._reader.grads()

    def full_params(self) -> dict[str, Tensor]:
        return self._reader.weights()

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        return self._reader.optimizer_state()

    def grad_norm(self) -> float | None:
        """Return DeepSpeed's get_global_grad_norm(), which is None in fp32 at stage 0 (deepspeedai/DeepSpeed#7255)."""
        norm = self._engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        """Return which rank owned each piece of the fp32 master weights when the engine was built."""
        return self._layout

    def observe(self) -> Observations:
        scale, rates = self._reader.loss_scale(), self._engine.get_lr()
        if any(isinstance(rate, list) for rate in rates):
            raise EngineContractError(f"get_lr() returned {rates}, which has to be a number for each parameter group")
        return Observations(
            loss_scale=Absent("the fp32 optimizer of stage 0 has no loss scaler") if scale is None else scale,
            skipped_steps=int(self._engine.skipped_steps),
            learning_rates=join_rates(self._engine.optimizer.param_groups, [float(rate) for rate in rates]),
            masters=self._reader.masters() or Absent("the optimizer works on copies in the parameters' own dtype"),
        )

    def save(self, path: Path) -> None:
        if self._config.options.get(UNIVERSAL_CHECKPOINT):
            save_universal(self._engine, path)
        else:
            self._engine.save_checkpoint(str(path))

    def load(self, path: Path) -> None:
        loaded_path, _ = self._engine.load_checkpoint(str(path))
        if loaded_path is None:
            # This is no error of the harness: a rank also gets here while another rank crashes in its load.
            raise FileNotFoundError(f"DeepSpeed found no checkpoint in {path} for this stage and world size")

    def full_state_dict(self) -> dict[str, Tensor]:
        return self._reader.state_dict(self.module)

    @contextmanager
    def gathered(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        """Return a context that yields full weights by name, and at its end gives every rank the weights of rank 0.

        At stage 3 the weights are edited with GatheredParameters, and fp32 master weights with
        safe_set_full_fp32_param.
        """
        with self._reader.edit_weights(names) as weights:
            yield weights

    def close(self) -> None:
        with ExitStack() as undo:
            undo.callback(self._eager.close)
            undo.callback(self._global_state.restore)
            self._coalesce_block.close()
            if self._sequence_parts is not None:
                undo.callback(self._sequence_parts.restore_attention)
            self._engine.destroy()

    def _require_known_options(self) -> None:
        """Raise ConfigError for an option or reduction that this release lacks, since it would ignore most of them."""
        reason = self.capabilities.unknown_option(self._config.options)
        if self._config.reduction is Reduction.SUM:
            reason = reason or self.capabilities.refusal(Feature.SUM) or ""
        if reason:
            raise ConfigError(f"got options that this release does not know: {reason}")

    def _prepare_accumulation(self) -> None:
        """Set the accumulation boundary before a forward or backward, or enter the block of the option ``COALESCE``.

        DeepSpeed documents both ways for callers that divide and sum micro-batches themselves.
        """
        if self._config.options.get(COALESCE):
            if not self._engine.inside_no_sync_ctxt:
                self._coalesce_block.enter_context(self._engine.coalesce_grad_reduction())
        elif self._caller_owns_accumulation and self._engine_finds_boundaries:
            self._engine.set_gradient_accumulation_boundary(self._backward_count + 1 >= self._backwards_per_step)


# DeepSpeed and torch import many modules when the first engine is built and makes its first step. These two modules
# import almost all of them: torch.optim imports the first one at the first step, and the second one calls torch.compile
# when it is imported.
_LAZY_MODULES = ("torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer")


def warm_up(device_type: str | None = None) -> None:
    """Import and load in the rank server the modules that DeepSpeed loads lazily, so that no rank has to load them."""
    device_type = device_type or compute_device_type()
    deepspeed = import_deepspeed(device_type)
    for name in _LAZY_MODULES:
        with suppress(ModuleNotFoundError):  # a release without the module does not need it
            importlib.import_module(name)
    if device_type == "cpu":
        load_built_adam(deepspeed)
