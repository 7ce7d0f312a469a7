"""Engines with different axes one after another in one process: what one leaves behind changes nothing of the next."""

from __future__ import annotations

import copy
from itertools import pairwise, permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import deepspeed, deepspeed_pp
from zharness.engines.protocol import EngineConfig
from zharness.mesh import Mesh
from zharness.workload import Batch, ModelSpec, model_spec

pytest.importorskip("deepspeed")

MODELS = {"pp2": "chain", "ep2": "routed", "tp2": "exact", "cp2": "context", "": "exact"}
# Each axis follows each other one.
TURNS = ("", "pp2", "ep2", "tp2", "cp2", "pp2", "tp2", "ep2", "cp2", "", "ep2", "pp2", "cp2", "tp2", "", "cp2")
TURNS += ("ep2", "", "tp2", "pp2", "")


def build_config(mesh: Mesh, spec: ModelSpec, stage: int) -> EngineConfig:
    """Return the config of a model on a mesh, with the model's plans."""
    plans: dict[str, Any] = {"tp_plan": spec.tp_plan, "cp_plan": spec.cp_plan, "ep_plan": tuple(spec.ep_plan)}
    return EngineConfig(stage=stage, micro_batch_size=4, mesh=mesh, pp_plan=spec.pp_plan, **plans)


def plain_mean(model: nn.Module, spec: ModelSpec, batches: list[Batch]) -> dict[str, Tensor]:
    """Return the mean gradients of plain PyTorch over micro-batches."""
    for batch in batches:
        (spec.loss(model(batch.inputs), batch.target) / len(batches)).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def train(label: str, stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradients of one backward of an engine that is built and closed here, and those of plain PyTorch."""
    mesh, spec, rank = Mesh.parse(label), model_spec(MODELS[label]), dist.get_rank()
    model = spec.model(0)
    plain, config = copy.deepcopy(model), build_config(mesh, spec, stage)
    if label == "pp2":
        batches = [spec.micro_batch(0, 0, step) for step in range(2)]
        pipeline = deepspeed_pp.factory(model, config)
        pipeline.train_batch([(batch.inputs, batch.target) for batch in batches], spec.loss)
        grads = pipeline.full_grads()
        pipeline.close()
    else:
        batches = [spec.micro_batch(0, at, 0) for at in range(mesh.data_size(2))]
        engine = deepspeed.factory(model, config)
        batch = batches[mesh.data_coordinate(rank, 2)]
        engine.backward(spec.loss(engine(batch.inputs), batch.target))
        grads = engine.full_grads()
        engine.close()
    return grads, plain_mean(plain, spec, batches)


def test_each_axis_follows_each_other_one() -> None:
    assert set(pairwise(TURNS)) == set(permutations(MODELS, 2))


@pytest.mark.world_size(2)
@pytest.mark.rank_timeout(180)  # it builds 21 engines
@pytest.mark.parametrize("stage", [0, 1])
def test_an_engine_after_one_with_another_axis_computes_what_plain_pytorch_does(stage: int) -> None:
    for before, label in pairwise(("", *TURNS)):
        grads, expected = train(label, stage)
        assert grads.keys() == expected.keys(), f"{label or 'no mesh'} after {before or 'no mesh'}"
        wrong = [name for name, value in expected.items() if not torch.equal(grads[name], value)]
        assert not wrong, f"{label or 'no mesh'} after {before or 'no mesh'}"
    dist.barrier()
