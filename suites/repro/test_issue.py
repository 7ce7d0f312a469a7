"""The text for an upstream issue: stripped scripts show the same result, and the text has only what a run showed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zharness.cli import cli
from zharness.errors import UsageError
from zharness.releases import issue_text, repros
from zharness.releases.issue_script import strip_script
from zharness.releases.issue_text import cut_output, run_stripped
from zharness.releases.repro_runs import ReproRun, run_repros
from zharness.releases.repros import REPRO_FOLDER, ReproVerdict, parse_repro

SCRIPTS = sorted(REPRO_FOLDER.glob("*.py"))
MAX_LINES = 80
MARKS = ("repro: ", "SIGNATURE", "signature:", "symptom:", "zharness")
# One script of each kind, without DeepSpeed and FSDP: a line that is printed, an error that is raised, an assertion
# before which a check stood.
RUN = ("47260", "exception-in-backward", "state-outlives-load")
MADE_UP = '''"""A made-up bug of two lines.

id: made-up
engine: ddp
symptom: the wrong number
reported: no report known
affects: >=2.0
fixed: 99.0
ranks: 1
law: training.grads
signature: the sum is 3
ok: repro: a sum OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=1 repro/ddp_noreport_made_up.py

Why the sum
is wrong.

If the bug is absent, the script prints the line "ok" above.
"""

import sys

SIGNATURE = "the sum is 3"
OK = "repro: a sum OK."


def main():
    try:
        # A comment within.
        total = add(1, 1)
    except ValueError as error:
        if SIGNATURE not in str(error):
            raise
        print(f"repro: REPRODUCED: {error}\\n", end="", flush=True)
        return 1
    told = f"the sum is {total}"
    if SIGNATURE in told:
        print(f"repro: REPRODUCED: {told}\\n", end="", flush=True)
        return 1
    assert total == 2, told
    print(OK, flush=True)
    return 0


def add(one, other):
    return one + other + WRONG


WRONG = 1

if __name__ == "__main__":
    sys.exit(main())
'''
STRIPPED_MAIN = """def main():
    # A comment within.
    total = add(1, 1)
    told = f"the sum is {total}"
    assert total == 2, told
    print("a sum OK.", flush=True)
    return 0
"""


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of reproductions with one made-up script, which needs no engine."""
    monkeypatch.setattr(repros.load_catalogue, "__defaults__", (tmp_path,))
    monkeypatch.setattr(repros.find_repros, "__defaults__", (tmp_path,))
    path = tmp_path / "ddp_noreport_made_up.py"
    path.write_text(MADE_UP)
    return path


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_can_be_stripped(path: Path) -> None:
    stripped = strip_script(path.read_text())
    compile(stripped, path.name, "exec")
    assert not [mark for mark in MARKS if mark in stripped]
    assert len(stripped.splitlines()) <= MAX_LINES


def test_checks_of_the_signature_are_removed() -> None:
    assert STRIPPED_MAIN in strip_script(MADE_UP)


@pytest.mark.parametrize(
    "identifier", [RUN[0], *(pytest.param(each, marks=pytest.mark.exhaustive) for each in RUN[1:])]
)
def test_a_stripped_script_shows_the_same_result(identifier: str) -> None:
    repro = repros.find_repro(next(each.engine for each in repros.find_repros(identifier)), identifier)
    run = ReproRun(repro, repro.engine)
    (whole,) = run_repros([run])
    stripped, issue_run = run_stripped(run, strip_script(repro.path.read_text()), 300.0)
    assert whole.verdict is stripped.verdict is ReproVerdict.REPRODUCED, stripped.output
    assert whole.evidence in issue_run.output


def test_the_text_has_script_output_and_versions(made_up: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["repro", "made-up", "--issue", "--on", "ddp"], standalone_mode=False) == 0
    text = capsys.readouterr().out
    assert text.startswith("A made-up bug of two lines\n\nWhy the sum is wrong.\n\n### To reproduce")
    assert STRIPPED_MAIN in text
    assert 'It prints "a sum OK." and ends with exit code 0. torch 99.0 does so.' in text
    assert 'File "script.py"' in text
    assert "AssertionError: the sum is 3\n```" in text
    assert "torch 2." in text.partition("### Versions")[2]
    assert "Python 3." in text.partition("### Versions")[2]
    assert str(Path.home()) not in text
    assert str(made_up.parent) not in text


def test_there_is_no_text_without_the_bug(made_up: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_up.write_text(MADE_UP.replace("WRONG = 1", "WRONG = 0"))
    assert cli.main(["repro", "made-up", "--issue", "--on", "ddp"], standalone_mode=False) == 1
    made_up.write_text(MADE_UP.replace("WRONG = 1", "WRONG = None"))
    assert cli.main(["repro", "made-up", "--issue", "--on", "ddp"], standalone_mode=False) == 3
    printed = capsys.readouterr()
    assert not printed.out
    assert "not reproduced, so there is no text" in printed.err
    assert "failed otherwise, so there is no text" in printed.err
    assert "TypeError" in printed.err


def test_the_run_of_a_record_is_printed(made_up: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "results.jsonl"
    run = ReproRun(parse_repro(made_up), "ddp")
    (result,) = run_repros([run])
    line = {**result.as_json(), "machine": "Python 3.99, another machine, CUDA, nccl", "torch_version": "2.99"}
    record.write_text(json.dumps(line) + "\n")
    command = ["repro", "made-up", "--issue", "--on", "ddp", "--record", str(record)]
    assert cli.main(command, standalone_mode=False) == 0
    text = capsys.readouterr().out
    assert "```\nthe sum is 3\n```" in text
    assert f"torch {result.release}; Python 3.99, another machine, CUDA, nccl." in text
    record.write_text(json.dumps({**line, "verdict": "not reproduced"}) + "\n")
    with pytest.raises(UsageError, match="has no run that shows made-up with its output"):
        cli.main(command, standalone_mode=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["8026", "--issue"], "--issue: got the reproductions"),
        (["--issue"], "no reproduction was named"),
        (["--all", "--issue"], "--issue prints the text of one reproduction"),
        (["47260", "--record", str(REPRO_FOLDER / SCRIPTS[0].name)], "--record applies only to --issue"),
        (["47260", "--issue", "--record", str(SCRIPTS[0])], "is not a file of `zharness repro --jsonl`"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        cli.main(["repro", *arguments], standalone_mode=False)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_output_is_cut_to_what_shows_the_bug() -> None:
    frames = [f'  File "/env/lib/python3.12/site-packages/torch/{number}.py", line 1, in f' for number in range(50)]
    lines = ["a warning", "[rank1]: Traceback (most recent call last):", *frames, "[rank1]: ValueError: wrong number"]
    shown = cut_output("\n".join([*lines, "[rank0]: ValueError: another", "ChildFailedError"]), "wrong number")
    assert shown.startswith('Traceback (most recent call last):\n  File "torch/0.py"')
    assert shown.endswith('  File "torch/49.py", line 1, in f\nValueError: wrong number')
    assert len(shown.splitlines()) == issue_text.MAX_OUTPUT_LINES + 1
    assert cut_output("Traceback (most recent call last):\n  x\nKeyError\n\nwrong number\n", "wrong number") == (
        "wrong number"
    )
