"""A fault in DeepSpeed is found with a LoRA model on a checkpointed GPT-2, and with the smallest such model too.

Every command runs in its own process, because importing the model changes DeepSpeed for the whole process.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from suites.warm import programs
from zharness.run.record import Record
from zharness.run.record_reader import load_records

# Looked for, not imported: every worker would import both, and what they do runs in processes of its own.
pytestmark = pytest.mark.skipif(not (find_spec("deepspeed") and find_spec("peft")), reason="needs deepspeed and peft")
MODEL = "suites.export.planted:lora"
SMALL = "num_hidden_layers=1,num_attention_heads=1,hidden_size=8,vocab_size=16,max_position_embeddings=8"
FACTOR = "it is 1.0001 x the right gradient"


def zharness(status: int, *arguments: str) -> None:
    """Run the command in a process of its own and check its exit code."""
    done = programs.run("-m", "zharness", *arguments)
    assert done.returncode == status, done.stdout + done.stderr


def make_cell_id(model: str) -> str:
    return f"training.grads[deepspeed-zero1-w2-fp32-{model}]"


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, ...]:
    path = tmp_path_factory.mktemp("records") / "records.jsonl"
    zharness(1, "check", make_cell_id(f"{MODEL}({SMALL})"), "--jsonl", str(path))
    return tuple(load_records([path]).records)


def test_the_planted_fault_is_found_in_the_smallest_model(records: tuple[Record, ...]) -> None:
    assert len(records) == 1
    for record in records:
        assert record.verdict.is_broken
        assert FACTOR in record.cause
        assert "lora_B" in record.cause


def test_the_smallest_is_told_in_a_script(tmp_path: Path) -> None:
    cell, script = make_cell_id(f"{MODEL}({SMALL})"), str(tmp_path / "small.py")
    zharness(0, "export", cell, "--standalone", "--no-verify", "-o", script)
    script = (tmp_path / "small.py").read_text()
    compile(script, "small.py", "exec")
    assert "lora(), {'num_hidden_layers': '1'" in script
    assert "class TrainingConfig" in script, "which the bench of the script names"
