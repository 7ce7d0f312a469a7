"""Define mutants that are wrong across the stages of a pipeline: in tied weights, norms, clipping or checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig, deepspeed_pp
from zharness.mesh import PIPELINE
from zharness.mutants import seams_engines
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.pipeline import PipelineWrapper, on_pipeline
from zharness.parity import Part

TIED = "blocks.0.linear.weight"


def on_norm(part: Part = Part.REDUCTION, model: str = "chain", parameter: str = "norm", cause: str = "") -> Target:
    """Return a target of the law pipeline.norm."""
    return on_pipeline(part, model, parameter, law="pipeline.norm", cause=cause)


def on_resume(part: Part = Part.GATHER, parameter: str = "*", variant: str = "", world_size: int = 2) -> Target:
    """Return a target of the law pipeline.resume."""
    return on_pipeline(part, parameter=parameter, law="pipeline.resume", variant=variant, world_size=world_size)


def square(param: nn.Parameter) -> Tensor:
    """Return the sum of squares of the gradient of a parameter, in float64."""
    assert param.grad is not None
    return param.grad.double().square().sum()


class ReportsAnotherNorm(PipelineWrapper):
    """The base class of mutants that clip correctly but report ``wrong_norm``, which they compute before the step."""

    reported = float("nan")

    def step(self) -> None:
        self.reported = self.wrong_norm()
        self.base.step()

    def grad_norm(self) -> float:
        return self.reported

    def wrong_norm(self) -> float:
        """Return the norm to report."""
        raise NotImplementedError

    def squares(self) -> Tensor:
        """Return the sum of squares of the gradients of this rank's stages."""
        return torch.stack([square(param) for param in seams_engines.stage_params(self.base).values()]).sum()


@mutant(FaultKind.CLIPPING, on_norm(cause="it is the norm of what rank 0 has (pp 0)"), origin=Origin.MESH)
class NormOfOneStage(ReportsAnotherNorm):
    """Reports on each rank the norm of the gradients of its own stages instead of the global norm."""

    def wrong_norm(self) -> float:
        return float(self.squares().sqrt())


@mutant(
    FaultKind.CLIPPING,
    on_norm(cause="it is the mean of the ranks' norms of what each has"),
    origin=Origin.MESH,
    imitates="https://github.com/deepspeedai/DeepSpeed/issues/8475",
)
class AveragesNormsOfStages(ReportsAnotherNorm):
    """Reports the mean of the stages' norms instead of the global norm."""

    def wrong_norm(self) -> float:
        norm = self.squares().sqrt()
        dist.all_reduce(norm)
        return float(norm / dist.get_world_size())


@mutant(
    FaultKind.CLIPPING,
    on_norm(model="tied_chain", cause="it counts what 2 ranks of pp have in common 2 times"),
    origin=Origin.MESH,
)
class NormCountsATiedWeightTwice(ReportsAnotherNorm):
    """Sums the squares of all stages for the norm, so that a weight tied over two stages counts twice."""

    def wrong_norm(self) -> float:
        total = self.squares()
        dist.all_reduce(total)
        return float(total.sqrt())


@mutant(
    FaultKind.CLIPPING,
    on_norm(Part.OPTIMIZER, parameter="*"),
    on_pipeline(Part.OPTIMIZER, parameter="blocks.0.*", law="pipeline.not_finite", variant="last_clipped"),
    origin=Origin.MESH,
)
class ClipsEachStageByItsOwnNorm(ReportsAnotherNorm):
    """Clips each stage by the norm of its own gradients, but reports the global norm."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        self.limit = config.clip
        super().__init__(model, replace(config, clip=None))

    def wrong_norm(self) -> float:
        if self.limit is not None:
            torch.nn.utils.clip_grad_norm_(seams_engines.stage_params(self.base).values(), self.limit)
        return self.total

    def train_batch(self, *args: object) -> tuple[Tensor, ...]:
        losses: tuple[Tensor, ...] = self.base.train_batch(*args)
        total = self.squares()
        dist.all_reduce(total)
        self.total = float(total.sqrt())
        return losses


@mutant(
    FaultKind.CLIPPING,
    on_pipeline(Part.OPTIMIZER, law="pipeline.clip", variant="1f1b"),
    origin=Origin.MESH,
)
class ClipsByTheNormOfTheFirstStage(ClipsEachStageByItsOwnNorm):
    """Clips all stages by the norm of the first stage, as DeepSpeed does, and reports no norm."""

    def step(self) -> None:
        limit, params = self.limit, seams_engines.stage_params(self.base).values()
        if limit is not None:
            norm = self.squares().sqrt()
            dist.broadcast(norm, src=0)
            torch.nn.utils.clip_grads_with_norm_(params, limit, norm)
        self.base.step()

    def grad_norm(self) -> None:  # type: ignore[override]
        """Return no norm."""


@mutant(FaultKind.CONTRIBUTION, on_pipeline(model="tied_chain", parameter=TIED), origin=Origin.MESH)
class LeavesGradientsOfATiedWeightApart(PipelineWrapper):
    """Does not sum a tied weight's gradients over its two stages: each stage steps with its own gradient."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        seams_engines.replace_end_of_batch(self.base, lambda: None)


