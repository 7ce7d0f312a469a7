"""The stand-in for deepspeed trains as torch does, gathers parameters, and refuses to replace the real DeepSpeed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from suites.compat.session_runs import run

PLUGIN = "zharness.compat.deepspeed_engine.install"
TRAINING = """
import deepspeed
import warnings
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_fp32_param
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from zharness.compat.deepspeed_engine.refusals import AssertionUsageError
from zharness.errors import CheckpointError, ConfigError, UsageError


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
class TestStandIn(DistributedTest):
    world_size = 2

    def build(self, stage, **keys):
        model = torch.nn.Linear(4, 2, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        config = self.config(stage, **keys)
        return deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]

    def config(self, stage, **keys):
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            **keys,
        }

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
            with deepspeed.zero.GatheredParameters(read):
                assert torch.equal(engine.module.weight, torch.full((2, 4), 3.0))
        engine.destroy()

    def test_what_is_not_sharded_is_not_gathered(self, stage):
        engine = self.build(stage)
        (parameter,) = engine.parameters()
        with deepspeed.zero.GatheredParameters([torch.ones(2), torch.nn.Parameter(torch.ones(2)), None]):
            assert getattr(parameter, "ds_status", None) is not ZeroParamStatus.AVAILABLE
        with pytest.raises(UsageError, match="is no Parameter"):
            safe_get_full_grad(torch.ones(2))
        if stage == 3:
            with deepspeed.zero.GatheredParameters(parameter):
                with pytest.raises(RuntimeError, match="cannot overlap"):
                    deepspeed.zero.GatheredParameters([parameter]).__enter__()
            assert parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE
        engine.destroy()

    def test_nested_init_blocks_shard_at_their_ends(self, stage):
        with deepspeed.zero.Init():
            with deepspeed.zero.Init():
                inner = torch.nn.Linear(2, 2)
            assert hasattr(inner.weight, "ds_id")
            engine = deepspeed.initialize(model=inner, config=self.config(stage))[0]
            outer = torch.nn.Linear(2, 2)
        assert hasattr(outer.weight, "ds_id")
        assert engine(torch.ones(1, 2)).shape == (1, 2)
        engine.destroy()

    def test_an_edit_that_would_be_lost_raises_under_sanity_checks(self, stage):
        with deepspeed.zero.Init(config={"zero_optimization": {"stage": 3, "enable_sanity_checks": True}}):
            layer = torch.nn.Linear(2, 2)
        with pytest.raises(RuntimeError, match="in-place modification"):
            with deepspeed.zero.GatheredParameters(layer.weight), torch.no_grad():
                layer.weight.zero_()
        with deepspeed.zero.GatheredParameters(layer.weight, modifier_rank=0), torch.no_grad():
            layer.weight.zero_()

    def test_a_second_engine_ends_the_first(self, stage):
        first = self.build(stage)
        if stage == 3:
            with pytest.raises(ConfigError, match="belongs to another engine"):
                deepspeed.initialize(model=first.module, config=self.config(stage))
            return
        with pytest.warns(RuntimeWarning, match="already has an engine, which ends now"):
            second = deepspeed.initialize(model=first.module, config=self.config(stage))[0]
        self.take_step(second)
        for use in (lambda: first(torch.ones(1, 4)), first.step, lambda: first.scale(torch.ones(()))):
            with pytest.raises(UsageError, match="closed"):
                use()
        second.destroy()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            deepspeed.initialize(model=first.module, config=self.config(stage))[0].destroy()

    def test_tags_and_folders_are_checked(self, stage, tmp_path):
        engine = self.build(stage, checkpoint={"tag_validation": "Fail"})
        for folder in (None, ""):
            with pytest.raises(ValueError, match="save_dir"):
                engine.save_checkpoint(folder)
        # An AssertionError, as in DeepSpeed, which python -O does not remove.
        with pytest.raises(AssertionUsageError, match="by rank .*'tag-0', 'tag-1'.*; pass the same tag on every rank"):
            engine.save_checkpoint(str(tmp_path), f"tag-{dist.get_rank()}")
        engine.save_checkpoint(str(tmp_path), "tag")
        with pytest.raises(deepspeed.DeepSpeedConfigError, match="tag_validation"):
            self.build(stage, checkpoint={"tag_validation": "foo"})
        engine.destroy()

    def test_the_json_marks_leaf_modules(self, stage):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Tanh()), torch.nn.Linear(4, 2))
        leaves = {"classes": "Tanh", "names": ["0", "absent"], "name_suffixes": ["2"]}
        short = {"param_persistence_threshold": 0, "prefetch_bucket_size": 8}  # without stage3_
        config = self.config(stage, zero_optimization={"stage": stage, "leaf_module": leaves, **short})
        engine = deepspeed.initialize(model=model, config=config)[0]
        assert deepspeed.utils.get_z3_leaf_modules(model) == [model[0], model[1][0], model[2]]
        engine.destroy()

    def test_ranks_may_use_different_parts_of_a_leaf_module(self, stage):
        class Experts(torch.nn.ModuleList):
            def forward(self, x):
                return self[dist.get_rank()](x)

        model = Experts(torch.nn.Linear(3, 1, bias=False) for _ in range(2))
        deepspeed.utils.set_z3_leaf_modules(model, [Experts])
        engine = deepspeed.initialize(model=model, config=self.config(stage, gradient_accumulation_steps=1))[0]
        engine.backward(engine(torch.ones(2, 3)).sum())
        for parameter in engine.parameters():  # two of one rank's ones, and none of the other's
            assert torch.equal(safe_get_full_grad(parameter), torch.ones(1, 3))
        engine.destroy()

    def test_engines_do_not_mix_their_parameters(self, stage):
        first, second = self.build(stage), self.build(stage)
        with torch.no_grad():
            for engine, value in ((first, 3.0), (second, 5.0)):
                with deepspeed.zero.GatheredParameters(engine.module.weight, modifier_rank=0):
                    engine.module.weight.fill_(value)
            read = first.module.weight
        assert torch.equal(safe_get_full_fp32_param(read), torch.full((2, 4), 3.0))
        assert torch.equal(safe_get_full_fp32_param(second.module.weight), torch.full((2, 4), 5.0))
        first.destroy()
        if stage == 3:
            with pytest.raises(UsageError, match="is no Parameter"):
                safe_get_full_fp32_param(read)
        assert torch.equal(safe_get_full_fp32_param(second.module.weight), torch.full((2, 4), 5.0))
        second.destroy()

    def take_step(self, engine):
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 4)).sum())
            engine.step()

    def test_a_checkpoint_without_the_optimizer_loads_schedule_and_counts(self, stage, tmp_path):
        schedule = {"scheduler": {"type": "StepLR", "params": {"step_size": 1}}}
        saved = self.build(stage, **schedule)
        self.take_step(saved)
        saved.save_checkpoint(str(tmp_path), client_state={"epoch": 3})
        for options, wanted in (
            ({}, (1, 1)),
            ({"load_optimizer_states": False}, (1, 1)),
            ({"load_lr_scheduler_states": False}, (0, 1)),
            ({"load_optimizer_states": False, "load_lr_scheduler_states": False}, (0, 1)),
            ({"load_module_only": True}, (0, 0)),
        ):
            engine = self.build(stage, **schedule)
            _, client_state = engine.load_checkpoint(str(tmp_path), **options)
            assert (engine.lr_scheduler.last_epoch, engine.global_steps) == wanted, options
            assert client_state == {"epoch": 3}
            assert torch.equal(self.weight(engine), self.weight(saved))
            engine.destroy()
        saved.destroy()

    def test_a_checkpoint_may_leave_out_latest_and_frozen_parameters(self, stage, tmp_path):
        engine = self.build(stage)
        assert engine.load_checkpoint(str(tmp_path)) == (None, None)
        self.take_step(engine)
        engine.save_checkpoint(str(tmp_path), "first")
        self.take_step(engine)
        (parameter,) = engine.parameters()
        parameter.requires_grad_(False)
        engine.save_checkpoint(str(tmp_path), "second", save_latest=False, exclude_frozen_parameters=True)
        parameter.requires_grad_(True)
        changed = self.weight(engine)
        with pytest.raises(CheckpointError, match="parameter 'weight' is missing in the checkpoint"):
            engine.load_checkpoint(str(tmp_path), "second")
        engine.load_checkpoint(str(tmp_path), "second", load_module_strict=False)
        assert torch.equal(self.weight(engine), changed)
        engine.load_checkpoint(str(tmp_path))
        assert torch.equal(self.weight(engine), torch.full((2, 4), 0.5))
        with pytest.raises(UsageError, match="custom_load_fn"):
            engine.load_checkpoint(str(tmp_path), custom_load_fn=print)
        engine.destroy()
"""


def test_the_reference_engine_trains_in_place_of_deepspeed(tmp_path: Path) -> None:
    session = run(tmp_path, TRAINING, "-p", PLUGIN, conftest="")
    failures = {name: result.text for name, result in session.tests.items() if result.verdict != "passed"}
    assert not failures, failures
    assert len(session.tests) == 56, session.output


def test_the_stand_in_refuses_to_replace_an_imported_deepspeed() -> None:
    source = f"import sys, types; sys.modules['deepspeed'] = types.ModuleType('deepspeed'); import {PLUGIN}"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "deepspeed is imported already" in done.stderr
