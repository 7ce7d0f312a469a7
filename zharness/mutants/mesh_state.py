"""Define mutants that save or load a mesh's state wrongly: weights that tp splits, or weights that copies replicate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from zharness.mesh import REPLICATE, TENSOR
from zharness.mutants import seams_engines
from zharness.mutants.mesh import REP2, MeshWrapper, on_mesh
from zharness.mutants.mesh_context import UlyssesWrapper
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.parity import Part


def on_other_mesh(part: Part | None = Part.GATHER, model: str = "exact", mesh: str = "tp2", to: bool = True) -> Target:
    """Return a target of the law mesh.other_mesh, which loads on other meshes (``to``) or on the mesh of the cell."""
    return on_mesh("mesh.other_mesh", part, model, mesh, variant="to_others" if to else "from_others")


def on_full_state_dict(part: Part | None = Part.GATHER, model: str = "exact", cause: str = "") -> Target:
    """Return a target of the law mesh.full_state_dict."""
    return on_mesh("mesh.full_state_dict", part, model, cause=cause)


class LoadsOnMesh(MeshWrapper):
    """The base class of mutants that load correctly on the default mesh, and damage loaded state on other meshes."""

    def load(self, path: Path) -> None:
        self.base.load(path)
        if self.config.mesh.sizes:
            with torch.no_grad():
                self.spoil_loaded()

    def spoil_loaded(self) -> None:
        """Change the loaded weights or optimizer state; subclasses override this method."""


@mutant(FaultKind.STATE, on_other_mesh(to=False), origin=Origin.MESH)
class LoadsSplitWeightsInReversedOrder(LoadsOnMesh):
    """On the second rank of tp, loads the rank's part of each split weight in reversed order."""

    def spoil_loaded(self) -> None:
        for param in self.split_params() if self.coordinates[TENSOR] else ():
            param.to_local().copy_(param.to_local().flip(0))


@mutant(FaultKind.STATE, on_other_mesh(to=False), origin=Origin.MESH)
class LoadsNoStateOfSplitWeights(LoadsOnMesh):
    """In a load, zeroes the optimizer state of weights that tp splits."""

    def spoil_loaded(self) -> None:
        for param in self.split_params():
            for value in self.optimizer.state.get(param, {}).values():
                value.zero_()


@mutant(FaultKind.STATE, on_other_mesh(to=False, mesh=REP2), origin=Origin.MESH)
class LoadsTheFirstCopyAlone(LoadsOnMesh):
    """Does not load the weights of the second copy."""

    def load(self, path: Path) -> None:
        before = [(param, param.to_local().detach().clone()) for _, param in self.params()]
        self.base.load(path)
        with torch.no_grad():
            for param, weight in before if self.coordinates[REPLICATE] else ():
                param.to_local().copy_(weight)


@mutant(
    FaultKind.STATE,
    replace(on_other_mesh(), variant="to_others_adam"),  # the variants of SGD load on no mesh with two such axes
    replace(on_other_mesh(mesh=REP2), variant="to_others_adam"),
    on_other_mesh(mesh="tp4", to=False),
    origin=Origin.MESH,
)
class LoadsInnerPartsInReversedOrder(LoadsOnMesh):
    """On the second and third of four ranks of tp, loads the rank's part of a split weight in reversed order."""

    def spoil_loaded(self) -> None:
        for param in self.split_params() if self.tensor_size == 4 and self.coordinates[TENSOR] in (1, 2) else ():
            param.to_local().copy_(param.to_local().flip(0))


@mutant(
    FaultKind.STATE,
    Target(
        "mesh.other_mesh",
        Part.GATHER,
        "context",
        "from_others_adam",
        parameter="*/exp_avg*",
        mesh="cp2",
        setting="universal_checkpoint",
    ),
    origin=Origin.MESH,
)
class LoadsMomentsOnTheFirstRankOfASequence(UlyssesWrapper):
    """In a load, zeroes the moments in the partition of the second rank of a sequence."""

    stages: ClassVar[tuple[int, ...]] = (3,)

    def load(self, path: Path) -> None:
        self.base.load(path)
        for state in seams_engines.partitioned_state(self.base) if self.size > 1 and self.place else ():
            for value in state.values():
                if value.dim():
                    value.zero_()


class SavesWrongly(MeshWrapper):
    """The base class of mutants that change weights while they are saved, and restore them afterwards."""

    def save(self, path: Path) -> None:
        before = [(param, param.to_local().detach().clone()) for _, param in self.params()]
        with torch.no_grad():
            if self.config.mesh.sizes:
                self.spoil_saved()
            self.base.save(path)
            for param, weight in before:
                param.to_local().copy_(weight)

    def spoil_saved(self) -> None:
        """Change the weights; subclasses override this method."""


@mutant(FaultKind.STATE, on_other_mesh(), origin=Origin.MESH)
class SavesZerosOfTheSecondTensorRank(SavesWrongly):
    """Saves zeros for the part of a split weight that the second rank of tp has."""

    def spoil_saved(self) -> None:
        for param in self.split_params() if self.coordinates[TENSOR] else ():
            param.to_local().zero_()


@mutant(FaultKind.STATE, on_full_state_dict(), origin=Origin.MESH)
class TheFullStateDictHasOnePartTwice(MeshWrapper):
    """In the full state dict, replaces the second half of the rows of each tensor by the first half."""

    def full_state_dict(self) -> dict[str, Tensor]:
        full: dict[str, Tensor] = self.base.full_state_dict()
        for tensor in full.values():
            half = len(tensor) // 2
            tensor[half : 2 * half] = tensor[:half].clone()
        return full


@mutant(FaultKind.STATE, on_full_state_dict(None, cause="Missing key(s) in state_dict"), origin=Origin.MESH)
class TheFullStateDictLosesReplicatedWeights(MeshWrapper):
    """Leaves the weights that tp does not split out of the full state dict."""

    def full_state_dict(self) -> dict[str, Tensor]:
        full: dict[str, Tensor] = self.base.full_state_dict()
        split = {name for name, param in self.params() if param in set(self.split_params())}
        return {name: tensor for name, tensor in full.items() if name in split}


@mutant(FaultKind.STATE, on_full_state_dict(None, "heads", "size mismatch for embed.weight"), origin=Origin.MESH)
class TheFullStateDictIsEmptyBeyondTheFirstTensorRank(MeshWrapper):
    """Returns empty tensors in the full state dict on the second rank of tp."""

    def full_state_dict(self) -> dict[str, Tensor]:
        full: dict[str, Tensor] = self.base.full_state_dict()
        return full if self.coordinates[TENSOR] == 0 else {name: tensor[:0] for name, tensor in full.items()}
