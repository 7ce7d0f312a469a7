"""A hundred wrong usages: each gets one sentence with what was given and what to do, exit code 2, and no traceback."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache

import click
import pytest

from suites.warm import programs
from zharness.cli import cli
from zharness.cli.options import OnceCommand

# Run in one process, because importing torch takes longer than any of these mistakes.
SEVERAL = """
import contextlib, io, json, sys
from zharness.cli import main
done = []
for arguments in json.load(sys.stdin):
    sys.argv, out, errors = ["zharness", *arguments], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as ended:
            done.append([ended.code, out.getvalue(), errors.getvalue()])
print(json.dumps(done))
"""
CELL = "training.grads[reference-zero3-w2-fp32-mlp]"
ODD, TINY = "suites.cli.odd_factories", "suites.model.tiny:perceptron"

# The command line, and what its sentence has to say.
WRONG: dict[str, tuple[str, ...]] = {
    # names
    "chekc": ("no such command 'chekc'", "Did you mean 'check'", "zharness --help"),
    "list lawz": ("'lawz'", "did you mean 'laws'?", "zharness list --help"),
    "list laws training.grad": ("unknown law 'training.grad'", "did you mean 'training.grads'?"),
    "list models nonsense": ("unknown model 'nonsense'", "allowed: ", "zharness list models"),
    "check --law training.grads": ("no such option '--law'", "`zharness check LAW...`"),
    "check --modle mlp": ("no such option '--modle'", "'--model'", "zharness check --help"),
    "check --engine deepsped": ("unknown engine 'deepsped'", "did you mean 'deepspeed'?", "zharness list engines"),
    "check training.grads --device cuda": ("ZHARNESS_DEVICE is cuda, but",),
    "check training.grads --backend nccl": ("one GPU for each of 2 ranks", "ZHARNESS_BACKEND=staged"),
    "check training.grads --backend mpi": ("'mpi'", "gloo, nccl, staged"),
    "check --engine nonsense": ("unknown engine 'nonsense'", "allowed: plain, reference", "zharness list engines"),
    "check traning.grads": ("unknown law 'traning.grads'", "did you mean 'training.grads'?", "zharness list laws"),
    "check trajectory": ("unknown law 'trajectory'", "did you mean 'training.trajectory'?"),
    "check 'trainig.*'": ("unknown law 'trainig.*'", "did you mean 'training'"),
    "check mesh.dropout-masks": ("a variant of mesh.dropout is named in the id of a cell", "-DTYPE-MODEL-masks]'"),
    "check nonsense": ("unknown law 'nonsense'", "allowed: training.grads", "in all)"),
    "check --model mpl": ("unknown model 'mpl'", "did you mean 'mlp'?", "zharness list models"),
    "check --dtype bf61": ("unknown dtype 'bf61'", "did you mean 'bf16'? Allowed: fp32"),
    "check --variant tiny_bucket": ("unknown variant of engine 'reference'", "did you mean 'tiny_buckets'?"),
    "check --isolation pool": ("got 'pool'", "did you mean 'pooled'?"),
    "check 'training.grads[reference{tiny}-zero3-w2-fp32-mlp]'": ("variant of engine 'reference': 'tiny'", "allowed: "),
    "list": ("missing argument", "Choose from: engines, laws", "zharness list --help"),
    "mutants --scope target": ("got 'target'", "did you mean 'targets'?"),
    "hunt ddp --bogus": ("no such option '--bogus'", "zharness hunt --help"),
    "program 'x(2) linear(2) | q'": ("unknown verb 'q'", "allowed: f, b"),
    "repro 7352 --on ddp": ("reproduction 7352 runs on deepspeed, not on ddp", "pass --on deepspeed"),
    "check 'training.grad[reference-zero3-w2-fp32-mlp]'": ("did you mean 'training.grads'?",),
    "check 'training.grads[refrence-zero3-w2-fp32-mlp]'": ("did you mean 'reference'?",),
    "check 'training.grads[reference-zero3-w2-fp32-mlpp]'": ("unknown model 'mlpp'", "did you mean 'mlp'?"),
    "check 'training.grads[reference-zero3-w2-fp99-mlp]'": ("unknown dtype 'fp99'", "; allowed: fp32"),
    "mutants never_reduce": ("unknown mutant 'never_reduce'", "did you mean 'never_reduces'?"),
    "program --optimizer sdg 'x(2) linear(2) | f b'": ("got 'sdg'", "did you mean 'sgd'?"),
    "program 'x(2) lenear(2) | f b'": ("unknown layer 'lenear'", "did you mean 'linear'?"),
    "hunt depspeed": ("unknown engine 'depspeed'", "did you mean 'deepspeed'?"),
    "bisect deepsped training.grads --good 1 --bad 2": ("did you mean 'deepspeed'?",),
    "repro 999999": ("unknown reproduction '999999'", "zharness list repros"),
    "export nonsense": (
        "not a cell id: 'nonsense'",
        "expected LAW[ENGINE-zeroSTAGE-wRANKS.MESH-DTYPE-MODEL-VARIANT]",
    ),
    "shrink 'training.grad[ddp-zero0-w2-fp32-mlp]'": ("did you mean 'training.grads'?",),
    # numbers
    "check --stage 7": ("unknown stage '7'", "allowed: 0, 1, 2, 3"),
    "check --stage two": ("got 'two'", "expected integers separated by commas"),
    "check --engine ddp --stage 3": ("stage of engine 'ddp'", "allowed: 0"),
    "check --world-size 0": ("world size 0 cannot be started here", "allowed: 1 to"),
    "check --world-size 99999": ("world size 99999 cannot be started", "allowed: 1 to"),
    "check --world-size ''": ("got ''", "expected integers separated by commas"),
    "check --depth 9": ("9 is not in the range 1<=x<=4",),
    "program 'x(2) linear(2) | f b' --world-size 0": ("world size 0 cannot be started", "allowed: 1 to"),
    "hunt reference --stage 9": ("unknown stage '9'", "allowed: 0, 1, 2, 3"),
    "shrink 'training.grads[ddp-zero0-w2-fp32-mlp]' --seconds -1": ("-1.0 is not in the range",),
    "export 'training.grads[ddp-zero0-w2-fp32-mlp]' --seed x": ("'x' is not a valid integer",),
    "repro 7352 --on deepspeed==x": ("got release 'x'", "such as 0.18.8"),
    "check --jobs -1": ("-1 is not in the range",),
    "check --timeout 0": ("0.0 is not in the range",),
    # combinations
    "check torch_func --model transformer": ("nothing to run", "zharness list"),
    "check mesh.norm --model exact": ("the laws (mesh.norm) need a mesh, such as --mesh rep2;", "`zharness docs mesh`"),
    "check mesh.norm --engine torch_tp": (
        "got torch_tp with no mesh on 2 ranks; expected a mesh that takes all ranks, such as",
    ),
    "check mesh.norm --engine fsdp2 --mesh ''": ("the laws (mesh.norm) need a mesh, such as --mesh tp2;",),
    "check mesh.routing --engine deepspeed": ("the laws (mesh.routing) need a mesh, such as --mesh ep2;",),
    "check mesh.routing --engine fsdp2": ("--mesh ep2, and fsdp2 claims the axes dp_replicate, tp alone; `zh",),
    "check pipeline --engine deepspeed": ("such as --mesh pp2, and deepspeed claims the axes cp, ",),
    "check mesh --engine ddp": ("--mesh tp2, and ddp claims no axis of a mesh; `zharness docs mesh` lists the axes",),
    "check mesh.replicas --engine deepspeed --model routed": (
        "experts that ep splits; give it a mesh such as --mesh ep2",
    ),
    "check mesh.replicas --model context": ("whose sequence cp splits; give it a mesh such as --mesh cp2",),
    "check mesh.norm --model changing": ("none of the laws (mesh.norm) applies to the models changing",),
    "check mesh.norm --engine fsdp2 --mesh tp3": ("the mesh tp3 has 3 ranks or a multiple", "world size 2 is not"),
    "check mesh.training --engine deepspeed --mesh cp3 --world-size 3": (
        "the mesh cp3 splits none of the models of these laws",
        "the 4 tokens of a sequence of the model context cannot be split over cp3",
    ),
    "check --engine fsdp2 --mesh tp2 --depth 2": ("got the mesh tp2 and depth 2; a covering array", "use depth 1"),
    "check --variant tiny_buckets --depth 2": ("depth 2", "leave out the variant"),
    "repro": ("no reproduction was named", "`zharness repro 7352`"),
    "shrink": ("missing argument", "zharness shrink --help"),
    "program 'x(2) linear(2)'": ("not a program", "as in 'x(3) linear(2) relu | f b s'"),
    "hunt": ("missing argument 'ENGINE'", "zharness hunt --help"),
    "report": ("missing argument", "zharness report --help"),
    "check --jsonl": ("option '--jsonl' requires an argument", "zharness check --help"),
    "export": ("no cell id was given", "training.grads["),
    "program --clip 1": ("--clip", "give a program"),
    "program 'x(2) linear(2) | f b' --engine fsdp2 --stage 3 --mesh tp2": (
        "sums of integers could be compared where tp splits them",
        "run: zharness check mesh.any_order --engine fsdp2 --world-size 2 --mesh tp2 --seed N",
    ),
    "program --engine torch_pp --mesh pp2": ("check pipeline.any_order --engine torch_pp --world-size 2 --mesh pp2",),
    "program --mesh rep3": ("the mesh rep3 has 3 ranks or a multiple, which the world size 2 is not",),
    "program --engine ddp --mesh rep2": ("ddp does not claim the axis dp_replicate of the mesh",),
    "program 'x(2) linear(2) | f b' --engine ddp --mesh rep2": ("ddp cannot run", "claim the axis dp_replicate at st"),
    "hunt deepspeed --mesh ep2": ("check mesh.any_order --engine deepspeed --world-size 2,4 --mesh ep2 --seed N",),
    "hunt fsdp2 --mesh rep2 --world-size 3": ("which the world size 3 is not",),
    "hunt fsdp2 --world-size 0": ("world size 0 cannot be started here",),
    "releases deepspeed 0.18.8 --mesh tpp2": ("unknown axis of the mesh 'tpp'; did you mean 'pp' or 'tp'?",),
    "compare fsdp2 fsdp2 --mesh 2": ("got '2' in the mesh '2'; expected an axis and its size, as in tp2",),
    "releases --list --clean": ("both --list and --clean", "expected one of them"),
    f"check '{CELL}' --engine ddp": ("got --engine beside the id of a cell", "leave the option out"),
    "check training.grads --changed main": ("--changed and --reach need each other",),
    f"model {TINY} --mesh tp2": ("reference does not claim the axis tp", "dp_replicate"),
    f"model {ODD}:raises --mesh tp2": ("reference does not claim the axis tp",),  # before the model is built
    f"model {ODD}:raises --mesh rep3": ("the mesh rep3 has 3 ranks or a multiple",),
    f"model {ODD}:wrong_width --engine torch_tp --mesh tp2": ("ships no plan for the axis tp", "without --mesh"),
    f"model {TINY} --engine deepspeed --mesh ep2": ("has no plan for the axis ep; for a model of your own, only tp",),
    f"model {TINY} --only backward": ("nothing to run", "none of the laws (backward) applies"),
    # a repeated option
    "check mesh --mesh tp2 --mesh=pp2": ("got --mesh 2 times; expected it once", "once for each value"),
    "check --stage 1 --stage 2": ("got --stage 2 times", "write --stage 0,1,2,3 with all its values"),
    "check --world-size 2 --world-size 2,4": ("got --world-size 2 times", "write --world-size 1,2,4 with"),
    "check --seed 1 --seed 2 --seed 3": ("got --seed 3 times", "leave out all but one"),
    "check -x --maxfail 2": ("got -x and --maxfail; expected one of them",),
    "mutants --model mlp --model deep": ("got --model 2 times", "write --model NAME,... with"),
    f"model {TINY} --dtype fp32 --dtype bf16": ("got --dtype 2 times", "once for each value"),
    "report README.md --contracts --combinations": ("got --contracts and --combinations",),
    # what a user means by a name
    "check reference": ("got 'reference' as a law", "give --engine reference"),
    "check my_engine:MyEngine": ("got 'my_engine:MyEngine' as a law", "give --engine my_engine:MyEngine"),
    "check --engine ./my_engine.py:MyEngine": ("named package.module:factory, as Python imports it",),
    "check --engine my_engine": ("unknown engine 'my_engine'", "an engine of your own is named package.module:factory"),
    "check --engine reference,ddp": ("name one engine at a time: --engine reference --engine ddp",),
    "check 'training.grads[reference-zero3-w2-fp32-mlp'": ("not a cell id", "expected LAW[ENGINE-zeroSTAGE"),
    "check 'training.grads[reference-zero3-w2-fp32]'": ("not a cell id", "for example training.grads["),
    "check 'parameters.*[deepspeed-zero2-w2.ep2-*]'": ("not a cell id", "give 'parameters.*' and options"),
    "mutants --law 'training.grad[s]'": ("not a cell id",),
    "check ''": ("unknown law ''",),
    "check --laws ''": ("unknown version of the law set ''", "zharness laws versions"),
    f"model {TINY} --laws 9": ("unknown version of the law set '9'", "zharness laws versions"),
    "check training.grads --timeout nan": ("got 'nan'; expected a number",),
    "check training.grads --max-seconds nan": ("got 'nan'; expected a number",),
    "check training.grads --stage 0-3": ("got '0-3'", "expected integers separated by commas, as in 0,1,2"),
    # files
    "check training.grads --jsonl both --html both": ("both' twice", "a file of its own for each of the outputs"),
    "init README.md": ("found no record in README.md",),
    "check --jsonl /no/such/place": ("cannot write '/no/such/place'", "a path that can be written"),
    "check --html /no/such/place": ("cannot write '/no/such/place'",),
    "check training.grads --stage 0 --model exact --jsonl /dev/full": ("'/dev/full': No space left on device",),
    "check --expected-failures /no/such/file": ("cannot read expected failures from '/no/such/file'",),
    "report README.md": ("found no record in README.md", "`zharness check --jsonl FILE`"),
    "check training.grads --expected-failures README.md": ("README.md is not valid TOML",),
    "export 'training.grads[ddp-zero0-w2-fp32-mlp]' -o /no/such/x.py": ("cannot write '/no/such/x.py'",),
    "report /no/such/file": ("'/no/such/file' does not exist",),
    # packages and factories
    "check --engine no.such:factory": ("cannot import 'no.such'", "package.module:factory"),
    "check --engine json:factory": ("module 'json' has no callable 'factory'",),
    "check --engine suites.meta.broken:returns_no_engine": ("returned a NotAnEngine", "missing", "full_grads"),
    "check --engine suites.meta.broken:raises_at_once": ("raised OSError: no licence file",),
    "check --engine fsdp2==1.0": ("fsdp2==1.0 is not the installed release", "pip install torch==1.0"),
    "model": ("missing argument", "zharness model --help"),
    "model my_model": ("got 'my_model'", "expected package.module:factory"),
    f"model {TINY} --only training.grad": ("unknown law 'training.grad'", "did you mean 'training.grads'?"),
    f"model {TINY} --config no.json": ("cannot read the configuration 'no.json'", "No such file"),
    f"model {TINY} --config README.md": ("got the configuration 'README.md'", "ends in .json"),
    f"model {TINY} --against no.jsonl": ("cannot read 'no.jsonl'", "`zharness check --jsonl`"),
    f"model {TINY} --world-size 0": ("0 is not in the range x>=1", "zharness model --help"),
    f"model {TINY} --steps 0": ("'--steps': 0 is not in the range",),
    "model suites.model.tiny:x*": ("unknown factory of suites.model.tiny 'x*'", "allowed: perceptron"),
    "model suites/model/tiny.py:perceptron": ("expected package.module:factory",),
    "model no.such:factory": ("cannot import 'no.such'",),
    f"model {ODD}:on_meta": ("'weight'", "on the device meta", "build it without torch.device('meta')"),
    f"model {ODD}:exits": ("called sys.exit('no licence')", "remove the exit"),
    f"model {ODD}:raises": ("raised KeyError: 'weights' (raised by suites/cli/odd_factories.py, line ", "in raises)"),
    f"model {ODD}:four_parts": (
        "returned a tuple of (a Linear, a function, a function, an int)",
        "expected a model; or",
    ),
    f"model {ODD}:a_class": ("returned the class Linear", "expected a model; or"),
    f"model {ODD}:batch_without_argument": ("batch(generator) raised TypeError", "draws a micro-batch"),
    f"model {ODD}:wrong_width": ("mat1 and mat2 shapes", "(raised by suites/cli/odd_factories.py", "in forward)"),
    f"model {ODD}:bf16_layer": ("parameter 'last.weight' is not fp32", "x.to(self.layer.weight.dtype)"),
    f"model {ODD}:sparse_embedding": ("has sparse gradients", "sparse=False"),
    "model suites.cli.exits_at_import:factory": ("SystemExit: no GPU", "exits_at_import.py, line 5, in <module>"),
    "check --engine suites.cli.exits_at_import:factory": ("SystemExit: no GPU", "package.module:factory"),
    f"check training.grads --engine ddp --model {ODD}:a_class": ("returned the class Linear",),
    f"check 'training.grads[ddp-zero0-w2-fp32-{ODD}:a_class]'": ("returned the class Linear",),
    f"model {ODD}:z*": ("unknown factory of suites.cli.odd_factories 'z*'", "a function of suites.cli.odd_factories"),
    f"model {TINY} --jobs abc": ("'abc' is not a valid integer (see",),
    f"model {TINY} --config suites/cli/misspelt_scheduler.json": ("scheduler.type 'WarmupLr'", "mean 'WarmupLR'?"),
}
MAX_LINES = {
    "check --engine suites.meta.broken:returns_no_engine": 4,  # a line for each missing method
    # The first line says that the size is not known before the model is built.
    "model suites.cli.odd_factories:exits": 2,
    "model suites.cli.odd_factories:raises": 2,
}
PROGRESS = re.compile(r"^.*(: building it, running it|^\d+ of \d+ cells).*\n", re.MULTILINE)


@cache
def run_all() -> dict[str, tuple[int, str, str]]:
    """Run every command of WRONG in one process, and return exit code, output and errors of each."""
    done = programs.run("-c", SEVERAL, stdin_text=json.dumps([shlex.split(line) for line in WRONG]))
    assert done.returncode == 0, done.stderr
    return dict(zip(WRONG, map(tuple, json.loads(done.stdout)), strict=True))


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_usage_gets_one_clear_sentence_and_exit_code_2(line: str) -> None:
    code, out, errors = run_all()[line]
    assert code == 2, out + errors
    for words in WRONG[line]:
        assert words in errors
    assert "Traceback" not in errors + out
    assert "please report" not in errors
    sentence = PROGRESS.sub("", errors).strip()
    assert len(sentence.splitlines()) <= MAX_LINES.get(line, 1), sentence
    assert len(sentence) < 700, sentence


def test_every_command_with_an_option_of_one_value_refuses_it_twice() -> None:
    for name, command in cli.commands.items():
        single = [each for each in command.params if isinstance(each, click.Option) and not each.multiple]
        assert isinstance(command, OnceCommand) or all(each.is_flag for each in single), name


def test_lists_and_flags_may_be_repeated() -> None:
    context = click.Context(cli.commands["check"])
    cli.commands["check"].parse_args(context, ["--engine", "ddp", "--engine", "fsdp2", "-x", "-x", "--probe-withheld"])
    assert context.params["engines"] == ("ddp", "fsdp2")
    assert context.params["max_failures"] == 1
