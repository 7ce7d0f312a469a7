"""The stand-in for deepspeed trains as torch does, gathers parameters, and refuses to replace the real DeepSpeed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from suites.compat.session_runs import run

PLUGIN = "zharness.compat.deepspeed_engine.install"
TRAINING = """
import deepspeed
from deepspeed.utils import safe_get_full_grad, safe_set_full_fp32_param
from zharness.errors import UsageError


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
class TestStandIn(DistributedTest):
    world_size = 2

    def build(self, stage, **keys):
        model = torch.nn.Linear(4, 2, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            **keys,
        }
        return deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]

    def weight(self, engine):
        (parameter,) = engine.parameters()
        with deepspeed.zero.GatheredParameters(parameter):
            return parameter.detach().clone()

    def test_window(self, stage):
        engine = self.build(stage)
        for boundary in (False, True):
            assert engine.is_gradient_accumulation_boundary() is boundary
            engine(torch.full((1, 4), 2.0 * dist.get_rank())).sum().backward()
            engine.step()
            assert engine.was_step_applied() is boundary
        assert engine.global_steps == 1
        assert torch.equal(self.weight(engine), torch.full((2, 4), 0.5))
        engine.destroy()

    def test_the_caller_owns_the_boundary(self, stage):
        engine = self.build(stage, managed_gradient_accumulation=False)
        engine.backward(engine(torch.full((1, 4), 2.0)).sum(), scale_wrt_gas=False)
        (parameter,) = engine.parameters()
        assert torch.equal(safe_get_full_grad(parameter), torch.full((2, 4), 2.0))
        engine.step()
        assert engine.was_step_applied()
        assert torch.equal(self.weight(engine), torch.zeros(2, 4))
        safe_set_full_fp32_param(parameter, torch.full((2, 4), 3.0))
        assert torch.equal(self.weight(engine), torch.full((2, 4), 3.0))
        engine.destroy()

    def test_edits_of_one_rank_reach_all(self, stage):
        engine = self.build(stage)
        (parameter,) = engine.parameters()
        if stage == 3:
            with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
                if dist.get_rank() == 0:
                    parameter.data.fill_(7.0)
            assert torch.equal(self.weight(engine), torch.full((2, 4), 7.0))
        engine.destroy()

    def test_an_attribute_finds_its_parameter(self, stage):
        engine = self.build(stage)
        engine(torch.ones(1, 4)).sum().backward()
        assert torch.equal(safe_get_full_grad(engine.module.weight), torch.full((2, 4), 0.5))
        if stage == 3:
            engine.zero_grad()
            with deepspeed.zero.GatheredParameters(engine.module.weight, modifier_rank=0), torch.no_grad():
                engine.module.weight.fill_(3.0)
            assert torch.equal(self.weight(engine), torch.full((2, 4), 3.0))
            with torch.no_grad():
                read = engine.module.weight
            for use in (deepspeed.zero.GatheredParameters, safe_get_full_grad):
                with pytest.raises(UsageError, match="is no Parameter of an engine"):
                    use(read)
        engine.destroy()

    def test_checkpoints_refuse_what_is_not_implemented(self, stage, tmp_path):
        engine = self.build(stage)
        assert engine.load_checkpoint(str(tmp_path)) == (None, None)
        with pytest.raises(UsageError, match="exclude_frozen_parameters=True"):
            engine.save_checkpoint(str(tmp_path), exclude_frozen_parameters=True)
        with pytest.raises(UsageError, match="load_module_strict=False, custom_load_fn"):
            engine.load_checkpoint(str(tmp_path), load_module_strict=False, custom_load_fn=print)
        engine.destroy()
"""


def test_the_reference_engine_trains_in_place_of_deepspeed(tmp_path: Path) -> None:
    session = run(tmp_path, TRAINING, "-p", PLUGIN, conftest="")
    failures = {name: result.text for name, result in session.tests.items() if result.verdict != "passed"}
    assert not failures, failures
    assert len(session.tests) == 20, session.output


def test_the_stand_in_refuses_to_replace_an_imported_deepspeed() -> None:
    source = f"import sys, types; sys.modules['deepspeed'] = types.ModuleType('deepspeed'); import {PLUGIN}"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "deepspeed is imported already" in done.stderr
