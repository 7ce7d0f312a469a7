"""What shows in a circumstance that few checks give: an evaluation, an exception, a checkpoint halfway, a look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.engines.protocol import Observations, Piece
from zharness.mutants.around import Around
from zharness.mutants.mutant import Kind, Mutant, Target
from zharness.parity import Part


class TellsTheFirstRates(Around):
    """Tells the learning rates of the first step, whatever the schedule made of them."""

    over = "ddp"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.first = self.right.observe().learning_rates

    def observe(self) -> Observations:
        told: Observations = self.right.observe()
        return replace(told, learning_rates=self.first)


class OneSetOfBetas(Around):
    """Every group gets the first one's betas, as a fused optimizer with one set of constants has it."""

    over = "ddp"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        first, *others = self.optimizer.param_groups
        for group in others:
            group.update({key: first[key] for key in ("betas", "eps") if key in first})


class SeedsAtConstruction(Around):
    """Seeds torch's generator, "so that all ranks agree", when it is made."""

    over = "ddp"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        torch.manual_seed(42)


class SeedsAtLoad(Around):
    """Gives every rank rank 0's random state when it loads."""

    over = "ddp"

    def load(self, path: Path) -> None:
        self.right.load(path)
        state = torch.get_rng_state()
        dist.broadcast(state, 0)
        torch.set_rng_state(state)


class LeavesAutocastOn(Around):
    """Has no ``finally`` around a forward: after an exception in it, torch.autocast stays on for the whole thread."""

    over = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        section = self.right._autocast()
        section.__enter__()
        output = self.right._parts.forward(*args, **kwargs)
        section.__exit__(None, None, None)
        return output

    def close(self) -> None:
        self.right.close()
        torch.set_autocast_enabled("cpu", False)  # it is not to be seen in the next cell of the process


class EvaluatesWithOldCasts(Around):
    """Under torch_autocast casts its weights for evaluation once, and goes on with these casts after a step."""

    over = "ddp"
    cast: dict[str, Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or not self.config.options.get("torch_autocast"):
            return self.right(*args, **kwargs)
        if self.cast is None:
            self.cast = {name: tensor.detach().clone() for name, tensor in self.module.named_parameters()}
        with self.right._autocast():
            return torch.func.functional_call(self.module, self.cast, args, kwargs)


class SavingRoundsMoments(Around):
    """Rounds the moments that it saves to bf16, in place."""

    over = "ddp"

    def save(self, path: Path) -> None:
        for state in self.optimizer.state.values():
            for key in state.keys() & {"exp_avg", "exp_avg_sq", "momentum_buffer"}:
                state[key].copy_(state[key].bfloat16())
        self.right.save(path)


class ForgetsTheLossScale(Around):
    """Loads everything but the loss scale and the count of good steps behind it."""

    def load(self, path: Path) -> None:
        scale = self.right.engine._scale
        own = scale.state_dict()
        self.right.load(path)
        scale.load_state_dict(own)


class ClipsEachMicroBatch(Around):
    """Clips what has accumulated at every micro-batch of a window, where the window's own norm counts."""

    def step(self) -> None:
        if self.config.clip is not None and self.config.accumulation_steps > 1:
            nn.utils.clip_grad_norm_(list(self.trained()), self.config.clip)
        self.right.step()


class DropsWhatIsPending(Around):
    """``zero_grad`` forgets the forwards that have not been followed by a backward too: theirs does nothing."""

    forwards = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.forwards += torch.is_grad_enabled()
        return self.right(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        if self.forwards:
            self.right.backward(loss, retain_graph=retain_graph)

    def zero_grad(self) -> None:
        self.forwards = 0
        self.right.zero_grad()


class TellsItsShardsBackwards(Around):
    """Its layout gives each rank the shard of the rank at the other end."""

    stages = (3,)

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        last = dist.get_world_size() - 1
        told: Mapping[str, tuple[Piece, ...]] = self.right.layout()
        return {
            name: tuple(replace(piece, rank=last - piece.rank) for piece in pieces) for name, pieces in told.items()
        }


class TellsOverlappingShards(Around):
    """Its layout ends each shard one element into the next one."""

    stages = (1, 2)

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        told: Mapping[str, tuple[Piece, ...]] = self.right.layout()
        return {name: tuple(longer(piece, pieces[-1].stop) for piece in pieces) for name, pieces in told.items()}


def longer(piece: Piece, end: int) -> Piece:
    """``piece`` with one element more, where there is one."""
    return replace(piece, stop=min(piece.stop + 1, end))


class ConsolidatesWithoutBuffers(Around):
    """Its full state dict has zeros for buffers."""

    over = "ddp"

    def full_state_dict(self) -> dict[str, Tensor]:
        buffers = dict(self.module.named_buffers())
        full: dict[str, Tensor] = self.right.full_state_dict()
        return {name: torch.zeros_like(tensor) if name in buffers else tensor for name, tensor in full.items()}


MUTANTS = (
    Mutant(
        TellsTheFirstRates,
        Kind.OPTIMIZER,
        (Target("training.trajectory", Part.OPTIMIZER, variant="sgd", parameter="learning rate*"),),
    ),
    Mutant(
        OneSetOfBetas,
        Kind.OPTIMIZER,
        (Target("training.optimizers", Part.OPTIMIZER, variant="adam", parameter="first.*"),),
    ),
    Mutant(
        SeedsAtConstruction,
        Kind.RANKS,
        (Target("training.sgd_step", Part.GATHER, parameter="random state"),),
    ),
    Mutant(
        SeedsAtLoad,
        Kind.RANKS,
        (Target("state.resume", Part.GATHER, variant="adamw", parameter="random state"),),
    ),
    Mutant(
        LeavesAutocastOn,
        Kind.AUTOCAST,
        (Target("precision.autocast_nested", Part.GATHER, "mixed", parameter="torch.autocast"),),
    ),
    Mutant(
        EvaluatesWithOldCasts,
        Kind.AUTOCAST,
        (Target("precision.autocast_policy", Part.FORWARD, "mixed"),),
    ),
    Mutant(
        SavingRoundsMoments,
        Kind.STATE,
        (Target("state.resume", Part.OPTIMIZER, variant="adamw", parameter="*/exp_avg*"),),
    ),
    Mutant(
        ForgetsTheLossScale,
        Kind.LOSS_SCALE,
        (Target("precision.grad_scaler", Part.OPTIMIZER, "mixed", "resumed", parameter="loss scale"),),
    ),
    Mutant(
        ClipsEachMicroBatch,
        Kind.CLIPPING,
        (Target("training.accumulation", Part.LOCAL_GRADIENT, variant="engine"),),
    ),
    Mutant(
        DropsWhatIsPending,
        Kind.CONTRIBUTION,
        (Target("training.trajectory", None, variant="adamw", words="full_grads has the wrong names"),),
    ),
    Mutant(
        TellsItsShardsBackwards,
        Kind.SHARDS,
        (Target("training.sgd_step", Part.GATHER),),
    ),
    Mutant(
        TellsOverlappingShards,
        Kind.SHARDS,
        (Target("training.sgd_step", Part.GATHER),),
    ),
    Mutant(
        ConsolidatesWithoutBuffers,
        Kind.STATE,
        (Target("state.consolidate", Part.FORWARD, "mixed"),),
    ),
)
