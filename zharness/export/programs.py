"""A program (see ``zharness.workload.programs``) as a script: its model as torch's modules, its verbs as lines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from zharness.checks.trajectory import TRAINED_BY
from zharness.engines import Capabilities, Feature
from zharness.export.frame import Script, Setting, Writing, quoted
from zharness.export.header import WRONG, facts_first
from zharness.export.judged import judged_script, of_program
from zharness.run.programs import SEED, Outcome, command
from zharness.run.record import Verdict
from zharness.workload.layers import BLOCKS, spec_of
from zharness.workload.programs import Act, Book, Kind, Layer, Mark, Program, Verb, Widths, behind, played

LAYERS = "zharness.workload.layers"
UNWRITTEN_LAYERS = (Kind.TIED, Kind.SOMETIMES)
WRITTEN_ACTS = (
    *(Act.FORWARD, Act.BACKWARD, Act.NO_SYNC, Act.STEP, Act.ZERO_GRAD, Act.NO_GRAD, Act.INFERENCE),
    Act.INPUT_GRAD,
)
WRITTEN_MARKS = (Mark.OLD, Mark.TENSOR, Mark.SCALE, Mark.OTHER, Mark.RETAIN)
FORWARDS = {Act.NO_GRAD: "torch.no_grad()", Act.INFERENCE: "torch.inference_mode()"}


def told_in_lines(program: Program) -> bool:
    """Whether every verb is a line or two that a caller writes, in fp32 and with an optimizer alone."""
    layers = not any(layer.kind in UNWRITTEN_LAYERS for layer in program.walk())
    verbs = all(verb.act in WRITTEN_ACTS and set(verb.marks) <= set(WRITTEN_MARKS) for verb in program.verbs)
    plain = program.plainly == program and program.optimizer in TRAINED_BY
    return layers and verbs and plain and program.dtype == "fp32"


def script_of_program(engine: str, version: str, program: Program, outcome: Outcome, claims: Capabilities) -> Script:
    """The script that shows what ``outcome`` says of ``program``; with the judge where a caller's lines do not do."""
    if not told_in_lines(program):
        return whole_script(engine, version, program, outcome, claims)
    writing = Writing(engine)
    model, told = model_of(writing, program), steps_of(writing, program)
    signature = WRONG if outcome.verdict is not Verdict.CRASH else exception_of(outcome.cause)
    head, ok = head_of(engine, version, program, outcome, signature)
    setting = Setting(
        engine=engine,
        stage=program.stage,
        seed=SEED,
        claims=claims,
        exact=False,
        zeros=claims.refusal(Feature.NO_GRADIENT) is not None,
        elements=sum(p.numel() for p in spec_of(program.layers).model(SEED).parameters()),
    )
    return writing.script(head, setting, model, told, signature, ok)


def whole_script(engine: str, version: str, program: Program, outcome: Outcome, claims: Capabilities) -> Script:
    """The script in which the program is played, and judged, as the harness does."""
    raised = "raised: " in outcome.cause
    signature = exception_of(outcome.cause) if raised else outcome.cause.partition(":")[0]
    head, ok = head_of(engine, version, program, outcome, signature)
    return judged_script(of_program(engine, program, claims), (head, signature, ok))


def head_of(engine: str, version: str, program: Program, outcome: Outcome, signature: str) -> tuple[str, str]:
    """The docstring, and the line that the script ends with where nothing is wrong."""
    ok = f"repro: {quoted(str(program))[1:-1]} on {engine} at stage {program.stage} OK."
    head = facts_first(
        title=f"A small program goes wrong on {engine} {version} at stage {program.stage}, {program.world_size} ranks.",
        engine=engine,
        version=version,
        ranks=program.world_size,
        law="training.trajectory",
        cause=outcome.cause,
        signature=signature,
        ok=ok,
        name="script.py",
        said=[
            f"The program: {program}",
            "Every verb is held against plain PyTorch's from the engine's own weights before it.",
            f"Written from: {command(engine, [program])}",
        ],
    )
    return head, ok


def exception_of(cause: str) -> str:
    """The exception's type and the first of its words."""
    raised = " ".join(cause.partition("raised: ")[2].split())
    return raised[:40].rpartition(" ")[0] or raised[:40]


def model_of(writing: Writing, program: Program) -> str:
    """SPEC: the model, its micro-batches and its loss."""
    writing.collection.add("zharness.workload.models", "ModelSpec")
    writing.collection.add("zharness.workload.models", "SAMPLES")
    writing.imports += ["import torch", "from torch import nn"]
    widths, lines = Widths(), []
    for layer in program.layers:
        lines.append(module_of(writing, layer, widths))
        widths = behind(widths, layer)
    held = "Chain" if any(layer.kind in BLOCKS for layer in program.layers) else "nn.Sequential"
    if held == "Chain":
        writing.collection.add(LAYERS, "Chain")
    listed = f"[{', '.join(lines)}]" if held == "Chain" else ", ".join(lines)
    source = program.layers[0]
    inputs = (
        f"torch.randint({source.sizes[0]}, (SAMPLES,), generator=generator)"
        if source.kind is Kind.TOKENS
        else f"torch.randn(SAMPLES, {source.sizes[0]}, generator=generator)"
    )
    return f"""def model():
    return {held}({listed})


def micro_batch(generator):
    inputs = {inputs}
    return Batch(inputs, torch.randn(SAMPLES, {widths.width}, generator=generator))


SPEC = ModelSpec({quoted(program.model)}, "the model of a program", model, micro_batch, nn.functional.mse_loss)"""


