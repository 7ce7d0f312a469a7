"""The docstring of an exported script, in the form of the scripts in repro/."""

from __future__ import annotations

import re
import textwrap

from zharness.checks import Check
from zharness.engines import registry
from zharness.run.record import Record, Verdict

WIDTH = 120


def header(record: Record, check: Check, signature: str, ok: str, name: str) -> str:
    """The docstring: what is wrong, its facts by key, how to run it, and the law."""
    case = record.case
    engine = registry.split(case.engine)[0]
    options = f", options {case.engine_variant}" if case.engine_variant else ""
    where = f"{case.subject} {record.engine_version} at stage {case.stage}, {case.world_size} ranks{options}"
    holds = "does not hold" if record.verdict in (Verdict.FAIL, Verdict.CRASH, Verdict.CONTRACT) else "holds"
    cause = " ".join(record.cause.split())
    facts = {
        "id": re.sub(r"\W+", "-", f"{case.check}-{engine}-zero{case.stage}-w{case.world_size}").strip("-"),
        "engine": engine,
        "symptom": textwrap.shorten(cause or "none", WIDTH - len("symptom: "), placeholder=" ..."),
        "reported": record.excuse or "no report known",
        "affects": f"=={record.engine_version.partition('+')[0]}",
        "fixed": "not yet",
        "ranks": str(case.world_size),
        "law": case.check,
        "signature": signature,
        "ok": ok,
    }
    package = "deepspeed" if engine == "deepspeed" else engine if ":" in engine else ""
    needs = " and ".join(["torch", *filter(None, [package or ("zharness" if engine == "reference" else "")])])
    paragraphs = [
        f"{case.check} {holds} on {where}.",
        "\n".join(f"{key}: {value}" for key, value in facts.items()),
        f"Run it with nothing but {needs} installed:",
        f"    torchrun --standalone --nproc_per_node={case.world_size} {name}",
        wrapped(f"The law: {check.law}. The same steps are made on the engine and on plain PyTorch, and compared."),
        wrapped(f"Written by: zharness export '{case.id}'" + (f" --seed {record.seed}" if record.seed else "")),
        wrapped(
            'It ends with the line above under "ok" and exit code 0 where the law holds; with a line that starts with '
            '"repro: REPRODUCED" and exit code 1 where it does not. Anything else says nothing about it.'
        ),
    ]
    text = "\n\n".join(paragraphs).replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{text}\n"""\n\nfrom __future__ import annotations'


def wrapped(text: str) -> str:
    """Lines of the width of this package's own."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
