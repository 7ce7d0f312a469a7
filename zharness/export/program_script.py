"""Render a program as a script: its model as torch modules, and its verbs as calls of the engine.

``zharness.workload.programs`` defines programs and verbs.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from zharness.engines import Capabilities, Feature
from zharness.export.header import WRONG_NUMBER_PHRASE, ScriptForm, render_docstring
from zharness.export.judge_script import build_program_script_spec, render_judge_script
from zharness.export.literals import render_literal
from zharness.export.script_writer import Script, ScriptSettings, ScriptWriter, quote
from zharness.law_kit.dtypes import DTYPES
from zharness.law_kit.optimizers import TRAJECTORY_OPTIMIZERS
from zharness.law_kit.program_executor import observe_program
from zharness.laws.training.trajectory import TRAJECTORY_LAW
from zharness.run.program_runner import SEED, ProgramOutcome, format_program_command, program_options
from zharness.run.record import Verdict
from zharness.workload.model_shape import ModelShape, shape_after_layer
from zharness.workload.models import ModelSpec
from zharness.workload.program_model import (
    BLOCK_CLASSES,
    Chain,
    Conv,
    FrozenLinear,
    UncalledLinear,
    UnusedParameter,
    program_model_spec,
)
from zharness.workload.programs import (
    Act,
    CallerState,
    Layer,
    LayerKind,
    Mark,
    Program,
    Verb,
    iter_verbs,
)

PACKAGE_LAYERS = {
    LayerKind.FROZEN: FrozenLinear,
    LayerKind.READ: UncalledLinear,
    LayerKind.CONV: Conv,
    LayerKind.UNUSED: UnusedParameter,
}
UNWRITTEN_LAYERS = (LayerKind.TIED, LayerKind.SOMETIMES)
WRITTEN_ACTS = (
    *(Act.FORWARD, Act.BACKWARD, Act.NO_SYNC, Act.STEP, Act.ZERO_GRAD, Act.NO_GRAD, Act.INFERENCE),
    Act.INPUT_GRAD,
)
WRITTEN_MARKS = (Mark.OLD, Mark.TENSOR, Mark.SCALE, Mark.OTHER, Mark.RETAIN)
GRADLESS_FORWARDS = {Act.NO_GRAD: "torch.no_grad()", Act.INFERENCE: "torch.inference_mode()"}


def has_short_script(program: Program) -> bool:
    """Return whether each verb of ``program`` can be written as one or two lines of user code.

    Such a program also has to use fp32 and the default settings.
    """
    layers = not any(layer.kind in UNWRITTEN_LAYERS for layer in program.walk())
    verbs = all(verb.act in WRITTEN_ACTS and set(verb.marks) <= set(WRITTEN_MARKS) for verb in program.verbs)
    plain = program.with_default_settings == program and program.optimizer in TRAJECTORY_OPTIMIZERS
    return layers and verbs and plain and program.dtype == "fp32"


def render_program_script(
    engine: str, version: str, program: Program, outcome: ProgramOutcome, claims: Capabilities
) -> Script:
    """Return the script that shows ``outcome`` of ``program``.

    The script contains the judge unless every verb can be written as user code.
    """
    if not has_short_script(program):
        return render_judged_program_script(engine, version, program, outcome, claims)
    writing = ScriptWriter(engine)
    model, observe_text = render_program_model(writing, program), render_observe(writing, program)
    signature = WRONG_NUMBER_PHRASE if outcome.verdict is not Verdict.CRASH else extract_exception(outcome.cause)
    head, ok = render_program_header(engine, version, program, outcome, signature)
    options, claims = program_options(program, claims), claims.with_options(program.options)
    setting = ScriptSettings(
        engine=engine,
        stage=program.stage,
        seed=SEED,
        claims=claims,
        options=options,
        reduce_dtype=DTYPES[claims.reduce_dtypes.get(program.dtype, program.dtype)],
        exact=False,
        zeros_allowed=claims.refusal(Feature.NO_GRADIENT) is not None,
        element_count=sum(p.numel() for p in program_model_spec(program.layers).model(SEED).parameters()),
    )
    return writing.render_script(head, setting, model, observe_text, signature, ok)


def render_judged_program_script(
    engine: str, version: str, program: Program, outcome: ProgramOutcome, claims: Capabilities
) -> Script:
    """Return the script that runs and judges ``program`` in the same way as the harness."""
    raised = "raised: " in outcome.cause
    signature = extract_exception(outcome.cause) if raised else extract_tensor(outcome.cause)
    head, ok = render_program_header(engine, version, program, outcome, signature)
    return render_judge_script(build_program_script_spec(engine, program, claims), (head, signature, ok))


def render_program_header(
    engine: str,
    version: str,
    program: Program,
    outcome: ProgramOutcome,
    signature: str,
    form: ScriptForm = ScriptForm.STANDALONE,
) -> tuple[str, str]:
    """Return the script's docstring, and the line that the script prints if the law holds."""
    ok = f"repro: {quote(str(program))[1:-1]} on {engine} at stage {program.stage} OK."
    ranks = f"{program.world_size} ranks{f' on the mesh {program.mesh.label}' if program.mesh.sizes else ''}"
    head = render_docstring(
        title=f"A small program goes wrong on {engine} {version} at stage {program.stage}, {ranks}"
        f"{''.join(f', {name}' for name in program.options)}.",
        engine=engine,
        version=version,
        ranks=program.world_size,
        law=TRAJECTORY_LAW,
        cause=outcome.cause,
        signature=signature,
        success_line=ok,
        name="script.py",
        notes=[
            f"The program: {program}",
            "Every verb is compared with plain PyTorch, which starts from the engine's weights before that verb.",
            f"Written from: {format_program_command(engine, [program])}",
        ],
        form=form,
    )
    return head, ok


