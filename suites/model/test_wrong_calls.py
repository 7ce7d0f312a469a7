"""A wrong call of the public functions, marker or option is one clear sentence before any rank starts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zharness
from suites.warm import programs
from zharness.errors import UsageError

BATCH = torch.zeros(16, 8)
A_TUPLE_OF_NAMES = r"expected a tuple of names, such as "


def square(output: Tensor, _batch: Tensor) -> Tensor:
    return output.square().mean()


def verify(*args: Any, **options: Any) -> Callable[[], Any]:
    """Return a call of ``zharness.verify`` on a linear layer, whose arguments are replaced by those given."""
    return lambda: zharness.verify(*(args or (nn.Linear(8, 4), BATCH, square)), **options)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no model": (verify(3, BATCH, square), "got an int; expected a module, a function that builds one"),
    "a class": (verify(nn.Linear, BATCH, square), r"got the class Linear; expected .*lambda: Linear\(\.\.\.\)"),
    "no batch": (verify(nn.Linear(8, 4), None, square), "a Linear without a batch; expected its inputs as batch="),
    "no row": (verify(nn.Linear(8, 4), torch.zeros(()), square), r"shape \(\).*the same number of rows, at least two"),
    "batch": (verify(nn.Linear(8, 4), 3, square), "got the batch an int; expected a function"),
    "path": (verify("no.such:factory"), "cannot import 'no.such'"),
    "factory": (verify("suites.model.tiny:perceptro"), "has no callable 'perceptro'"),
    "bare name": (verify("perceptron"), "unknown model 'perceptron'; allowed: .*package.module:factory"),
    "engine": (verify(engine="deepsped"), "did you mean 'deepspeed'"),
    "no engine": (verify(engine=None), "got engine=None; expected a string"),
    "stage": (verify(stages=(7,)), "unknown stage '7'; allowed: 0, 1, 2, 3"),
    "one stage": (verify(stages=3), r"got stages=3; expected a tuple of integers, such as stages=\(3,\)"),
    "text as stage": (verify(stages=("3",)), r"got stages=\('3',\); expected a tuple of integers"),
    "dtype": (verify(dtype=torch.float32), "unknown dtype 'torch.float32'; allowed: fp32, bf16, fp16"),
    "ranks": (verify(world_size=0), "world size 0 cannot be started here; allowed: 1 to"),
    "text as ranks": (verify(world_size="2"), "got world_size='2'; expected an integer"),
    "steps": (verify(steps=0), "got steps=0; expected a number that is at least 1"),
    "time-out": (verify(timeout=-1), "got timeout=-1; expected a number that is at least 1"),
    "jobs": (verify(jobs=-1), "got jobs=-1; expected a number that is at least 0"),
    "one law": (verify(only="training.grads"), rf"{A_TUPLE_OF_NAMES}only=\('training.grads',\)"),
    "law": (verify(only=("training.grad",)), "did you mean 'training.grads'"),
    "file": (verify(config="no.json"), "cannot read the configuration 'no.json' as a JSON file: No such file"),
    "configuration": (verify(config=3), "got config=3; expected a dictionary, or the path of a JSON file"),
    "lambda as engine": (lambda: zharness.check_engine(lambda _model, _config: None), "cannot import the factory"),
    "laws in a string": (lambda: zharness.check_engine("ddp", laws="training.grads"), A_TUPLE_OF_NAMES),
    "two names": (lambda: zharness.check_engine("ddp", laws=("a",), checks=("b",)), "expected laws, or its older name"),
    "law of run_laws": (lambda: zharness.run_laws("ddp", laws=("training.grad",)), "did you mean 'training.grads'"),
    "dtype of run_laws": (lambda: zharness.run_laws("ddp", dtypes=("fp99",)), "unknown dtype 'fp99'; allowed: fp32"),
    "size of run_laws": (lambda: zharness.run_laws("ddp", world_sizes=2), r"such as world_sizes=\(2,\)"),
    "mesh": (verify(mesh="tp2"), "reference does not claim the axis tp of the mesh; axes that it claims: dp_replicate"),
    "size of the mesh": (verify(mesh="rep3"), "the mesh rep3 has 3 ranks or a multiple, which the world size 2 is not"),
    "form of a mesh": (lambda: zharness.check_engine("fsdp2", mesh="2"), "got '2' in the mesh '2'; expected an axis"),
    "no text as mesh": (
        lambda: zharness.check_engine("fsdp2", mesh=("tp2",)),
        "; expected a string",
    ),
    "mesh of run_laws": (lambda: zharness.run_laws("fsdp2", mesh="tp3"), "tp3 has 3 ranks or a multiple"),
    "axis of run_laws": (lambda: zharness.run_laws("ddp", mesh="tp2"), "ddp does not claim the axis tp of the mesh"),
    "time of run_laws": (lambda: zharness.run_laws("ddp", timeout=0), "got timeout=0; expected a number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_one_sentence(name: str) -> None:
    call, words = WRONG[name]
    with pytest.raises(UsageError) as raised:
        call()
    sentence = str(raised.value)
    assert re.search(words, sentence), sentence
    assert len(sentence.splitlines()) == 1, sentence
    assert len(sentence) < 700, sentence


WRONG_FILES = {
    "law": ("test_laws = zharness.check_engine('ddp', laws=('training.grad',))", "did you mean 'training.grads'?"),
    "engine": ("test_laws = zharness.check_engine('deepsped')", "did you mean 'deepspeed'?"),
    "stage": (
        "test_laws = zharness.check_engine('ddp', stages=(3,))",
        "unknown stage of engine 'ddp': '3'; allowed: 0",
    ),
    "mesh": ("test_laws = zharness.check_engine('fsdp2', mesh='tp3')", "the mesh tp3 has 3 ranks or a multiple"),
    "no_rank": ("@pytest.mark.world_size(0)\ndef test_it(): pass", "world_size(0): expected one or more different"),
    "text": ("@pytest.mark.world_size('2')\ndef test_it(): pass", "as in @pytest.mark.world_size(2, 4)"),
}


def test_a_wrong_marker_or_argument_is_one_sentence_of_the_collection(tmp_path: Path) -> None:
    for name, (text, _) in WRONG_FILES.items():
        (tmp_path / f"test_{name}.py").write_text(f"import pytest, zharness\n{text}\n")
    done = programs.run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path))
    for name, (_, words) in WRONG_FILES.items():
        assert words in done.stdout, name
    assert "Traceback" not in done.stdout + done.stderr
    assert f"{len(WRONG_FILES)} errors" in done.stdout


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--zharness-isolation=pool", "invalid choice: 'pool' (choose from "),
        ("--zharness-rank-timeout=0", "expected a number of seconds above 0, got 0"),
    ],
)
def test_a_wrong_option_of_pytest_is_one_sentence(option: str, words: str) -> None:
    done = programs.run("-m", "pytest", option, "suites/model/tiny.py")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert words in done.stderr
    assert "Traceback" not in done.stderr
