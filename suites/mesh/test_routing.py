"""The law mesh.routing: which expert a token goes to, and when rounding could decide it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from zharness.device.float32_products import Float32Products
from zharness.laws import mesh_routing
from zharness.parity.bounds import gamma
from zharness.parity.comparison import TensorLocation
from zharness.run.observe_and_judge import summarize_comparisons
from zharness.run.record import Verdict
from zharness.run.verdicts import conclude_judgement
from zharness.workload import model_spec
from zharness.workload.random_routed import SUMMED_TERMS, GateLogits, compute_gate_logits

ERROR = gamma(SUMMED_TERMS, torch.float32)


def make_logits(*rows: list[float]) -> GateLogits:
    """Return logits of tokens whose terms have the absolute sum 1."""
    logits = torch.tensor(rows, dtype=torch.float64)
    return GateLogits(logits, torch.ones_like(logits))


def test_a_choice_far_from_a_tie_is_certain() -> None:
    assert make_logits([0.1, 0.2], [0.5, -0.5]).find_near_tie(ERROR) is None


def test_the_first_token_that_rounding_may_route_otherwise_is_named() -> None:
    near = make_logits([0.1, 0.2], [0.5, 0.5 + ERROR], [0.3, 0.3]).find_near_tie(ERROR)
    assert near is not None
    assert (near.token, near.error) == (1, 3 * ERROR)
    assert 0 < near.margin <= near.error


def test_logits_that_the_softmax_makes_equal_are_a_tie() -> None:
    logits = torch.tensor([[0.0, 2.0**-26]], dtype=torch.float64)
    softmax = torch.softmax(logits.float(), dim=1)
    assert softmax[0, 0] == softmax[0, 1]
    assert GateLogits(logits, logits.abs()).find_near_tie(ERROR) is not None


def test_equal_logits_are_a_tie() -> None:
    assert make_logits([0.25, 0.25, 0.0, 0.0]).find_near_tie(0.0) is not None


def test_the_bound_covers_the_rounding_of_torchs_gate() -> None:
    spec = model_spec("random_routed")
    model, batch = spec.model(0), spec.micro_batch(0, 0, 0)
    gate: list[Tensor] = []
    model.get_submodule("moe.gate").register_forward_hook(lambda _module, _inputs, output: gate.append(output.detach()))
    batch.feed(model)
    wide = compute_gate_logits(model, batch.inputs)
    error = (gate[0].flatten(0, 1).double() - wide.logits).abs()
    assert float(error.max()) > 0
    assert bool((error <= ERROR * wide.absolute).all())


def test_every_expert_gets_a_token() -> None:
    spec = model_spec("random_routed")
    wide = compute_gate_logits(spec.model(0), spec.micro_batch(0, 0, 0).inputs)
    assert set(wide.logits.argmax(dim=1).tolist()) == {0, 1, 2, 3}


def test_a_cell_in_which_a_tie_could_flip_is_undetermined(monkeypatch: pytest.MonkeyPatch) -> None:
    ties = make_logits([0.1, 0.2], [0.3, 0.3])
    monkeypatch.setattr(mesh_routing, "compute_gate_logits", lambda _model, _tokens: ties)
    micro_batch = SimpleNamespace(inputs=None)
    baseline = SimpleNamespace(
        batch=lambda _rank, _step: micro_batch, build_module=lambda: None, products=Float32Products.FULL
    )
    ctx: Any = SimpleNamespace(data_size=1, dtype=torch.float32, baseline=baseline, location=TensorLocation)
    verdict, cause = conclude_judgement(summarize_comparisons(list(mesh_routing.judge_routing(ctx))))
    assert verdict is Verdict.UNDETERMINED
    assert cause.startswith("a tie could flip: two experts of token 1 of micro-batch 0 are 0.0e+00 apart")
