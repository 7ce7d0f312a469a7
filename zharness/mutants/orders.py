"""What shows in some order of calls alone, or in a setting beside another: the laws of any order draw these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.engines.protocol import Reduction
from zharness.mutants.around import Around
from zharness.mutants.mutant import Kind, Mutant, Target, pytorch
from zharness.parity import Part
from zharness.reference.buckets import copy_shards_to_full
from zharness.reference.layout import ModelParam


def rows_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many samples a forward is given."""
    return next(len(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


class WeighsByTheFirstBatch(Around):
    """Weighs each loss by its micro-batch's samples over those of the first, as if losses were sums."""

    over = "ddp"
    first = rows = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.rows = rows_of(args, kwargs)
        self.first = self.first or self.rows
        return self.right(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss * (self.rows / self.first), retain_graph=retain_graph)


class ShowsItsOwnWeights(Around):
    """The full parameters are the model's own, so that whoever writes over them trains from there."""

    over = "ddp"

    def full_params(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.module.named_parameters()}


class ShowsItsOwnMoments(Around):
    """The full optimizer state is the optimizer's own tensors, not copies of them."""

    over = "ddp"

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        named = dict(self.module.named_parameters())
        return {
            name: {key: value for key, value in state.items() if isinstance(value, Tensor)}
            for name, parameter in named.items()
            if (state := self.optimizer.state.get(parameter))
        }


class LoadsTheNewest(Around):
    """Loads what it has saved last, whichever folder it is asked for."""

    over = "ddp"
    newest: Path | None = None

    def save(self, path: Path) -> None:
        self.newest = path
        self.right.save(path)

    def load(self, path: Path) -> None:
        self.right.load(self.newest or path)


class KeepsTheFirstCheckpoint(Around):
    """Saves nothing into a folder that has a checkpoint already."""

    over = "ddp"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.saved: set[Path] = set()

    def save(self, path: Path) -> None:
        if path not in self.saved:
            self.right.save(path)
        self.saved.add(path)


class ConsolidatesItsOwnWeights(Around):
    """The full state dict is the module's own, not a copy of it."""

    over = "ddp"

    def full_state_dict(self) -> dict[str, Any]:
        return dict(self.module.state_dict())


class LowersMatrixProducts(Around):
    """Lowers the precision of the process's matrix products, "for speed", when it is made."""

    over = "ddp"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        torch.set_float32_matmul_precision("high")
        super().__init__(model, config)

    def close(self) -> None:
        self.right.close()
        torch.set_float32_matmul_precision("highest")  # it is not to be seen in the next cell of the process


class ClipsTheSumAsAMean(Around):
    """Takes the clipping norm for that of the mean, so that summed gradients may be as many times as large."""

    over = "ddp"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        if config.clip is not None and config.reduction is Reduction.SUM:
            self.right._clip = config.clip * dist.get_world_size()


class ClipsAsTheNewestEngine(Around):
    """The norm to clip to belongs to the process: it is that of whichever engine was made last."""

    over = "ddp"
    limit: float | None = None

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        type(self).limit = config.clip

    def step(self) -> None:
        self.right._clip = type(self).limit
        self.right.step()


class LogsTheMeanLoss(Around):
    """Averages the loss over the ranks for its log, in the caller's own tensor."""

    over = "ddp"

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss, retain_graph=retain_graph)
        dist.all_reduce(loss.data)
        loss.data /= dist.get_world_size()


class WantsGradientsOfInputs(Around):
    """Makes the caller's inputs require a gradient, so that reentrant checkpoints work."""

    over = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for value in args:
            if isinstance(value, Tensor) and value.is_floating_point() and value.is_leaf and torch.is_grad_enabled():
                value.requires_grad_()
        return self.right(*args, **kwargs)


class ForgetsAtAFailedForward(Around):
    """After an exception in a forward it begins anew, without the gradients that wait for a step."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.right(*args, **kwargs)
        except Exception:
            self.right.zero_grad()
            raise


class TakesGraphsForBatches(Around):
    """Counts a forward in eval mode for a micro-batch, and leaves its gradients out of the next reduction's mean."""

    over = "ddp"
    graphs = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.graphs += torch.is_grad_enabled() and not self.module.training
        return self.right(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss / (1 + self.graphs), retain_graph=retain_graph)
        self.graphs = 0


class EditsForgetMoments(Around):
    """An edit of a weight begins its moments anew, as of a new parameter."""

    def gathered(self, names: Any) -> Any:
        for name in names:
            self.optimizer.state.pop(self.right.engine._parameters.leaves[name], None)
        return self.right.gathered(names)


class LoadsStateForAll(Around):
    """A load makes optimizer state for the parameters that had none, as if they had been used."""

    def load(self, path: Path) -> None:
        self.right.load(path)
        for leaf in self.right.engine._parameters.leaves.values():
            state = self.optimizer.state[leaf]
            if not state:
                state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(leaf), exp_avg_sq=torch.zeros_like(leaf))