def module_of(writing: Writing, layer: Layer, widths: Widths) -> str:
    """The expression that builds one layer."""
    width, size = widths.width, (0, *layer.sizes)[-1]
    if layer.kind in BLOCKS:
        name = BLOCKS[layer.kind].__name__
        writing.collection.add(LAYERS, name)
        writing.collection.add(LAYERS, "Chain")
        inner = []
        for each in layer.inner:
            inner.append(module_of(writing, each, widths))
            widths = behind(widths, each)
        return f"{name}(Chain([{', '.join(inner)}]))"
    own = {Kind.FROZEN: f"Frozen({width}, {size})", Kind.READ: f"Read({width}, {size})", Kind.CONV: f"Conv({size})"}
    own[Kind.UNUSED] = f"Unused({size})"
    if layer.kind in own:
        writing.collection.add(LAYERS, own[layer.kind].partition("(")[0])
        return own[layer.kind]
    return {
        Kind.INPUTS: "nn.Identity()",
        Kind.TOKENS: f"nn.Embedding({layer.sizes[0] if layer.sizes else 0}, {size})",
        Kind.LINEAR: f"nn.Linear({width}, {size})",
        Kind.MATRIX: f"nn.Linear({width}, {size}, bias=False)",
        Kind.NORM: f"nn.LayerNorm({width})",
        Kind.RELU: "nn.ReLU()",
        Kind.GELU: "nn.GELU()",
    }[layer.kind]


def steps_of(writing: Writing, program: Program) -> str:
    """observe: a line or two for each verb."""
    writing.collection.add("zharness.checks.trajectory", program.optimizer.upper())
    if any(Mark.OTHER in verb.marks for verb in program.verbs):
        writing.collection.add("zharness.checks.double_backward", "second_loss")
    lines = [f"engine = bench.engine(optimizer={program.optimizer.upper()})", "bench.record_trained(engine, 0)"]
    era = 0
    for place, verb, book in played(program):
        lines.append(f"# {verb}")
        lines += lines_of(verb, book, place)
        if verb.act is Act.STEP:
            era += 1
            lines.append(f"bench.record_trained(engine, {era})")
    assert TRAINED_BY[program.optimizer], "a name of the steps' own"
    return "def observe(bench):\n" + textwrap.indent("\n".join([*lines, "engine.close()"]), "    ")


def lines_of(verb: Verb, book: Book, place: int) -> Iterator[str]:
    """What a caller writes for one verb; a gradient is recorded after each backward that reduces."""
    drawn = book.drawn
    batch = f"bench.batch({drawn})"
    if verb.act is Act.FORWARD:
        yield f"output{drawn} = engine({batch}.inputs)"
        yield f'bench.record("output", {{"output": output{drawn}}}, {place})'
    elif verb.act in FORWARDS:
        yield f"with {FORWARDS[verb.act]}:"
        yield f"    output = engine({batch}.inputs)"
        yield f'bench.record("output", {{"output": output.clone()}}, {place})'
    elif verb.act is Act.BACKWARD:
        chosen = book.chosen(verb)
        yield from backward(verb, f"output{chosen}", chosen)
        yield f'bench.record("grads", engine.full_grads(), {place})'
    elif verb.act is Act.NO_SYNC:
        yield "with engine.no_sync():"
        yield f"    output = engine({batch}.inputs)"
        yield from (f"    {line}" for line in backward(verb, "output", drawn))
    elif verb.act is Act.INPUT_GRAD:
        yield f"leaf = {batch}.inputs.clone().requires_grad_()"
        yield "(grad,) = torch.autograd.grad(engine(leaf).sum(), leaf)"
        yield f'bench.record("input", {{"input": grad}}, {place})'
    else:
        yield from ["engine.step()", "engine.zero_grad()"] if verb.act is Act.STEP else ["engine.zero_grad()"]


def backward(verb: Verb, output: str, micro: int) -> Sequence[str]:
    """A backward in its spelling."""
    loss = f"SPEC.loss({output}, bench.batch({micro}).target)"
    loss = f"second_loss({output})" if Mark.OTHER in verb.marks else loss
    retain = f"retain_graph={Mark.RETAIN in verb.marks}"
    if Mark.TENSOR in verb.marks:
        return [f"torch.autograd.backward({loss}, {retain})"]
    if Mark.SCALE in verb.marks:
        return [f"torch.autograd.backward(engine.scale({loss}), {retain})"]
    return [f"engine.backward({loss}, {retain})"]