def extract_exception(cause: str) -> str:
    """Return the type of the exception in ``cause`` and the start of its message."""
    raised = " ".join(cause.partition("raised: ")[2].split())
    return raised[:40].rpartition(" ")[0] or raised[:40]


def extract_tensor(cause: str) -> str:
    """Return the text with which ``cause`` names the first wrong tensor, or the start of ``cause`` if it names none.

    The part of the step is left out, because a script does not attribute a mismatch to a part.
    """
    named = re.match(r"step \d+, [^:]+(: [^\[(]+[\[(])", cause)
    return named[1] if named else cause.partition(":")[0]


def render_program_model(writing: ScriptWriter, program: Program) -> str:
    """Return the text that defines SPEC: the model of ``program``, its micro-batches and its loss."""
    writing.add_definition(ModelSpec)
    writing.collection.add(ModelSpec.__module__, "SAMPLES")
    writing.imports += ["import torch", "from torch import nn"]
    widths, lines = ModelShape(), []
    for layer in program.layers:
        lines.append(render_layer(writing, layer, widths))
        widths = shape_after_layer(widths, layer)
    if any(layer.kind in BLOCK_CLASSES for layer in program.layers):
        model = f"{writing.add_definition(Chain)}([{', '.join(lines)}])"
    else:
        model = f"nn.Sequential({', '.join(lines)})"
    source = program.layers[0]
    inputs = (
        f"torch.randint({source.sizes[0]}, (SAMPLES,), generator=generator)"
        if source.kind is LayerKind.TOKENS
        else f"torch.randn(SAMPLES, {source.sizes[0]}, generator=generator)"
    )
    return f"""def model():
    return {model}


def micro_batch(generator):
    inputs = {inputs}
    return Batch(inputs, torch.randn(SAMPLES, {widths.width}, generator=generator))


SPEC = ModelSpec({quote(program.model)}, "the model of a program", model, micro_batch, nn.functional.mse_loss)"""


