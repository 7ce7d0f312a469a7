"""With DeepSpeed installed: ranks can use its communication, and its engine trains, saves and loads on them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from suites.compat.session_runs import run
from suites.compat.shared_memory import SOURCE as SHARED_MEMORY
from suites.compat.shared_memory import build_variables, find_missing_needs, leave_lock_of_killed_build
from zharness.engines.deepspeed_operators import remove_stale_lock

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

TRAINING = """
import deepspeed
import deepspeed.comm as ds

from zharness.compat.deepspeed import preferred_dtype, reduce_boolean_flags


def trained(stage, batch):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.ones(batch, 4)).square().mean())
    engine.step()
    return engine


class saved_by_4(DistributedFixture):
    world_size = 4

    def run(self, class_tmpdir, stage):
        trained(stage, 1).save_checkpoint(str(class_tmpdir), tag=f"stage{stage}")


@pytest.mark.parametrize("stage", [1, 2])
class TestTraining(DistributedTest):
    world_size = 2

    def test_steps(self, stage):
        before = torch.nn.Linear(4, 1)
        after = [tensor.detach().clone() for tensor in trained(stage, 2).module.parameters()]
        for tensor in after:
            others = [torch.empty_like(tensor) for _ in range(2)]
            dist.all_gather(others, tensor)
            assert reduce_boolean_flags(torch.equal(others[0], others[1]))

    def test_loads_what_4_ranks_saved(self, saved_by_4, class_tmpdir, stage):
        engine = trained(stage, 1)
        path, _ = engine.load_checkpoint(
            str(class_tmpdir), tag=f"stage{stage}", load_optimizer_states=False, load_module_only=True
        )
        assert path is not None
        saved = torch.load(path, weights_only=False)["module"]
        assert all(torch.equal(saved[name], value) for name, value in engine.module.state_dict().items())


class TestReady(DistributedTest):
    world_size = [1, 2]
    reuse_dist_env = True

    def test_communication(self):
        assert ds.is_initialized()
        assert ds.get_world_size() == int(os.environ["WORLD_SIZE"])
        total = torch.ones(1)
        ds.all_reduce(total)
        assert total.item() == ds.get_world_size()

    def test_again_in_the_same_ranks(self):
        ds.barrier()
        assert deepspeed.get_accelerator().device_count() == int(os.environ["LOCAL_SIZE"])
        assert preferred_dtype() in (torch.bfloat16, torch.float32)


class TestNotReady(DistributedTest):
    init_distributed = False

    def test_until_it_says_so(self):
        assert not ds.is_initialized()
        deepspeed.init_distributed("gloo")
        ds.barrier()
"""


def test_deepspeeds_engine_trains_saves_and_loads_on_ranks(tmp_path: Path) -> None:
    session = run(tmp_path, TRAINING, conftest="", DS_ACCELERATOR="cpu")
    failures = {name: result.text for name, result in session.tests.items() if result.verdict != "passed"}
    assert not failures, failures
    assert len(session.tests) == 9, session.output


@pytest.mark.exhaustive
@pytest.mark.skipif(any(find_missing_needs()), reason=f"needs {', '.join(find_missing_needs())}")
def test_the_shared_memory_operator_is_built_once_despite_the_lock_of_a_killed_build(tmp_path: Path) -> None:
    lock = leave_lock_of_killed_build(tmp_path / "built")
    session = run(tmp_path / "session", SHARED_MEMORY, conftest="", **build_variables(tmp_path / "built"))
    failures = {name: result.text for name, result in session.tests.items() if result.verdict != "passed"}
    assert not failures, failures
    assert len(session.tests) == 4, session.output
    assert not lock.exists()


def test_a_lock_that_a_process_has_open_is_left_alone(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with lock.open("w"):
        remove_stale_lock(lock)
        assert lock.exists()
    remove_stale_lock(lock)
    assert not lock.exists()
