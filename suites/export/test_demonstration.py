"""A fault planted into DeepSpeed under a LoRA on a GPT-2 that recomputes: found, and in the smallest too."""

from __future__ import annotations

import pytest

from zharness import engines
from zharness.export.script import script_of
from zharness.export.shrink import likeness
from zharness.run.record import Record, Verdict

pytest.importorskip("deepspeed")
pytest.importorskip("peft")
MODEL = "suites.export.planted:lora"
SMALL = "num_hidden_layers=1,num_attention_heads=1,hidden_size=8,vocab_size=16,max_position_embeddings=8"
FACTOR = "it is 1.0001 x the right gradient"


@pytest.mark.cells("deepspeed", stages=(1,), checks=("training.grads",), models=(MODEL,))
def test_the_planted_fault_is_found(record: Record) -> None:
    assert record.verdict.broken
    assert FACTOR in record.cause
    assert "lora_B" in record.cause


@pytest.mark.cells("deepspeed", stages=(1,), checks=("training.grads",), models=(f"{MODEL}({SMALL})",))
def test_it_is_found_in_the_smallest_of_that_model_and_told_in_a_script(record: Record) -> None:
    wanted = likeness(Verdict.FAIL, f"step 0, reduction: w[0] (bound 1); {FACTOR}")
    assert wanted.alike(likeness(record.verdict, record.cause))
    claims = engines.capabilities("deepspeed", 1)
    assert claims is not None
    script = script_of(record, claims, "small.py").text
    compile(script, "small.py", "exec")
    assert "reduced(factory(), {'num_hidden_layers': '1'" in script
    assert "class Training" in script, "which the bench of the script names"