def render_layer(writing: ScriptWriter, layer: Layer, widths: ModelShape) -> str:
    """Return the expression that builds ``layer``; ``widths`` is the shape that the earlier layers return."""
    width, size = widths.width, (0, *layer.sizes)[-1]
    if layer.kind in BLOCK_CLASSES:
        name, chain = writing.add_definition(BLOCK_CLASSES[layer.kind]), writing.add_definition(Chain)
        inner = []
        for inner_layer in layer.inner:
            inner.append(render_layer(writing, inner_layer, widths))
            widths = shape_after_layer(widths, inner_layer)
        return f"{name}({chain}([{', '.join(inner)}]))"
    if layer.kind in PACKAGE_LAYERS:
        sizes = (width, size) if layer.kind in (LayerKind.FROZEN, LayerKind.READ) else (size,)
        return f"{writing.add_definition(PACKAGE_LAYERS[layer.kind])}({', '.join(map(str, sizes))})"
    return {
        LayerKind.INPUTS: "nn.Identity()",
        LayerKind.TOKENS: f"nn.Embedding({layer.sizes[0] if layer.sizes else 0}, {size})",
        LayerKind.LINEAR: f"nn.Linear({width}, {size})",
        LayerKind.MATRIX: f"nn.Linear({width}, {size}, bias=False)",
        LayerKind.NORM: f"nn.LayerNorm({width})",
        LayerKind.RELU: "nn.ReLU()",
        LayerKind.GELU: "nn.GELU()",
    }[layer.kind]


def render_observe(writing: ScriptWriter, program: Program) -> str:
    """Return the text of the function ``observe``, which has a few lines for each verb of ``program``."""
    optimizer = render_literal(TRAJECTORY_OPTIMIZERS[program.optimizer], writing.collection, writing.imports)
    if any(Mark.OTHER in verb.marks for verb in program.verbs):
        writing.collection.add(observe_program.__module__, "second_loss")
    lines = ["engine = ctx.build_engine(optimizer=OPTIMIZER)", "ctx.record_training_state(engine, 0)"]
    steps = 0
    for position, verb, state in iter_verbs(program):
        lines.append(f"# {verb}")
        lines += render_verb(verb, state, position)
        if verb.act is Act.STEP:
            steps += 1
            lines.append(f"ctx.record_training_state(engine, {steps})")
    body = textwrap.indent("\n".join([*lines, "engine.close()"]), "    ")
    return f"OPTIMIZER = {optimizer}\n\n\ndef observe(ctx):\n{body}"


def render_verb(verb: Verb, state: CallerState, position: int) -> Iterator[str]:
    """Yield the lines of code for one verb.

    ``position`` is the verb's index in the program. The lines of a verb that runs a backward and reduces gradients also
    record the gradients.
    """
    drawn = state.micro_batches_drawn
    batch = f"ctx.batch({drawn})"
    if verb.act is Act.FORWARD:
        yield f"output{drawn} = engine({batch}.inputs)"
        yield f'ctx.record("output", {{"output": output{drawn}}}, {position})'
    elif verb.act in GRADLESS_FORWARDS:
        yield f"with {GRADLESS_FORWARDS[verb.act]}:"
        yield f"    output = engine({batch}.inputs)"
        yield f'ctx.record("output", {{"output": output.clone()}}, {position})'
    elif verb.act is Act.BACKWARD:
        chosen = state.select_output(verb)
        yield from render_backward(verb, f"output{chosen}", chosen)
        yield f'ctx.record("grads", engine.full_grads(), {position})'
    elif verb.act is Act.NO_SYNC:
        yield "with engine.no_sync():"
        yield f"    output = engine({batch}.inputs)"
        yield from (f"    {line}" for line in render_backward(verb, "output", drawn))
    elif verb.act is Act.INPUT_GRAD:
        yield f"leaf = {batch}.inputs.clone().requires_grad_()"
        yield "(grad,) = torch.autograd.grad(engine(leaf).sum(), leaf)"
        yield f'ctx.record("input", {{"input": grad}}, {position})'
    else:
        yield from ["engine.step()", "engine.zero_grad()"] if verb.act is Act.STEP else ["engine.zero_grad()"]


def render_backward(verb: Verb, output: str, micro_step: int) -> Sequence[str]:
    """Return the lines of a backward of ``output``. The verb's marks (its options) select the loss and the call."""
    loss = f"SPEC.loss({output}, ctx.batch({micro_step}).target)"
    loss = f"second_loss({output})" if Mark.OTHER in verb.marks else loss
    retain = f"retain_graph={Mark.RETAIN in verb.marks}"
    if Mark.TENSOR in verb.marks:
        return [f"torch.autograd.backward({loss}, {retain})"]
    if Mark.SCALE in verb.marks:
        return [f"torch.autograd.backward(engine.scale({loss}), {retain})"]
    return [f"engine.backward({loss}, {retain})"]