@mutant(
    FaultKind.CONTRIBUTION,
    on_pipeline(model="tied_chain", parameter=TIED, variant="1f1b"),
    origin=Origin.MESH,
)
class CountsTheGradientOfATiedWeightTwice(PipelineWrapper):
    """Doubles a tied weight's gradient after the gradient was summed over the weight's two stages."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        seams_engines.wrap_end_of_batch(self.base, self.twice)

    def twice(self, original: Callable[[], None]) -> Callable[[], None]:
        """Return a function that doubles the gradient of the tied weight after ``original``."""

        def end() -> None:
            original()
            param = seams_engines.stage_params(self.base).get(TIED)
            if param is not None and param.grad is not None:
                param.grad *= 2

        return end


@mutant(
    FaultKind.CONTRIBUTION,
    on_pipeline(model="tied_chain", parameter=TIED, law="pipeline.windows", variant="accumulated_singles"),
    origin=Origin.MESH,
)
class SumsATiedGradientAgain(PipelineWrapper):
    """Sums a tied weight's gradient of an earlier batch over the stages again, because the last stage keeps it."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        if dist.get_rank():
            seams_engines.keep_tied_gradients(self.base)


@mutant(
    FaultKind.CONTRIBUTION, on_pipeline(model="tied_ends", parameter="ends.bias", variant="1f1b"), origin=Origin.MESH
)
class SumsOneWeightOfATiedLayer(PipelineWrapper):
    """Sums the gradient of only the first weight of a layer that two stages call over these stages, not of its bias."""

    wraps = "deepspeed_pp"
    capabilities = deepspeed_pp.CAPABILITIES

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        seams_engines.sum_one_weight_of_tied_layers(self.base)


@mutant(FaultKind.STATE, on_resume(), origin=Origin.MESH)
class LoadsTheFirstStageAlone(PipelineWrapper):
    """Does not load the weights of the second rank's stage."""

    def load(self, path: Path) -> None:
        params = seams_engines.stage_params(self.base)
        before = {name: param.detach().clone() for name, param in params.items()}
        self.base.load(path)
        with torch.no_grad():
            for name, param in params.items() if dist.get_rank() else ():
                param.copy_(before[name])


@mutant(FaultKind.STATE, on_resume(parameter="*/momentum_buffer"), origin=Origin.MESH)
class ForgetsTheStateOfTheLastStage(PipelineWrapper):
    """Sets the last stage's optimizer state to zeros after a load."""

    def load(self, path: Path) -> None:
        self.base.load(path)
        for state in self.optimizer.state.values() if dist.get_rank() else ():
            for value in state.values():
                value.zero_()


@mutant(FaultKind.STATE, on_resume(Part.OPTIMIZER, "*/momentum_buffer"), origin=Origin.MESH)
class SavingZeroesTheStateOfTheLastStage(PipelineWrapper):
    """Sets the last stage's optimizer state to zeros before a save, so that the saving engine loses the state too."""

    def save(self, path: Path) -> None:
        for state in self.optimizer.state.values() if dist.get_rank() else ():
            for value in state.values():
                value.zero_()
        self.base.save(path)


@mutant(FaultKind.STATE, on_resume(parameter="*/momentum_buffer", variant="new_engine"), origin=Origin.MESH)
class LoadsNoStateBeforeTheFirstStep(PipelineWrapper):
    """Sets the momentum to zeros after a load if the engine has made no step."""

    def load(self, path: Path) -> None:
        had_state = bool(self.optimizer.state)
        self.base.load(path)
        for state in () if had_state else self.optimizer.state.values():
            for value in state.values():
                value.zero_()


@mutant(FaultKind.STATE, on_resume(Part.OPTIMIZER, "blocks.*", "unstepped"), origin=Origin.MESH)
class LoadsNoEmptyState(PipelineWrapper):
    """Keeps the last stage's momentum when the engine loads a checkpoint from before the first step."""

    wraps = "deepspeed_pp"

    def load(self, path: Path) -> None:
        before = dict(seams_engines.deepspeed_optimizer(self.base).state)
        self.base.load(path)
        loaded = seams_engines.deepspeed_optimizer(self.base).state
        if dist.get_rank() and not loaded:
            loaded.update(before)


@mutant(FaultKind.STATE, on_resume(Part.OPTIMIZER, "blocks.0.*", "unstepped"), origin=Origin.MESH)
class SavingMakesAStepOnZeros(PipelineWrapper):
    """Gives the first stage, at a save before the first step, the momentum of a step with gradients of zeros."""

    wraps = "deepspeed_pp"

    def save(self, path: Path) -> None:
        self.base.save(path)
        optimizer = seams_engines.deepspeed_optimizer(self.base)
        for group in () if dist.get_rank() or optimizer.state else optimizer.param_groups:
            for param in group["params"]:
                optimizer.state[param]["momentum_buffer"] = group["weight_decay"] * param.detach()


