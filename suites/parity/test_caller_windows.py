"""In a cell whose caller accumulates, the expected gradients are those of the divided losses, with their underflow."""

from __future__ import annotations

import torch

from zharness.engines import AccumulationOwner
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.setting import Setting
from zharness.parity.baseline import Baseline
from zharness.workload import model_spec

STEPS = 4


def compute_gradients(owner: AccumulationOwner) -> dict[str, torch.Tensor]:
    """Return the gradients that the judge of a cell with an accumulation window expects of one micro-batch in fp16."""
    baseline = Baseline(model_spec("transformer"), 0, 1, dtype=torch.float16)
    setting = Setting(accumulation_steps=STEPS, owner=owner)
    (local,) = JudgeContext(baseline, (), torch.float16, setting=setting).compute_local_grads()
    return dict(local.grads)


def test_a_caller_s_quotient_of_a_small_fp16_gradient_underflows() -> None:
    (divided,) = Baseline(model_spec("transformer"), 0, 1, dtype=torch.float16).run_all_ranks(
        weigh=lambda loss, _rank: loss / STEPS
    )
    by_caller, by_engine = (compute_gradients(owner) for owner in (AccumulationOwner.CALLER, AccumulationOwner.ENGINE))
    for name, gradient in divided.grads.items():
        assert torch.equal(by_caller[name], STEPS * gradient), name
    assert any(not torch.equal(by_caller[name], by_engine[name]) for name in by_caller)