class DecaysWhatHasNoGradient(Around):
    """A step without any gradient still decays the weights."""

    over = "ddp"

    def step(self) -> None:
        if not any(True for _ in self.trained()):
            with torch.no_grad():
                for parameter in self.module.parameters():
                    parameter.mul_(1 - 1e-3)
        self.right.step()


class TakesWhatAFailedBackwardGathered(Around):
    """What a backward that raises has gathered is what the next forward takes, whatever was loaded meanwhile."""

    stages = (3,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.ahead: dict[str, Tensor] = {}
        self.shelf = self.right.engine._gradients._wire.shelf
        self.fresh, self.shelf.fetch = self.shelf.fetch, self.fetch

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        try:
            self.right.backward(loss, retain_graph=retain_graph)
        except Exception:
            self.ahead = dict(self.shelf._lot.shards) if self.shelf._lot else {}
            raise

    def fetch(self, original: ModelParam, full: Tensor) -> None:
        """The parameter; the first time after such a backward, as that has left it."""
        self.fresh(original, full)
        if original.name in self.ahead:
            copy_shards_to_full(self.ahead.pop(original.name), full, original.layout)


class LaysOutInTheSecondForward(Around):
    """Makes its buckets in the forward after the first backward, in memory that a transform of torch.func hides."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.backwards, self.buckets = 0, list[int]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.backwards and not self.buckets and torch.is_grad_enabled():
            self.buckets.append(torch.empty(1).data_ptr())  # raises in a transform
        return self.right(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss, retain_graph=retain_graph)
        self.backwards += 1


ORDER = "training.any_order"
MUTANTS = (
    Mutant(WeighsByTheFirstBatch, Kind.SCALE, (Target(ORDER, Part.LOCAL_GRADIENT, variant="sums"),)),
    Mutant(ShowsItsOwnWeights, Kind.STALE, (Target(ORDER, Part.OPTIMIZER, variant="steps"),)),
    Mutant(ShowsItsOwnMoments, Kind.STATE, (Target(ORDER, Part.OPTIMIZER, variant="steps", parameter="*/*"),)),
    Mutant(LoadsTheNewest, Kind.STATE, (Target(ORDER, Part.GATHER, variant="saved"),)),
    Mutant(KeepsTheFirstCheckpoint, Kind.STATE, (Target(ORDER, Part.GATHER, variant="saved"),)),
    Mutant(ConsolidatesItsOwnWeights, Kind.STATE, (Target("state.consolidate", Part.FORWARD, "mixed"),)),
    Mutant(
        LowersMatrixProducts,
        Kind.RANKS,
        (Target("training.sgd_step", Part.GATHER, parameter="precision of matrix products"),),
    ),
    Mutant(ClipsTheSumAsAMean, Kind.CLIPPING, (Target(ORDER, Part.OPTIMIZER, variant="sums"),)),
    Mutant(ClipsAsTheNewestEngine, Kind.CLIPPING, (Target(ORDER, Part.OPTIMIZER, variant="steps"),)),
    Mutant(LogsTheMeanLoss, Kind.STALE, (Target(ORDER, Part.FORWARD, variant="steps", parameter="loss"),)),
    Mutant(WantsGradientsOfInputs, Kind.GRAPH, (Target(ORDER, Part.FORWARD, variant="steps", parameter="inputs"),)),
    Mutant(ForgetsAtAFailedForward, Kind.CONTRIBUTION, (Target(ORDER, Part.ACCUMULATION, variant="sums"),)),
    Mutant(TakesGraphsForBatches, Kind.SCALE, (Target(ORDER, Part.REDUCTION, variant="steps"),)),
    Mutant(
        EditsForgetMoments, Kind.STATE, (Target(ORDER, None, variant="saved", words="what a rank reports as state"),)
    ),
    Mutant(
        LoadsStateForAll,
        Kind.STATE,
        (Target("parameters.any_order", None, "changing", "saved", words="what a rank reports as state"),),
    ),
    Mutant(
        DecaysWhatHasNoGradient,
        Kind.OPTIMIZER,
        (Target(ORDER, Part.OPTIMIZER, variant="sums"),),
    ),
    Mutant(  # a bug of FSDP2 that has no report: `zharness repro load-after-exception`
        TakesWhatAFailedBackwardGathered,
        Kind.STALE,
        (Target(ORDER, Part.FORWARD, variant="interrupted_load", parameter="output"),),
    ),
    Mutant(
        LaysOutInTheSecondForward,
        Kind.GRAPH,
        (Target(ORDER, None, variant="second_forward", words="data pointer of Tensor that doesn't have storage"),),
        imitates=pytorch(102197),
    ),
)