@mutant(FaultKind.STATE, on_resume(variant="other_stages"), origin=Origin.MESH)
class LoadsStagesOfTheirOwnRankAlone(PipelineWrapper):
    """Loads on each rank only the weights that this rank had when the checkpoint was saved."""

    def save(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / f"stages of rank {dist.get_rank()}").write_text("\n".join(seams_engines.stage_params(self.base)))
        self.base.save(path)

    def load(self, path: Path) -> None:
        params = seams_engines.stage_params(self.base)
        saved = (path / f"stages of rank {dist.get_rank()}").read_text().splitlines()
        before = {name: param.detach().clone() for name, param in params.items() if name not in saved}
        self.base.load(path)
        with torch.no_grad():
            for name, weight in before.items():
                params[name].copy_(weight)


@mutant(FaultKind.STATE, on_resume(Part.OPTIMIZER), origin=Origin.MESH)
class LoadsNoRate(PipelineWrapper):
    """Does not restore the step count of the learning-rate schedule at load."""

    def load(self, path: Path) -> None:
        schedule = seams_engines.stage_schedule(self.base)
        before = schedule.last_epoch
        self.base.load(path)
        schedule.last_epoch = before


@mutant(
    FaultKind.STATE,
    on_resume(parameter="*/momentum_buffer", variant="single", world_size=4),
    origin=Origin.MESH,
)
class LoadsTheStateOfOneReplica(PipelineWrapper):
    """Sets the momentum to zeros on the second rank of each stage after a load."""

    def load(self, path: Path) -> None:
        self.base.load(path)
        for state in self.optimizer.state.values() if dist.get_rank() % 2 else ():
            for value in state.values():
                value.zero_()


def on_other_stages(variant: str, mesh: str = "pp2", parameter: str = "*") -> Target:
    """Return a target of the law pipeline.other_mesh on four ranks."""
    target = on_pipeline(Part.GATHER, law="pipeline.other_mesh", variant=variant, parameter=parameter, world_size=4)
    return replace(target, mesh=mesh)


def on_full_state_dict(part: Part | None = Part.GATHER, cause: str = "") -> Target:
    """Return a target of the law pipeline.full_state_dict."""
    return on_pipeline(part, law="pipeline.full_state_dict", variant="", cause=cause)


@mutant(FaultKind.STATE, on_other_stages("to_others"), on_other_stages("from_others", "pp4"), origin=Origin.MESH)
class LoadsNoStageBetweenOthers(PipelineWrapper):
    """Does not load the weights of the stages between the first and the last stage."""

    def load(self, path: Path) -> None:
        params = seams_engines.stage_params(self.base)
        stages, rank = self.config.mesh.size(PIPELINE), dist.get_rank()
        place = self.config.mesh.coordinates(rank, dist.get_world_size())[PIPELINE]
        before = {name: param.detach().clone() for name, param in params.items()}
        self.base.load(path)
        with torch.no_grad():
            for name, param in params.items() if 0 < place < stages - 1 else ():
                param.copy_(before[name])


@mutant(FaultKind.STATE, on_other_stages("from_others", parameter="*/exp_avg"), origin=Origin.MESH)
class LoadsMomentsOfTheFirstModuleAlone(PipelineWrapper):
    """Sets Adam's first moments to zeros at load for all modules of a stage except its first module."""

    def load(self, path: Path) -> None:
        self.base.load(path)
        params = seams_engines.stage_params(self.base)
        first = next(iter(params)).rpartition(".linear.")[0]
        for name, param in params.items():
            if not name.startswith(f"{first}."):
                self.optimizer.state[param]["exp_avg"].zero_()


@mutant(FaultKind.STATE, on_full_state_dict(), origin=Origin.MESH)
class TheFullStateDictHasInitialWeightsOfOtherStages(PipelineWrapper):
    """Returns from ``full_state_dict`` initial instead of trained weights for the stages of other ranks."""

    def full_state_dict(self) -> dict[str, Tensor]:
        full: dict[str, Tensor] = self.base.full_state_dict()
        own, stale = seams_engines.stage_params(self.base), self.module.state_dict()
        return {name: value if name in own else stale[name].clone() for name, value in full.items()}


@mutant(FaultKind.STATE, on_full_state_dict(None, cause="Missing key(s) in state_dict"), origin=Origin.MESH)
class TheFullStateDictLosesBuffersOfStages(PipelineWrapper):
    """Returns from ``full_state_dict`` the weights of all stages, but no buffers."""

    def full_state_dict(self) -> dict[str, Tensor]:
        full: dict[str, Tensor] = self.base.full_state_dict()
        weights = self.base.full_params()
        return {name: value for name, value in full.items() if name in weights}
